"""The contract of every lane, last part: any order of everything that may be done to a hand-over.

Two exporters and two fetchers, pools that are too small. What must hold after every rule: free +
used == total and one owner per block in every pool, no byte of any arena other than foreseen,
on_released once per export and only for a reason. A fetch returns only if its export was complete
while the lease was held and no newer epoch had been heard; then exactly that export's KV lies in
its blocks. It fails with a KVError, for a reason. At the end: nothing pinned, no thread or
conversation left. What the rules draw depends on no thread's luck: what they find may.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Coroutine
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from baton.protocol.errors import KVError, KVLost, KVStale
from baton.protocol.kv_spec import LayerSpec
from baton.runtime.timing import Timing
from kv_transfer.protocol.base import Blocks, HeldExport, KVReady
from tests.transfer import faults
from tests.transfer.faults import FaultyLane
from tests.transfer.pools import BOOT_D, BOOT_E, LAYERS, PATIENCE_S
from tests.transfer.shadows import ASK, MAX_TOKENS, Ask, Exporting, Fetch, Offer, Shadowed, Stage

T = TypeVar("T")
GROUPS = (LayerSpec(2, 8, 8), LayerSpec(2, 8, 8, window=16, kind="sliding"))
# Only the machine's clocks end a lease, and nothing is slow enough for a KVTimeout.
PATIENT = Timing(kv_lease_s=600.0, kv_progress_s=60.0, request_s=1e6)
DAMAGE = (faults.flip_bit, faults.truncate, faults.repeat, faults.lose)
WINDOWED = ((False, False), (False, True), (True, True))
ANY = st.integers(0, 99)  # one of however many there are


class TransferMachine(RuleBasedStateMachine):
    def __init__(self, lane: str, seen: Counter[str]) -> None:
        """`seen`: what has happened, over all runs."""
        super().__init__()
        self.seen = seen
        self.threads = set(threading.enumerate())
        self.stack = ExitStack()
        self.runner = self.stack.enter_context(asyncio.Runner())
        directory = Path(self.stack.enter_context(TemporaryDirectory()))
        self.stage = Stage(lane, directory, PATIENT)
        self.exporters: list[Exporting] = []
        self.fetchers: list[Shadowed] = []
        self.offers: list[Offer] = []
        self.fetches: dict[Fetch, asyncio.Task[KVReady]] = {}
        self.kept: list[tuple[Shadowed, Blocks]] = []
        self.held: list[tuple[Fetch, HeldExport]] = []
        self.epochs: Counter[str] = Counter()

    # ---- the stage ----

    @initialize(
        layers=st.sampled_from((LAYERS, GROUPS)),
        blocks=st.tuples(*[st.sampled_from((4, 5, 8))] * 2),
        windowed=st.sampled_from(WINDOWED),
    )
    def start(
        self, layers: tuple[LayerSpec, ...], blocks: tuple[int, int], windowed: tuple[bool, bool]
    ) -> None:
        self.exporting, fetching = (
            {"layers": layers, "block_size": size, "windowed": drops, "num_blocks": 192 // size}
            for size, drops in zip(blocks, windowed, strict=True)
        )
        for _ in range(2):
            self.exporters.append(self.run(self.stage.exporter(self.exporting)))
        # One fetcher's frames can be held up and damaged, the other's lane is as it is.
        faulty = FaultyLane(self.stage.lane())
        for lane, boot_id in ((faulty, BOOT_D), (self.stage.lane(), BOOT_E)):
            node = self.run(self.stage.node(lane, boot_id, fetching))
            self.fetchers.append(Shadowed(node))
        faulty.receiving = self.fetchers[0].gate.receive

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        async def bounded() -> T:
            async with asyncio.timeout(PATIENCE_S):
                return await work

        return self.runner.run(bounded())

    def any_offer(self, index: int) -> Offer | None:
        """One of the youngest: the old ones have ended."""
        recent = self.offers[-4:]
        return recent[index % len(recent)] if recent else None

    # ---- exporting ----

    @rule(which=ANY, name=st.sampled_from("ab"), newer=st.booleans(), num=st.integers(1, 40))
    def export(self, which: int, name: str, newer: bool, num: int) -> None:
        """A new request, or one of the two again: for as many tokens or others, newer or not."""
        self.epochs[name] = max(2, self.epochs[name] + newer)
        home = self.exporters[which % 2]
        offer = home.export(len(self.offers) + 1, name, self.epochs[name], num)
        if offer is not None:
            self.offers.append(offer)
            self.seen["exported"] += 1

    @rule(which=ANY, layer=ANY, upto=st.integers(1, MAX_TOKENS))
    def publish(self, which: int, layer: int, upto: int) -> None:
        offer = self.any_offer(which)
        if offer is not None:
            offer.publish(layer % len(offer.upto), min(upto, offer.handle.num_tokens))

    @rule(which=ANY)
    def complete(self, which: int) -> None:
        offer = self.any_offer(which)
        if offer is not None and not offer.done:
            offer.complete()
            for fetch in self.fetches:
                fetch.notice()

    @rule(which=ANY)
    def release(self, which: int) -> None:
        offer = self.any_offer(which)
        if offer is not None:
            offer.may_end = True
            self.run(offer.home.node.connector.release(offer.handle, "aborted"))
            assert offer.ended

    # ---- fetching ----

    @rule(which=ANY, ask=ASK)
    def fetch(self, which: int, ask: Ask) -> None:
        offer = self.any_offer(which)
        if offer is None:
            return
        who, num_tokens = self.fetchers[ask.who], offer.handle.num_tokens
        blocks = who.allocate(num_tokens)
        if blocks is None:
            return
        fetch = Fetch(
            offer,
            who,
            max(1, offer.handle.epoch + ask.newer),
            min(ask.start, num_tokens),
            blocks,
            ask.hold,
            ask.misled and not offer.home.alive,
            who.gate.num_damaged,
        )
        fetch.notice()
        offer.home.tried(offer.handle.request_id, fetch.epoch)
        offer.num_claims += not ask.hold
        offer.may_end |= not ask.hold
        self.fetches[fetch] = self.run(self.begin(fetch, ask.waits))

    async def begin(self, fetch: Fetch, waits: bool) -> asyncio.Task[KVReady]:
        handle, home = fetch.offer.handle, fetch.offer.home
        if fetch.misled:  # where the dead one was, another is
            lanes = self.exporters[0].node.connector.endpoint().lanes
            handle = replace(handle, endpoint=replace(handle.endpoint, lanes=lanes))
        home.admitted.clear()
        connector = fetch.who.node.connector
        task = asyncio.create_task(
            connector.fetch(handle, fetch.epoch, fetch.blocks, fetch.start, fetch.hold)
        )
        admitted = asyncio.create_task(home.admitted.wait())
        if waits:
            await asyncio.wait((task, admitted), return_when=asyncio.FIRST_COMPLETED)
        admitted.cancel()
        await asyncio.wait((admitted,))
        return task

    @rule(which=ANY, num=st.integers(1, MAX_TOKENS), who=st.integers(0, 1), early=st.booleans())
    def hand_over(self, which: int, num: int, who: int, early: bool) -> None:
        """What is usual, so that it is frequent. `early`: the fetch is there before the KV."""
        before = len(self.offers)
        self.export(which, "a", newer=False, num=num)
        if len(self.offers) == before:
            return
        youngest = len(self.offers[-4:]) - 1
        if early:
            self.fetch(youngest, Ask(who))
        self.complete(youngest)
        if not early:
            self.fetch(youngest, Ask(who, waits=False))

    @rule(
        which=ANY,
        num=st.integers(1, MAX_TOKENS),
        frames=st.integers(0, 1),
        early=st.booleans(),
        then=st.sampled_from(("lapse", "lapse unseen", "release", "restart", "cancel")),
    )
    def interrupt(self, which: int, num: int, frames: int, early: bool, then: str) -> None:
        """In mid-transfer something ends the export and its blocks go to others, or the fetch is
        given up. `early`: before END could be said."""
        before = len(self.offers)
        self.let_fetches_end()
        while self.fetches:
            self.cancel(0)
        self.export(which, "c", newer=False, num=num)
        if len(self.offers) == before:
            return
        youngest, offer = len(self.offers[-4:]) - 1, self.offers[-1]
        self.hold_up(frames)
        if not early:
            self.complete(youngest)
        self.fetch(youngest, Ask())
        for layer in range(len(offer.upto)):
            offer.publish(layer, num)
        for task in self.fetches.values():
            self.seen["interrupted"] += self.run(self.stand_still(task))
        match then:
            case "cancel":
                self.cancel(0)
            case "release":
                self.release(youngest)
            case "restart":
                self.restart(which, 0)
            case _:
                self.pass_time(which, 1.0, swept=then == "lapse")
        self.every_block_and_byte_is_accounted_for()  # unpins
        for home in self.exporters:
            home.churn(num)
        self.complete(youngest)
        self.let_fetches_end()

    async def stand_still(self, task: asyncio.Task[KVReady]) -> bool:
        """Wait until the one fetch under way stands at the gate; False if it has ended instead."""
        gate = self.fetchers[0].gate
        standing = asyncio.create_task(asyncio.to_thread(gate.wait_standing))
        await asyncio.wait((task, standing), return_when=asyncio.FIRST_COMPLETED)
        if not standing.done():
            gate.open()
        return await standing

    @rule()
    def let_fetches_end(self) -> None:
        """Those that have nothing to wait for."""
        for fetcher in self.fetchers:
            fetcher.gate.open()
        for fetch in [fetch for fetch in self.fetches if fetch.must_end]:
            self.run(self.end(fetch))

    @rule(which=ANY)
    def cancel(self, which: int) -> None:
        if self.fetches:
            fetch = list(self.fetches)[which % len(self.fetches)]
            fetch.cancelled = self.fetches[fetch].cancel()
            self.run(self.linger(fetch))
            fetch.who.gate.open()
            self.run(self.end(fetch))

    async def linger(self, fetch: Fetch) -> None:
        """A cancelled fetch is not over while its thread may still write."""
        going_on = [
            each for each, task in self.fetches.items() if each.who is fetch.who and not task.done()
        ]
        if fetch in going_on and len(going_on) == fetch.who.gate.num_standing:
            for _ in range(5):
                await asyncio.sleep(0)
            assert not self.fetches[fetch].done()
            self.seen["cancelled in mid-frame"] += 1

    async def end(self, fetch: Fetch) -> None:
        """Wait for it and judge it."""
        task, offer, who = self.fetches[fetch], fetch.offer, fetch.who
        await asyncio.wait((task,))
        del self.fetches[fetch]
        if task.cancelled() or task.exception() is not None:
            who.scribble([block for each in fetch.blocks for block in each.ids], 7)
            who.free(fetch.blocks)
        if task.cancelled():
            assert fetch.cancelled
            self.seen["cancelled"] += 1
            return
        error = task.exception()
        if error is not None:
            assert isinstance(error, KVError), error
            assert fetch.explains(error), f"failed for no reason: {error!r}"
            self.seen[type(error).__name__] += 1
            return
        ready = task.result()
        assert fetch.may_return, "what may not be used was handed over"
        assert (ready.num_tokens, ready.first_tokens) == (
            offer.handle.num_tokens, offer.first_tokens
        )  # fmt: skip
        who.foresee(offer.number, fetch.blocks, fetch.start, offer.handle.num_tokens)
        self.kept.append((who, fetch.blocks))
        self.seen["returned"] += 1
        self.seen["returned despite damage"] += who.gate.num_damaged > fetch.num_damaged
        if ready.held is not None:
            self.held.append((fetch, ready.held))
        elif offer.epoch_tried <= fetch.epoch:
            await offer.freed()

    @rule(which=ANY)
    def let_go(self, which: int) -> None:
        """The end of a fetch that held the export."""
        if self.held:
            fetch, held = self.held.pop(which % len(self.held))
            offer = fetch.offer
            offer.may_end = True
            offer.num_claims += 1
            self.run(held.release())
            if offer.servable:
                assert offer.epoch_tried > fetch.epoch, "let go and yet not released"

    @rule(which=ANY)
    def forget(self, which: int) -> None:
        """A decode node is done with what it fetched."""
        if self.kept:
            who, blocks = self.kept.pop(which % len(self.kept))
            who.free(blocks)

    @rule(which=ANY, who=st.integers(0, 1), newer=st.integers(-1, 1))
    def release_from_afar(self, which: int, who: int, newer: int) -> None:
        offer = self.any_offer(which)
        if offer is None:
            return
        epoch = max(1, offer.handle.epoch + newer)
        offer.home.tried(offer.handle.request_id, epoch)
        if epoch >= offer.epoch_heard:
            offer.may_end = True
            offer.num_claims += 1
        connector = self.fetchers[who].node.connector
        self.run(connector.release(offer.handle, "not wanted", epoch))
        assert offer.ended or not offer.servable or offer.epoch_tried > epoch

    @rule(which=ANY, who=st.integers(0, 1), newer=st.integers(-1, 2))
    def renew(self, which: int, who: int, newer: int) -> None:
        offer = self.any_offer(which)
        if offer is None:
            return
        epoch = max(1, offer.handle.epoch + newer)
        too_old, could_live = offer.epoch_heard > epoch, offer.servable
        offer.home.tried(offer.handle.request_id, epoch)
        try:
            self.run(self.fetchers[who].node.connector.renew(offer.handle, epoch))
        except KVStale:
            assert not offer.servable or offer.num_claims or offer.epoch_tried > epoch
        except KVLost:
            assert not offer.home.alive
        else:
            assert could_live
            assert not too_old
            offer.renewed()
            offer.hear(epoch)
            self.seen["renewed"] += 1

    # ---- time, other prompts, damage, death ----

    @rule(which=ANY, share=st.sampled_from((0.6, 1.0)), swept=st.booleans())
    def pass_time(self, which: int, share: float, swept: bool) -> None:
        """The lease watch may come late."""
        home = self.exporters[which % 2]
        home.node.clock.advance(share * PATIENT.kv_lease_s)
        for offer in home.offers.values():
            offer.may_end |= offer.lapsed  # the connector sweeps, too, when it gets to it
        if not swept:
            return
        self.seen["expired"] += home.node.connector.expire(home.node.clock.now)
        for offer in home.offers.values():
            assert offer.ended or not offer.lapsed

    @rule(which=ANY, seed=ANY)
    def churn(self, which: int, seed: int) -> None:
        (self.exporters + self.fetchers)[which % 4].churn(seed)

    @rule(how=st.sampled_from(DAMAGE), count=st.sampled_from((1, 10)))
    def damage(self, how: Any, count: int) -> None:
        self.fetchers[0].gate.damage(how, count)

    @rule(frames=st.integers(0, 3))
    def hold_up(self, frames: int) -> None:
        """After so many more frames the fetches of one node stand still."""
        self.fetchers[0].gate.close(frames)

    @rule(which=ANY, seldom=st.integers(0, 3))
    def restart(self, which: int, seldom: int) -> None:
        if seldom:
            return
        self.run(self.exporters[which % 2].die())
        self.exporters[which % 2] = self.run(self.stage.exporter(self.exporting))
        self.seen["restarted"] += 1

    # ---- what must hold ----

    @invariant()
    def every_block_and_byte_is_accounted_for(self) -> None:
        for home in self.exporters:
            home.unpin()
            home.check(home.pinned(), [])
        for who in self.fetchers:
            kept = [blocks for owner, blocks in self.kept if owner is who]
            who.check(kept, [fetch.blocks for fetch in self.fetches if fetch.who is who])

    def teardown(self) -> None:
        try:
            if len(self.fetchers) == 2:
                self.finish()
        finally:
            for each in (*self.fetchers, *self.stage.lives):  # also after a failure
                each.gate.open()
                self.run(each.node.connector.stop())
            self.stack.close()
            self.stage.close()
        left = {each for each in set(threading.enumerate()) - self.threads if each.is_alive()}
        assert not left, "threads are left"

    def finish(self) -> None:
        self.let_fetches_end()
        while self.fetches:
            self.cancel(0)
        while self.held:
            self.let_go(0)
        while self.kept:
            self.forget(0)
        self.every_block_and_byte_is_accounted_for()
        for who in self.fetchers:
            self.run(who.node.connector.stop())
            assert who.pool.num_used == 0
        for home in self.exporters:
            self.run(home.die())
        for home in self.stage.lives:
            assert len(home.node.released) == len(home.offers) == home.node.connector.stats.exports


@pytest.mark.parametrize("lane", ["memory", "shm", "stream-unix"])
def test_every_end_is_reached(lane: str) -> None:
    """One run by hand: what the machine judges does happen, and is judged as it should be."""
    seen: Counter[str] = Counter()
    machine = TransferMachine(lane, seen)  # type: ignore[arg-type]
    machine.start(GROUPS, (4, 8), (True, True))
    machine.hand_over(0, 20, 0, early=True)
    machine.let_fetches_end()
    for count in (1, 10):  # the second try, too
        machine.damage(faults.flip_bit, count)
        machine.hand_over(0, 20, 0, early=False)
        machine.let_fetches_end()
    machine.damage(faults.flip_bit, 0)
    ends = {"returned": 2, "returned despite damage": 1, "KVCorrupt": 1}
    assert seen == {"exported": 3, **ends}
    seen.clear()
    machine.renew(2, 1, 1)
    machine.fetch(2, Ask(start=3))  # by an epoch that is over
    machine.fetch(2, Ask(start=3, newer=1, hold=True))
    machine.let_fetches_end()
    machine.let_go(0)
    assert seen == {"renewed": 1, "KVStale": 1, "returned": 1, "returned despite damage": 0}
    seen.clear()
    machine.forget(0)
    machine.interrupt(0, 20, 1, early=True, then="lapse")
    assert seen == {"exported": 1, "interrupted": 1, "expired": 1, "KVStale": 1}
    seen.clear()
    machine.interrupt(0, 20, 0, early=False, then="cancel")
    ends = ("exported", "interrupted", "cancelled in mid-frame", "cancelled")
    assert seen == dict.fromkeys(ends, 1)
    seen.clear()
    machine.export(1, "b", newer=False, num=9)
    machine.fetch(3, Ask(start=3))
    machine.cancel(0)
    machine.fetch(3, Ask(start=3))
    machine.restart(1, 0)
    machine.let_fetches_end()
    machine.fetch(3, Ask(misled=True))
    machine.let_fetches_end()
    machine.teardown()
    assert seen == {"exported": 1, "cancelled": 1, "restarted": 1, "KVLost": 1, "KVStale": 1}


@pytest.mark.parametrize(("lane", "examples"), [("memory", 30), ("shm", 6), ("stream-unix", 6)])
def test_any_order_of_everything(lane: str, examples: int) -> None:
    """The machine's rules and invariants judge; `test_every_end_is_reached` shows that they do.

    Which ends a few random examples reach is luck (hypothesis leaves whole rules out of
    one), so nothing is asserted about that here.
    """
    run_state_machine_as_test(
        lambda: TransferMachine(lane, Counter()),  # type: ignore[arg-type]
        settings=settings(max_examples=examples, stateful_step_count=40, deadline=None),
    )
