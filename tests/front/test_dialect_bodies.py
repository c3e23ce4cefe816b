"""Whatever stands in a body of either dialect: it is read, or refused as the client's fault."""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.protocol.errors import BatonError, InvalidRequest
from router.api.anthropic import body as messages
from router.api.dialect import in_own_names
from tests.front.dialects import responses_call

RESPONSES: dict[str, Any] = {
    "model": "m", "instructions": "Be kind.", "stream": True, "max_output_tokens": 5,
    "temperature": 0.5, "top_logprobs": 2, "metadata": {"a": "b"}, "store": True,
    "include": ["message.output_text.logprobs"], "tool_choice": {"type": "function", "name": "f"},
    "tools": [{"type": "function", "name": "f", "parameters": {}, "strict": None}],
    "text": {"format": {"type": "text"}, "verbosity": "low"}, "parallel_tool_calls": False,
    "reasoning": {"effort": "none", "summary": "auto"}, "stop": ["x"], "truncation": "disabled",
    "chat_template_kwargs": {"a": 1}, "background": False, "top_k": 3, "seed": 1,
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "b"}], "content": None},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "c"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "d"},
    ],
}  # fmt: skip
MESSAGES: dict[str, Any] = {
    "model": "m", "max_tokens": 5, "system": [{"type": "text", "text": "Be kind."}],
    "stream": False, "stop_sequences": ["x"], "temperature": 1, "metadata": {"user_id": "u"},
    "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
    "tools": [{"name": "f", "input_schema": {"type": "object"}, "description": "d"}],
    "thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"},
    "output_config": {"effort": "low"}, "chat_template_kwargs": {"a": 1}, "top_k": 3,
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "b", "signature": ""},
            {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "c"}]}
        ]},
    ],
}  # fmt: skip
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**63), st.floats(allow_nan=False),
    st.sampled_from(["", "text", "auto", "function", "user", "assistant", "tool_result", "{", "ä"]),
)  # fmt: skip
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "text", "role", "content", "name"]), inner)
    ),
    max_leaves=6,
)


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of everything in `tree` but itself."""
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree)
    found: list[tuple[Any, ...]] = []
    for key, value in inner:
        found.append((*path, key))
        if isinstance(value, dict | list):
            found += places(value, (*path, key))
    return found


def planted(body: dict[str, Any], changes: list[tuple[int, Any]]) -> bytes:
    """The body with some of its places set to other values."""
    changed = copy.deepcopy(body)
    for number, value in changes:
        paths = places(changed)
        if not paths:
            break
        *way, last = paths[number % len(paths)]
        parent: Any = changed
        for step in way:
            parent = parent[step]
        parent[last] = value
    try:
        return orjson.dumps(changed)
    except TypeError:  # an integer beyond 64 bits: no such JSON reaches the router as a number
        return b"{"


changes_of = st.lists(st.tuples(st.integers(0, 200), values), min_size=1, max_size=4)


@given(changes_of)
def test_responses(changes: list[tuple[int, Any]]) -> None:
    _read(responses_call, planted(RESPONSES, changes))


@given(changes_of)
def test_messages(changes: list[tuple[int, Any]]) -> None:
    raw = planted(MESSAGES, changes)
    _read(messages.read, raw)
    _read(messages.read_count, raw)


def _read(read: Any, raw: bytes) -> None:
    with suppress(InvalidRequest):  # and nothing else
        read(raw)


def test_what_is_planted_into_is_valid() -> None:
    assert responses_call(orjson.dumps(RESPONSES)).chat.max_completion_tokens == 5
    assert messages.read(orjson.dumps(MESSAGES)).max_tokens == 5
    assert messages.read_count(orjson.dumps(MESSAGES)).messages


def test_errors_keep_their_class_and_get_the_clients_name() -> None:
    names = {"max_tokens": "max_output_tokens", "messages": "input"}
    with pytest.raises(InvalidRequest, match="max_output_tokens is wrong") as found:  # noqa: SIM117
        with in_own_names(names):
            raise InvalidRequest("max_tokens is wrong", field="max_tokens")
    assert found.value.field == "max_output_tokens"
    with pytest.raises(InvalidRequest) as other:  # noqa: SIM117
        with in_own_names(names):
            raise InvalidRequest("messagesx", field="messagesx")
    assert (type(other.value), other.value.field) == (InvalidRequest, "messagesx")
    assert isinstance(other.value, BatonError)
