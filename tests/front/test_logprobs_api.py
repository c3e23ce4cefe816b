"""Log-probabilities over HTTP: OpenAI's and vLLM's shapes, to the letter, on made-up numbers."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from baton.protocol.events import TokenLogprob
from baton.text.tokenizer import Tokenizer
from router.api.openai.logprobs import FLOOR, CompletionWriter, chat_logprobs
from tests.front.fakes import (
    MODEL,
    TOKENIZER,
    FakeDispatcher,
    FakeModel,
    FakeRegistry,
    Front,
    serving,
)
from tests.front.tokenizers_built import byte_fallback

A = TOKENIZER.encode("a")[0]
B = TOKENIZER.encode("b")[0]


async def completion(answer: str = "b", **body: Any) -> dict[str, Any]:
    front = Front(dispatcher=FakeDispatcher(answer))
    async with front.client() as client:
        reply = await client.post("/v1/completions", json={"prompt": "ab", **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


async def test_a_completions_four_lists() -> None:
    choice = (await completion(logprobs=1))["choices"][0]
    assert choice["logprobs"] == {
        "tokens": ["b", "</s>"],
        "token_logprobs": [-B / 100, -0.01],
        "top_logprobs": [
            {"b": -B / 100, "<|user|>": -0.001},
            {"</s>": -0.01, "<|user|>": -0.001},
        ],
        "text_offset": [0, 1],
    }
    alone = (await completion(logprobs=0))["choices"][0]["logprobs"]
    assert alone["top_logprobs"] == [{"b": -B / 100}, {"</s>": -0.01}]
    assert (await completion())["choices"][0]["logprobs"] is None


async def test_tokens_are_named_by_their_ids_where_that_is_asked() -> None:
    by_id: dict[str, Any] = {"return_tokens_as_token_ids": True, "logprobs": 1, "echo": True}
    told = (await completion(**by_id))["choices"][0]["logprobs"]
    assert told["tokens"] == [f"token_id:{each}" for each in (A, B, B, 1)]
    assert told["top_logprobs"][-1] == {"token_id:1": -0.01, "token_id:2": -0.001}
    assert told["text_offset"] == [0, 1, 2, 3], "of the text, whatever its tokens are called"
    body = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 1}
    async with Front(dispatcher=FakeDispatcher("b")).client() as client:
        asked = {**body, "return_tokens_as_token_ids": True}
        reply = await client.post("/v1/chat/completions", json=asked)
        plain = await client.post("/v1/chat/completions", json=body)
    first, spelled = (it.json()["choices"][0]["logprobs"]["content"][0] for it in (reply, plain))
    assert (first["token"], spelled["token"]) == (f"token_id:{B}", "b")
    assert (first["bytes"], first["logprob"]) == (spelled["bytes"], spelled["logprob"])
    assert [each["token"] for each in first["top_logprobs"]] == ["token_id:2"]


async def test_an_echo_comes_first() -> None:
    choice = (await completion(logprobs=0, echo=True))["choices"][0]
    assert choice["text"] == "abb"
    assert choice["logprobs"]["tokens"] == ["a", "b", "b", "</s>"]
    assert choice["logprobs"]["token_logprobs"] == [None, -B / 100, -B / 100, -0.01]
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]
    assert choice["prompt_logprobs"] is None
    plain = (await completion(echo=True))["choices"][0]
    assert (plain["text"], plain["logprobs"]) == ("abb", None)


@pytest.mark.parametrize("prompt", ["ab", [A, B], [[A, B]]])
async def test_an_echo_alone_generates_nothing(prompt: Any) -> None:
    reply = await completion(prompt=prompt, logprobs=1, echo=True, max_tokens=0)
    choice = reply["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "length")
    assert choice["logprobs"]["tokens"] == ["a", "b"]
    assert (reply["usage"]["completion_tokens"], reply["usage"]["total_tokens"]) == (0, 2)


async def test_the_prompts_own_are_vllms() -> None:
    choice = (await completion(prompt_logprobs=1, logprobs=0, echo=True))["choices"][0]
    assert choice["prompt_logprobs"] == [
        None,
        {
            str(B): {"logprob": -B / 100, "rank": 2, "decoded_token": "b"},
            "2": {"logprob": -0.001, "rank": 1, "decoded_token": "<|user|>"},
        },
    ]
    assert choice["logprobs"]["top_logprobs"][1] == {"b": -B / 100}, "each its own count"


async def test_the_sdk_reads_a_chats_whole_and_streamed_alike() -> None:
    ask: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    async with serving(Front(dispatcher=FakeDispatcher("b🙂", tokens_per_event=2))) as port:
        url = f"http://127.0.0.1:{port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            create = client.chat.completions.create
            whole = await create(**ask, logprobs=True, top_logprobs=2)
            stream = await create(**ask, logprobs=True, top_logprobs=2, stream=True)
            chunks = [chunk.choices[0].logprobs async for chunk in stream]
            bare = await create(**ask, logprobs=True)
    told = whole.choices[0].logprobs
    assert told is not None
    assert told.content is not None
    assert [entry for each in chunks for entry in (each and each.content) or []] == told.content
    first = told.content[0]
    assert (first.token, first.bytes, first.logprob) == ("b", [98], -B / 100)
    assert [top.token for top in first.top_logprobs] == ["<|user|>", "b"]
    assert b"".join(bytes(e.bytes or []) for e in told.content).decode() == "b🙂</s>"
    assert bare.choices[0].logprobs is not None
    assert all(entry.top_logprobs == [] for entry in bare.choices[0].logprobs.content or [])


async def test_a_stop_string_cuts_them_with_its_tokens() -> None:
    choice = (await completion("xyz", logprobs=0, stop=["y"]))["choices"][0]
    assert (choice["text"], choice["logprobs"]["tokens"]) == ("x", ["x", "y"])


async def test_more_than_one_message_holds_is_refused() -> None:
    front = Front(registry=FakeRegistry(FakeModel(max_model_len=1 << 20)))
    many = [A] * 60_000
    async with front.client() as client:
        for body, field in (
            ({"prompt_logprobs": 20}, "prompt_logprobs"),
            ({"logprobs": 20, "echo": True}, "logprobs"),
        ):
            reply = await client.post("/v1/completions", json={"prompt": many, **body})
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)
        fits = {"prompt": many, "logprobs": 1, "echo": True, "max_tokens": 0}
        reply = await client.post("/v1/completions", json=fits)
    assert len(reply.json()["choices"][0]["logprobs"]["tokens"]) == len(many)


def test_tokens_within_a_character_are_spelled_as_bytes() -> None:
    tokenizer = Tokenizer(byte_fallback(), {})
    ids = tokenizer.encode("🙂", add_special_tokens=False)[1:]
    writer = CompletionWriter(tokenizer, 0)
    told = writer.rows([(TokenLogprob(token, float("-inf"), 9),) for token in ids])
    assert told.tokens == ["bytes:\\xf0", "bytes:\\x9f", "bytes:\\x99", "bytes:\\x82"]
    assert told.text_offset == [0, 0, 0, 0]
    assert told.token_logprobs == [FLOOR] * 4
    assert writer.rows([(TokenLogprob(ids[0], -1.0, 1),)]).text_offset == [1]
    (entry,) = chat_logprobs([(TokenLogprob(ids[0], float("-inf"), 1),)], 1, tokenizer)
    assert (entry["token"], entry["bytes"], entry["logprob"]) == ("\ufffd", [0xF0], FLOOR)
