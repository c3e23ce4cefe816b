"""Timelines of requests through real nodes: what delays a request is what its timeline shows.

All clocks of the process are one that stands still (`Slowed`): time passes only where a test lets
it pass. So spans are exact, however busy the machine is.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton.protocol import wire_values
from baton.protocol.clock import SystemClock
from baton.protocol.errors import NodeLost
from baton.protocol.events import SpanName
from baton.protocol.request import RequestState
from baton.protocol.sampling import SamplingParams
from baton.runtime.failpoints import Failpoints
from router.request.timeline import MOST_APPENDS, TimelineEntry
from router.server.app import create_app
from tests.cluster import Cluster, Member, Plan, cluster
from tests.router.fakes import FakeClock
from tests.system.references import prompts
from tests.timelines import assert_whole
from tests.tiny_models import make_tiny_model
from tests.waiting import WAIT_S, eventually

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
PROMPT, OTHER = prompts((40, 45), seed=3)
DELAY_S = 0.3
DELAY_MS = 300


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_tiny_model("llama", path, max_position_embeddings=512)
    return path


class Slowed(Failpoints):
    """Lets DELAY_S pass at each passage of one failpoint."""

    def __init__(self, clock: FakeClock, name: str) -> None:
        super().__init__()
        self._clock = clock
        self._name = name

    @property
    def armed(self) -> bool:
        return True

    def hit(self, name: str) -> bool:
        if name == self._name:
            self._clock.advance(DELAY_S)
        return False


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    stands = FakeClock()
    monkeypatch.setattr(SystemClock, "monotonic", staticmethod(stands.monotonic))
    return stands


async def entries(c: Cluster, count: int) -> list[TimelineEntry]:
    """All timelines, the newest first, once there are `count`."""
    timelines = c.router.services.timelines
    assert timelines is not None

    async def there() -> bool:
        return len(list(timelines.newest())) >= count

    await eventually(there)
    return list(timelines.newest())


def parts(entry: TimelineEntry) -> Counter[str]:
    """Milliseconds by what took them: stages, and what nodes did in them."""
    took: Counter[str] = Counter()
    for stage, work in entry.work:
        took[stage.stage] += round(1000 * (stage.end - stage.start))
        for each in work:
            took[f"{stage.stage}: {each.span.name}"] += round(1000 * (each.end - each.start))
    return +took


def figures(c: Cluster) -> dict[str, float]:
    """The router's metrics without labels, by name."""
    page = c.router.services.metrics.render().decode()
    families = text_string_to_metric_families(page)
    return {sample.name: sample.value for family in families for sample in family.samples}


async def ended(c: Cluster, count: int) -> dict[str, float]:
    """The metrics once they have `count` requests."""

    async def measured() -> bool:
        return figures(c).get("vllm:request_queue_time_seconds_count", 0) >= count

    await eventually(measured)
    return figures(c)


@pytest.mark.parametrize(
    ("place", "name", "part"),
    [
        ("kv_transfer.exporter", "kv.first", "hand-over: fetch"),
        ("prefill_node.role", "p.queued", "prefill: queue"),
    ],
)
async def test_only_what_was_delayed_grows(
    model: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, place: str, name: str, part: str
) -> None:
    """On the lane; in the prefill node's queue."""
    async with cluster(Plan(model, lanes=("grpc",))) as c:
        await c.client.generate(PROMPT, GREEDY)
        (first,) = await entries(c, 1)
        assert parts(first) == Counter(), "no time has passed"
        monkeypatch.setattr(f"{place}.FAILPOINTS", Slowed(clock, name))
        await c.client.generate(OTHER, GREEDY)
        entry, _ = await entries(c, 2)
    assert parts(entry) == {part.partition(":")[0]: DELAY_MS, part: DELAY_MS}
    assert entry.total_s == pytest.approx(DELAY_S)


async def test_only_the_decode_nodes_queue_grows(model: Path, clock: FakeClock) -> None:
    """Another hand-over is first in its line, and leaves it after the prompt is computed."""
    async with cluster(Plan(model, lanes=("grpc",))) as c:
        role: Any = c.decode[0].node.shell.role
        before = role._admission.ticket(ready=False)
        asked = asyncio.create_task(c.client.generate(OTHER, GREEDY))

        async def waits() -> bool:
            live = c.router.services.dispatcher.live()
            prefilled = any(trace.first_token_at is not None for _, trace in live)
            return prefilled and role._admission.num_waiting == 2

        await eventually(waits)
        clock.advance(DELAY_S)
        role._admission.release(before)
        await asked
        (entry,) = await entries(c, 1)
        found = await ended(c, 1)
    assert parts(entry) == {"hand-over": DELAY_MS, "hand-over: queue": DELAY_MS}
    handover = {
        name: found[f"baton_handover_{name}_seconds_sum"]
        for name in ("queue", "fetch", "first_step")
    }
    assert handover == pytest.approx({"queue": DELAY_S, "fetch": 0.0, "first_step": 0.0})


async def test_what_waits_for_a_slow_prefill_node_is_seen_to_wait(
    model: Path, clock: FakeClock
) -> None:
    """20 prompts, one after another, on a node whose steps take 100 ms."""
    count, step_s = 20, 0.1
    options = [{"max_num_seqs": 1, "num_kv_blocks": 200, "enable_prefix_caching": False}]
    async with cluster(Plan(model, prefill=options, decode=[{"num_kv_blocks": 400}])) as c:
        runner, all_there = c.prefill[0].engine.steps.runner, threading.Event()
        run = runner.run

        num_steps, loop = 0, asyncio.get_running_loop()

        async def all_shown() -> bool:
            return figures(c).get("vllm:time_to_first_token_seconds_count", 0) >= num_steps

        def slow(chunks: Sequence[Any], *rest: Any) -> Any:
            nonlocal num_steps
            assert all_there.wait(WAIT_S)
            if chunks:  # time passes once the token of the step before is with its client
                asyncio.run_coroutine_threadsafe(eventually(all_shown), loop).result(WAIT_S)
                clock.advance(step_s)
                num_steps += 1
            return run(chunks, *rest)

        runner.run = slow  # pyright: ignore[reportAttributeAccessIssue]
        asked = asyncio.create_task(c.generate(prompts((9,) * count, seed=5), GREEDY))

        async def waiting() -> bool:
            return len(c.prefill[0].node.shell.requests) == count

        await eventually(waiting)
        all_there.set()
        await asked
        found = await ended(c, count)
    waits = found["vllm:time_to_first_token_seconds_sum"] - count * step_s
    assert waits > count * step_s
    assert found["vllm:request_queue_time_seconds_sum"] >= 0.9 * waits


# ---- what the KV and the log take ----


async def told_of(c: Cluster, **headers: str) -> dict[str, Any]:
    """The timeline over HTTP of a request that has just been asked, and has ended."""
    transport = httpx.ASGITransport(create_app(c.router.services))
    async with httpx.AsyncClient(
        transport=transport, base_url="http://baton", timeout=WAIT_S
    ) as client:
        body = {"prompt": list(PROMPT), "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        answer = await client.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        (entry,) = await entries(c, 1)
        assert_whole(entry)
        return (await client.get(f"/v1/requests/{entry.request_id}/timeline")).json()


def fetch_of(told: dict[str, Any]) -> dict[str, Any]:
    parts = [part for stage in told["stages"] for part in stage.get("parts", ())]
    (fetch,) = (part for part in parts if part["name"] == "fetch")
    return fetch


@pytest.mark.parametrize("lane", ["grpc", "stream"])
async def test_a_fetch_tells_each_layer(model: Path, lane: str) -> None:
    async with cluster(Plan(model, lanes=(lane,))) as c:
        told = await told_of(c)
        layers = len(c.decode[0].engine.info.layers)
    fetch = fetch_of(told)
    assert fetch["lane"] == lane
    assert [(each["first"], each["last"]) for each in fetch["layers"]] == [
        (layer, layer) for layer in range(layers)
    ]
    assert sum(each["kv_bytes"] for each in fetch["layers"]) == fetch["kv_bytes"] > 0
    for each in fetch["layers"]:
        assert fetch["start_ms"] <= each["start_ms"] <= each["end_ms"] <= fetch["end_ms"]
    (transfer,) = told["transfers"]
    assert [part["name"] for part in transfer["parts"]] == ["export", "subscribe"]
    assert told["log"] is None, "a plain request"


async def test_a_node_of_an_older_version_tells_no_layers(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to_wire = wire_values.node_pb2.NodeSpan

    def older(*, layers: object, **fields: Any) -> Any:
        return to_wire(**fields)

    monkeypatch.setattr(wire_values.node_pb2, "NodeSpan", older)
    async with cluster(Plan(model, lanes=("grpc",))) as c:
        fetch = fetch_of(await told_of(c))
    assert fetch["kv_bytes"] > 0
    assert "layers" not in fetch


async def test_a_resumable_request_tells_its_appends(model: Path) -> None:
    async with cluster(Plan(model, lanes=("grpc",))) as c:
        told = await told_of(c, **{"x-baton-resumable": "30", "x-request-id": "mine"})
    log = told["log"]
    assert 1 <= log["appends"] <= 5, "4 tokens; the decode node repeats the first one"
    assert 0 < log["longest_ms"] <= log["total_ms"]
    assert 1 <= len(log["longest"]) <= MOST_APPENDS
    for each in log["longest"]:
        assert each["stage"] == "log-append"
        assert 0 <= each["start_ms"] <= each["end_ms"] <= told["total_ms"]


# ---- all kinds ----

BOUNDS = {"max_live_requests": 40, "max_queued_requests": 90}
ROOMY: dict[str, Any] = {"num_kv_blocks": 600, "max_num_seqs": 64}
BODIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "n": {"n": 3, "temperature": 0.9, "seed": 5},
    "best_of": {"n": 2, "best_of": 3, "temperature": 0.9, "seed": 6},
    "beams": {"use_beam_search": True, "n": 2, "best_of": 2, "temperature": 0},
    "stop": {"stop": ["e", "a", "t", " "], "temperature": 0.9, "seed": 7},
    "one token": {"max_tokens": 1},
    "too long": {"max_tokens": 4000},
    "seeded": {"temperature": 0.9, "seed": 8},
}


async def test_200_requests_of_all_kinds_are_told_without_a_hole(model: Path) -> None:
    """Some are refused, aborted or moved, and in the midst of them nodes are lost."""
    plan = Plan(model, prefill=[ROOMY, ROOMY], decode=[ROOMY, ROOMY], router=BOUNDS)
    async with cluster(plan) as c:
        transport = httpx.ASGITransport(create_app(c.router.services))
        async with httpx.AsyncClient(
            transport=transport, base_url="http://baton", timeout=WAIT_S
        ) as client:
            asked = [asyncio.create_task(ask(client, index)) for index in range(200)]
            dispatcher = c.router.services.dispatcher

            async def so_many(count: int) -> None:
                async def enough() -> bool:
                    return sum(task.done() for task in asked) >= count

                await eventually(enough)

            for index in range(4):
                await so_many(20 * (index + 1))
                for request, _ in dispatcher.live()[:3]:
                    dispatcher.abort(request.id, by_operator=True)
                names = [each.request_id for each in dispatcher.candidates()[:4]]
                await asyncio.gather(*(dispatcher.migrate(name) for name in names))
                lose(c.decode[index % 2] if index < 2 else c.prefill[index % 2])
            statuses = Counter([(await task).status_code for task in asked])
        found = await entries(c, statuses[200])
    assert set(statuses) <= {200, 400, 429, 503}, statuses
    assert statuses[429] > 0, "more came than may wait"
    outcomes = Counter(each.trace.outcome for each in found)
    assert outcomes[RequestState.FINISHED.value] > 50, outcomes
    assert outcomes[RequestState.CANCELLED.value] > 0, outcomes
    stages = Counter(stage.stage for each in found for stage in each.stages)
    assert set(stages) >= {"gate", "placement", "prefill", "hand-over", "decode", "retry"}
    retried = [each for each in found if each.trace.retries]
    assert all("retry" in [stage.stage for stage in each.stages] for each in retried)
    assert sum(bool(each.trace.work) for each in found) >= outcomes[RequestState.FINISHED.value]


def lose(member: Member) -> None:
    """Break its sessions: it aborts what it was given, and comes back."""
    for session in member.node.shell.sessions:
        session.cut(NodeLost("cut by the test"))


async def ask(client: httpx.AsyncClient, index: int) -> httpx.Response:
    kind = list(BODIES)[index % len(BODIES)]
    prompt = list(prompts((3 + index % 50,), seed=index)[0])
    body = {"prompt": prompt, "max_tokens": 24, "ignore_eos": True, **BODIES[kind]}
    return await client.post("/v1/completions", json=body)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
async def test_a_preemption_lies_in_the_stage_that_it_interrupts(model: Path, mode: str) -> None:
    """Eight requests begin on a decode node that has room for the whole of three."""
    small: dict[str, Any] = {"num_kv_blocks": 100, "block_size": 4, "preemption_mode": mode}
    long = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
    lanes, options = ("grpc",), [{"block_size": 4, "num_kv_blocks": 200}]
    async with cluster(Plan(model, prefill=options, decode=[small], lanes=lanes)) as c:
        rounds = 0
        while not c.decode[0].stats.num_preemptions:  # else they came one after another
            rounds += 1
            assert rounds < 20
            await c.generate(prompts((40,) * 8, seed=rounds), long)
        found = await entries(c, 8 * rounds)
    preempted = [each for each in found if each.trace.preemptions]
    assert preempted
    for each in found:
        pauses = [
            (stage, part)
            for stage, work in each.work
            for part in work
            if part.span.name == SpanName.PREEMPTED
        ]
        assert 0 < len(pauses) <= each.trace.preemptions or not each.trace.preemptions
        assert all(part.node == each.trace.decode_node for _, part in pauses)
        for stage, part in pauses:
            assert stage.start <= part.start <= part.end <= stage.end
            assert stage.stage == "decode"
