"""Routes in process: SSE to the letter, hostile bodies as a table, probes, tokens, metrics."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest

from baton.protocol.errors import NodeLost
from router.api.http.reading import MAX_BODY_BYTES
from router.services import Lifecycle
from tests.front.fakes import MAX_MODEL_LEN, MODEL, TOKENIZER, FakeDispatcher, FakeRegistry, Front

JSON = {"content-type": "application/json"}
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


def events_of(body: bytes) -> list[Any]:
    """The data of each event, "[DONE]" as itself; nothing but `data:` lines and blank ones."""
    assert body.endswith(b"\n\n")
    events: list[Any] = []
    for block in body[:-2].split(b"\n\n"):
        assert block.startswith(b"data: ")
        assert b"\n" not in block
        data = block.removeprefix(b"data: ")
        events.append("[DONE]" if data == b"[DONE]" else orjson.loads(data))
    return events


async def test_chat_stream_to_the_letter() -> None:
    front = Front(dispatcher=FakeDispatcher(answer="hi"))
    body = {"messages": USER, "stream": True, "stream_options": {"include_usage": True}}
    async with front.client() as client:
        reply = await client.post(CHAT, json=body)
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    *chunks, done = events_of(reply.content)
    assert done == "[DONE]"
    assert [chunk["choices"] for chunk in chunks] == [
        [{"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None,
          "finish_reason": None}],
        *[[{"index": 0, "delta": {"content": piece}, "logprobs": None, "finish_reason": None}]
          for piece in ("h", "i")],
        [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop",
          "stop_reason": None}],
        [],
    ]  # fmt: skip
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * 4
    prompt = len(front.dispatcher.requests[0].prompt_ids)
    assert chunks[-1]["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 3,
        "total_tokens": prompt + 3,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    for chunk in chunks:
        assert chunk["object"] == "chat.completion.chunk"
        assert chunk["model"] == MODEL
        assert chunk["system_fingerprint"].startswith("baton-")
        assert (chunk["id"], chunk["created"]) == (chunks[0]["id"], chunks[0]["created"])


async def test_completion_stream_to_the_letter() -> None:
    front = Front(dispatcher=FakeDispatcher(answer='"\n\\🙂 </s>'))
    async with front.client() as client:
        body = {"prompt": "a", "stream": True, "max_tokens": 40}
        reply = await client.post(COMPLETIONS, json=body)
    *chunks, last, done = events_of(reply.content)
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == '"\n\\🙂 '
    assert {chunk["choices"][0]["finish_reason"] for chunk in chunks} == {None}
    assert (last["choices"][0]["text"], last["choices"][0]["finish_reason"]) == ("", "stop")
    assert all("usage" not in chunk for chunk in (*chunks, last))


async def test_a_failure_in_mid_stream_ends_it_with_one_error_event() -> None:
    front = Front().failing(NodeLost("10.1.2.3"), at=2)
    async with front.client() as client:
        reply = await client.post(CHAT, json={"messages": USER, "stream": True})
    events = events_of(reply.content)
    assert events[-1] == "[DONE]"
    assert events[-2]["error"]["code"] == "node_lost"
    assert events[-2]["error"]["type"] == "server_error"
    assert sum("error" in event for event in events[:-1]) == 1
    assert b"10.1.2.3" not in reply.content


async def test_events_of_several_tokens_are_counted_to_the_stop() -> None:
    front = Front(dispatcher=FakeDispatcher(answer="hello world", tokens_per_event=4))
    async with front.client() as client:
        body = {"prompt": "a", "max_tokens": 40, "stop": "llo"}
        choice = (await client.post(COMPLETIONS, json=body)).json()["choices"][0]
        assert (choice["text"], choice["stop_reason"]) == ("he", "llo")
        body["include_stop_str_in_output"] = True
        choice = (await client.post(COMPLETIONS, json=body)).json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("hello", "stop")


HOSTILE: list[tuple[str, bytes, str | None]] = [
    ("nan", b'{"prompt": "a", "temperature": NaN}', "temperature"),
    ("infinity", b'{"prompt": "a", "temperature": 1e999}', "temperature"),
    ("surrogate", b'{"prompt": "\\ud800"}', "prompt"),
    ("depth", b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", None),
    ("not utf-8", b'{"prompt": "\xff"}', None),
    ("empty body", b"", None),
    ("array", b"[]", None),
    ("trailing", b'{"prompt": "a"} x', None),
    ("no prompt", b"{}", "prompt"),
    ("null prompt", b'{"prompt": null}', "prompt"),
    ("empty prompt", b'{"prompt": ""}', "prompt"),
    ("empty list", b'{"prompt": []}', "prompt"),
    ("empty in batch", b'{"prompt": ["a", ""]}', "prompt[1]"),
    ("empty ids in batch", b'{"prompt": [[1], []]}', "prompt[1]"),
    ("mixed", b'{"prompt": [1, "a"]}', "prompt"),
    ("bool id", b'{"prompt": [true]}', "prompt"),
    ("float id", b'{"prompt": [1.0]}', "prompt[0]"),
    ("negative id", b'{"prompt": [-1]}', "prompt"),
    ("id beyond the vocabulary", b'{"prompt": [100000]}', "prompt"),
    ("huge id", b'{"prompt": [99999999999999]}', "prompt"),
    ("object prompt", b'{"prompt": {"a": 1}}', "prompt"),
    ("too many prompts", b'{"prompt": [' + b'"a",' * 128 + b'"a"]}', "prompt"),
    ("too long", b'{"prompt": "' + b"z" * 500 + b'"}', "prompt"),
    ("too long with output", b'{"prompt": "a", "max_tokens": 128}', "max_tokens"),
    ("max_tokens 0", b'{"prompt": "a", "max_tokens": 0}', "max_tokens"),
    ("max_tokens text", b'{"prompt": "a", "max_tokens": "3"}', "max_tokens"),
    ("max_tokens bool", b'{"prompt": "a", "max_tokens": true}', "max_tokens"),
    ("max_tokens float", b'{"prompt": "a", "max_tokens": 3.5}', "max_tokens"),
    ("max_tokens huge", b'{"prompt": "a", "max_tokens": 1e30}', "max_tokens"),
    ("n huge", b'{"prompt": "a", "n": 1000000000}', "n"),
    ("n bool", b'{"prompt": "a", "n": true}', "n"),
    ("n 0", b'{"prompt": "a", "n": 0}', "n"),
    ("best_of below n", b'{"prompt": "a", "n": 3, "best_of": 2}', "best_of"),
    ("best_of streamed", b'{"prompt": "a", "best_of": 2, "stream": true}', "best_of"),
    ("beams streamed", b'{"prompt": "a", "n": 2, "use_beam_search": true, "stream": true}',
     "use_beam_search"),
    ("beams too wide", b'{"prompt": "a", "n": 65, "use_beam_search": true}', "n"),
    ("early_stopping", b'{"prompt": "a", "n": 2, "use_beam_search": true, "early_stopping": "no"}',
     "early_stopping"),
    ("early_stopping alone", b'{"prompt": "a", "early_stopping": true}', "early_stopping"),
    ("length_penalty", b'{"prompt": "a", "length_penalty": 11}', "length_penalty"),
    ("logprobs", b'{"prompt": "a", "logprobs": 21}', "logprobs"),
    ("logprobs of an echo", b'{"prompt": "a", "logprobs": -1, "echo": true}', "logprobs"),
    ("logprobs bool", b'{"prompt": "a", "logprobs": true}', "logprobs"),
    ("prompt_logprobs", b'{"prompt": "a", "prompt_logprobs": 21}', "prompt_logprobs"),
    ("prompt_logprobs streamed", b'{"prompt": "a", "prompt_logprobs": 1, "stream": true}',
     "prompt_logprobs"),
    ("echo", b'{"prompt": "a", "echo": 1}', "echo"),
    ("top_logprobs", b'{"prompt": "a", "top_logprobs": 1}', "top_logprobs"),
    ("tools", b'{"prompt": "a", "tools": [{"type": "function"}]}', "tools"),
    ("suffix", b'{"prompt": "a", "suffix": "x"}', "suffix"),
    ("logit_bias", b'{"prompt": "a", "logit_bias": {"5": 101}}', "logit_bias"),
    ("logit_bias key", b'{"prompt": "a", "logit_bias": {"x": 1}}', "logit_bias"),
    ("temperature", b'{"prompt": "a", "temperature": -0.1}', "temperature"),
    ("top_p 0", b'{"prompt": "a", "top_p": 0}', "top_p"),
    ("top_k", b'{"prompt": "a", "top_k": -2}', "top_k"),
    ("min_p", b'{"prompt": "a", "min_p": 2}', "min_p"),
    ("seed tiny", b'{"prompt": "a", "seed": -9223372036854775809}', "seed"),
    ("seed float", b'{"prompt": "a", "seed": 1.5}', "seed"),
    ("seed huge", b'{"prompt": "a", "seed": 18446744073709551616}', "seed"),
    ("presence", b'{"prompt": "a", "presence_penalty": 2.5}', "presence_penalty"),
    ("stop number", b'{"prompt": "a", "stop": 3}', "stop"),
    ("stop inner", b'{"prompt": "a", "stop": ["a", 3]}', "stop[1]"),
    ("stop empty", b'{"prompt": "a", "stop": [""]}', "stop"),
    ("stop many", b'{"prompt": "a", "stop": ' + json.dumps(list("abcdefghijklmnopq")).encode()
     + b"}", "stop"),
    ("stop ids", b'{"prompt": "a", "stop_token_ids": [-1]}', "stop_token_ids"),
    ("stop ids beyond", b'{"prompt": "a", "stop_token_ids": [99999]}', "stop_token_ids"),
    ("allowed beyond", b'{"prompt": "a", "allowed_token_ids": [99999]}', "allowed_token_ids"),
    ("allowed none", b'{"prompt": "a", "allowed_token_ids": []}', "allowed_token_ids"),
    ("allowed text", b'{"prompt": "a", "allowed_token_ids": ["x"]}', "allowed_token_ids[0]"),
    ("allowed and a grammar", b'{"prompt": "a", "allowed_token_ids": [1], "guided_regex": "a"}',
     "allowed_token_ids"),
    ("side", b'{"prompt": "a", "truncation_side": "middle"}', "truncation_side"),
    ("request id", b'{"prompt": "a", "request_id": "a b"}', "request_id"),
    ("stream text", b'{"prompt": "a", "stream": "yes"}', "stream"),
    ("options", b'{"prompt": "a", "stream_options": {"include_usage": true}}', "stream_options"),
    ("options inner", b'{"prompt": "a", "stream": true, "stream_options": {"include_usage": 1}}',
     "stream_options.include_usage"),
    ("priority", b'{"prompt": "a", "priority": 9999999999}', "priority"),
    ("cache_salt", b'{"prompt": "a", "cache_salt": ""}', "cache_salt"),
    ("guided_regex", b'{"prompt": "a", "guided_regex": "("}', "guided_regex"),
    ("guided_json", b'{"prompt": "a", "guided_json": "{"}', "guided_json"),
    ("guided_json schema", b'{"prompt": "a", "guided_json": {"type": "strin"}}', "guided_json"),
    ("guided_choice", b'{"prompt": "a", "guided_choice": []}', "guided_choice"),
    ("guided_grammar", b'{"prompt": "a", "guided_grammar": "root ::= x"}', "guided_grammar"),
    ("two", b'{"prompt": "a", "guided_regex": "a", "guided_choice": ["b"]}', "guided_choice"),
    ("backend", b'{"prompt": "a", "guided_regex": "a", "guided_decoding_backend": "own"}',
     "guided_decoding_backend"),
    ("outputs", b'{"prompt": "a", "structured_outputs": {}}', "structured_outputs"),
    ("outputs two", b'{"prompt": "a", "structured_outputs": {"regex": "a", "json": {}}}',
     "structured_outputs"),
    ("outputs json", b'{"prompt": "a", "structured_outputs": {"json": 3}}',
     "structured_outputs.json"),
    ("outputs space",
     b'{"prompt": "a", "structured_outputs": {"json": {}, "whitespace_pattern": 3}}',
     "structured_outputs.whitespace_pattern"),
    ("outputs regex", b'{"prompt": "a", "structured_outputs": {"regex": 3}}',
     "structured_outputs.regex"),
    ("large", b'{"prompt": "a", "guided_regex": "' + b"a" * 300_000 + b'"}', "guided_regex"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "field"), [(b, f) for _, b, f in HOSTILE], ids=[name for name, _, _ in HOSTILE]
)
async def test_hostile_bodies(body: bytes, field: str | None) -> None:
    front = Front()
    async with front.client() as client:
        reply = await client.post(COMPLETIONS, content=body, headers=JSON)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == field
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert front.dispatcher.requests == []


CALL: dict[str, Any] = {"id": "1", "type": "function", "function": {"name": "f"}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
HOSTILE_CHAT: list[tuple[dict[str, Any], str]] = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": 1}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    ({"messages": [*USER, {"role": "robot", "content": "x"}]}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [*USER, {"role": "system", "content": None}]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]},
     "messages[0].content[0].text"),
    ({"messages": USER, "reasoning_effort": "blah"}, "reasoning_effort"),
    ({"messages": [{"role": "user", "tool_calls": [CALL]}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        "messages[0].content[0].image_url",
    ),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
    ({"messages": [{"role": "user", "content": "z" * 500}]}, "messages"),
    ({"messages": USER, "tools": [{"type": "function"}], "tool_choice": "none"}, "tools[0]"),
    ({"messages": USER, "tools": [{"type": "web_search", "function": {"name": "f"}}],
      "tool_choice": "none"}, "tools[0].type"),
    ({"messages": USER, "tools": [{"type": "function", "function": {"name": ""}}],
      "tool_choice": "none"}, "tools[0].function.name"),
    ({"messages": USER, "tools": TOOLS}, "tools"),
    ({"messages": USER, "tools": TOOLS, "tool_choice": "auto"}, "tool_choice"),
    ({"messages": USER, "tool_choice": "required"}, "tool_choice"),
    ({"messages": USER, "tools": TOOLS, "tool_choice": {
        "type": "function", "function": {"name": "g"}}}, "tool_choice.function.name"),
    ({"messages": USER, "tool_choice": "required", "tools": [{"type": "function", "function": {
        "name": "a b"}}]}, "tools[0].function.name"),
    ({"messages": USER, "tool_choice": "required", "tools": [{"type": "function", "function": {
        "name": "f", "parameters": {"type": "object", "properties": 1}}}]}, "tools"),
    ({"messages": USER, "tools": TOOLS, "tool_choice": "maybe"}, "tool_choice"),
    ({"messages": USER, "tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
    ({"messages": [*USER, {"role": "assistant", "tool_calls": [{"id": "1"}]}]},
     "messages[1].tool_calls[0].function"),
    ({"messages": [*USER, {"role": "assistant", "tool_calls": [CALL | {"function": {
        "name": "f", "arguments": "{"}}]}]}, "messages[1].tool_calls[0].function.arguments"),
    ({"messages": [*USER, {"role": "assistant", "tool_calls": [CALL | {"function": {
        "name": "f", "arguments": "[]"}}]}]}, "messages[1].tool_calls[0].function.arguments"),
    ({"messages": USER, "continue_final_message": True, "add_generation_prompt": True},
     "continue_final_message"),
    ({"messages": USER, "echo": 1}, "echo"),
    ({"messages": USER, "response_format": {"type": "xml"}}, "response_format.type"),
    ({"messages": USER, "response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"messages": USER, "response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
     "response_format.json_schema.schema"),
    ({"messages": USER, "response_format": {"type": "json_schema", "json_schema": {
        "strict": True, "schema": {"type": "object", "not": {}}}}},
     "response_format.json_schema.schema"),
    ({"messages": USER, "response_format": {"type": "structural_tag"}}, "response_format"),
    ({"messages": USER, "logprobs": 1}, "logprobs"),
    ({"messages": USER, "top_logprobs": 2}, "top_logprobs"),
    ({"messages": USER, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"messages": USER, "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"messages": USER, "chat_template": "x"}, "chat_template"),
    ({"messages": USER, "max_completion_tokens": 0}, "max_completion_tokens"),
    ({"messages": USER, "max_completion_tokens": 500}, "max_completion_tokens"),
    ({"messages": USER, "chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs.messages"),
    ({"messages": USER, "chat_template_kwargs": {"x": []}}, "chat_template_kwargs.x"),
    ({"messages": USER, "chat_template_kwargs": {"__x": 1}}, "chat_template_kwargs.__x"),
    ({"messages": USER, "chat_template_kwargs": {"self": 1}}, "chat_template_kwargs.self"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "field"), HOSTILE_CHAT)
async def test_hostile_chats(body: dict[str, Any], field: str) -> None:
    front = Front()
    async with front.client() as client:
        reply = await client.post(CHAT, json=body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == field
    assert front.dispatcher.requests == []


async def test_harmless_fields_are_ignored() -> None:
    front = Front()
    body = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}], "extra": 1}],
        "user": "u", "metadata": {"a": "b"}, "store": False, "logprobs": False, "n": 1,
        "response_format": {"type": "text"}, "tools": [], "tool_choice": "none", "stop": None,
        "presence_penalty": 0, "top_logprobs": None, "service_tier": "auto", "seed": None,
    }  # fmt: skip
    async with front.client() as client:
        reply = await client.post(CHAT, json=body)
        plain = await client.post(CHAT, json={"messages": USER})
    assert reply.status_code == plain.status_code == 200
    one, two = front.dispatcher.requests
    assert one.prompt_ids == two.prompt_ids
    assert one.params.seed != two.params.seed
    assert one.id != two.id


@pytest.mark.parametrize("said", [
    {"tool_calls": [CALL]}, {"content": None, "tool_calls": []}, {"content": None, "refusal": "no"},
    {"content": None, "refusal": None, "reasoning": "hm", "reasoning_content": "hm"}, {},
    {"content": [{"type": "refusal", "refusal": "no"}, {"type": "output_text", "text": "x"}, "y"]},
])  # fmt: skip
async def test_whatever_an_assistant_said_is_taken_back(said: dict[str, Any]) -> None:
    front = Front()
    body = {"messages": [*USER, {"role": "assistant", **said}, *USER]}
    async with front.client() as client:
        reply = await client.post(CHAT, json=body)
    assert reply.status_code == 200, reply.text
    assert len(front.dispatcher.requests) == 1


@pytest.mark.parametrize(
    ("given", "seed"),
    [(-1, 2**64 - 1), (-(2**63), 2**63), (0, 0), (7, 7), (2**64 - 1, 2**64 - 1)],
)
async def test_a_signed_seed_counts_modulo_64_bits(given: int, seed: int) -> None:
    front = Front()
    async with front.client() as client:
        reply = await client.post(COMPLETIONS, json={"prompt": "a", "seed": given})
    assert reply.status_code == 200, reply.text
    assert front.dispatcher.requests[0].params.seed == seed


async def test_the_models_sampling_defaults_hold_where_the_client_says_nothing() -> None:
    front = Front(sampling_defaults={"temperature": 0.0, "top_k": 20, "repetition_penalty": 1.1})
    async with front.client() as client:
        await client.post(COMPLETIONS, json={"prompt": "a"})
        await client.post(CHAT, json={"messages": USER, "temperature": None})
        await client.post(CHAT, json={"messages": USER, "temperature": 0.7, "top_k": 0})
    silent, null, loud = (request.params for request in front.dispatcher.requests)
    for params in (silent, null):
        assert (params.temperature, params.top_k, params.repetition_penalty) == (0.0, 20, 1.1)
        assert params.top_p == 1.0
    assert (loud.temperature, loud.top_k, loud.repetition_penalty) == (0.7, 0, 1.1)


async def test_default_max_tokens() -> None:
    front = Front()
    async with front.client() as client:
        await client.post(COMPLETIONS, json={"prompt": "a"})
        await client.post(COMPLETIONS, json={"prompt": [5] * (MAX_MODEL_LEN - 3)})
    assert [r.params.max_tokens for r in front.dispatcher.requests] == [16, 3]


async def test_no_chat_template_is_a_clear_400() -> None:
    async with Front(chat_template=None).client() as client:
        reply = await client.post(CHAT, json={"messages": USER})
    assert reply.status_code == 400
    assert "no chat template" in reply.json()["error"]["message"]


async def test_body_limits_and_types() -> None:
    async with Front().client() as client:
        big = await client.post(COMPLETIONS, content=b" " * (MAX_BODY_BYTES + 1), headers=JSON)
        text = await client.post(COMPLETIONS, content=b'{"prompt": "a"}')
        form = await client.post(COMPLETIONS, data={"prompt": "a"})
    assert (big.status_code, big.json()["error"]["code"]) == (413, "request_too_large")
    assert text.status_code == form.status_code == 415


async def test_http_errors_have_openais_shape() -> None:
    async with Front().client() as client:
        missing = await client.get("/v1/nothing")
        method = await client.get(COMPLETIONS)
        slash = await client.post("/v1/completions/", json={"prompt": "a"})
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    assert (method.status_code, method.headers["allow"]) == (405, "POST")
    assert method.json()["error"]["type"] == "invalid_request_error"
    assert slash.status_code == 404


async def test_without_a_node_everything_says_so_at_once() -> None:
    front = Front(registry=FakeRegistry(None))
    async with front.client() as client:
        reply = await client.post(COMPLETIONS, json={"prompt": "a"})
        ready = await client.get("/ready")
        models = await client.get("/v1/models")
        health = await client.get("/health")
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
    assert reply.json()["error"]["code"] == "unavailable"
    assert ready.status_code == 503
    assert models.json()["data"] == []
    assert health.status_code == 200


async def test_probes_and_version() -> None:
    front = Front()
    async with front.client() as client:
        for path in ("/health", "/ping", "/ready", "/readyz", "/version"):
            assert (await client.get(path)).status_code == 200
    front.lifecycle.draining = True
    async with front.client() as client:
        assert (await client.get("/ready")).json() == {"status": "draining"}
        assert (await client.get("/health")).status_code == 200
    assert front.lifecycle == Lifecycle(draining=True)


async def test_request_ids_are_echoed_only_if_plain() -> None:
    async with Front().client() as client:
        given = await client.get("/health", headers={"x-request-id": "abc-1"})
        odd = await client.get("/health", headers={"x-request-id": "a b\t"})
    assert given.headers["x-request-id"] == "abc-1"
    assert len(odd.headers["x-request-id"]) == 24


async def test_traceparent_travels() -> None:
    front = Front()
    good = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    async with front.client() as client:
        for value in (good, "junk"):
            headers = {"traceparent": value}
            await client.post(COMPLETIONS, json={"prompt": "a"}, headers=headers)
    assert [request.traceparent for request in front.dispatcher.requests] == [good, ""]


async def test_tokenize_and_detokenize() -> None:
    async with Front().client() as client:
        plain = await client.post("/tokenize", json={"prompt": "hi", "return_token_strs": True})
        chat = await client.post("/tokenize", json={"messages": USER})
        back = await client.post("/detokenize", json={"tokens": chat.json()["tokens"]})
        both = await client.post("/tokenize", json={"prompt": "a", "messages": USER})
        beyond = await client.post("/detokenize", json={"tokens": [10**6]})
        negative = await client.post("/detokenize", json={"tokens": [-1]})
    assert plain.json()["tokens"] == TOKENIZER.encode("hi")
    assert plain.json()["token_strs"] == ["h", "i"]
    assert plain.json()["count"] == 2
    assert plain.json()["max_model_len"] == MAX_MODEL_LEN
    assert back.json()["prompt"] == "<s><|user|>hi<|assistant|>"
    assert [r.status_code for r in (both, beyond, negative)] == [400, 400, 400]
    assert beyond.json()["error"]["param"] == "tokens"


async def test_metrics_count_what_happened_under_both_names() -> None:
    front = Front()
    async with front.client() as client:
        await client.post(
            COMPLETIONS, json={"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}
        )
        front.failing(NodeLost("x"), at=1)
        await client.post(COMPLETIONS, json={"prompt": [5, 6, 7]})
        text = (await client.get("/metrics")).text
    lines = text.splitlines()
    for prefix in ("baton_", "vllm:"):
        assert f'{prefix}time_to_first_token_seconds_count{{model_name="tiny"}} 2.0' in lines
        assert f'{prefix}inter_token_latency_seconds_count{{model_name="tiny"}} 3.0' in lines
        assert f'{prefix}prompt_tokens_total{{model_name="tiny"}} 6.0' in lines
        assert f'{prefix}generation_tokens_total{{model_name="tiny"}} 5.0' in lines
        assert f'{prefix}prefix_cache_hits_total{{model_name="tiny"}} 4.0' in lines
        success = f'{prefix}request_success_total{{finished_reason="length",model_name="tiny"}} 1.0'
        assert success in lines
        assert f'{prefix}e2e_request_latency_seconds_count{{model_name="tiny"}} 1.0' in lines
    assert 'vllm:time_per_output_token_seconds_count{model_name="tiny"} 3.0' in lines
    assert 'baton_request_failure_total{code="node_lost",model_name="tiny"} 1.0' in lines
    assert 'baton_migrations_total{outcome="done"} 0.0' in lines
    assert 'vllm:request_num_preemptions_sum{model_name="tiny"} 2.0' in lines
    assert 'vllm:request_num_preemptions_count{model_name="tiny"} 1.0' in lines
    source = '{model_name="tiny",source="%s"}'
    assert f"vllm:prompt_tokens_by_source_total{source % 'local_cache_hit'} 4.0" in lines
    assert f"vllm:prompt_tokens_by_source_total{source % 'local_compute'} 2.0" in lines
    assert 'vllm:request_success_total{finished_reason="stop",model_name="tiny"} 0.0' in lines
    answers = 'baton_http_requests_total{method="POST",route="/v1/completions",status="%s"} 1.0'
    assert answers % 200 in lines
    assert answers % 503 in lines
    seconds = 'baton_http_request_seconds_count{method="POST",route="/v1/completions"} 2.0'
    assert seconds in lines
    families = [line.split()[2] for line in lines if line.startswith("# TYPE ")]
    assert len(families) == len(set(families)), "one name, one meaning"
    assert "_created" not in text
    assert "baton_live_requests 0.0" in lines
