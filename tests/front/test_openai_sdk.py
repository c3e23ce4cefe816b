"""The real OpenAI SDK against the real server: chat, completions, streams, its error classes."""

from __future__ import annotations

import asyncio

import openai
import pytest

from baton.protocol.errors import DeadlineExceeded, InternalError, NodeLost, Overloaded, Unavailable
from router.config import RouterConfig
from tests.front.fakes import MAX_MODEL_LEN, MODEL, TOKENIZER, Front
from tests.front.openai_sdk import sdk

CHAT = [{"role": "user", "content": "hi"}]


async def test_chat() -> None:
    front = Front()
    async with sdk(front) as client:
        reply = await client.chat.completions.create(model=MODEL, messages=CHAT)  # type: ignore[arg-type]
    assert reply.choices[0].message.content == "hello world"
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.object == "chat.completion"
    assert reply.id.startswith("chatcmpl-")
    request = front.dispatcher.requests[0]
    prompt = "<s><|user|>hi<|assistant|>"
    assert request.prompt_ids == tuple(TOKENIZER.encode(prompt, add_special_tokens=False))
    assert request.params.max_tokens == MAX_MODEL_LEN - len(request.prompt_ids)
    assert request.params.seed is not None
    assert request.deadline is not None
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == len(request.prompt_ids)
    assert reply.usage.completion_tokens == len(TOKENIZER.encode("hello world")) + 1
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == 2


async def test_streamed_chat() -> None:
    async with sdk(Front()) as client:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=CHAT,  # type: ignore[arg-type]
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    first, *middle, last, usage = chunks
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert "".join(c.choices[0].delta.content or "" for c in middle) == "hello world"
    assert [c.choices[0].finish_reason for c in (first, *middle, last)][-1] == "stop"
    assert all(c.choices[0].finish_reason is None for c in (first, *middle))
    assert last.choices[0].delta.content is None
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.total_tokens == usage.usage.prompt_tokens + usage.usage.completion_tokens
    assert len({c.id for c in chunks}) == 1


async def test_completions_whole_and_streamed_agree() -> None:
    front = Front()
    async with sdk(front) as client:
        whole = await client.completions.create(model=MODEL, prompt="a", max_tokens=3)
        stream = await client.completions.create(model=MODEL, prompt="a", max_tokens=3, stream=True)
        chunks = [chunk async for chunk in stream]
    assert whole.object == "text_completion"
    assert "".join(c.choices[0].text for c in chunks) == whole.choices[0].text
    assert whole.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "length"
    assert all(c.usage is None for c in chunks)


async def test_batches_keep_their_indices() -> None:
    front = Front()
    texts = ["first", "second", "third"]
    ids = [TOKENIZER.encode(text) for text in texts]
    for prompt, text in zip(ids, texts, strict=True):
        front.dispatcher.scripts[tuple(prompt)] = text * 2
    async with sdk(front) as client:
        for prompts in (texts, ids):
            reply = await client.completions.create(model=MODEL, prompt=prompts, max_tokens=50)  # type: ignore[arg-type]
            assert [c.text for c in reply.choices] == [text * 2 for text in texts]
            assert [c.index for c in reply.choices] == [0, 1, 2]
            stream = await client.completions.create(
                model=MODEL,
                prompt=prompts,  # type: ignore[arg-type]
                max_tokens=50,
                stream=True,
            )
            streamed = ["", "", ""]
            async for chunk in stream:
                streamed[chunk.choices[0].index] += chunk.choices[0].text
            assert streamed == [text * 2 for text in texts]
        single = await client.completions.create(model=MODEL, prompt=ids[0], max_tokens=50)
    assert single.choices[0].text == "firstfirst"
    assert len({request.id for request in front.dispatcher.requests}) == 13
    assert front.dispatcher.closed == 0


async def test_32_concurrent_streams() -> None:
    front = Front()
    async with sdk(front) as client:

        async def one() -> str:
            stream = await client.chat.completions.create(
                model=MODEL,
                messages=CHAT,  # type: ignore[arg-type]
                stream=True,
            )
            return "".join([c.choices[0].delta.content or "" async for c in stream])

        assert await asyncio.gather(*(one() for _ in range(32))) == ["hello world"] * 32
    assert front.dispatcher.exhausted == 32


async def test_sampling_fields_arrive() -> None:
    front = Front()
    async with sdk(front) as client:
        await client.completions.create(
            model=MODEL,
            prompt="a",
            max_tokens=5,
            temperature=0,
            top_p=0.5,
            seed=7,
            user="someone",
            extra_body={
                "top_k": 3,
                "min_p": 0.1,
                "ignore_eos": True,
                "stop_token_ids": [4],
                "unknown": 1,
                "priority": -2,
                "cache_salt": "tenant",
            },
        )
    request = front.dispatcher.requests[0]
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.0, 0.5, 3, 0.1)
    assert (params.seed, params.ignore_eos, params.stop_token_ids) == (7, True, (4,))
    assert (request.priority, request.tenant_salt, params.max_tokens) == (-2, "tenant", 5)


async def test_stop_strings() -> None:
    front = Front()
    front.dispatcher.answer = "one. two. three"
    async with sdk(front) as client:
        reply = await client.completions.create(
            model=MODEL, prompt="a", max_tokens=40, stop=[". th", "nope"]
        )
        stream = await client.completions.create(
            model=MODEL, prompt="a", max_tokens=40, stop=". th", stream=True
        )
        text = "".join([chunk.choices[0].text async for chunk in stream])
    assert reply.choices[0].text == text == "one. two"
    assert reply.choices[0].finish_reason == "stop"
    assert front.dispatcher.closed == 2
    assert all(trace.text_stop for trace in front.dispatcher.traces)
    count = reply.usage.completion_tokens if reply.usage else 0
    assert 0 < count < len(TOKENIZER.encode("one. two. three"))


async def test_models() -> None:
    async with sdk(Front()) as client:
        listed = [model.id async for model in client.models.list()]
        one = await client.models.retrieve(MODEL)
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other/model")
    assert listed == [MODEL] == [one.id]


@pytest.mark.parametrize(
    ("error", "expected", "status"),
    [
        (Overloaded("queue full"), openai.RateLimitError, 429),
        (Unavailable("no decode node"), openai.InternalServerError, 503),
        (NodeLost("10.0.0.7:1 died"), openai.InternalServerError, 503),
        (DeadlineExceeded("too late"), openai.InternalServerError, 504),
        (InternalError("secret path /x"), openai.InternalServerError, 500),
        (ValueError("secret path /x"), openai.InternalServerError, 500),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_failures_before_the_first_token_have_their_status(
    error: Exception, expected: type[openai.APIStatusError], status: int, stream: bool
) -> None:
    async with sdk(Front().failing(error)) as client:
        with pytest.raises(expected) as caught:
            await client.completions.create(model=MODEL, prompt="a", stream=stream)
    assert caught.value.status_code == status
    assert "secret" not in str(caught.value)
    assert "10.0.0.7" not in str(caught.value)
    assert caught.value.request_id


async def test_a_failure_in_mid_stream_is_an_error_event() -> None:
    front = Front().failing(NodeLost("gone"), at=2)
    async with sdk(front) as client:
        stream = await client.completions.create(model=MODEL, prompt="a", stream=True)
        seen = [(await anext(stream)).choices[0].text for _ in range(2)]
        with pytest.raises(openai.APIError, match="may be sent again"):
            await anext(stream)
    assert all(seen)


async def test_client_errors_map_to_the_sdks_classes() -> None:
    front = Front(config=RouterConfig(api_key=("right", "other")))
    async with sdk(front, key="right") as client:
        with pytest.raises(openai.NotFoundError) as missing:
            await client.completions.create(model="nope", prompt="a")
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as bad:
            await client.completions.create(model=MODEL, prompt="a", temperature=-1)
        assert bad.value.param == "temperature"
        with pytest.raises(openai.BadRequestError) as long:
            await client.completions.create(model=MODEL, prompt="a", max_tokens=MAX_MODEL_LEN)
        assert (long.value.code, long.value.param) == ("context_length_exceeded", "max_tokens")
    async with sdk(front, key="wrong") as client:
        with pytest.raises(openai.AuthenticationError):
            await client.completions.create(model=MODEL, prompt="a")
    assert front.dispatcher.requests == []


async def test_a_client_that_leaves_closes_the_dispatcher() -> None:
    front = Front()
    front.dispatcher.stall_at = 2
    async with sdk(front) as client:
        stream = await client.completions.create(model=MODEL, prompt="a", stream=True)
        async for _ in stream:
            break
        await stream.close()
        await asyncio.wait_for(front.dispatcher.aborted.wait(), 30)
        assert front.dispatcher.closed == 1


async def test_a_client_that_leaves_a_whole_reply_closes_the_dispatcher() -> None:
    front = Front()
    front.dispatcher.stall_at = 0
    async with sdk(front) as client:
        call = asyncio.create_task(client.completions.create(model=MODEL, prompt=["a", "b"]))
        await asyncio.wait_for(front.dispatcher.stalled.wait(), 30)
        call.cancel()
        await asyncio.wait_for(front.dispatcher.aborted.wait(), 30)
        await asyncio.gather(call, return_exceptions=True)
    assert front.dispatcher.closed == 2
