"""The load generator and the chat client against a real HTTP server that plays a model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvicorn
from rich.console import Console
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from bench.load import LoadTarget, parse_handovers, run_workload
from bench.sse import StreamError, parse_line, parse_lines, text_of
from bench.workload import WorkloadSpec, plan_requests
from deploy.chat import ChatClient, ChatSettings, ask_and_show

SPEC = WorkloadSpec(num_requests=6, rate=0.0, input_words=3, output_tokens=4, length_spread=0.0)


class FakeModel:
    """Answers each prompt with `max_tokens` words; breaks off or refuses when told so."""

    def __init__(self) -> None:
        self.requests: list[dict[str, object]] = []
        self.refuse = False
        self.break_off = False

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/models", self.models),
                Route("/ready", self.ready),
                Route("/metrics", self.metrics),
                Route("/v1/completions", self.complete, methods=["POST"]),
                Route("/v1/chat/completions", self.complete, methods=["POST"]),
            ]
        )

    async def models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": "fake"}]})

    async def ready(self, request: Request) -> Response:
        return PlainTextResponse("ok")

    async def metrics(self, request: Request) -> Response:
        count = len(self.requests)
        return PlainTextResponse(
            "# TYPE baton_handover_seconds histogram\n"
            f'baton_handover_seconds_bucket{{le="+Inf"}} {count}\n'
            f"baton_handover_seconds_sum {0.25 * count}\nbaton_handover_seconds_count {count}\n"
        )

    async def complete(self, request: Request) -> Response:
        body = json.loads(await request.body())
        self.requests.append(body)
        if self.refuse:
            return JSONResponse({"error": {"message": "no node left"}}, status_code=503)
        return StreamingResponse(self.stream(body), media_type="text/event-stream")

    async def stream(self, body: dict[str, object]) -> AsyncIterator[str]:
        count = int(str(body.get("max_tokens") or 2))
        chat = "messages" in body
        yield ": a comment\n\n"
        for index in range(count):
            piece = {"delta": {"content": f"w{index} "}} if chat else {"text": f"w{index} "}
            yield f"id: {index}\ndata: {json.dumps({'choices': [piece]})}\n\n"
        if self.break_off:
            return
        usage = {"prompt_tokens": 5, "completion_tokens": count}
        yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"
        yield "data: [DONE]\n\n"


@asynccontextmanager
async def serving(model: FakeModel) -> AsyncIterator[str]:
    """The model behind a real uvicorn on a free port."""
    server = uvicorn.Server(uvicorn.Config(model.app(), port=0, log_level="warning", ws="none"))
    listener = server.config.bind_socket()
    listener.listen()  # from here on connections wait in the backlog
    port = listener.getsockname()[1]
    task = asyncio.create_task(server.serve([listener]))
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await asyncio.wait_for(task, 10)


async def test_every_request_is_sent_and_timed() -> None:
    model = FakeModel()
    async with serving(model) as url:
        run = await run_workload(LoadTarget(url), plan_requests(SPEC))
    assert [sample.error for sample in run.samples] == [None] * 6
    assert {sample.output_tokens for sample in run.samples} == {4}
    assert {sample.input_tokens for sample in run.samples} == {5}
    assert {len(sample.piece_s) for sample in run.samples} == {4}
    assert all(sample.ttft_s > 0 for sample in run.samples)
    assert {body["model"] for body in model.requests} == {"fake"}
    assert all(body["ignore_eos"] is True for body in model.requests)
    assert run.handovers.mean_s == pytest.approx(0.25)


async def test_failures_become_samples() -> None:
    model = FakeModel()
    async with serving(model) as url:
        model.refuse = True
        refused = await run_workload(LoadTarget(url), plan_requests(SPEC))
        model.refuse, model.break_off = False, True
        broken = await run_workload(LoadTarget(url), plan_requests(SPEC))
    assert all("HTTP 503" in str(sample.error) for sample in refused.samples)
    assert all("broke off" in str(sample.error) for sample in broken.samples)


async def test_chat_shows_the_answer_as_it_comes(capsys: pytest.CaptureFixture[str]) -> None:
    model = FakeModel()
    async with serving(model) as url:

        def ask() -> str:
            with ChatClient(url + "/v1/") as client:
                client.wait_ready(5.0)
                messages = [{"role": "user", "content": "What is prefill?"}]
                settings = ChatSettings(max_tokens=3, temperature=0.0)
                return ask_and_show(client, messages, settings, Console()).text

        assert await asyncio.to_thread(ask) == "w0 w1 w2 "
    assert "w0 w1 w2" in capsys.readouterr().out
    assert model.requests[0]["temperature"] == 0.0


async def test_chat_reports_the_servers_own_message() -> None:
    model = FakeModel()
    model.refuse = True
    async with serving(model) as url:

        def ask() -> None:
            with ChatClient(url) as client:
                client.ask([], ChatSettings(), lambda text: None)

        with pytest.raises(StreamError, match="HTTP 503: no node left"):
            await asyncio.to_thread(ask)


def test_lines_of_a_stream() -> None:
    assert parse_line(": comment") is None
    assert parse_line("id: 3") is None
    assert parse_line("data: [DONE]") is None
    assert text_of(parse_line('data: {"choices": [{"text": "a"}]}') or {}) == "a"
    assert text_of({"choices": [{"delta": {"role": "assistant"}}]}) == ""
    with pytest.raises(StreamError, match="overloaded"):
        parse_line('data: {"error": {"message": "overloaded"}}')
    with pytest.raises(StreamError, match="not JSON"):
        parse_line("data: {")
    with pytest.raises(StreamError, match="broke off"):
        list(parse_lines(['data: {"choices": []}']))


def test_a_server_without_handovers() -> None:
    handovers = parse_handovers("# TYPE up gauge\nup 1\n")
    assert handovers.mean_s is None
