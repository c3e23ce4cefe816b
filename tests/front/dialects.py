"""A front door whose model thinks and calls tools, for the tests of /v1/responses and /v1/messages;
and checkers: a stream of events is well-formed, and what it tells, put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from baton.text.chat_template import ChatTemplate
from router.api.responses.body import ResponsesCall, call_of, read
from router.api.responses.items import items_of
from router.config import RouterConfig
from tests.front.fakes import TOKENIZER, FakeDispatcher, FakeModel, FakeRegistry, Front

TEMPLATE = (
    "{% if tools %}TOOLS{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}CALL{{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %}[{{ k }}={{ v }}]{% endfor %}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{% if reasoning_effort is defined %}EFFORT{{ reasoning_effort }}{% endif %}"
    "{% endif %}"
)
THOUGHT = "\nhm, Oslo\n"
ARGUMENTS = '{"city":  "Oslo"}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
ANSWER = f"<think>{THOUGHT}</think>\n\nLet me see.\n{CALL}\n{CALL}"
CONFIG = RouterConfig(
    request_timeout_s=20.0,
    enable_auto_tool_choice=True,
    tool_call_parser="hermes",
    reasoning_parser="qwen3",
)


def front(answer: str = ANSWER, config: RouterConfig = CONFIG, step: int = 1) -> Front:
    return Front(
        dispatcher=FakeDispatcher(answer, tokens_per_event=step),
        registry=FakeRegistry(FakeModel(max_model_len=4096)),
        chat_template=ChatTemplate(TEMPLATE, TOKENIZER.special_tokens),
        config=config,
    )


def prompt_of(of: Front) -> str:
    return TOKENIZER.decode(of.dispatcher.requests[-1].prompt_ids, skip_special_tokens=False)


def events_of(stream: str) -> list[dict[str, Any]]:
    """Server-sent events; each is named as its data's `type` says."""
    events: list[dict[str, Any]] = []
    for frame in stream.split("\n\n")[:-1]:
        name, data = frame.split("\n")
        event = orjson.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


_CALLS = ("function_call", "custom_tool_call")


def responses_call(raw: bytes) -> ResponsesCall:
    """What a body asks for that refers to nothing stored. Raises InvalidRequest."""
    given = read(raw)
    return call_of(given, (), items_of(given.body.input), drops_tools=True)


def check_response(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The final response object of a well-formed stream of /v1/responses."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    for event in events[:2]:
        assert (event["response"]["status"], event["response"]["output"]) == ("in_progress", [])
    last = events[-1]
    assert last["type"] == f"response.{last['response']['status']}"
    done: list[dict[str, Any]] = []
    item: dict[str, Any] | None = None  # the one that is open, as it was announced
    text: list[str] | None = None  # of its part that is open (a call's arguments are one)
    for event in events[2:-1]:
        what = event["type"].removeprefix("response.")
        assert event["output_index"] == len(done)
        if what == "output_item.added":
            assert item is None
            item = event["item"]
            assert item is not None
            assert item["status"] == "in_progress"
            text = [] if item["type"] in _CALLS else None
            continue
        assert item is not None
        if what == "output_item.done":
            assert text is None
            assert event["item"]["id"] == item["id"]
            assert event["item"]["type"] == item["type"]
            done.append(event["item"])
            item = None
            continue
        assert event["item_id"] == item["id"]
        match what.rpartition("."):
            case ("content_part" | "reasoning_summary_part", _, "added"):
                assert text is None
                text = []
            case (_, _, "delta"):
                assert text is not None
                text.append(event["delta"])
            case ("content_part" | "reasoning_summary_part", _, "done"):
                assert text is not None
                assert event["part"]["text"] == "".join(text)
                text = None
            case (_, _, "done"):
                assert text is not None
                [told] = [event[name] for name in ("arguments", "input", "text") if name in event]
                assert told == "".join(text)
                text = None if item["type"] in _CALLS else text
            case _:
                raise AssertionError(what)
    if last["type"] == "response.failed":
        assert last["response"]["output"][: len(done)] == done
    else:
        assert item is None
        assert last["response"]["output"] == done
    return last["response"]


_FIELDS = {"text": "text", "thinking": "thinking", "tool_use": "partial_json"}


def check_message(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The message that a well-formed stream of /v1/messages tells."""
    events = [event for event in events if event["type"] != "ping"]
    first, *middle, delta, stop = events
    assert first["type"] == "message_start"
    message = dict(first["message"])
    assert (message["content"], message["stop_reason"]) == ([], None)
    blocks: list[dict[str, Any]] = []
    block: dict[str, Any] | None = None
    texts: list[str] = []
    for event in middle:
        assert event["index"] == len(blocks)
        match event["type"]:
            case "content_block_start":
                assert block is None
                block, texts = dict(event["content_block"]), []
            case "content_block_delta":
                assert block is not None
                texts.append(event["delta"][_FIELDS[block["type"]]])
            case "content_block_stop":
                assert block is not None
                field = _FIELDS[block["type"]]
                text = "".join(texts)
                block["input" if field == "partial_json" else field] = (
                    _input(text) if field == "partial_json" else text
                )
                blocks.append(block)
                block = None
            case other:
                raise AssertionError(other)
    assert block is None
    assert (delta["type"], stop["type"]) == ("message_delta", "message_stop")
    return {**message, "content": blocks, **delta["delta"], "usage": delta["usage"]}


def _input(text: str) -> Any:
    """Valid or not: only a whole object is one."""
    if not text.strip():
        return {}
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError:
        return {"raw_arguments": text}
    return found if isinstance(found, dict) else {"raw_arguments": text}
