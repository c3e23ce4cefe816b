"""Embeddings, reranking, tokens in and out, ids, options, admin and the API's description, by HTTP.

Vectors come from a scripted node, tokens from the scripted dispatcher.
"""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.protocol.errors import UnsupportedFeature
from baton.protocol.events import Pooled
from baton.protocol.messages import SubmitPool
from baton.text.reranking import DEFAULT_INSTRUCTION, answer_tokens, rerank_prompts
from baton.text.tokenizer import Tokenizer
from router.api.openapi.document import OPERATIONS, document
from router.api.pooling.config import PoolingSettings
from router.config import RouterConfig
from router.request.request_ids import engine_id, names
from router.request.timeline import TimelineEntry, TimelineRing
from router.request.trace import RequestTrace
from tests.front.fakes import MODEL, TOKENIZER, FakeDispatcher, Front
from tests.front.tokenizers_built import byte_level
from tests.router.fakes import FakeNode, fake_nodes, running_router

JSON = {"content-type": "application/json"}


@dataclass
class Door:
    client: httpx.AsyncClient
    node: FakeNode
    front: Front
    asked: list[SubmitPool] = field(default_factory=list[SubmitPool])


@asynccontextmanager
async def door(**config: Any) -> AsyncIterator[Door]:
    """A front door over one prefill node that answers [tokens, sum, 0.5], or sum / 1000."""
    async with AsyncExitStack() as stack:
        (p,) = await stack.enter_async_context(fake_nodes("p"))
        p.record = replace(p.record, vocab_size=TOKENIZER.vocab_size)
        router = await stack.enter_async_context(running_router([p]))
        registry: Any = router.registry
        front = Front(registry=registry, config=RouterConfig(request_timeout_s=20.0, **config))
        async with front.client() as client:
            it = Door(client, p, front)
            serving = asyncio.create_task(serve(it))
            yield it
            serving.cancel()


async def serve(it: Door) -> None:
    while True:
        asked = await it.node.hear(SubmitPool)
        it.asked.append(asked)
        rows = [
            struct.pack("<f", sum(ids) / 1000)
            if asked.kind == "yes_no"
            else struct.pack("<3f", len(ids), sum(ids), 0.5)
            for ids in asked.prompts
        ]
        it.node.say(pooled=(Pooled(asked.request.id, asked.request.epoch, tuple(rows)),))


# ---- embeddings ----


async def test_embeddings_of_every_kind_of_input() -> None:
    async with door() as it:
        ids = TOKENIZER.encode("hello")
        for given in ("hello", ["hello"], ids, [ids]):
            reply = await it.client.post("/v1/embeddings", json={"input": given, "model": "tiny"})
            body = reply.json()
            assert body["data"] == [
                {"object": "embedding", "index": 0, "embedding": [len(ids), sum(ids), 0.5]}
            ]
            assert body["usage"] == {"prompt_tokens": len(ids), "total_tokens": len(ids)}
            assert (body["object"], body["model"]) == ("list", MODEL)
            assert body["id"] == "embd-" + reply.headers["x-request-id"]
        assert {(asked.kind, asked.normalize, asked.dimensions) for asked in it.asked} == {
            ("last", True, 0)
        }
        batch = {"input": ["hello", "a", "hello"], "encoding_format": "base64", "normalize": False}
        data = (await it.client.post("/v1/embeddings", json=batch)).json()["data"]
        assert [item["index"] for item in data] == [0, 1, 2]
        raw = base64.b64decode(data[0]["embedding"])
        assert struct.unpack("<3f", raw) == (len(ids), sum(ids), 0.5)
        assert it.asked[-1].normalize is False
        cut = {"input": list(range(5, 25)), "truncate_prompt_tokens": 3}
        await it.client.post("/v1/embeddings", json=cut)
        assert it.asked[-1].prompts == [(5, 6, 7)]
        soon = {"input": "a", "priority": -3, "request_id": "mine"}
        head = {"x-request-priority": "9"}
        named = await it.client.post("/v1/embeddings", json=soon, headers=head)
        assert (named.json()["id"], it.asked[-1].request.priority) == ("embd-mine", -3)
        await it.client.post("/v1/embeddings", json={**cut, "truncation_side": "left"})
        assert it.asked[-1].prompts == [(22, 23, 24)]
        page = (await it.client.get("/metrics")).text
        assert 'baton_pooling_requests_total{model_name="tiny",outcome="ok"} 8.0' in page


BAD_EMBEDDINGS: list[tuple[dict[str, Any], str]] = [
    ({}, "input"),
    ({"input": ""}, "input"),
    ({"input": []}, "input"),
    ({"input": {"a": 1}}, "input"),
    ({"input": ["a", ""]}, "input[1]"),
    ({"input": ["a", 3]}, "input[1]"),
    ({"input": [[1], []]}, "input[1]"),
    ({"input": [True]}, "input"),
    ({"input": [-1]}, "input"),
    ({"input": [1, "a"]}, "input"),
    ({"input": [10**6]}, "input"),
    ({"input": "a " * 400}, "input"),
    ({"input": ["a"] * 2049}, "input"),
    ({"input": "a", "dimensions": 8}, "dimensions"),
    ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
    ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"input": "a", "truncate_prompt_tokens": 10**6}, "truncate_prompt_tokens"),
    ({"input": "a", "normalize": "yes"}, "normalize"),
]


async def test_bad_embedding_requests_are_told_by_field() -> None:
    async with door() as it:
        for body, where in BAD_EMBEDDINGS:
            reply = await it.client.post("/v1/embeddings", json=body)
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, where), body
        unknown = await it.client.post("/v1/embeddings", json={"input": "a", "model": "other"})
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
        assert not it.asked
        page = (await it.client.get("/metrics")).text
        assert "baton_pooling_requests_total{" not in page  # refused before they were any


async def test_dimensions_where_they_are_configured() -> None:
    async with door(matryoshka_dimensions=(2, 3), pooling_type="mean") as it:
        good = await it.client.post("/v1/embeddings", json={"input": "a", "dimensions": 2})
        assert good.status_code == 200
        assert (it.asked[0].dimensions, it.asked[0].kind) == (2, "mean")
        bad = await it.client.post("/v1/embeddings", json={"input": "a", "dimensions": 4})
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "dimensions")


def test_what_a_models_files_say_of_its_vectors(tmp_path: Path) -> None:
    config = RouterConfig(model=str(tmp_path))
    assert PoolingSettings.of(config) == PoolingSettings("last", False, None)
    (tmp_path / "1_Pooling").mkdir()
    pooling = {"pooling_mode_mean_tokens": True}
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    said: dict[str, Any] = {"is_matryoshka": True, "classifier_from_token": ["no", "yes"]}
    (tmp_path / "config.json").write_text(json.dumps(said))
    assert PoolingSettings.of(config) == PoolingSettings("mean", True, ())
    (tmp_path / "config.json").write_text(json.dumps({"matryoshka_dimensions": [8, 16]}))
    assert PoolingSettings.of(config).dimensions == (8, 16)
    own = replace(config, pooling_type="last", reranker="qwen3", matryoshka_dimensions=(4,))
    assert PoolingSettings.of(own) == PoolingSettings("last", True, (4,))
    assert PoolingSettings("last", False, ()).check_dimensions(5) == 5


# ---- rerank and score ----


@pytest.fixture
def yes_and_no(monkeypatch: pytest.MonkeyPatch) -> None:
    """This tokenizer has no single tokens for them."""
    monkeypatch.setattr("router.api.pooling.judges.answer_tokens", lambda _: (7, 8))


def test_what_a_reranker_is_asked_and_may_answer() -> None:
    (ids,) = rerank_prompts(TOKENIZER, "what?", ["that."], None)
    text = TOKENIZER.decode(ids, skip_special_tokens=False)
    assert f"<Instruct>: {DEFAULT_INSTRUCTION}\n<Query>: what?\n<Document>: that." in text
    with pytest.raises(UnsupportedFeature, match="not single tokens"):
        answer_tokens(TOKENIZER)
    backend = byte_level()
    backend.add_tokens(["yes", "no"])
    wanted = backend.token_to_id("yes"), backend.token_to_id("no")
    assert answer_tokens(Tokenizer(backend, {})) == wanted


async def test_other_models_are_refused_as_rerankers_by_name() -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/rerank": {"query": "q", "documents": ["d"]},
        "/rerank": {"query": "q", "documents": ["d"]},
        "/v1/score": {"text_1": "q", "text_2": "d"},
        "/score": {"text_1": "q", "text_2": "d"},
    }
    async with door() as it:
        for path, body in bodies.items():
            error = (await it.client.post(path, json=body)).json()["error"]
            assert (error["param"], error["code"]) == ("model", "unsupported_feature")
            assert MODEL in error["message"]
    async with door(reranker="qwen3") as it:  # a reranker, but not by single tokens
        error = (await it.client.post("/rerank", json=bodies["/rerank"])).json()["error"]
        assert "not single tokens" in error["message"]


@pytest.mark.usefixtures("yes_and_no")
async def test_rerank_orders_and_score_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real prompts do not fit this model: its stand-in is the query and the document."""
    monkeypatch.setattr(
        "router.prompts.reader.rerank_prompts",
        lambda tokenizer, query, documents, _: [
            tokenizer.encode(query + text, add_special_tokens=False) for text in documents
        ],
    )
    async with door(reranker="qwen3") as it:
        texts = ["a", "zzzz", "m"]
        sums = [sum(TOKENIZER.encode("q" + text, add_special_tokens=False)) for text in texts]
        order = sorted(range(3), key=lambda index: -sums[index])
        documents: list[Any] = [texts[0], {"text": texts[1]}, texts[2]]
        body = {"query": "q", "documents": documents}
        reply = (await it.client.post("/v1/rerank", json=body)).json()
        assert [result["index"] for result in reply["results"]] == order
        assert [result["document"]["text"] for result in reply["results"]] == [
            texts[index] for index in order
        ]
        assert [r["relevance_score"] for r in reply["results"]] == pytest.approx(
            [sums[index] / 1000 for index in order]
        )
        assert (it.asked[0].kind, it.asked[0].answers) == ("yes_no", (7, 8))
        short = {**body, "top_n": 1, "return_documents": False}
        (only,) = (await it.client.post("/rerank", json=short)).json()["results"]
        assert (only["index"], "document" in only) == (order[0], False)
        for names_of in (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "items")):
            pairs = dict(zip(names_of, ("q", texts), strict=True))
            scored = (await it.client.post("/v1/score", json=pairs)).json()
            assert [item["score"] for item in scored["data"]] == pytest.approx(
                [total / 1000 for total in sums]
            )
        both = {"queries": ["q", "q"], "documents": ["a", "m"]}
        assert len((await it.client.post("/score", json=both)).json()["data"]) == 2
        for bad, where in (
            ({"query": "q", "documents": []}, "documents"),
            ({"query": "q"}, "documents"),
            ({"query": "q", "documents": [{"image": "x"}]}, "documents[0]"),
            ({**body, "top_n": -1}, "top_n"),
            ({**body, "instruction": "x" * 5000}, "instruction"),
            ({**body, "documents": ["a" * 2000]}, "documents[0]"),
        ):
            error = (await it.client.post("/rerank", json=bad)).json()["error"]
            assert error["param"] == where, bad
        for bad, where in (
            ({"text_1": "q"}, "text_1"),
            ({"text_1": ["q", "r"], "text_2": ["a", "b", "c"]}, "text_1"),
            ({"text_1": "q", "text_2": []}, "text_1"),
        ):
            error = (await it.client.post("/score", json=bad)).json()["error"]
            assert error["param"] == where, bad


# ---- tokens in, tokens out ----


async def test_generate_of_tokens() -> None:
    text = "hello world"
    front = Front(dispatcher=FakeDispatcher(answer=text))
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    async with front.client() as client:
        body = {"token_ids": [5, 6], "sampling_params": {"temperature": 0, "prompt_logprobs": 1}}
        reply = await client.post(
            "/inference/v1/generate", json=body, headers={"x-request-id": "abc"}
        )
        told = reply.json()
        assert told["request_id"] == "generate-abc"
        assert told["choices"] == [
            {"index": 0, "token_ids": [*ids, 1], "finish_reason": "stop", "logprobs": None}
        ]
        assert told["prompt_logprobs"][0] is None
        assert len(told["prompt_logprobs"]) == 2
        request = front.dispatcher.requests[0]
        assert request.prompt_ids == (5, 6)
        assert request.params.max_tokens == 126  # all that the model holds
        stop = {"max_tokens": 20, "stop": ["ll"]}
        reply = await client.post(
            "/inference/v1/generate", json={**body, "sampling_params": stop, "request_id": "mine"}
        )
        (choice,) = reply.json()["choices"]
        assert choice["finish_reason"] == "stop"
        assert "ll" in TOKENIZER.decode(choice["token_ids"])
        assert len(choice["token_ids"]) < len(ids)
        assert names("mine", front.dispatcher.requests[-1].id)


async def test_generate_several_answers() -> None:
    texts = ("hello world", "one two", "zz")
    outputs = [[*TOKENIZER.encode(text, add_special_tokens=False), 1] for text in texts]
    front = Front(dispatcher=FakeDispatcher(samples=texts))
    body = {"token_ids": [5, 6], "sampling_params": {"n": 3, "logprobs": 0}}
    async with front.client() as client:
        whole = (await client.post("/inference/v1/generate", json=body)).json()
        reply = await client.post(
            "/inference/v1/generate",
            json={
                **body,
                "stream": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            },
        )
    assert front.dispatcher.requests[0].params.n == 3
    assert [choice["token_ids"] for choice in whole["choices"]] == outputs
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    told = [choice["logprobs"]["content"] for choice in whole["choices"]]
    assert [len(rows) for rows in told] == [len(ids) for ids in outputs]
    counts = [len(ids) for ids in outputs]
    assert whole["usage"] == {
        "prompt_tokens": 2, "completion_tokens": sum(counts), "total_tokens": 2 + sum(counts)
    }  # fmt: skip
    *chunks, last = [json.loads(x[6:]) for x in reply.text.split("\n\n")[:-2]]
    assert last["usage"] == whole["usage"]
    streamed: list[list[int]] = [[], [], []]
    for chunk in chunks:
        (choice,) = chunk["choices"]
        streamed[choice["index"]] += choice["token_ids"]
        assert chunk["usage"]["completion_tokens"] == len(streamed[choice["index"]])
    assert streamed == outputs


BAD_GENERATE: list[tuple[dict[str, Any], str]] = [
    ({"sampling_params": {}}, "token_ids"),
    ({"token_ids": [1]}, "sampling_params"),
    ({"token_ids": [], "sampling_params": {}}, "token_ids"),
    ({"token_ids": [-1], "sampling_params": {}}, "token_ids"),
    ({"token_ids": [10**7], "sampling_params": {}}, "token_ids"),
    ({"token_ids": [2**80], "sampling_params": {}}, "token_ids[0]"),
    ({"token_ids": [1] * 200, "sampling_params": {}}, "token_ids"),
    ({"token_ids": [1], "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
    ({"token_ids": [1], "sampling_params": {"top_p": "x"}}, "sampling_params.top_p"),
    ({"token_ids": [1], "sampling_params": {"n": 10**6}}, "sampling_params.n"),
    ({"token_ids": [1], "sampling_params": {"guided_json": []}}, "sampling_params.guided_json"),
    (
        {"token_ids": [1], "sampling_params": {"structured_outputs": {"regex": "("}}},
        "sampling_params.structured_outputs.regex",
    ),
    ({"token_ids": [1], "sampling_params": {"bad_words": [""]}}, "sampling_params.bad_words"),
    ({"token_ids": [1], "sampling_params": {}, "features": {}}, "features"),
    ({"token_ids": [1], "sampling_params": {}, "kv_transfer_params": {}}, "kv_transfer_params"),
    ({"token_ids": [1], "sampling_params": {}, "request_id": "a b"}, "request_id"),
    ({"token_ids": [1], "sampling_params": {}, "priority": 2**40}, "priority"),
    ({"token_ids": [1], "sampling_params": {}, "stream_options": {}}, "stream_options"),
]


async def test_bad_requests_for_tokens_are_told_by_field() -> None:
    front = Front()
    async with front.client() as client:
        for body, where in BAD_GENERATE:
            reply = await client.post("/inference/v1/generate", json=body)
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, where), body
    assert not front.dispatcher.requests


async def test_a_streams_failures_are_told_as_elsewhere() -> None:
    body = {"token_ids": [5], "sampling_params": {}, "stream": True}
    for at, status in ((0, 503), (2, 200)):
        front = Front().failing(RuntimeError("ours"), at=at)
        async with front.client() as client:
            reply = await client.post("/inference/v1/generate", json=body)
        assert reply.status_code == (500 if at == 0 else status)
        assert b"ours" not in reply.content
        assert b'"code":"internal"' in reply.content
        assert at == 0 or reply.text.endswith("data: [DONE]\n\n")


# ---- ids and options ----


async def test_request_ids_are_echoed_and_make_the_replys_id() -> None:
    front = Front()
    async with front.client() as client:
        for path, prefix, body in (
            ("/v1/completions", "cmpl", {"prompt": ["a", "b"]}),
            ("/v1/chat/completions", "chatcmpl", {"messages": [{"role": "user", "content": "x"}]}),
        ):
            for _ in range(2):  # the same id again is another request
                reply = await client.post(path, json=body, headers={"x-request-id": "my-id.7"})
                assert reply.headers["x-request-id"] == "my-id.7"
                assert reply.json()["id"] == f"{prefix}-my-id.7"
            drawn = await client.post(path, json=body, headers={"x-request-id": "no spaces"})
            assert drawn.json()["id"] == f"{prefix}-" + drawn.headers["x-request-id"]
            assert " " not in drawn.headers["x-request-id"]
        missing = await client.get("/nowhere", headers={"x-request-id": "my-id.7"})
        assert missing.headers["x-request-id"] == "my-id.7"
        assert missing.json()["error"]["code"] == "not_found"
    ids = [request.id for request in front.dispatcher.requests]
    assert len(set(ids)) == len(ids) == 9
    assert all(len(id_) <= 256 for id_ in ids)


@pytest.mark.parametrize(
    ("path", "prefix", "body"),
    [
        ("/v1/completions", "cmpl-", {"prompt": "a"}),
        ("/v1/chat/completions", "chatcmpl-", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses", "resp_", {"input": "x"}),
        ("/inference/v1/generate", "", {"token_ids": [5], "sampling_params": {}}),
    ],
)
async def test_a_body_may_name_its_request(path: str, prefix: str, body: dict[str, Any]) -> None:
    """vLLM's request_id: as if it had come in the head, which goes first."""
    async with Front().client() as client:
        named = await client.post(path, json={**body, "request_id": "order-66"})
        assert named.headers["x-request-id"] == "order-66"
        known = named.json().get("id") or named.json()["request_id"]
        assert known.startswith(prefix)
        assert prefix == "resp_" or known == f"{prefix}order-66"
        head = {"x-request-id": "mine"}
        both = await client.post(path, json={**body, "request_id": "order-66"}, headers=head)
        assert both.headers["x-request-id"] == "mine"
        for bad in ("a b", "x" * 129, 7):
            refused = await client.post(path, json={**body, "request_id": bad})
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "request_id"


def test_who_is_meant_by_an_id() -> None:
    first, second = engine_id("chatcmpl-a-b", 0), engine_id("chatcmpl-a-b", 1)
    assert first != second
    for asked in ("chatcmpl-a-b", "a-b", first):
        assert names(asked, first)
    for asked in ("b", "a", "chatcmpl", second, ""):
        assert not names(asked, first)


async def test_bad_words_and_cut_prompts() -> None:
    front = Front()
    async with front.client() as client:
        body = {"prompt": "the quick fox", "bad_words": ["lazy"], "truncate_prompt_tokens": 2}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        request = front.dispatcher.requests[0]
        whole = TOKENIZER.encode("the quick fox")
        assert request.prompt_ids == tuple(whole[-2:])
        plain = tuple(TOKENIZER.encode("lazy", add_special_tokens=False))
        assert request.params.bad_words[0] == plain
        ids = {"token_ids": whole, "sampling_params": {"truncate_prompt_tokens": 2}}
        assert (await client.post("/inference/v1/generate", json=ids)).status_code == 200
        assert front.dispatcher.requests.pop().prompt_ids == tuple(whole[-2:])
        chat = {"messages": [{"role": "user", "content": "the quick fox"}]}
        for cut in ({}, {"truncate_prompt_tokens": 3, "truncation_side": "right"}):
            await client.post("/v1/chat/completions", json={**chat, **cut})
        first, other = front.dispatcher.requests.pop(), front.dispatcher.requests.pop()
        assert first.prompt_ids == other.prompt_ids[:3]
        body = {"prompt": "a" * 2000, "max_tokens": 8, "truncate_prompt_tokens": -1}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        assert len(front.dispatcher.requests[1].prompt_ids) == 120
        for bad, where in (
            ({"bad_words": ["x"] * 65}, "bad_words"),
            ({"bad_words": [" "]}, "bad_words"),
            ({"bad_words": [1]}, "bad_words[0]"),
            ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
            ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
            ({"logits_processors": ["m.f"]}, "logits_processors"),
        ):
            reply = await client.post("/v1/completions", json={"prompt": "a", **bad})
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, where), bad


# ---- the description ----


async def test_the_document_describes_every_route_and_every_reply() -> None:
    ring, trace = TimelineRing(1), RequestTrace(finished_at=2.0)
    ring.add(TimelineEntry(f"cmpl-{MODEL}-0.1", 1.0, 1e9, 3, "", trace))
    async with Front(timelines=ring).client() as client:
        told = (await client.get("/openapi.json")).json()
        assert told == json.loads(json.dumps(document()))
        assert told["openapi"] == "3.1.0"
        stored = (await client.post("/v1/responses", json={"input": "a"})).json()["id"]
        again = {"x-request-id": stored.removeprefix("resp_")}
        for path, operations in told["paths"].items():
            for method in operations:
                if "{id}" in path:  # one that was deleted is stored anew
                    await client.post("/v1/responses", json={"input": "a"}, headers=again)
                url = path.replace("{name}", MODEL).replace("{id}", stored)
                body = operations[method].get("requestBody", {}).get("content", {})
                example = body.get("application/json", {}).get("example", {})
                asked = client.build_request(method, url, json=example if body else None)
                reply = await client.send(asked)
                assert reply.status_code not in (404, 405), path
                if path.endswith(("completions", "generate", "tokenize")):
                    assert reply.status_code == 200, (path, reply.text)
                described = operations[method]["responses"]
                assert str(reply.status_code) in described, (path, reply.status_code)
    served = {(operation.method, operation.path) for operation in OPERATIONS}
    assert len(served) == len(OPERATIONS)
    text = json.dumps(told)
    references = {ref.partition('"')[0] for ref in text.split("#/components/schemas/")[1:]}
    assert references <= set(told["components"]["schemas"])
