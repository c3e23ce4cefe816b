"""One contract, two stores: MemoryStore and RedisStore (a real server) give the same answers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

import pytest

from baton.protocol.errors import StoreUnavailable
from baton.protocol.request import TERMINAL, TRANSITIONS, RequestState
from router.store.base import (
    ALIAS,
    END_MARK,
    LOGGED,
    LogEntry,
    Move,
    RequestStore,
    Swept,
    WriteStatus,
)
from tests.router.conftest import StoreMaker
from tests.router.fakes import PATIENCE_S, FakeClock

S = RequestState
W = WriteStatus

# A legal way into each state, from a fresh claim (QUEUED).
PATHS = {
    S.QUEUED: (),
    S.PREFILL: (S.PREFILL,),
    S.TRANSFER: (S.PREFILL, S.TRANSFER),
    S.DECODE: (S.DECODE,),
    S.FINISHED: (S.DECODE, S.FINISHED),
    S.FAILED: (S.FAILED,),
    S.CANCELLED: (S.CANCELLED,),
}


async def write(store: RequestStore, request_id: str, epoch: int, state: S, **more: Any) -> W:
    move = Move(request_id, epoch, state, **more)
    return await (store.finish(move) if state.terminal else store.move(move))


async def walk(store: RequestStore, request_id: str, *states: S) -> None:
    assert await store.claim(request_id) is not None
    for state in states:
        assert await write(store, request_id, 1, state) is W.OK


async def test_a_claim_makes_a_queued_request_of_epoch_1(make_store: StoreMaker) -> None:
    store = make_store("r1")
    await store.start()
    record = await store.claim("a", {"seed": "7", "prompt_tokens": "12"})
    assert record is not None
    assert (record.state, record.epoch, record.owner) == (S.QUEUED, 1, "r1")
    assert record.fields == {"seed": "7", "prompt_tokens": "12"}
    assert await store.read("a") == record
    assert await store.read("b") is None
    assert (await store.counts())[S.QUEUED] == 1


async def test_a_claimed_id_belongs_to_one_router(make_store: StoreMaker) -> None:
    one, two = make_store("r1"), make_store("r2")
    assert await one.claim("a") is not None
    assert await two.claim("a") is None
    assert await one.claim("a") is not None  # its own answer was lost: the same again
    assert (await one.counts())[S.QUEUED] == 1
    assert await write(one, "a", 1, S.PREFILL) is W.OK
    assert await one.claim("a") is None  # in use


async def test_a_posted_claim_comes_before_what_is_asked_next(make_store: StoreMaker) -> None:
    one, two, told = make_store("r1"), make_store("r2"), list[Any]()
    one.post_claim("a", {"seed": "7"}, told.append)
    assert await one.append([LogEntry("a", 1, 0, (1, 2))]) == [W.OK]
    record = await one.read("a")
    assert record is not None
    assert (record.state, record.owner, record.fields) == (S.QUEUED, "r1", {"seed": "7"})
    two.post_claim("a", {}, told.append)
    await two.read("a")
    assert told == [1, None]


@pytest.mark.parametrize(("old", "new"), list(itertools.product(S, S)))
async def test_transitions_are_the_table(make_store: StoreMaker, old: S, new: S) -> None:
    store = make_store("r1")
    await walk(store, "a", *PATHS[old])
    status = await write(store, "a", 1, new)
    repeated = old is new and new is not S.QUEUED  # the answer to the first try was lost
    assert status is (W.OK if repeated or new in TRANSITIONS[old] else W.ILLEGAL)
    record = await store.read("a")
    assert record is not None
    assert record.state is (new if status is W.OK else old)
    counts = {state: count for state, count in (await store.counts()).items() if count}
    assert counts == {record.state: 1}


async def test_what_is_posted_is_written_before_what_is_asked_next(make_store: StoreMaker) -> None:
    store, told = make_store("r1"), list[Any]()
    await walk(store, "a")
    await walk(store, "b")
    store.post(Move("a", 1, S.PREFILL, {"prefill_node": "p"}), told.append)
    store.post(Move("a", 1, S.TRANSFER, {"decode_node": "d"}), told.append)
    store.post(Move("b", 1, S.DECODE, {"decode_node": "d"}), told.append)
    record = await store.read("a")
    assert record is not None
    assert (record.state, record.epoch) == (S.TRANSFER, 1)
    assert record.fields == {"prefill_node": "p", "decode_node": "d"}
    store.post(Move("a", 1, S.DECODE), told.append)
    assert await store.finish(Move("a", 1, S.FINISHED, {"output_tokens": "2"})) is W.OK
    record = await store.read("a")
    assert record is not None
    assert record.state is S.FINISHED
    assert record.fields.items() >= {"decode_node": "d", "output_tokens": "2"}.items()
    assert told == [W.OK] * 4
    counts = {state: count for state, count in (await store.counts()).items() if count}
    assert counts == {S.FINISHED: 1, S.DECODE: 1}


async def test_what_was_posted_keeps_nothing_that_is_released(make_store: StoreMaker) -> None:
    one, two, told = make_store("r1"), make_store("r2"), list[Any]()
    await walk(one, "a")
    one.post(Move("a", 1, S.PREFILL), told.append)
    await one.release(["a"])
    assert told == [W.OK]
    record = await two.read("a")
    assert record is not None
    assert record.state is S.PREFILL


async def test_a_posted_move_is_fenced_as_any_other(make_store: StoreMaker) -> None:
    store, told = make_store("r1"), list[Any]()
    await walk(store, "a", S.PREFILL)
    assert await store.move(Move("a", 1, S.QUEUED)) is W.OK
    store.post(Move("a", 1, S.TRANSFER), told.append)
    store.post(Move("a", 1, S.DECODE), told.append)
    record = await store.read("a")
    assert record is not None
    assert (record.state, record.epoch) == (S.QUEUED, 2)
    assert told == [W.FENCED] * 2


async def test_failover_raises_the_epoch_and_fences_the_old_one(make_store: StoreMaker) -> None:
    store = make_store("r1")
    await walk(store, "a", S.PREFILL, S.TRANSFER)
    assert await write(store, "a", 1, S.QUEUED) is W.OK
    assert await write(store, "a", 1, S.QUEUED) is W.OK  # repeated: still epoch 2
    record = await store.read("a")
    assert record is not None
    assert (record.state, record.epoch) == (S.QUEUED, 2)
    assert await write(store, "a", 1, S.PREFILL) is W.FENCED
    assert await write(store, "a", 2, S.PREFILL) is W.OK
    assert await write(store, "a", 3, S.TRANSFER) is W.ILLEGAL  # an epoch nobody made


async def test_writes_of_others_and_to_nothing(make_store: StoreMaker) -> None:
    one, two = make_store("r1"), make_store("r2")
    await walk(one, "a")
    assert await write(two, "a", 1, S.PREFILL) is W.FENCED
    assert await write(two, "a", 1, S.CANCELLED) is W.FENCED
    assert await write(one, "none", 1, S.PREFILL) is W.GONE
    assert await two.append([LogEntry("a", 1, 0, (1,))]) == [W.FENCED]


async def test_fields_are_merged(make_store: StoreMaker) -> None:
    store = make_store("r1")
    assert await store.claim("a", {"seed": "7"}) is not None
    assert await write(store, "a", 1, S.PREFILL, fields={"prefill_node": "p1"}) is W.OK
    assert await write(store, "a", 1, S.FAILED, fields={"error": "x", "seed": "8"}) is W.OK
    record = await store.read("a")
    assert record is not None
    assert record.fields == {"seed": "8", "prefill_node": "p1", "error": "x", LOGGED: "0"}
    assert record.owner == "r1"


async def test_the_end_counts_the_log_once(make_store: StoreMaker) -> None:
    """Over all samples and epochs; what was appended twice counts once, what came late never."""
    store = make_store("r1")
    await walk(store, "a", S.PREFILL, S.TRANSFER, S.DECODE)
    await store.append([LogEntry("a", 1, 0, (11, 12)), LogEntry("a", 1, 0, (31,), sample=2)])
    assert await write(store, "a", 1, S.QUEUED) is W.OK
    await store.append([LogEntry("a", 2, 1, (12, 13)), LogEntry("a", 1, 3, (99,))])
    assert await write(store, "a", 2, S.DECODE) is W.OK
    for _ in range(2):
        assert await write(store, "a", 2, S.FINISHED) is W.OK
        assert await store.append([LogEntry("a", 2, 3, (14,))]) == [W.ILLEGAL]
        record = await store.read("a")
        assert record is not None
        assert record.fields[LOGGED] == "4"
    counts = {state: count for state, count in (await store.counts()).items() if count}
    assert counts == {S.FINISHED: 1}, "one end"


@pytest.mark.parametrize("more", [{"min_tokens": 4}, {"min_ends": 2}])
async def test_an_end_may_ask_how_much_is_logged(
    make_store: StoreMaker, more: dict[str, int]
) -> None:
    """A log that lacks what its writer saw confirmed gets no end; other states do not ask."""
    store = make_store("r1")
    await walk(store, "a")
    await store.append([LogEntry("a", 1, 0, (11, 12)), LogEntry("a", 1, 0, (31,), 1, END_MARK)])
    assert await write(store, "a", 1, S.DECODE, **more) is W.OK
    for _ in range(2):
        assert await write(store, "a", 1, S.FINISHED, **more, fields={"x": "1"}) is W.GAP
    record = await store.read("a")
    assert record is not None
    assert (record.state, dict(record.fields)) == (S.DECODE, {})
    await store.append([LogEntry("a", 1, 2, (13,), 0, END_MARK)])
    assert await write(store, "a", 1, S.FINISHED, **more, fields={"x": "1"}) is W.OK
    record = await store.read("a")
    assert record is not None
    assert dict(record.fields) == {"x": "1", LOGGED: "4"}


async def test_an_end_that_is_not_kept_frees_the_id_at_once(make_store: StoreMaker) -> None:
    one, two = make_store("r1"), make_store("r2")
    assert await one.claim("a") is not None
    one.post(Move("a", 1, S.DECODE), lambda _: None)
    end = Move("a", 1, S.FAILED, {"error": "unavailable"}, kept=False)
    assert await one.finish(end) is W.OK
    assert await one.read("a") is None
    assert await one.read_log("a") == []
    assert await one.finish(end) is W.GONE, "asked again: it is gone all the same"
    assert (await one.counts())[S.FAILED] == 1
    record = await two.claim("a")
    assert record is not None
    assert (record.state, record.epoch, record.owner) == (S.QUEUED, 1, "r2")
    assert await one.finish(end) is W.FENCED, "it is another router's by now"


async def test_an_alias_finds_the_request_and_is_taken_as_its_id_is(
    make_store: StoreMaker,
) -> None:
    one, two = make_store("r1"), make_store("r2")
    fields = {ALIAS: "k"}
    assert await one.claim("a", fields) is not None
    assert await one.claim("a", fields) is not None, "its own answer was lost: the same again"
    for asked in ("a", "k"):
        record = await two.read(asked)
        assert record is not None
        assert (record.id, record.state, record.fields[ALIAS]) == ("a", S.QUEUED, "k")
    assert await two.claim("b", fields) is None, "another id, the same alias"
    assert await two.claim("k") is None, "the alias as an id"
    assert await two.claim("c", {ALIAS: "a"}) is None, "the id as an alias"
    assert (await two.counts())[S.QUEUED] == 1
    assert await write(one, "a", 1, S.DECODE) is W.OK
    assert await write(one, "a", 1, S.FINISHED) is W.OK
    record = await two.read("k")
    assert record is not None
    assert record.state is S.FINISHED
    assert await two.claim("b", fields) is None


async def test_an_alias_goes_with_its_request(make_store: StoreMaker) -> None:
    one, two = make_store("r1"), make_store("r2")
    fields = {ALIAS: "k"}
    assert await one.claim("a", fields) is not None
    assert await one.finish(Move("a", 1, S.FAILED, kept=False)) is W.OK
    assert await two.read("k") is None
    assert await two.claim("b", fields) is not None
    record = await one.read("k")
    assert record is not None
    assert record.id == "b"
    assert await two.claim("a") is not None, "and its id is free"


async def test_catch_up_skips_states_but_no_fence(make_store: StoreMaker) -> None:
    one, two = make_store("r1"), make_store("r2")
    await walk(one, "a")
    assert await write(one, "a", 1, S.FINISHED) is W.ILLEGAL
    assert await write(two, "a", 3, S.FINISHED, catch_up=True) is W.FENCED
    assert await write(one, "a", 3, S.FINISHED, catch_up=True) is W.OK
    record = await one.read("a")
    assert record is not None
    assert (record.state, record.epoch) == (S.FINISHED, 3)
    assert await write(one, "a", 3, S.FAILED, catch_up=True) is W.ILLEGAL  # ends only once


async def test_appends_are_idempotent_gapless_and_fenced(make_store: StoreMaker) -> None:
    store = make_store("r1")
    await walk(store, "a", S.PREFILL)
    await walk(store, "b", S.PREFILL)
    entries = [
        LogEntry("a", 1, 0, (11,)),
        LogEntry("b", 1, 0, (21, 22)),
        LogEntry("a", 1, 0, (11, 12, 13)),  # overlaps: only its tail is new
        LogEntry("a", 1, 1, (12,)),  # known
        LogEntry("a", 1, 5, (99,)),
        LogEntry("c", 1, 0, (1,)),
        LogEntry("a", 1, 0, (31,), sample=1),  # its own positions
        LogEntry("a", 1, 3, ()),  # a finish without a token
    ]
    assert await store.append(entries) == [W.OK, W.OK, W.OK, W.OK, W.GAP, W.GONE, W.OK, W.OK]
    assert await store.append([]) == []
    assert await store.read_log("a") == [
        LogEntry("a", 1, 0, (11,)),
        LogEntry("a", 1, 1, (12, 13)),
        LogEntry("a", 1, 0, (31,), sample=1),
    ]
    assert await write(store, "a", 1, S.QUEUED) is W.OK
    assert await store.append([LogEntry("a", 1, 3, (14,))]) == [W.FENCED]
    assert await store.append([LogEntry("a", 2, 3, (14,))]) == [W.OK]
    assert await store.read_log("b") == [LogEntry("b", 1, 0, (21, 22))]
    assert await store.read_log("none") == []


async def test_a_posted_append_comes_before_the_next_call(make_store: StoreMaker) -> None:
    store = make_store("r1")
    names = [f"r{number}" for number in range(40)]  # of several key groups
    for name in names:
        await walk(store, name, S.DECODE)
    answers: list[tuple[str, WriteStatus]] = []

    def take(part: Sequence[LogEntry], answer: Sequence[WriteStatus] | StoreUnavailable) -> None:
        assert not isinstance(answer, StoreUnavailable)
        answers.extend((e.request_id, each) for e, each in zip(part, answer, strict=True))

    entries = [LogEntry(name, 1, 0, (number,)) for number, name in enumerate(names)]
    store.post_append([*entries, LogEntry("none", 1, 0, (1,))], take)
    store.post_append([LogEntry(names[0], 1, 1, (50,)), LogEntry(names[1], 1, 2, (51,))], take)
    assert await write(store, names[0], 1, S.FINISHED) is W.OK
    for name in (*names[1:], "none"):  # each waits for what was posted to its key group
        await store.read(name)
    expected = [*((name, W.OK) for name in names), ("none", W.GONE)]
    assert sorted(answers) == sorted([*expected, (names[0], W.OK), (names[1], W.GAP)])
    record = await store.read(names[0])
    assert record is not None
    assert record.fields[LOGGED] == "2"


async def test_an_end_brings_entries_or_is_refused_with_them(make_store: StoreMaker) -> None:
    store = make_store("r1")
    await walk(store, "a", S.DECODE)
    assert await store.append([LogEntry("a", 1, 0, (1, 2))]) == [W.OK]
    gap = (LogEntry("a", 1, 1, (2, 3)), LogEntry("a", 1, 5, (6,)))
    assert await write(store, "a", 1, S.FINISHED, entries=gap) is W.GAP
    record = await store.read("a")
    assert record is not None
    assert record.state is S.DECODE
    last = (LogEntry("a", 1, 1, (2, 3)), LogEntry("a", 1, 0, (7,), sample=1))
    for _ in range(2):  # the answer to the first try may be lost
        assert await write(store, "a", 1, S.FINISHED, entries=last, fields={"x": "1"}) is W.OK
    record = await store.read("a")
    assert record is not None
    assert (record.state, dict(record.fields)) == (S.FINISHED, {"x": "1", LOGGED: "4"})
    log = await store.read_log("a")
    assert [(e.sample, e.position, e.token_ids) for e in log] == [
        (0, 0, (1, 2)), (0, 2, (3,)), (1, 0, (7,)),
    ]  # fmt: skip
    await walk(store, "b", S.DECODE)
    assert await write(store, "b", 1, S.QUEUED) is W.OK
    stale = (LogEntry("b", 1, 0, (1,)),)
    assert await write(store, "b", 1, S.FAILED, entries=stale) is W.FENCED
    assert await store.read_log("b") == []


async def test_nothing_is_appended_after_the_end(make_store: StoreMaker) -> None:
    store = make_store("r1")
    await walk(store, "a", S.DECODE)
    assert await store.append([LogEntry("a", 1, 0, (1, 2))]) == [W.OK]
    assert await write(store, "a", 1, S.FINISHED) is W.OK
    assert await store.append([LogEntry("a", 1, 2, (3,))]) == [W.ILLEGAL]
    assert await store.read_log("a") == [LogEntry("a", 1, 0, (1, 2))]


async def test_a_beat_keeps_what_is_held_and_tells_what_is_not(
    make_store: StoreMaker,
) -> None:
    one, two = make_store("r1"), make_store("r2")
    await walk(one, "live", S.PREFILL)
    await walk(one, "over", S.FAILED)
    await walk(two, "other")
    assert sorted(await one.beat(["live", "over", "other", "none"])) == ["none", "other", "over"]
    assert await one.beat([]) == []


async def sweep_until(store: RequestStore, clock: FakeClock, lease_s: float) -> list[Swept]:
    """Redis counts leases by its own TIME, so their end is waited for; the fake clock jumps."""
    clock.advance(2.5 * lease_s)
    give_up = time.monotonic() + PATIENCE_S
    while not (swept := await store.sweep()):
        assert time.monotonic() < give_up
    return swept


async def test_an_expired_owner_loses_its_requests(
    make_store: StoreMaker, clock: FakeClock
) -> None:
    lease_s = 0.02
    dead, sweeper = make_store("dead", lease_s), make_store("alive", lease_s)
    await sweeper.start()
    await walk(dead, "plain", S.PREFILL)
    assert await sweep_until(sweeper, clock, lease_s) == [Swept("plain", S.CANCELLED, 2)]
    assert await sweeper.sweep() == []
    assert await dead.beat(["plain"]) == ["plain"]
    assert await write(dead, "plain", 1, S.TRANSFER) is W.FENCED
    assert await write(dead, "plain", 2, S.CANCELLED) is W.FENCED
    assert await dead.append([LogEntry("plain", 1, 0, (1,))]) == [W.FENCED]
    counts = {state: count for state, count in (await sweeper.counts()).items() if count}
    assert counts == {S.CANCELLED: 1}


async def test_a_resumable_request_is_adopted_once(
    make_store: StoreMaker, clock: FakeClock
) -> None:
    lease_s = 0.02
    dead, one, two = (make_store(name, lease_s) for name in ("dead", "r1", "r2"))
    await one.start()
    assert await dead.claim("a", {"resumable": "1", "seed": "3"}) is not None
    assert await write(dead, "a", 1, S.DECODE) is W.OK
    assert await dead.append([LogEntry("a", 1, 0, (5, 6))]) == [W.OK]
    assert await sweep_until(one, clock, lease_s) == [Swept("a", S.QUEUED, 2)]
    record = await one.claim("a")
    assert record is not None
    assert (record.epoch, record.owner, record.tries) == (2, "r1", 1)
    assert record.fields["seed"] == "3"
    assert await two.claim("a") is None
    assert await write(dead, "a", 1, S.FINISHED) is W.FENCED
    assert await one.append([LogEntry("a", 2, 2, (7,))]) == [W.OK]
    assert [entry.token_ids for entry in await one.read_log("a")] == [(5, 6), (7,)]


async def test_no_sweep_soon_after_connecting(make_store: StoreMaker, clock: FakeClock) -> None:
    lease_s = 0.02
    dead, sweeper = make_store("dead", lease_s), make_store("alive", lease_s)
    await walk(dead, "a")
    await sweeper.start()
    clock.advance(1.9 * lease_s)
    assert await sweeper.sweep() == []
    assert await sweep_until(sweeper, clock, lease_s) == [Swept("a", S.CANCELLED, 2)]


async def test_a_late_beat_revives_what_was_not_swept(
    make_store: StoreMaker, clock: FakeClock
) -> None:
    late, sweeper = make_store("late", 0.001), make_store("alive", 60.0)
    await sweeper.start()
    await walk(late, "a")
    owner = make_store("late", 60.0)  # the same router; its next beat holds longer
    assert await owner.beat(["a"]) == []
    clock.advance(130.0 if sweeper.name == "redis" else 59.0)
    assert await sweeper.sweep() == []
    assert await write(owner, "a", 1, S.PREFILL) is W.OK


def test_every_terminal_state_is_reachable() -> None:
    assert {path[-1] for path in PATHS.values() if path and path[-1] in TERMINAL} == TERMINAL
