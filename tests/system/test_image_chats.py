"""Chats with images over HTTP, by router and nodes as real processes: the tokens of transformers'
generate, in every dialect and after a kill -9; what is no image is a 400 that names its field."""

from __future__ import annotations

import asyncio
import base64
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from baton.runtime.failpoints import VARIABLE
from baton.text.tokenizer import Tokenizer
from tests.combinations import combined
from tests.front.image_front import data_url, part, said
from tests.images.files import SVG, bomb
from tests.system.processes import STOP_S, Processes, ServerProcess
from tests.tiny_vision import IMAGE, KINDS, generated, make_chat_model, picture, prompt_of
from tests.waiting import WAIT_S, eventually

pytestmark = pytest.mark.slow

NEW_TOKENS = 24
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
_HOST = "http://127.0.0.1"
CAT, DOG = picture(1), picture(2, 16, 40)
FLAGS = (
    "--threads", "1", "--dtype", "float32", "--num-kv-blocks", "256", "--block-size", "4",
    "--max-num-batched-tokens", "48", "--max-num-seqs", "8", "--metrics-port", "0",
)  # fmt: skip
ENCODE = ("--threads", "1", "--dtype", "float32", "--metrics-port", "0")


@dataclass(frozen=True)
class Answer:
    """What transformers says: the prompt's tokens, those behind it, and their text."""

    prompt: list[int]
    tokens: list[int]
    text: str

    @classmethod
    def to(cls, path: Path, kind: str, *parts: str | bytes, count: int = NEW_TOKENS) -> Answer:
        """To one message of a user; each file stands between two texts."""
        tokenizer = Tokenizer.load(path)
        around = "\n\n" if kind == "gemma3" else ""
        texts = ["<|user|>\n", *(part for part in parts if isinstance(part, str))]
        texts = [texts[0] + texts[1], *texts[2:]]
        texts[-1] += "<|assistant|>"
        files = [part for part in parts if isinstance(part, bytes)]
        pieces: list[bytes | Sequence[int]] = []
        for index, text in enumerate(texts):
            before, after = around * (index > 0), around * (index < len(files))
            pieces.append(tokenizer.encode(before + text + after, add_special_tokens=False))
            pieces += files[index : index + 1]
        ids, images = prompt_of(kind, pieces)
        tokens = generated(path, kind, ids, images, count)
        return cls(list(ids), tokens, tokenizer.decode(tokens))


@dataclass(frozen=True)
class Served:
    client: httpx.AsyncClient
    prefill: list[ServerProcess]
    decode: list[ServerProcess]
    encode: list[ServerProcess]
    router: ServerProcess

    @property
    def nodes(self) -> list[ServerProcess]:
        return [*self.prefill, *self.decode, *self.encode]

    async def post(self, path: str, **body: Any) -> Any:
        reply = await self.client.post(path, json={**GREEDY, **body})
        assert reply.status_code == 200, reply.text
        return reply.json()

    async def chat(self, *parts: Any, **more: Any) -> Any:
        files = [part(data_url(it)) if isinstance(it, bytes) else it for it in parts]
        ask = {"messages": said(*files), "max_tokens": NEW_TOKENS, "return_token_ids": True}
        return await self.post(CHAT, **ask, **more)

    async def streamed(self, *parts: Any, count: int) -> tuple[list[int], str]:
        """The tokens and the text of a chat's events."""
        files = [part(data_url(it)) if isinstance(it, bytes) else it for it in parts]
        ask = {"messages": said(*files), "max_tokens": count, "return_token_ids": True}
        reply = await self.client.post(CHAT, json={**GREEDY, **ask, "stream": True})
        assert reply.status_code == 200, reply.text
        *events, done = [x.removeprefix("data: ") for x in reply.text.split("\n\n") if x]
        assert done == "[DONE]", reply.text[-300:]
        choices = [orjson.loads(event)["choices"][0] for event in events]
        tokens = [token for choice in choices for token in choice.get("token_ids") or ()]
        return tokens, "".join(choice["delta"].get("content") or "" for choice in choices)

    async def encoded(self, servers: Sequence[ServerProcess]) -> list[int]:
        """How many images each of them has run its tower over."""
        return [await self.number(each, "baton_encoded_images_total") for each in servers]

    async def number(self, server: ServerProcess, name: str) -> int:
        at = server.ready.get("metrics_port")
        page = (await self.client.get("/metrics" if at is None else f"{_HOST}:{at}/metrics")).text
        [line] = [line for line in page.splitlines() if line.startswith(name + "{")]
        return int(float(line.rpartition(" ")[2]))


def check(reply: Any, expected: Answer) -> None:
    [choice] = reply["choices"]
    assert reply["prompt_token_ids"] == expected.prompt
    assert choice["token_ids"] == expected.tokens
    assert choice["message"]["content"] == expected.text


@asynccontextmanager
async def served(
    path: Path,
    folder: Path,
    num_decode: int = 1,
    num_encode: int = 0,
    dying: Mapping[str, str] | None = None,
) -> AsyncIterator[Served]:
    """`dying`: variables of the first decode node."""
    async with Processes(path, folder, forked=True) as processes:
        starts = [processes.start("prefill_node", "p", FLAGS)]
        starts += [
            processes.start("decode_node", f"d{i}", FLAGS, dying if i == 0 else None)
            for i in range(num_decode)
        ]
        starts += [processes.start("encode_node", f"e{i}", ENCODE) for i in range(num_encode)]
        first, *others = await asyncio.gather(*starts)
        decode, encode = others[:num_decode], others[num_decode:]
        flags = [word for each in encode for word in ("--encode-node", each.address)]
        router = await processes.router([first], decode, flags)
        async with httpx.AsyncClient(
            base_url=f"http://{router.address}", timeout=2 * WAIT_S
        ) as client:
            made = Served(client, [first], decode, encode, router)

            async def all_serve() -> bool:
                page = (await client.get("/metrics")).text
                lines = page.splitlines()
                ready = [x for x in lines if x.startswith("baton_router_nodes") and "ready" in x]
                return sum(float(x.rpartition(" ")[2]) for x in ready) == 1 + len(others)

            await eventually(all_serve)
            yield made


async def test_every_dialect_gives_the_tokens_of_generate(tmp_path: Path) -> None:
    kind = "qwen3_vl"
    path = make_chat_model(kind, tmp_path / "model")
    pair = Answer.to(path, kind, "see ", CAT, " and ", DOG, " now")
    alone = Answer.to(path, kind, "what ", CAT, "?")
    assert pair.tokens != alone.tokens
    url = data_url(CAT)
    texts = {"responses": "input_text", "messages": "text"}
    told = {
        name: [{"type": text, "text": "what "}, {}, {"type": text, "text": "?"}]
        for name, text in texts.items()
    }
    told["responses"][1] = {"type": "input_image", "image_url": url}
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(CAT).decode()}
    told["messages"][1] = {"type": "image", "source": source}
    async with served(path, tmp_path) as it:
        reply, again = await asyncio.gather(
            it.chat("see ", CAT, " and ", DOG, " now"), it.chat("what ", CAT, "?")
        )
        check(reply, pair)
        check(again, alone)
        details = reply["usage"]["prompt_tokens_details"]
        assert details["image_tokens"] == pair.prompt.count(IMAGE)
        asked = [{"role": "user", "content": told["responses"]}]
        response = await it.post(RESPONSES, input=asked, max_output_tokens=NEW_TOKENS)
        assert response["output"][0]["content"][0]["text"] == alone.text
        asked = [{"role": "user", "content": told["messages"]}]
        message = await it.post(MESSAGES, messages=asked, max_tokens=NEW_TOKENS)
        assert message["content"][0]["text"] == alone.text
        # Two files in four requests: each went through the prefill node's tower once.
        assert await it.encoded(it.prefill) == [2]
        assert await it.encoded(it.decode) == [0]
        hostile = {"svg": SVG, "bomb": bomb(7100), "broken": CAT[: len(CAT) // 2], "empty": b""}
        for name, file in hostile.items():
            body = {"messages": said("see ", part(data_url(CAT)), part(data_url(file)))}
            refused = await it.client.post(CHAT, json={**GREEDY, **body, "max_tokens": 4})
            assert refused.status_code == 400, name
            assert refused.json()["error"]["param"] == "messages[0].content[2].image_url", name
        content = [{"type": "input_image", "image_url": data_url(SVG)}]
        body = {"input": [{"role": "user", "content": content}]}
        refused = await it.client.post(RESPONSES, json=body)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "input[0].content[0].image_url"
        source["data"] = base64.b64encode(SVG).decode()
        refused = await it.client.post(MESSAGES, json={"messages": asked, "max_tokens": 4})
        assert refused.status_code == 400
        assert "messages[0].content[1]" in refused.json()["error"]["message"]
        assert await it.encoded(it.prefill) == [2]


@pytest.mark.parametrize(
    ("kind", "num_encode"),
    combined(KINDS, (0, 1), marks=[pytest.mark.soak], always=[("qwen3_vl_moe", 0)]),
)
@pytest.mark.long
async def test_every_family(kind: str, num_encode: int, tmp_path: Path) -> None:
    path = make_chat_model(kind, tmp_path / "model")
    asked = [("see ", CAT, " and ", DOG, " now"), ("what ", CAT, "?"), ("which ", CAT, "?")]
    expected = [Answer.to(path, kind, *parts) for parts in asked]
    async with served(path, tmp_path, num_encode=num_encode) as it:
        replies = await asyncio.gather(*(it.chat(*parts) for parts in asked))
        for reply, wanted in zip(replies, expected, strict=True):
            check(reply, wanted)
        encoders = it.encode or it.prefill

        async def counted() -> bool:  # a node's counters may follow its answer
            return await it.encoded(encoders) == [2]

        await eventually(counted)
        assert await it.encoded([each for each in it.nodes if each not in encoders]) == (
            [0] * (1 + num_encode)
        )


@pytest.mark.long
@pytest.mark.parametrize(
    "kind",
    ["qwen3_vl", *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("qwen3_5", "gemma3"))],
)
async def test_a_decode_node_is_killed_in_mid_stream(kind: str, tmp_path: Path) -> None:
    path = make_chat_model(kind, tmp_path / "model")
    count = 60
    asked = [(f"{number} see ", CAT, " and ", DOG, " now") for number in range(4)]
    expected = [Answer.to(path, kind, *parts, count=count) for parts in asked]
    dying = {VARIABLE: "d.step_n:20:kill9"}
    async with served(path, tmp_path, num_decode=2, dying=dying) as it:
        doomed = it.decode[0].process
        async with asyncio.timeout(5 * STOP_S):
            while doomed.returncode is None:  # which node a stream comes to is chance
                streaming = [it.streamed(*parts, count=count) for parts in asked]
                streams = await asyncio.gather(*streaming)
                for (tokens, text), wanted in zip(streams, expected, strict=True):
                    assert tokens == wanted.tokens
                    assert text == wanted.text
        assert doomed.returncode == -signal.SIGKILL
        assert await it.number(it.router, "baton_request_retries_total") > 0
