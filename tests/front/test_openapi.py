"""/openapi.json holds: replies of the dialects look as described, bounds are those of the code."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from jsonschema import Draft202012Validator

from router.api.anthropic.body import UNSERVED
from router.api.openapi.dialects import (
    AnthropicErrorReply,
    CountReply,
    MessageReply,
    ResponsesReply,
)
from router.api.openapi.document import document
from router.api.openapi.shapes import REQUIRED
from router.api.pooling.rerank import SIDES
from router.models import PromptReaders
from router.server.app import all_routes
from tests.front.fakes import CHAT_TEMPLATE, Front

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
USER = [{"role": "user", "content": "x"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "ChatBody": ("/v1/chat/completions", {"messages": USER}),
    "CompletionBody": ("/v1/completions", {"prompt": "x"}),
    "ResponsesBody": ("/v1/responses", {"input": "x"}),
    "MessagesBody": ("/v1/messages", {"messages": USER, "max_tokens": 4}),
    "EmbeddingBody": ("/v1/embeddings", {"input": "x"}),
    "EmbedBody": ("/v2/embed", {"texts": ["x"]}),
}
# Schema, path, a body as described, and what breaks it: a name and its value in a body, one by one.
SHAPES: list[tuple[str, str, dict[str, Any], list[dict[str, Any]]]] = [
    ("CompletionBody", "/v1/completions", {"prompt": "x", "stream": True, "stream_options": {},
                                           "bad_words": [" " * 9 + "x" * 256, "a b\n"]}, [
        {"prompt": None}, {"stream": None}, {"top_p": 0}, {"early_stopping": True},
        {"bad_words": [""]}, {"bad_words": [" "]}, {"bad_words": ["x" * 257]},
        {"guided_regex": ""}, {"truncate_prompt_tokens": 0}, {"response_format": {"type": "odd"}},
        {"response_format": {"type": "structural_tag"}}, {"structured_outputs": {}},
        {"structured_outputs": {"json": {}, "regex": "a"}},
        {"prompt_logprobs": 1}, {"structured_outputs": {"json_object": False}},
        {"structured_outputs": {"json_object": {}}}, {"structured_outputs": {"grammar": ""}},
        {"structured_outputs": {"json": {}, "structural_tag": False}},
        {"structured_outputs": {"json": {}, "disable_any_whitespace": "yes"}},
    ]),
    ("ChatBody", "/v1/chat/completions", {"messages": USER, "logprobs": True, "top_logprobs": 1}, [
        {"use_beam_search": True, "stream": True}, {"tools": [
            {"type": "function", "function": {"name": "a b"}}]},
        {"messages": None}, {"messages": []}, {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "tool_calls": []}]}, {"logprobs": None},
        {"tool_choice": "required"}, {"tool_choice": "any"}, {"stream_options": {}},
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"tools": TOOLS, "tool_choice": {}}, {"tools": [], "tool_choice": "required"},
        {"tools": TOOLS, "tool_choice": {"type": "function", "name": "f"}},
    ]),
    ("ChatBody", "/v1/chat/completions", {"messages": USER, "tools": TOOLS,
                                          "tool_choice": "required"}, [{"tools": None}]),
    ("ResponsesBody", "/v1/responses", {"input": "x"}, [
        {"input": None}, {"tool_choice": "required"}, {"input": [{"role": "user"}]},
        {"background": True, "store": False}, {"tools": [{"type": "custom", "name": "a b"}]},
        {"tools": [{"type": "custom", "name": "f", "format": {}}]}, {"logprob_token_ids": [5]},
        {"logprob_token_ids": [5], "include": []},
        {"tools": [{"type": "namespace", "name": "a", "description": [], "tools": []}]},
        {"input": [{"role": "user", "type": "message"}]},
        {"input": [{"type": "function_call_output", "call_id": "c", "output": {}}]},
        {"tools": [{"type": "function", "name": "f"}], "tool_choice": {"type": "function"}},
    ]),
    ("ResponsesBody", "/v1/responses", {"input": "x", "logprob_token_ids": [5],
                                        "top_logprobs": 0}, [{"top_logprobs": None}]),
    ("ResponsesBody", "/v1/responses", {
        "input": "x", "logprob_token_ids": [5], "include": ["message.output_text.logprobs"],
    }, [{"include": None}]),
    ("ResponsesBody", "/v1/responses", {"input": [
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "user", "content": "x"}]}, []),
    ("MessagesBody", "/v1/messages", {"messages": USER, "max_tokens": 4, "system": ""}, [
        {"messages": None}, {"tool_choice": {"type": "any"}}, {"system": {}}, {"system": False},
        {"tools": [{"name": "f"}], "tool_choice": {"type": "tool"}}, {"request_id": "a b"},
        {"output_config": {"format": {}}}, {"tools": [{"name": "a b"}]},
        {"thinking": {"type": "enabled", "budget_tokens": -2}},
        {"thinking": {"type": "disabled", "budget_tokens": 2**31}},
        {"messages": [{"role": "user", "content": [
            {"type": "tool_use", "id": "1", "name": "f", "input": {}}]}]},
        {"messages": [{"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "1", "content": 1}]}]},
    ]),
    ("CountBody", "/v1/messages/count_tokens", {"messages": USER}, [{"messages": None}]),
    ("GenerateBody", "/inference/v1/generate", {"token_ids": [5], "sampling_params": {}}, [
        {"cache_salt": ""}, {"cache_salt": "x" * 257}, {"stream_options": {}},
    ]),
    ("TokenizeBody", "/tokenize", {"prompt": "x", "messages": None}, [
        {"prompt": None}, {"messages": USER}, {"prompt": None, "messages": []},
        {"chat_template": ""}, {"chat_template": "", "messages": USER},
    ]),
    ("TokenizeBody", "/tokenize", {"messages": USER, "prompt": None}, [
        {"messages": None}, {"tools": [{}]},
    ]),
]  # fmt: skip


def test_all_that_is_served_is_described_and_nothing_else() -> None:
    front = Front(chat_template=CHAT_TEMPLATE)
    prompts = PromptReaders(front.config, front.services.models)
    try:
        routes = all_routes(front.services, prompts)
    finally:
        prompts.close()
    served = {
        (method, route.path.replace(":path", ""))
        for route in routes
        for method in route.methods or ()
        if method in METHODS
    }
    paths = document()["paths"]
    described = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    assert served == described | {("GET", "/")}, "that one leads to /docs"
    assert ("GET", "/v1/requests/{name}/stream") in described
    ids = [told["operationId"] for methods in paths.values() for told in methods.values()]
    assert len(set(ids)) == len(ids)


def test_every_reference_leads_somewhere() -> None:
    told = document()
    found = set(re.findall(r"#/components/(\w+)/([\w-]+)", json.dumps(told)))
    assert len(found) > 20
    assert all(name in told["components"][kind] for kind, name in found)


async def test_replies_of_the_dialects_have_the_fields_that_are_described() -> None:
    front = Front(chat_template=CHAT_TEMPLATE)
    async with front.client() as client:
        for name, kind in (("ResponsesBody", ResponsesReply), ("MessagesBody", MessageReply)):
            path, body = BODIES[name]
            reply = await client.post(path, json=body)
            assert reply.status_code == 200, reply.text
            read = msgspec.json.decode(reply.content, type=kind, strict=True)
            assert reply.json() == msgspec.to_builtins(read), name  # no field more, none less
        counted = await client.post("/v1/messages/count_tokens", json={"messages": USER})
        assert msgspec.json.decode(counted.content, type=CountReply).input_tokens > 0
        wrong = await client.post("/v1/messages", json={"messages": USER})
        told = msgspec.json.decode(wrong.content, type=AnthropicErrorReply, strict=True)
        assert (wrong.status_code, told.error.type) == (400, "invalid_request_error")


def test_what_messages_refuse_is_not_described_of_them() -> None:
    schemas = document()["components"]["schemas"]
    for name in ("MessagesBody", "CountBody"):
        assert not schemas[name]["properties"].keys() & UNSERVED.keys()


async def test_messages_without_a_block_are_the_clients_fault() -> None:
    async with Front(chat_template=CHAT_TEMPLATE).client() as client:
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            body = {"messages": [{"role": "user", "content": []}], "max_tokens": 4}
            assert (await client.post(path, json=body)).status_code == 400


async def test_what_is_out_of_a_described_bound_is_refused() -> None:
    schemas = document()["components"]["schemas"]
    front = Front(chat_template=CHAT_TEMPLATE)
    num_tried = 0
    async with front.client() as client:
        for name, (path, body) in BODIES.items():
            for field, schema in schemas[name]["properties"].items():
                for value in _beyond(schema):
                    num_tried += 1
                    more = {"logprobs": True} if field == "top_logprobs" else {}
                    reply = await client.post(path, json={**body, **more, field: value})
                    assert reply.status_code == 400, (path, field, value)
    assert num_tried > 100
    assert not front.dispatcher.requests


async def test_a_head_that_is_too_large_is_described_of_every_operation() -> None:
    told = document()
    heads: dict[str, dict[str, Any]] = {
        "414": {"params": {"a": "x" * 50_000}}, "431": {"headers": {"a": "x" * 50_000}}
    }  # fmt: skip
    async with Front().client() as client:
        for code, head in heads.items():
            reply = await client.get("/v1/models", **head)
            assert (str(reply.status_code), [*reply.json()]) == (code, ["error"])
            theirs = await client.get("/v1/messages", **head)
            assert msgspec.json.decode(theirs.content, type=AnthropicErrorReply)
            operations = [one for methods in told["paths"].values() for one in methods.values()]
            assert all(code in operation["responses"] for operation in operations)


def test_every_integer_of_a_body_has_bounds() -> None:
    """None is read that has more than 64 bits."""
    schemas = document()["components"]["schemas"]
    for name in (name for name in schemas if name.endswith("Body")):
        for field, told in schemas[name]["properties"].items():
            for branch in told.get("anyOf", (told,)):
                if branch.get("type") == "integer":
                    assert {"minimum", "maximum"} <= branch.keys(), (name, field)


def test_required_fields_have_no_default_and_are_no_null() -> None:
    for name, schema in document()["components"]["schemas"].items():
        for field in schema.get("required", ()) if name in REQUIRED else ():
            told = schema["properties"][field]
            assert "default" not in told, (name, field)
            assert {"type": "null"} not in told.get("anyOf", ()), (name, field)


@pytest.mark.parametrize(("name", "path", "body", "wrongs"), SHAPES)
async def test_what_breaks_the_schema_is_refused(
    name: str, path: str, body: dict[str, Any], wrongs: list[dict[str, Any]]
) -> None:
    told = document()
    schema = {"$ref": f"#/components/schemas/{name}", "components": told["components"]}
    validator = Draft202012Validator(schema)
    async with Front(chat_template=CHAT_TEMPLATE).client() as client:
        reply = await client.post(path, json=body)
        assert (validator.is_valid(body), reply.status_code) == (True, 200), reply.text
        for wrong in wrongs:
            reply = await client.post(path, json={**body, **wrong})
            assert reply.status_code == 400, (wrong, reply.text)
            assert not validator.is_valid({**body, **wrong}), wrong


def test_a_score_has_two_sides() -> None:
    told = document()
    schema = {"$ref": "#/components/schemas/ScoreBody", "components": told["components"]}
    validator = Draft202012Validator(schema)
    for first, second in SIDES:
        assert validator.is_valid({first: "a", second: ["b"]})
        for wrong in ({}, {first: "a"}, {first: "a", second: None}, {first: "a", second: []}):
            assert not validator.is_valid(wrong)


def _beyond(schema: dict[str, Any]) -> Iterator[object]:
    """Values just outside of each bound in a property's schema."""
    for branch in schema.get("anyOf", (schema,)):
        if "minimum" in branch and branch["type"] == "integer":
            yield branch["minimum"] - 1
        if "maximum" in branch and branch["type"] == "integer":
            yield branch["maximum"] + 1
        if "minimum" in branch and branch["type"] == "number":
            yield branch["minimum"] - 0.5
        if "maximum" in branch and branch["type"] == "number":
            yield branch["maximum"] + 0.5
        if "maxLength" in branch:
            yield "x" * (branch["maxLength"] + 1)
        if branch.get("minLength"):
            yield ""
        if "maxItems" in branch and "items" in branch:
            yield [_some(branch["items"])] * (branch["maxItems"] + 1)
        if branch.get("minItems"):
            yield []
        if "enum" in branch:
            yield "none of them"


def _some(schema: dict[str, Any]) -> object:
    return 1 if schema.get("type") == "integer" else "x"
