"""Flapping and failing nodes in quarantine, and the panic that ends it. No node, a fake clock."""

from __future__ import annotations

import pytest

from baton.protocol.errors import InternalError, Overloaded
from baton.protocol.events import NodeStep, RequestFailed, TokenEvent
from baton.protocol.handles import Role
from baton.protocol.messages import SubmitDecode
from router.nodes.health import HealthSettings, Known, NodeHealth
from tests.router.clients import Client, cluster
from tests.router.fakes import FakeClock, FakeRouter, make_request

D, P = Role.DECODE, Role.PREFILL


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def failed(code: str) -> NodeStep:
    return NodeStep(failed=(RequestFailed("r", 1, code, "", False),))


def test_three_deaths_in_a_minute_are_a_quarantine_that_doubles(clock: FakeClock) -> None:
    health = NodeHealth(clock)
    for _ in range(2):
        health.died(("1:1", "d"))
        assert not health.in_quarantine(("1:1", "d"))
    lengths: list[float] = []
    for _ in range(6):
        health.died(("1:1", "d"))
        assert health.in_quarantine(("1:1", "d"))
        began = clock.now
        while health.in_quarantine(("1:1", "d")):
            clock.advance(1.0)
        lengths.append(clock.now - began)
        health.died(("1:1", "d"))  # so that those of a minute ago need not count
        health.died(("1:1", "d"))
        while health.in_quarantine(("1:1", "d")):
            clock.advance(1.0)
    assert lengths[0] == 5.0
    assert lengths == sorted(lengths)
    assert lengths[-1] == 60.0


def test_deaths_far_apart_are_no_flapping(clock: FakeClock) -> None:
    health = NodeHealth(clock)
    for _ in range(10):
        health.died(("d",))
        clock.advance(40.0)
    assert health.stats.quarantines == 0


def test_a_node_is_known_by_either_name_after_a_restart(clock: FakeClock) -> None:
    health = NodeHealth(clock)
    for port in range(3):
        health.died((f"127.0.0.1:{port}", "d"))
    assert health.in_quarantine(("127.0.0.1:9", "d"))
    assert not health.in_quarantine(("127.0.0.1:9", "other"))
    assert health.stats.quarantines == 1


def test_only_own_failures_in_a_row_count(clock: FakeClock) -> None:
    health = NodeHealth(clock, HealthSettings(failures=3))
    own = failed(InternalError.code)
    good = NodeStep(tokens=(TokenEvent("r", 1, 0, (1,)),))
    for step in (own, own, good, own, own, failed(Overloaded.code), failed("kv_lost")):
        health.heard(("d",), step)
        assert not health.in_quarantine(("d",))
    health.heard(("d",), own)
    assert health.in_quarantine(("d",))


def test_panic_below_half_disregards_quarantines_of_that_role_only(clock: FakeClock) -> None:
    health = NodeHealth(clock)
    nodes = [Known((name,), D, fit=True) for name in ("d1", "d2", "d3", "d4")]
    nodes += [Known((name,), P, fit=True) for name in ("p1", "p2")]
    asked: list[bool] = []

    def known() -> list[Known]:
        asked.append(True)
        return nodes

    assert health.panicking(known) == frozenset()
    assert not asked, "nobody is in quarantine: nobody needs to be counted"
    for name in ("d1", "d2", "p1"):
        for _ in range(3):
            health.died((name,))
    assert health.panicking(known) == frozenset(), "half of each role is healthy"
    nodes[2] = Known(("d3",), D, fit=False)  # lost, or its engine hangs
    assert health.panicking(known) == {("", D)}
    assert health.panicking(known) == {("", D)}
    assert health.stats.panics == 1
    clock.advance(5.0)
    assert health.panicking(known) == frozenset()


async def test_a_flapping_node_gets_nothing_new_until_it_has_rested() -> None:
    async with cluster("d1", "d2") as (router, (d1, d2)):
        registry = router.registry
        for sessions in (2, 3, 4):
            d1.cut()
            await router.until(lambda count=sessions: d1.sessions == count and _all_up(router))
        assert registry.health.stats.quarantines == 1
        shunned = {node.node_id for node in registry.snapshots() if node.shunned}
        assert shunned == {"d1"}
        clients = [Client(router, make_request(f"r{i}")) for i in range(8)]
        for _ in clients:
            request = (await d2.hear(SubmitDecode)).request
            d2.finish(request, 0, 41)
        for client in clients:
            assert await client.done() == [41]
        d2.cut()
        await router.until(lambda: d2.sessions == 2 and _all_up(router))
        assert len(registry.snapshots()) == 2


def _all_up(router: FakeRouter) -> bool:
    return len(router.registry.records()) == 2
