"""The ring of events: bounded, in order, and what the router's parts note in it."""

from __future__ import annotations

from baton.protocol.errors import StoreUnavailable
from baton.protocol.handles import NodeLoad
from baton.protocol.messages import SubmitDecode, SubmitPrefill
from baton.runtime.timing import Timing
from router.events import MOST_OF_A_KIND, EventRing
from router.store.guard import StoreGuard
from router.store.memory_store import MemoryStore
from tests.router.clients import Client, cluster, first_of
from tests.router.fakes import FakeClock, make_request


def test_a_flood_of_one_kind_does_not_drive_out_another() -> None:
    ring = EventRing(lambda: 7.0)
    ring.note("node-lost", "gone", node="d")
    for number in range(3 * MOST_OF_A_KIND):
        ring.note("refused-key", f"{number}" * 200)
    found = ring.newest(1000)
    assert len(found) == MOST_OF_A_KIND + 1
    assert (found[0].kind, found[0].at, found[0].node) == ("node-lost", 7.0, "d")
    assert max(len(each.text) for each in found) == 240
    assert [each.seq for each in found] == sorted(each.seq for each in found)
    assert [each.seq for each in ring.newest(2)] == [ring.seq - 1, ring.seq]
    assert ring.newest(5, after=ring.seq) == ring.newest(0) == []


def test_the_store_notes_an_outage_and_its_end() -> None:
    ring, timing = EventRing(), Timing()
    guard = StoreGuard(MemoryStore("r", timing, FakeClock()), timing, ring)
    guard.lose(StoreUnavailable("redis://:secret@h is away"))
    guard.lose(StoreUnavailable("still"))
    (event,) = ring.newest(9)
    assert event.kind == "store"
    assert "secret" not in event.text


async def test_nodes_and_retries_are_noted() -> None:
    async with cluster("p1", "p2", "d") as (router, (p1, p2, d)):
        joined = {each.node for each in router.events.newest(9) if each.kind == "node-joined"}
        assert joined == {"p1", "p2", "d"}
        client = Client(router, make_request())
        victim = await first_of([p1, p2], SubmitPrefill)
        other = p2 if victim is p1 else p1
        await victim.stop()
        prefill = (await other.hear(SubmitPrefill)).request
        other.export(prefill)
        decode = (await d.hear(SubmitDecode)).request
        other.tokens(prefill, 0, 41)
        d.finish(decode, 0, 41, 42)
        assert await client.done() == [41, 42]
        lost, retry = router.events.newest(2)
        if lost.kind == "retry":  # the request may hear of it first
            lost, retry = retry, lost
        assert (lost.kind, lost.node) == ("node-lost", victim.record.node_id)
        assert (retry.kind, retry.request_id) == ("retry", "r")
        assert "epoch 1 failed after 0 tokens" in retry.text
        other.say(load=NodeLoad(draining=True))
        await router.until(lambda: router.events.newest(1)[0].kind == "drain")
        assert router.events.newest(1)[0].node == other.record.node_id
