"""`baton batch`: the files, retries, resuming, against a real HTTP server and one engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from baton.engine.config import EngineConfig
from baton.llm import LLM
from baton.protocol.errors import InvalidRequest
from deploy import cli
from deploy.batch import show_batch
from deploy.batch_engine import engine_app
from router.batches.lines import Output, check_tasks, read_tasks
from router.batches.run import BatchPlan, Outcome, RetryPatience, run_batch
from router.config import RouterConfig
from tests.engine.test_models_lora import linear_layers, make_adapter
from tests.tiny_models import make_reranker, make_tiny_model

HI = [{"role": "user", "content": "hi"}]
TEXTS = ["the heart of the matter", "on the road", "a"]
QUICK = RetryPatience(tries=4, first_s=0.001, longest_s=0.01)
URL = "/v1/completions"


def line(custom_id: str, **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": URL, "body": body})


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{text}\n" for text in lines))
    return path


def answers(path: Path) -> dict[str, dict[str, Any]]:
    rows = [json.loads(text) for text in path.read_text().splitlines()]
    assert len({row["custom_id"] for row in rows}) == len(rows), "answered twice"
    return {row["custom_id"]: row for row in rows}


class Server:
    """Answers with the prompt; `script`: prompt -> answers before that one (status, headers)."""

    def __init__(self, **script: list[tuple[int, dict[str, str]]]) -> None:
        self.script = script
        self.asked: list[str] = []
        self.at_once = 0
        self.most_at_once = 0

    async def complete(self, request: Request) -> Response:
        prompt = (await request.json())["prompt"]
        self.asked.append(prompt)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0)
        self.at_once -= 1
        headers = {"x-request-id": f"id-{prompt}"}
        if self.script.get(prompt):
            status, more = self.script[prompt].pop(0)
            return JSONResponse({"error": {"message": "no"}}, status, {**headers, **more})
        return JSONResponse({"text": prompt}, headers=headers)

    def client(self) -> httpx.AsyncClient:
        app = Starlette(routes=[Route(URL, self.complete, methods=["POST"])])
        return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server")


async def run(server: Server, source: Path, target: Path, concurrency: int = 4) -> Outcome:
    plan = BatchPlan(source, target, concurrency, patience=QUICK)
    async with server.client() as client:
        return await run_batch(plan, client, lambda _: None)


async def test_every_request_is_answered_under_its_own_id(tmp_path: Path) -> None:
    names = [f"n{i}" for i in range(40)]
    source = write(tmp_path / "in", *(line(f"id-of-{n}", prompt=n) for n in names), "")
    server = Server()
    outcome = await run(server, source, tmp_path / "out")
    found = answers(tmp_path / "out")
    assert (outcome.total, outcome.answered, outcome.failed) == (40, 40, 0)
    assert 2 <= server.most_at_once <= 4
    for name in names:
        row = found[f"id-of-{name}"]
        assert row["id"].startswith("batch_req_")
        assert row["error"] is None
        assert row["response"] == {
            "status_code": 200, "request_id": f"id-{name}", "body": {"text": name}
        }  # fmt: skip


async def test_busy_servers_are_asked_again_and_errors_are_answers(tmp_path: Path) -> None:
    source = write(tmp_path / "in", *(line(n, prompt=n) for n in ("busy", "bad", "never")))
    server = Server(
        busy=[(429, {"retry-after": "0"}), (503, {})],
        bad=[(400, {})],
        never=[(503, {})] * 9,
    )
    outcome = await run(server, source, tmp_path / "out")
    found = answers(tmp_path / "out")
    assert found["busy"]["response"]["status_code"] == 200
    assert found["bad"]["response"]["status_code"] == 400
    assert found["never"]["response"]["status_code"] == 503
    assert {n: server.asked.count(n) for n in found} == {"busy": 3, "bad": 1, "never": 4}
    assert (outcome.retries, outcome.failed) == (5, 2)


def test_a_wait_is_what_the_server_asks_for_within_bounds() -> None:
    patience = RetryPatience(first_s=1.0, longest_s=20.0)
    assert patience.wait_s(1, "7") == 7.0
    assert patience.wait_s(1, "3600") == 20.0
    assert 0.5 <= patience.wait_s(1, None) <= 1.0
    assert 4.0 <= patience.wait_s(4, "Wed, 21 Oct 2026 07:28:00 GMT") <= 8.0
    assert patience.wait_s(30, None) <= 20.0


async def test_nobody_there_is_an_error_not_an_answer(tmp_path: Path) -> None:
    source = write(tmp_path / "in", line("a", prompt="a"))

    def refuse(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    plan = BatchPlan(source, tmp_path / "out", patience=QUICK)
    transport = httpx.MockTransport(refuse)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        outcome = await run_batch(plan, client, lambda _: None)
    row = answers(tmp_path / "out")["a"]
    assert row["response"] is None
    assert row["error"] == {"code": "connection_error", "message": "ConnectError: refused"}
    assert (outcome.failed, outcome.retries) == (1, 3)


async def test_it_goes_on_where_it_was_also_after_a_torn_line(tmp_path: Path) -> None:
    names = [f"n{i}" for i in range(6)]
    source = write(tmp_path / "in", *(line(n, prompt=n) for n in names))
    target = tmp_path / "out"
    await run(Server(), source, target)
    lines = target.read_bytes().splitlines(keepends=True)
    torn = json.loads(lines[2])["custom_id"]
    target.write_bytes(b"".join(lines[:2]) + lines[2][:25])
    kept = [json.loads(text)["custom_id"] for text in lines[:2]]

    server = Server()
    outcome = await run(server, source, target)
    assert (outcome.skipped, outcome.answered) == (2, 4)
    assert sorted(server.asked) == sorted(set(names) - set(kept))
    assert torn in server.asked
    assert answers(target).keys() == set(names)

    again = Server()
    assert (await run(again, source, target)).answered == 0
    assert again.asked == []


async def test_what_failed_in_an_earlier_run_has_failed(tmp_path: Path) -> None:
    source = write(tmp_path / "in", *(line(n, prompt=n) for n in "abc"))
    target = tmp_path / "out"
    outcome = await run(Server(a=[(400, {})], b=[(404, {})]), source, target)
    assert (outcome.failed, outcome.failed_before) == (2, 0)
    outcome = await run(Server(), source, target)
    assert (outcome.answered, outcome.failed, outcome.failed_before) == (0, 0, 2)
    rows = target.read_bytes().splitlines(keepends=True)
    target.write_bytes(b"".join(row for row in rows if b'"a"' not in row))
    outcome = await run(Server(), source, target)
    assert (outcome.answered, outcome.failed, outcome.failed_before) == (1, 0, 1)


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        (["{"], "line 1: not JSON"),
        (["[]"], "line 1: not an object"),
        ([line("a"), line("a")], "is there twice"),
        (['{"url": "/v1/completions", "body": {}}'], "custom_id"),
        (['{"custom_id": "a", "url": "/metrics", "body": {}}'], "url must begin with"),
        (['{"custom_id": "a", "url": "http://x/v1/completions", "body": {}}'], "url must begin"),
        (['{"custom_id": "a", "url": "/v1/x", "method": "GET", "body": {}}'], "method"),
        (['{"custom_id": "a", "url": "/v1/x", "body": "no"}'], "body must be an object"),
        ([line("a", stream=True)], "does not stream"),
    ],
)
async def test_a_bad_file_is_refused_before_anything_is_sent(
    tmp_path: Path, lines: list[str], named: str
) -> None:
    source = write(tmp_path / "in", line("good", prompt="x"), *lines)
    server = Server()
    with pytest.raises(InvalidRequest, match=named.replace("line 1", "line 2")):
        await run(server, source, tmp_path / "out")
    assert server.asked == []
    assert not (tmp_path / "out").exists()


def test_a_target_that_is_no_batchs_is_left_alone(tmp_path: Path) -> None:
    target = write(tmp_path / "out", '{"some": "data"}')
    with pytest.raises(InvalidRequest, match="not an answer of a batch"):
        Output(target).open()
    assert target.read_text() == '{"some": "data"}\n'


def test_blank_lines_are_no_requests(tmp_path: Path) -> None:
    source = write(tmp_path / "in", "", line("a", prompt="x"), "")
    assert check_tasks(source) == 1
    assert [task.custom_id for task in read_tasks(source)] == ["a"]


@contextlib.asynccontextmanager
async def engine_client(
    tmp_path: Path, lora_modules: tuple[str, ...] = (), **api: Any
) -> AsyncIterator[httpx.AsyncClient]:
    make = make_reranker if api else partial(make_tiny_model, "llama")
    model = str(make(tmp_path / "model"))
    config = EngineConfig(
        model=model, dtype="float32", num_kv_blocks=64, block_size=16, lora_modules=lora_modules
    )
    async with engine_app(config, RouterConfig(model=model, request_timeout_s=60.0, **api)) as app:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            yield client


async def test_one_engine_in_this_process_answers_as_a_router_does(tmp_path: Path) -> None:
    source = write(
        tmp_path / "in",
        *(line(f"n{i}", prompt="abc", max_tokens=5, temperature=0, seed=i) for i in range(6)),
        line("bad", prompt="abc", max_tokens=-1),
        json.dumps(
            {
                "custom_id": "chat",
                "url": "/v1/chat/completions",
                "body": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
            }
        ),
    )
    console = Console(quiet=True)
    plan = BatchPlan(source, tmp_path / "out", 4)
    async with engine_client(tmp_path) as client:
        outcome = await show_batch(plan, client, console)
    found = answers(tmp_path / "out")
    assert (outcome.answered, outcome.failed) == (8, 1)
    texts = {found[f"n{i}"]["response"]["body"]["choices"][0]["text"] for i in range(6)}
    assert len(texts) == 1
    assert found["n0"]["response"]["body"]["usage"]["completion_tokens"] == 5
    assert found["bad"]["response"]["body"]["error"]["param"] == "max_tokens"
    chat = found["chat"]["response"]["body"]
    assert chat["choices"][0]["finish_reason"] in ("length", "stop")


@pytest.mark.parametrize("more", [{"best_of": 3}, {"n": 2, "stop": ["e", "a", "o", "t"]}])
async def test_several_samples_of_one_engine_end_each_by_itself(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    body = {"prompt": "the heart", "max_tokens": 24, "seed": 3, "ignore_eos": True, **more}
    async with engine_client(tmp_path) as client:
        reply = await client.post(URL, json=body)
        assert reply.status_code == 200, reply.text
        choices = reply.json()["choices"]
        assert len(choices) == body.get("n", 1)
        alone = (await client.post(URL, json={**body, "n": 1})).json()["choices"]
    assert choices[0]["text"] == alone[0]["text"]
    if "stop" in more:
        assert {choice["finish_reason"] for choice in choices} == {"stop"}


async def test_one_engine_answers_on_every_endpoint(tmp_path: Path) -> None:
    """All that OpenAI's batches may ask, and the rest of /v1: tokens and vectors side by side."""
    asked: dict[str, tuple[str, dict[str, Any]]] = {
        "completion": (URL, {"prompt": "abc", "max_tokens": 3}),
        "chat": ("/v1/chat/completions", {"messages": HI, "max_tokens": 3}),
        "response": ("/v1/responses", {"input": "hi", "max_output_tokens": 3}),
        "message": ("/v1/messages", {"messages": HI, "max_tokens": 3}),
        "vectors": ("/v1/embeddings", {"input": TEXTS}),
        "rerank": ("/v1/rerank", {"query": TEXTS[0], "documents": TEXTS}),
        "score": ("/v1/score", {"text_1": TEXTS[0], "text_2": TEXTS}),
        "tokens": ("/inference/v1/generate",
                   {"token_ids": [5, 6], "sampling_params": {"max_tokens": 3}}),
        "long": ("/v1/embeddings", {"input": [9] * 2000}),
    }  # fmt: skip
    lines = [{"custom_id": name, "url": url, "body": body} for name, (url, body) in asked.items()]
    source = write(tmp_path / "in", *map(json.dumps, lines))
    async with engine_client(tmp_path, pooling_type="mean", reranker="qwen3") as client:
        plan = BatchPlan(source, tmp_path / "out", len(asked), patience=QUICK)
        outcome = await run_batch(plan, client, lambda _: None)
    told = {name: row["response"] for name, row in answers(tmp_path / "out").items()}
    assert {name for name, row in told.items() if row["status_code"] != 200} == {"long"}, told
    assert (outcome.answered, outcome.failed, outcome.retries) == (len(asked), 1, 0)
    assert told["long"]["body"]["error"]["param"] == "input"
    own = LLM(str(tmp_path / "model"), "float32", num_kv_blocks=64)
    vectors = [row["embedding"] for row in told["vectors"]["body"]["data"]]
    for found, wanted in zip(vectors, own.embed(TEXTS, "mean"), strict=True):
        assert found == pytest.approx(wanted, abs=1e-5)
    scores = [row["score"] for row in told["score"]["body"]["data"]]
    assert scores == pytest.approx(own.rerank(TEXTS[0], TEXTS), abs=1e-5)
    best = told["rerank"]["body"]["results"][0]
    assert best["relevance_score"] == pytest.approx(max(scores), abs=1e-6)


async def test_one_engine_knows_its_models_by_name(tmp_path: Path) -> None:
    """Its own, its adapters, and no other: that is no server that may come back."""
    layers = linear_layers(make_tiny_model("llama", tmp_path / "model"), ("q_proj", "v_proj"))
    poet = make_adapter(tmp_path / "poet", layers, 1)
    body = {"prompt": [5, 6, 7], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    texts: dict[str, str] = {}
    async with engine_client(tmp_path, lora_modules=(f"poet={poet}",)) as client:
        for name in ("model", "poet"):
            reply = await client.post(URL, json={**body, "model": name})
            assert reply.status_code == 200, reply.text
            assert reply.json()["model"] == name
            texts[name] = reply.json()["choices"][0]["text"]
        listed = (await client.get("/v1/models")).json()["data"]
        unknown = await client.post("/v1/embeddings", json={"input": "a", "model": "other"})
    assert texts["model"] != texts["poet"]
    assert [card["id"] for card in listed] == ["model", "poet"]
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "model")


async def test_vectors_wait_for_the_blocks_of_a_request_that_is_given_up(tmp_path: Path) -> None:
    """64 blocks of 16 tokens: 900 find no room beside a request that holds 400 or more."""
    async with engine_client(tmp_path, pooling_type="last") as client:
        body = {"prompt": [7] * 400, "ignore_eos": True}
        running = asyncio.create_task(client.post(URL, json={**body, "max_tokens": 600}))
        assert (await client.post(URL, json={**body, "max_tokens": 1})).status_code == 200
        asking = asyncio.create_task(client.post("/v1/embeddings", json={"input": [9] * 900}))
        await client.post(URL, json={"prompt": [7], "max_tokens": 2})
        running.cancel()
        vectors = await asking
        assert (vectors.status_code, len(vectors.json()["data"])) == (200, 1), vectors.text


async def test_an_engines_request_that_is_given_up_leaves_it(tmp_path: Path) -> None:
    async with engine_client(tmp_path) as client:
        body = {"prompt": "abc", "max_tokens": 400, "ignore_eos": True}
        asking = asyncio.create_task(client.post(URL, json=body))
        short = await client.post(URL, json={**body, "max_tokens": 2})
        assert short.status_code == 200
        asking.cancel()
        await asyncio.wait({asking})
        again = await client.post(URL, json={**body, "max_tokens": 2})
        assert again.json()["choices"][0]["finish_reason"] == "length"


def test_the_command_hands_over_and_tells_of_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "in", line("a", prompt="x"))
    called: list[tuple[BatchPlan, object, str]] = []

    def fake(plan: BatchPlan, engine: object, url: str, key: object, console: object) -> int:
        called.append((plan, engine, url))
        return 1

    monkeypatch.setattr("deploy.batch.batch", fake)
    out = tmp_path / "out"
    flags = ["batch", str(source), str(out), "--url", "http://x:1", "--concurrency", "7"]
    assert cli.main(flags) == 1
    ((plan, engine, url),) = called
    assert (plan.source, plan.target, plan.concurrency) == (source, out, 7)
    assert (engine, url) == (None, "http://x:1")
    assert cli.main([*flags[:-1], "0"]) == 2


def test_an_engine_of_its_own_gets_the_options_of_the_api(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the environment's of a router, though: a key would shut its own client out."""
    called: list[tuple[EngineConfig, RouterConfig]] = []

    def fake(_: object, engine: tuple[EngineConfig, RouterConfig], *others: object) -> int:
        called.append(engine)
        return 0

    monkeypatch.setattr("deploy.batch.batch", fake)
    monkeypatch.setenv("BATON_API_KEY", "k")
    monkeypatch.chdir(tmp_path)
    Path("in").touch()
    flags = ["batch", "in", "out", "--model", "m", "--num-kv-blocks", "7", "--reranker", "qwen3"]
    assert cli.main([*flags, "--timeout-s", "9"]) == 0
    ((engine, api),) = called
    assert (engine.model, engine.num_kv_blocks) == ("m", 7)
    assert (api.model, api.reranker, api.request_timeout_s, api.api_key) == ("m", "qwen3", 9.0, ())
    alone = ["batch", "in", "out", "--model", "m", "--enable-auto-tool-choice"]
    assert cli.main(alone) == 2, "it needs a parser"
