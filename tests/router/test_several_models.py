"""Several models on one router: what the file says, whose nodes are whose, lines at the gate."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from baton.protocol.clock import SystemClock
from baton.protocol.errors import ConfigError, InvalidRequest, Unavailable
from baton.protocol.handles import NodeLoad, NodeRecord, Role
from baton.protocol.messages import SubmitPool
from router.config import RouterConfig
from router.models import ModelNodes, read_entries
from router.nodes.health import HealthSettings, Known, NodeHealth
from router.nodes.policy import Ask, NodeSnapshot, PolicySettings, choose_route
from router.request.gate.admission import AdmissionQueue, Bounds, Ticket, TicketState
from router.request.gate.gate import Gate, GateSettings
from router.request.pool import PoolAsk, PoolDispatcher
from router.request.terms import Terms
from router.request.trace import RequestTrace
from router.tenants.keys import Grant
from tests.router.fakes import (
    FakeClock,
    FakeNode,
    FakeRouter,
    make_record,
    make_request,
    running_router,
)
from tests.router.test_gate import Visitor, settle

D, P = Role.DECODE, Role.PREFILL


# ---- the file ----


def written(folder: Path, models: Any, name: str = "models.yaml") -> RouterConfig:
    file = folder / name
    file.write_bytes(orjson.dumps({"models": models}))
    return RouterConfig(models=str(file), max_logprobs=5, max_live_requests=100)


def test_an_entrys_options_go_before_the_routers(tmp_path: Path) -> None:
    config = written(
        tmp_path,
        {
            "small": {"model": "/m/s", "max-logprobs": 9, "aliases": ["tiny"]},
            "large": {
                "model": "/m/l", "nodes": ["l-1", "l-2"], "digest": "ABCDEF0123",
                "adapters": ["sql"],
                "enable_auto_tool_choice": True, "tool_call_parser": "hermes",
                "max_live_requests": 7,
            },
        },
    )  # fmt: skip
    small, large = read_entries(config)
    assert (small["key"], small["config"].model, small["config"].max_logprobs) == (
        "small",
        "/m/s",
        9,
    )
    assert small["config"].served_model_name == ("small", "tiny")
    assert (small["nodes"], small["adapters"]) == (ModelNodes(("small",)), None)
    mine = large["config"]
    assert (mine.max_logprobs, mine.max_live_requests, mine.tool_call_parser) == (5, 7, "hermes")
    assert large["nodes"] == ModelNodes(("l-1", "l-2"), "abcdef0123")
    assert large["adapters"] == {"sql"}


def test_a_toml_file_says_the_same(tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_text('[models.small]\nmodel = "/m/s"\n[models.large]\nmodel = "/m/l"\n')
    keys = [each["key"] for each in read_entries(RouterConfig(models=str(file)))]
    assert keys == ["small", "large"]


@pytest.mark.parametrize(
    ("models", "words"),
    [
        ({}, 'expected one key, "models"'),
        ([], 'expected one key, "models"'),
        ({"a": "/m"}, "a: a model has a name and options"),
        ({"a": {}}, "a: model is missing"),
        ({"a": {"model": "/m", "port": 1}}, "a: unknown option 'port'"),
        ({"a": {"model": "/m", "max_logprobs": "x"}}, "a: --max-logprobs: 'x' is not a valid int"),
        ({"a": {"model": "/m", "enable_auto_tool_choice": True}}, "requires --tool-call-parser"),
        ({"a": {"model": "/m", "digest": "12"}}, "a: digest must have 8 or more"),
        ({"a": {"model": "/m", "digest": "not digits"}}, "a: digest must have 8 or more"),
        ({"a": {"model": "/m", "aliases": [1]}}, "a: aliases: expected names"),
        ({"a": {"model": "/m", "nodes": []}}, "a: nodes must name"),
        ({"a": {"model": "/m"}, "b": {"model": "/n", "aliases": ["a"]}}, "both have the name 'a'"),
    ],
)
def test_a_bad_file_is_refused_with_its_entry(tmp_path: Path, models: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_entries(written(tmp_path, models))
    assert words in caught.value.message
    assert "models.yaml" in caught.value.message
    assert caught.value.field == "models"


def test_a_file_and_a_model_exclude_each_other(tmp_path: Path) -> None:
    config = written(tmp_path, {"a": {"model": "/m"}})
    for name, value in (("model", "/m"), ("served_model_name", ("a",))):
        with pytest.raises(ConfigError, match="exclude each other"):
            read_entries(replace(config, **{name: value}))
    with pytest.raises(ConfigError, match="cannot read"):
        read_entries(RouterConfig(models=str(tmp_path / "none.yaml")))


def test_nodes_fit_by_name_and_weights() -> None:
    record = make_record("d", D, model="large", model_digest="abcdef0123456789")
    assert ModelNodes(("small", "large")).fits(record)
    assert ModelNodes(("large",), "abcdef01").fits(record)
    assert not ModelNodes(("large",), "abcdef02").fits(record)
    assert not ModelNodes(("small",)).fits(record)


# ---- nodes ----


def model_of(record: NodeRecord) -> str | None:
    return record.model if record.model in ("a", "b") else None


@pytest.fixture
async def four() -> AsyncIterator[tuple[list[FakeNode], FakeRouter]]:
    """P and D of the models a and b, which have nothing in common."""
    nodes = [
        FakeNode(
            make_record(
                f"{role.value[0]}-{model}", role, model=model, model_digest=f"digest-{model}",
                max_model_len=256 if model == "a" else 64,
            )
        )
        for model in ("a", "b")
        for role in (P, D)
    ]  # fmt: skip
    for node in nodes:
        await node.start()
    async with running_router(nodes, model_of=model_of) as router:
        yield nodes, router
    for node in nodes:
        await node.stop()


async def test_a_registry_keeps_models_apart(
    four: tuple[list[FakeNode], FakeRouter],
) -> None:
    _, router = four
    registry = router.registry
    lengths = {key: info.max_model_len for key in "ab" if (info := registry.model(key))}
    assert lengths == {"a": 256, "b": 64}
    assert registry.model() is None
    assert {record.node_id for record in registry.records("b")} == {"p-b", "d-b"}
    assert {(node.model, node.node_id) for node in registry.snapshots()} == {
        ("a", "p-a"), ("a", "d-a"), ("b", "p-b"), ("b", "d-b"),
    }  # fmt: skip
    for changes, words in (
        ({"model": "c"}, "none of this router's models"),
        ({"model": "b", "model_digest": "digest-a"}, "another checkpoint"),
    ):
        with pytest.raises(ConfigError, match=words):
            registry.admit("127.0.0.1:9", make_record("d9", D, **changes))
    registry.admit("127.0.0.1:9", make_record("d9", D, model="a", model_digest="digest-a"))


async def test_vectors_come_from_the_models_nodes(
    four: tuple[list[FakeNode], FakeRouter],
) -> None:
    nodes, router = four
    pools = PoolDispatcher(router.registry, SystemClock(), 4)
    deadline = SystemClock().monotonic() + 30
    for model, heard in (("b", nodes[2]), ("a", nodes[0])):
        work = asyncio.create_task(
            pools.vectors(PoolAsk(f"embd-{model}", [(1, 2)], deadline, model=model))
        )
        await heard.hear(SubmitPool)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
    assert not nodes[1].heard_of(SubmitPool)
    assert not nodes[3].heard_of(SubmitPool)


def snapshot(name: str, model: str, **load: Any) -> NodeSnapshot:
    state = NodeLoad(free_blocks=100, total_blocks=100, prefill_tokens_per_s=1000.0, running=1)
    role = P if name[0] == "p" else D
    return NodeSnapshot(
        name, f"boot-{name}", role, f"digest-{model}", "layout", 16, "float32",
        load=replace(state, **load), model=model,
    )  # fmt: skip


def test_a_route_has_nodes_of_its_model_alone() -> None:
    draw = random.Random(1)
    names = [f"{role}{number}" for role in "pd" for number in range(6)]
    for _ in range(200):
        nodes = [snapshot(name, draw.choice("ab"), running=draw.randrange(9)) for name in names]
        model = draw.choice("ab")
        mine = [node for node in nodes if node.model == model]
        try:
            found = choose_route(
                Ask((1, 2, 3), model=model), nodes, PolicySettings(), draw.random()
            )
        except Unavailable:
            assert all(node.role is P for node in mine)
            continue
        chosen = [found.decode, *([] if found.prefill is None else [found.prefill])]
        assert all(node in mine for node in chosen)


def test_sick_nodes_of_one_model_are_no_panic_of_another() -> None:
    clock = FakeClock()
    health = NodeHealth(clock, HealthSettings(deaths=1))
    nodes = [Known((f"{model}{n}",), D, fit=True, model=model) for model in "ab" for n in (1, 2, 3)]
    for sick in ("a1", "a2", "b1"):
        health.died([sick])
    assert health.panicking(lambda: nodes) == {("a", D)}


# ---- the gate ----


FULL = {"swapped": 1}


def ticket(name: str, model: str, grant: Grant | None = None, priority: int = 0) -> Ticket:
    request = replace(make_request(name), priority=priority)
    return Ticket(request, RequestTrace(Terms(grant or Grant("k", "t")), model))


async def test_full_nodes_of_one_model_hold_up_no_request_of_another() -> None:
    nodes = [snapshot("d1", "a", **FULL), snapshot("d2", "b")]
    gate = Gate(FakeClock(), GateSettings(Bounds(9, 9)), lambda: nodes)
    first = Visitor(gate, "first")
    first.trace.model = "a"
    await settle()
    assert not first.inside.is_set()
    other = Visitor(gate, "other", deadline=1001.0)
    other.trace.model = "b"
    await other.enters()
    assert [request.id for request, _ in gate.waiting()] == ["first"]
    nodes[0] = snapshot("d1", "a")
    gate.poke()
    await first.enters()
    for visitor in (first, other):
        await visitor.leave()


async def test_a_model_without_nodes_waits_alone() -> None:
    gate = Gate(
        FakeClock(), GateSettings(Bounds(9, 9)), lambda: [snapshot("d2", "b")],
        lambda model, _: 60.0 if model == "a" else 0.0,
    )  # fmt: skip
    waiting, other = Visitor(gate, "waiting"), Visitor(gate, "other")
    waiting.trace.model, other.trace.model = "a", "b"
    await other.enters()
    assert [request.id for request, _ in gate.waiting()] == ["waiting"]
    await waiting.cancelled()
    await other.leave()


async def test_a_model_may_have_limits_of_its_own() -> None:
    settings = GateSettings(Bounds(9, 9, of_models={"a": 1}), tokens_of_models={"b": 10})
    gate = Gate(FakeClock(), settings)
    visitors = [Visitor(gate, name) for name in ("a1", "a2", "b1")]
    for visitor in visitors:
        visitor.trace.model = visitor.request.id[0]
    await visitors[0].enters()
    error = await visitors[2].fails()
    assert isinstance(error, InvalidRequest)
    assert "at most 10" in error.message
    assert [request.id for request, _ in gate.waiting()] == ["a2"]
    await visitors[0].leave()
    await visitors[1].enters()
    await visitors[1].leave()


def test_a_flood_for_one_model_does_not_starve_another() -> None:
    """Where the router's own bound is what binds, the model with fewer requests under way is next;
    a more urgent priority goes before that."""
    queue = AdmissionQueue(Bounds(2, 50))
    running = [queue.offer(ticket(f"r{n}", "a"), 0.0, lambda _: True) for n in range(2)]
    flood = [queue.offer(ticket(f"a{n}", "a"), 0.0, lambda _: True) for n in range(20)]
    late = queue.offer(ticket("late", "b"), 0.0, lambda _: True)
    urgent = queue.offer(ticket("urgent", "a", priority=-1), 0.0, lambda _: True)
    assert {each.state for each in (*flood, late, urgent)} == {TicketState.QUEUED}
    order: list[str] = []
    for ended in running:
        queue.release(ended, 0.0, 0, 1.0)
        order += [each.id for each in queue.pump(1.0, lambda _: True)]
    assert order == ["urgent", "late"]
    assert queue.queued_by_tenant() == {"t": 20}
    assert queue.waiting_models() == ["a"]


def test_in_a_full_queue_a_fairer_tenant_takes_a_place_whatever_its_model() -> None:
    queue = AdmissionQueue(Bounds(1, 4))
    queue.offer(ticket("running", "a"), 0.0, lambda _: True)
    flood = [queue.offer(ticket(f"a{n}", "a"), 0.0, lambda _: True) for n in range(4)]
    fair = queue.offer(ticket("b", "b", Grant("other", "other")), 0.0, lambda _: True)
    assert fair.state is TicketState.QUEUED
    assert [each.id for each in queue.pump(0.0, lambda _: True)] == [flood[-1].id]
    assert queue.num_queued == 4
