"""Embeddings, scores and reranking pass the same gate as generation: limits, order, refusals."""

from __future__ import annotations

import asyncio
import struct
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.protocol.clock import SystemClock
from baton.protocol.events import Pooled
from baton.protocol.messages import SubmitDecode, SubmitPool
from router.request.gate.admission import Bounds, Reason
from router.request.gate.gate import Gate, GateSettings
from tests.front.test_admission_api import Served, serving
from tests.front.test_endpoints import door
from tests.router.fakes import FakeNode

REFUSED = Bounds(0)
OPEN = {"authorization": "Bearer open"}
CALLS: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "a"},
    "/v1/rerank": {"query": "q", "documents": ["d"]},
    "/v2/rerank": {"query": "q", "documents": ["d"]},
    "/rerank": {"query": "q", "documents": ["d"]},
    "/v1/score": {"text_1": "q", "text_2": "d"},
    "/score": {"text_1": "q", "text_2": "d"},
}


def embed(
    client: httpx.AsyncClient, key: str, *inputs: list[int], **headers: str
) -> asyncio.Task[httpx.Response]:
    sent = {"authorization": f"Bearer {key}", **headers}
    call = client.post("/v1/embeddings", json={"input": list(inputs)}, headers=sent)
    return asyncio.create_task(call)


def answer(node: FakeNode, asked: SubmitPool) -> None:
    rows = tuple(struct.pack("<f", sum(prompt)) for prompt in asked.prompts)
    node.say(pooled=(Pooled(asked.request.id, asked.request.epoch, rows),))


async def answer_next(served: Served) -> SubmitPool:
    asked = await served.node.hear(SubmitPool)
    answer(served.node, asked)
    return asked


def refused(reply: httpx.Response) -> None:
    assert reply.status_code == 429
    assert 1 <= int(reply.headers["retry-after"]) <= 60
    error = reply.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "overloaded")


async def test_embeddings_and_completions_share_a_keys_concurrency(tmp_path: Path) -> None:
    async with serving(tmp_path, live=9) as served, served.front.client() as client:
        first = embed(client, "a", [3, 4])
        asked = await served.node.hear(SubmitPool)
        refused(await embed(client, "a", [5]))
        refused(await served.post(client, "a"))
        assert served.gate.queue.stats.refused[Reason.CONCURRENCY] == 2
        answer(served.node, asked)
        assert (await first).json()["data"][0]["embedding"] == [7.0]
        running = served.post(client, "a")
        await served.node.has_heard(SubmitDecode)
        refused(await embed(client, "a", [5]))
        await served.finish_next()
        assert (await running).status_code == 200
        assert served.gate.queue.num_live == 0


async def test_a_pooling_call_has_a_timeline(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, served.front.client() as client:
        asked = embed(client, "b", [3] * 30, [4] * 20)
        await answer_next(served)
        reply = (await asked).json()
        refused(await embed(client, "b", [5] * 20))  # it has used its tokens
        headers = {"authorization": "Bearer b"}
        listed = (await client.get("/v1/requests", headers=headers)).json()["data"]
        told = (await client.get(f"/v1/requests/{reply['id']}/timeline", headers=headers)).json()
    assert [each["error"] for each in listed] == ["overloaded", None]
    assert (told["outcome"], told["prompt_tokens"], told["output_tokens"]) == ("finished", 50, 0)
    assert (told["tenant"], told["decode_node"]) == ("bob", "d")
    stages = [(each["stage"], len(each.get("parts", ()))) for each in told["stages"]]
    assert stages == [("intake", 0), ("gate", 0), ("placement", 0), ("pooling", 1), ("reply", 0)]
    (part,) = told["stages"][3]["parts"]
    assert (part["name"], part["node"]) == ("pooling", "d")
    ends = [0.0, *(each["end_ms"] for each in told["stages"])]
    assert [each["start_ms"] for each in told["stages"]] == ends[:-1]
    assert told["total_ms"] == ends[-1]


async def test_tokens_of_inputs_are_charged_exactly(tmp_path: Path) -> None:
    async with serving(tmp_path, live=9) as served, served.front.client() as client:
        good = embed(client, "b", [3] * 30, [4] * 28)
        await answer_next(served)
        assert (await good).status_code == 200
        assert served.gate.stats.served["bob"] == 58
        refused(await embed(client, "b", [5] * 60))  # 2 of 60 are left, one comes a second
        assert served.gate.queue.stats.refused[Reason.TOKEN_RATE] == 1
        page = (await client.get("/metrics", headers=OPEN)).text
        assert 'baton_pooling_requests_total{model_name="tiny",outcome="overloaded"} 1.0' in page
        assert 'vllm:prompt_tokens_total{model_name="tiny"} 58.0' in page, (
            "of those that were let in"
        )


async def test_an_embedding_waits_its_turn_and_takes_its_terms_along(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, served.front.client() as client:
        running = served.post(client, "open")
        await served.node.has_heard(SubmitDecode)
        trace = f"00-{'a' * 32}-{'b' * 16}-01"
        waiting = embed(client, "open", [3], **{"x-request-priority": "4", "traceparent": trace})
        await served.queued(1)
        ((request, _),) = served.gate.waiting()
        assert (len(request.prompt_ids), request.priority) == (1, 4)
        load = await client.get("/load", headers=OPEN)
        assert load.json() == {"server_load": 2}
        hopeless = await embed(client, "open", [4], **{"x-request-timeout-ms": "1"})
        assert hopeless.status_code == 503
        assert served.gate.queue.stats.refused[Reason.DEADLINE] == 1
        leaving = embed(client, "open", [4])
        await served.queued(2)
        leaving.cancel()
        await served.queued(1)
        assert not served.node.heard_of(SubmitPool), "nothing was sent before its turn"
        await served.finish_next()
        asked = await answer_next(served)
        assert (asked.request.priority, asked.request.traceparent) == (4, trace)
        assert ((await waiting).status_code, (await running).status_code) == (200, 200)
        assert served.gate.queue.num_live == 0


async def test_too_large_an_input_is_told_by_its_field(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, served.front.client() as client:
        gate = Gate(SystemClock(), GateSettings(Bounds(9), max_request_tokens=6))
        served.front.dispatcher.gate = gate
        whole = embed(client, "open", [3] * 6)
        await answer_next(served)
        assert (await whole).status_code == 200
        reply = await embed(client, "open", [3] * 4, [4] * 3)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "input")
        assert gate.queue.stats.refused[Reason.TOO_LARGE] == 1


async def test_every_pooling_route_passes_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.api.pooling.judges.answer_tokens", lambda _: (7, 8))
    monkeypatch.setattr(
        "router.prompts.reader.rerank_prompts", lambda *given: [(3, 4) for _ in given[2]]
    )
    async with door(reranker="qwen3") as it:
        for path, body in CALLS.items():
            it.front.dispatcher.gate = Gate(SystemClock(), GateSettings(REFUSED))
            refused(await it.client.post(path, json=body))
            it.front.dispatcher.gate = Gate(SystemClock(), GateSettings())
            assert (await it.client.post(path, json=body)).status_code == 200, path
        assert len(it.asked) == len(CALLS)
