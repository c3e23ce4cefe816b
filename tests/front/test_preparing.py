"""Reading, rendering and tokenizing count with the key, are judged by length first, and let others
go on."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.routing import Route

from baton.protocol.clock import SystemClock
from baton.protocol.errors import Overloaded
from router.api.http.preparing import counted
from router.config import RouterConfig
from router.prompts.reader import CUT_TOKENS, Length, PromptReader, TextInputs
from router.request.gate.admission import Bounds
from router.request.gate.gate import Gate, GateSettings
from router.tenants.keys import Grant
from router.tenants.turns import LARGE_BYTES
from tests.front.fakes import CHAT_TEMPLATE, TOKENIZER, Front
from tests.waiting import WAIT_S

KEYS = """
[[keys]]
name = "two"
key = "two"
max_concurrency = 2

[[keys]]
name = "other"
key = "other"

[[keys]]
name = "slow"
key = "slow"
tokens_per_minute = 60
"""


class Held:
    """Encoding of a text that begins with "held" waits until it may."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.may_go = threading.Semaphore(0), threading.Event()
        encode = TOKENIZER.encode

        def held(text: str, *args: Any, **kwargs: Any) -> list[int]:
            if text.startswith("held"):
                self.begun.release()
                assert self.may_go.wait(WAIT_S)
            return encode(text[:64], *args, **kwargs)

        monkeypatch.setattr(TOKENIZER, "encode", held)
        monkeypatch.setattr(TOKENIZER, "most_chars", lambda _: 1 << 30)


@pytest.fixture
def front(tmp_path: Path) -> Front:
    keys = tmp_path / "keys.toml"
    keys.write_text(KEYS)
    made = Front(config=RouterConfig(api_keys=str(keys), request_timeout_s=20.0))
    made.dispatcher.gate = Gate(SystemClock(), GateSettings(Bounds(8, 8)))
    return made


def post(client: httpx.AsyncClient, key: str, path: str, **body: Any) -> asyncio.Task[Any]:
    headers = {"authorization": f"Bearer {key}"}
    return asyncio.create_task(client.post(path, json=body, headers=headers))


async def test_tokenizing_counts_with_its_key(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
    long = "held" * 40_000
    async with front.client() as client:
        first = [post(client, "two", "/tokenize", prompt=long) for _ in range(2)]
        assert await asyncio.to_thread(held.begun.acquire, timeout=WAIT_S)
        for path, body in (
            ("/tokenize", {"prompt": "a"}),
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
            ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a"}]}),
            ("/v1/embeddings", {"input": "a"}),
        ):
            reply = await post(client, "two", path, **body)
            assert reply.status_code == 429, path
            assert int(reply.headers["retry-after"]) >= 1
        other = await asyncio.wait_for(post(client, "other", "/tokenize", prompt="a" * 9000), 10)
        assert other.status_code == 200
        held.may_go.set()
        assert [(await task).status_code for task in first] == [200, 200]
        assert (await post(client, "two", "/tokenize", prompt="a")).status_code == 200


async def test_what_is_refused_is_not_even_read(front: Front) -> None:
    gate = front.dispatcher.gate
    with gate.preparing(Grant("two", "two", max_concurrency=1)):
        route = counted(Route("/x", _reading, methods=["POST"]), lambda: gate)
        scope = {
            "type": "http", "method": "POST", "path": "/x", "headers": [],
            "baton.grant": Grant("two", "two", max_concurrency=1),
        }  # fmt: skip

        async def never() -> Any:
            raise AssertionError("nobody reads it")

        with pytest.raises(Overloaded):
            await route.endpoint(Request(scope, never))


async def _reading(request: Request) -> None:
    await request.body()


async def test_counting_costs_a_hundredth(front: Front) -> None:
    """60 tokens a minute: a prompt of 60 is counted a hundred times, not once."""
    async with front.client() as client:
        text = "the quick fox " * 40
        count = (await post(client, "slow", "/tokenize", prompt=text)).json()["count"]
        assert count > 30
        replies = [await post(client, "slow", "/tokenize", prompt=text) for _ in range(200)]
    statuses = [reply.status_code for reply in replies]
    served = statuses.index(429)
    assert served * count >= 59 * 100 - 2 * count
    assert served * count <= 62 * 100 + 2 * count


async def test_a_chat_passes_while_texts_wait(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
    async with front.client() as client:
        flood = [post(client, "two", "/tokenize", prompt="held" * 40_000) for _ in range(2)]
        assert await asyncio.to_thread(held.begun.acquire, timeout=WAIT_S)
        # Short and long of another key, and every other kind.
        for chars in (2_000, 30_000, 200_000):
            reply = await post(client, "other", "/tokenize", prompt="a" * chars)
            assert reply.status_code == 200
        messages = [{"role": "user", "content": "a" * 30_000}]
        reply = await post(client, "other", "/v1/chat/completions", messages=messages, max_tokens=1)
        assert reply.status_code == 200
        held.may_go.set()
        await asyncio.gather(*flood)


@pytest.mark.parametrize("path", ["/tokenize", "/v1/completions", "/v1/embeddings"])
async def test_what_is_sure_to_be_too_long_is_not_begun(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TOKENIZER, "encode", lambda *_: 1 / 0)
    name = "input" if path == "/v1/embeddings" else "prompt"
    async with Front().client() as client:
        reply = await client.post(path, json={name: "word " * 1_600_000})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, name)
    error = reply.json()["error"]
    assert error["code"] == "context_length_exceeded"
    limit = "for counting" if path == "/tokenize" else "the model's maximum context length"
    assert limit in error["message"], "a number is called what it is"


@pytest.mark.parametrize("side", ["left", "right"])
async def test_what_is_cut_is_cut_first(side: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text = " ".join(f"word{number} é" for number in range(40_000))
    whole = TOKENIZER.encode(text, False)
    longest = 0
    encode = TOKENIZER.encode

    def measured(given: str, *args: Any) -> list[int]:
        nonlocal longest
        longest = max(longest, len(given))
        return encode(given, *args)

    monkeypatch.setattr(TOKENIZER, "encode", measured)
    reader = PromptReader(TOKENIZER, CHAT_TEMPLATE)
    [ids] = await reader.read(
        TextInputs([text], "prompt", Length(50, side), add_special_tokens=False)
    )
    reader.close()
    most = TOKENIZER.most_chars(50 + CUT_TOKENS)
    assert most is not None
    assert longest <= most < len(text)
    cut = ids[-50:] if side == "left" else ids[:50]
    assert list(cut) == (whole[-50:] if side == "left" else whole[:50])


async def test_many_small_inputs_are_one_piece_of_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """2048 texts of a call would keep the event loop for half a second."""
    threads: set[int] = set()
    encode = TOKENIZER.encode

    def noted(text: str, *args: Any) -> list[int]:
        threads.add(threading.get_ident())
        return encode(text, *args)

    monkeypatch.setattr(TOKENIZER, "encode", noted)
    reader = PromptReader(TOKENIZER, CHAT_TEMPLATE)
    found = await reader.read(TextInputs(["some words"] * 2048, "input", Length(2000)))
    assert len(found) == 2048
    assert len(threads) == 1
    assert threading.get_ident() not in threads
    reader.close()


async def test_a_body_of_a_million_brackets_is_not_parsed() -> None:
    async with Front().client() as client:
        headers = {"content-type": "application/json"}
        for raw in (b'{"x":[' + b"{}," * 250_000 + b"{}]}", b'{"x":[' + b"1," * 1_200_000 + b"1]}"):
            reply = await client.post("/v1/completions", content=raw, headers=headers)
            assert reply.status_code == 413
        text = "{[" * 100_000 + '\\"' + "," * 1_200_000  # a text of them is a text
        reply = await client.post("/v1/completions", json={"prompt": text})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "prompt")


async def test_the_time_of_a_route_is_measured_and_it_may_be_cancelled(front: Front) -> None:
    gate, seen = front.dispatcher.gate, asyncio.Event()

    async def slow(request: Request) -> str:
        seen.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return await asyncio.sleep(0, "cleaned up")
        raise AssertionError("it was not cancelled")

    route = counted(Route("/x", slow, methods=["POST"]), lambda: gate)
    headers = [(b"content-length", b"%d" % LARGE_BYTES)]
    scope = {"type": "http", "method": "POST", "path": "/x", "headers": headers}
    task = asyncio.create_task(route.endpoint(Request(scope)))
    await seen.wait()
    task.cancel()
    assert await task == "cleaned up"
    assert 0 < scope["baton.preparation"].busy_s < 5


def test_a_body_that_is_read_again_is_reserved_once() -> None:
    """Routes that look into a body hand it on, and the next one reads it as if it came."""
    gate = Gate(SystemClock(), GateSettings())
    one, other = Grant("one", "one"), Grant("other", "other")
    with gate.preparing(other), gate.preparing(one) as preparation:
        assert [preparation.reserve(8 << 20) for _ in range(3)] == [0.0, 0.0, 0.0]
    with gate.preparing(one) as preparation:
        assert 0 < preparation.reserve(8 << 20) < 1
