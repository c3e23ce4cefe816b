"""What is asked for besides tokens: usage in each chunk, encodings, fields of other APIs, blame."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import pytest

from baton.protocol.errors import InvalidRequest, UnsupportedFeature
from tests.front.fakes import MODEL, FakeDispatcher, Front

USER = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
JSON = "application/json"


async def stream_of(door: Front, path: str, **body: Any) -> list[dict[str, Any]]:
    async with door.client() as client:
        reply = await client.post(path, json={**body, "stream": True})
    assert reply.status_code == 200, reply.text
    return [json.loads(line[6:]) for line in reply.text.split("\n\n")[:-2]]


# ---- usage in each chunk ----


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_each_chunk_tells_its_choices_usage(path: str) -> None:
    door = Front(FakeDispatcher(samples=('a "usage":null b', "zz")))
    body = {"messages": USER} if path == CHAT else {"prompt": "hi"}
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = await stream_of(door, path, **body, n=2, max_tokens=60, stream_options=options)
    prompt = len(door.dispatcher.requests[0].prompt_ids)
    counts = {0: [0], 1: [0]}
    for chunk in chunks:
        usage, (choice,) = chunk["usage"], chunk["choices"]
        assert usage["prompt_tokens"] == prompt
        assert usage["total_tokens"] == prompt + usage["completion_tokens"]
        counts[choice["index"]].append(usage["completion_tokens"])
    for each in counts.values():
        assert each == sorted(each)
    assert counts[0][-1] > counts[1][-1] > 0
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == counts[0][-1] + counts[1][-1]
    texts = "".join(
        (c["choices"][0].get("delta") or {}).get("content") or c["choices"][0].get("text") or ""
        for c in chunks
        if c["choices"][0]["index"] == 0
    )
    assert texts == 'a "usage":null b'  # whoever writes such a text keeps it


async def test_it_asks_for_nothing_alone() -> None:
    options = {"continuous_usage_stats": True}
    chunks = await stream_of(Front(), CHAT, messages=USER, stream_options=options)
    assert all("usage" not in chunk for chunk in chunks)
    options = {"include_usage": True, "continuous_usage_stats": False}
    *chunks, last = await stream_of(Front(), CHAT, messages=USER, stream_options=options)
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["usage"]["completion_tokens"] > 0


# ---- bytes ----


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-encoding": "gzip"}, 415),
        ({"content-encoding": "br"}, 415),
        ({"content-encoding": "gzip, identity"}, 415),
        ({"content-encoding": "identity"}, 200),
        ({"content-type": f"{JSON}; charset=latin-1"}, 415),
        ({"content-type": f"{JSON}; charset=utf-16"}, 415),
        ({"content-type": f"{JSON}; charset=UTF-8"}, 200),
        ({"content-type": f'{JSON}; charset="utf-8"'}, 200),
        ({"content-type": f"{JSON}; x=charset; charset=us-ascii"}, 200),
    ],
)
async def test_encodings_that_are_not_read_are_refused(
    headers: dict[str, str], status: int
) -> None:
    body = json.dumps({"messages": USER}).encode()
    if "gzip" in headers.get("content-encoding", ""):
        body = gzip.compress(body)
    async with Front().client() as client:
        reply = await client.post(CHAT, content=body, headers={"content-type": JSON, **headers})
    assert reply.status_code == status
    if status == 415:
        error = reply.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert ("charset" in error["message"]) == ("content-type" in headers)
        wanted = "identity" if "content-encoding" in headers else None
        assert reply.headers.get("accept-encoding") == wanted


# ---- fields of other APIs ----


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_where_there_is_one_answer_more_are_refused(path: str) -> None:
    body = {"model": MODEL, "input": "x", "messages": USER, "max_tokens": 5}
    async with Front().client() as client:
        for field in ("n", "best_of"):
            refused = await client.post(path, json={**body, field: 3})
            assert refused.status_code == 400
            assert f"{field} is not supported" in refused.json()["error"]["message"]
            assert (await client.post(path, json={**body, field: 1})).status_code == 200


# ---- blame ----

SCHEMA = {"type": "object"}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
SPELLINGS: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": USER, "guided_regex": "a"}, "guided_regex"),
    (CHAT, {"messages": USER, "response_format": FORMAT}, "response_format.json_schema.schema"),
    (COMPLETIONS, {"prompt": "x", "structured_outputs": {"regex": "a"}},
     "structured_outputs.regex"),
    ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"guided_regex": "a"}},
     "sampling_params.guided_regex"),
    ("/v1/responses", {"input": "x", "text": {"format": {
        "type": "json_schema", "name": "x", "schema": SCHEMA}}}, "text.format.schema"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "field"), SPELLINGS)
@pytest.mark.parametrize("kind", [InvalidRequest, UnsupportedFeature])
async def test_what_a_node_refuses_names_the_clients_field(
    path: str, body: dict[str, Any], field: str, kind: type[InvalidRequest]
) -> None:
    door = Front().failing(kind("guided: no such thing", field="guided"))
    async with door.client() as client:
        reply = await client.post(path, json=body)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, field)
    assert error["message"] == f"{field}: no such thing"


async def test_other_fields_keep_their_names() -> None:
    door = Front().failing(InvalidRequest("n: too many", field="n"))
    async with door.client() as client:
        error = (await client.post(CHAT, json={"messages": USER, "guided_regex": "a"})).json()
    assert (error["error"]["param"], error["error"]["message"]) == ("n", "n: too many")


async def test_a_grammar_without_end_is_a_400_and_others_are_served_meanwhile() -> None:
    schema = {"type": "integer", "multipleOf": 9999991}
    door = Front()
    async with door.client() as client:
        bad = asyncio.create_task(client.post(CHAT, json={"messages": USER, "guided_json": schema}))
        for _ in range(5):
            assert (await client.post(CHAT, json={"messages": USER})).status_code == 200
        assert not bad.done()
        error = (await bad).json()["error"]
        assert error["param"] == "guided_json"
        assert error["message"] == "guided_json: the grammar takes too long to build"
        for grammar, why in (
            ("root ::= ", "nothing but an empty answer matches the grammar"),
            ("", "the grammar is empty"),
        ):
            body = {"messages": USER, "guided_grammar": grammar}
            error = (await client.post(CHAT, json=body)).json()["error"]
            assert (error["param"], error["message"]) == (
                "guided_grammar",
                f"guided_grammar: {why}",
            )
