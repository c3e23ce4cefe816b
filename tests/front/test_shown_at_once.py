"""Tokens that go to the client in the turn of the loop in which they come, without a task."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from baton.protocol.errors import Cancelled
from baton.protocol.events import TokenEvent
from baton.protocol.request import Request
from router.api.openai.chat_choices import ChatFrames
from router.request.completion import Delta, SampleText
from router.request.trace import RequestTrace
from tests.front.fakes import FakeDispatcher, Front, serving

CHAT = {"messages": [{"role": "user", "content": "hello"}], "stream": True, "seed": 1}


@dataclass
class AtOnce(FakeDispatcher):
    """Offers each event to the reader first, as OutputStream does."""

    answer: str = "h\u00e9llo \u2028 w\u00f6rld"
    taken: int = 0

    async def run(self, request: Request, trace: RequestTrace) -> AsyncGenerator[TokenEvent, None]:
        async for event in super().run(request, trace):
            await asyncio.sleep(0)
            if event.finish_reason is None and trace.shows is not None and trace.shows(event):
                self.taken += 1
            else:
                yield event


async def streamed(dispatcher: FakeDispatcher, **more: object) -> str:
    async with (
        serving(Front(dispatcher=dispatcher)) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client,
    ):
        return (await client.post("/v1/chat/completions", json={**CHAT, **more})).text


def text_of(frames: str) -> str:
    chunks = [json.loads(line[6:]) for line in frames.split("\n") if line.startswith("data: {")]
    return "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])


async def test_the_client_gets_the_same_frames_once_each() -> None:
    dispatcher = AtOnce()
    told = await streamed(dispatcher)
    assert text_of(told) == dispatcher.answer
    assert told.count('"finish_reason":"stop"') == 1
    assert told.endswith("data: [DONE]\n\n")
    assert "\u2028" not in told, "it would end a line"
    assert dispatcher.taken > 5


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**CHAT, "stream": False}),
        ("/v1/completions", {"prompt": "hello", "seed": 1}),
        ("/v1/responses", {"input": "hello", "store": False}),
        ("/inference/v1/generate", {"token_ids": [1, 2], "sampling_params": {"seed": 1}}),
    ],
)
async def test_an_answer_that_is_not_streamed_is_decoded_once(
    path: str, body: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokens are gathered until the last one comes, and nothing of it differs."""
    absorb, absorbed = SampleText.absorb, list[TokenEvent]()

    def noted(sample: SampleText, event: TokenEvent) -> Delta:
        absorbed.append(event)
        return absorb(sample, event)

    monkeypatch.setattr(SampleText, "absorb", noted)
    answers: list[dict[str, Any]] = []
    for dispatcher in (FakeDispatcher(answer=AtOnce.answer), AtOnce()):
        async with (
            serving(Front(dispatcher=dispatcher)) as port,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client,
        ):
            answers.append((await client.post(path, json=body)).raise_for_status().json())
    *one_by_one, gathered = absorbed
    assert len(one_by_one) > 5
    assert gathered.position == 0
    assert gathered.token_ids == tuple(t for event in one_by_one for t in event.token_ids)
    assert answers[0]["usage"] == answers[1]["usage"]
    texts = [answer.get("choices") or answer["output"][0]["content"] for answer in answers]
    assert texts[0] == texts[1]


async def test_an_aborted_answer_has_the_gathered_tokens() -> None:
    @dataclass
    class Aborted(AtOnce):
        async def run(
            self, request: Request, trace: RequestTrace
        ) -> AsyncGenerator[TokenEvent, None]:
            async for event in super().run(request, trace):
                if event.finish_reason is not None:
                    trace.aborted = True
                    raise Cancelled("an operator has aborted the request")
                yield event

    dispatcher = Aborted()
    answer = json.loads(await streamed(dispatcher, stream=False))
    [choice] = answer["choices"]
    assert choice["message"]["content"] == dispatcher.answer
    assert choice["finish_reason"] == "abort"
    assert answer["usage"]["completion_tokens"] == dispatcher.taken > 5


@pytest.mark.parametrize("more", [{"stop": ["zzz"]}, {"n": 2}, {"stop": ["z"], "stream": False}])
async def test_what_needs_the_task_goes_to_the_task(more: dict[str, object]) -> None:
    dispatcher = AtOnce(samples=("one", "two"))
    await streamed(dispatcher, **more)
    assert dispatcher.taken == 0


async def test_a_failure_there_ends_the_stream_once(monkeypatch: pytest.MonkeyPatch) -> None:
    write, calls = ChatFrames.delta, 0

    def delta(frames: ChatFrames, delta: Delta) -> bytes:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("a bug")
        return write(frames, delta)

    monkeypatch.setattr(ChatFrames, "delta", delta)
    dispatcher = AtOnce()
    told = await streamed(dispatcher)
    assert dispatcher.taken == 1
    assert dispatcher.closed == 1
    assert told.count('"error":') == 1
    assert '"finish_reason":"stop"' not in told


async def test_http_1_0_has_no_chunks() -> None:
    dispatcher = AtOnce()
    async with serving(Front(dispatcher=dispatcher)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = json.dumps(CHAT)
        head = f"POST /v1/chat/completions HTTP/1.0\r\ncontent-length: {len(body)}\r\n"
        writer.write((head + "content-type: application/json\r\n\r\n" + body).encode())
        told = (await reader.read()).decode()
        writer.close()
    assert dispatcher.taken == 0
    assert text_of(told) == dispatcher.answer
