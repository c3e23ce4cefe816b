"""n, best_of and beams over HTTP: choices prompt by prompt, each with its own text and end."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from baton.text.tokenizer import Tokenizer
from router.config import RouterConfig
from tests.front.fakes import TOKENIZER, FakeDispatcher, Front

ANSWERS = ("hello world", "one two", "a b c d e f", "zz")


def front(*samples: str, **options: Any) -> Front:
    return Front(FakeDispatcher(samples=samples or ANSWERS, **options))


async def post(door: Front, path: str, **body: Any) -> dict[str, Any]:
    async with door.client() as client:
        reply = await client.post(f"/v1/{path}", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def chunks(door: Front, path: str, **body: Any) -> list[dict[str, Any]]:
    async with door.client() as client:
        reply = await client.post(f"/v1/{path}", json={**body, "stream": True})
    assert reply.status_code == 200, reply.text
    lines = [line[6:] for line in reply.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def count_tokens(*texts: str) -> int:
    """With the token that ended each."""
    tokenizer: Tokenizer = TOKENIZER
    return sum(len(tokenizer.encode(text, add_special_tokens=False)) + 1 for text in texts)


async def test_choices_are_the_samples_and_usage_counts_the_prompt_once() -> None:
    door = front()
    reply = await post(door, "completions", prompt="hi", n=4, max_tokens=40)
    assert [(c["index"], c["text"]) for c in reply["choices"]] == list(enumerate(ANSWERS))
    assert {c["finish_reason"] for c in reply["choices"]} == {"stop"}
    (asked,) = door.dispatcher.requests
    assert asked.params.n == 4
    usage = reply["usage"]
    assert usage["prompt_tokens"] == len(asked.prompt_ids)
    assert usage["completion_tokens"] == count_tokens(*ANSWERS)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 2


async def test_batches_of_prompts_are_numbered_prompt_by_prompt() -> None:
    door = front("x", "yy")
    reply = await post(door, "completions", prompt=["a", "b", "c"], n=2, max_tokens=9, echo=True)
    texts = [c["text"] for c in reply["choices"]]
    assert [c["index"] for c in reply["choices"]] == list(range(6))
    assert texts == ["ax", "ayy", "bx", "byy", "cx", "cyy"]
    assert len(door.dispatcher.requests) == 3


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_a_stream_interleaves_choices_each_with_one_end(path: str) -> None:
    door = front()
    given = {"prompt": "hi"} if path == "completions" else {"messages": [USER]}
    got = await chunks(
        door, path, **given, n=4, max_tokens=40, stream_options={"include_usage": True}
    )
    *parts, last = got
    texts, ends, order = [""] * 4, [0] * 4, list[int]()
    for part in parts:
        (choice,) = part["choices"]
        order.append(choice["index"])
        assert ends[choice["index"]] == 0, "a chunk after the end"
        ends[choice["index"]] += choice["finish_reason"] is not None
        if path == "completions":
            texts[choice["index"]] += choice["text"]
        else:
            texts[choice["index"]] += choice["delta"].get("content") or ""
    assert tuple(texts) == ANSWERS
    assert ends == [1] * 4
    assert order != sorted(order), "they take turns"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == count_tokens(*ANSWERS)
    if path != "completions":
        roles = [p["choices"][0]["index"] for p in parts if "role" in p["choices"][0]["delta"]]
        assert sorted(roles) == [0, 1, 2, 3]


USER = {"role": "user", "content": "hi"}


async def test_a_stop_string_ends_its_sample_alone() -> None:
    door = front()
    reply = await post(door, "completions", prompt="hi", n=4, max_tokens=40, stop=[" wo", "wo"])
    texts = [c["text"] for c in reply["choices"]]
    assert texts == ["hello", "one t", *ANSWERS[2:]]
    assert [c["stop_reason"] for c in reply["choices"]] == [" wo", "wo", None, None]
    (asked,) = door.dispatcher.requests
    assert sorted(door.dispatcher.stopped) == [(asked.id, 0), (asked.id, 1)]
    assert door.dispatcher.exhausted == 1, "the others went on to their own ends"


async def test_when_all_stop_by_text_the_request_is_closed() -> None:
    door = front("aaa!bbbbbbbbbbbb", "a!bbbbbbbbbbbbbbbbbbb")
    reply = await post(door, "completions", prompt="hi", n=2, max_tokens=40, stop="!")
    assert [c["text"] for c in reply["choices"]] == ["aaa", "a"]
    assert door.dispatcher.closed == 1
    assert door.dispatcher.traces[0].text_stop
    assert [sample for _, sample in door.dispatcher.stopped] == [1]


async def test_logprobs_belong_to_their_choice() -> None:
    reply = await post(front(), "completions", prompt="hi", n=3, max_tokens=40, logprobs=1)
    for choice, answer in zip(reply["choices"], ANSWERS, strict=False):
        tokens = choice["logprobs"]["tokens"]
        assert "".join(tokens).startswith(answer)
        assert choice["logprobs"]["text_offset"][0] == 0
    chat = await post(
        front(), "chat/completions", messages=[USER], n=2, max_tokens=40, logprobs=True
    )
    counts = [len(c["logprobs"]["content"]) for c in chat["choices"]]
    assert counts == [count_tokens(answer) for answer in ANSWERS[:2]]


async def test_each_choice_has_its_own_tool_and_reasoning_parser() -> None:
    call = '<tool_call>{"name": "f", "arguments": {"city": "Oslo"}}</tool_call>'
    door = front(f"<think>hm</think>{call}", "<think>no</think>plain", f"<think></think>{call}")
    door.config = RouterConfig(
        request_timeout_s=20.0,
        enable_auto_tool_choice=True,
        tool_call_parser="hermes",
        reasoning_parser="qwen3",
    )
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    body = {
        "messages": [USER],
        "tools": tools,
        "n": 3,
        "max_tokens": 120,
        "max_completion_tokens": 120,
    }
    reply = await post(door, "chat/completions", **body)
    first, second, third = (c["message"] for c in reply["choices"])
    assert (first["reasoning"], second["reasoning"]) == ("hm", "no")
    assert second["content"] == "plain"
    assert [len(m.get("tool_calls") or ()) for m in (first, second, third)] == [1, 0, 1]
    assert [c["finish_reason"] for c in reply["choices"]] == ["tool_calls", "stop", "tool_calls"]
    ids = [call["id"] for m in (first, third) for call in m["tool_calls"]]
    assert len(set(ids)) == 2
    door.dispatcher.requests.clear()
    called: dict[int, str] = {}
    for part in await chunks(door, "chat/completions", **body):
        (choice,) = part["choices"]
        for each in choice["delta"].get("tool_calls") or ():
            called[choice["index"]] = (
                called.get(choice["index"], "") + each["function"]["arguments"]
            )
    assert sorted(called) == [0, 2]
    assert json.loads(called[0]) == {"city": "Oslo"}


async def test_best_of_returns_the_most_probable_ones_first() -> None:
    """The fake tells lower log probabilities of higher ids."""
    samples = ("zzzz", "!!", "zz", "a!")
    door = front(*samples)
    reply = await post(door, "completions", prompt="hi", n=2, best_of=4, max_tokens=9)
    means = {}
    for text in samples:
        ids = [*TOKENIZER.encode(text, add_special_tokens=False), 1]
        means[text] = -sum(ids) / len(ids)
    wanted = sorted(samples, key=lambda text: -means[text])[:2]
    assert [c["text"] for c in reply["choices"]] == wanted
    assert [c["index"] for c in reply["choices"]] == [0, 1]
    assert reply["usage"]["completion_tokens"] == count_tokens(*samples), "all were computed"
    assert all(c["logprobs"] is None for c in reply["choices"])
    (asked,) = door.dispatcher.requests
    assert (asked.params.n, asked.params.best_of) == (2, 4)


async def test_best_of_that_chooses_nothing_may_stream() -> None:
    got = await chunks(front("x", "y"), "completions", prompt="hi", n=2, best_of=2, max_tokens=4)
    assert {part["choices"][0]["index"] for part in got} == {0, 1}


async def test_beams_are_asked_for_as_in_vllm() -> None:
    door = front()
    body = {"use_beam_search": True, "n": 4, "length_penalty": 0.5, "early_stopping": "never"}
    reply = await post(door, "completions", prompt="hi", max_tokens=40, **body)
    assert [c["text"] for c in reply["choices"]] == list(ANSWERS)
    params = door.dispatcher.requests[0].params
    assert (params.beam_width, params.n, params.best_of) == (4, 4, None)
    assert (params.length_penalty, params.early_stopping) == (0.5, "never")
    await post(door, "completions", prompt="hi", n=2, best_of=3, use_beam_search=True)
    params = door.dispatcher.requests[1].params
    assert (params.beam_width, params.n, params.early_stopping) == (3, 2, "false")


async def test_a_client_that_leaves_aborts_all_its_samples() -> None:
    door = front(stall_at=1)
    async with door.client() as client:
        task = asyncio.create_task(
            client.post("/v1/completions", json={"prompt": "hi", "n": 4, "max_tokens": 40})
        )
        await door.dispatcher.stalled.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        async with asyncio.timeout(10):
            await door.dispatcher.aborted.wait()
    assert door.dispatcher.closed == 1
