"""Tokens of plain requests are shown first and logged soon after, joined, before what follows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.protocol.clock import SystemClock
from baton.protocol.errors import InternalError, StoreUnavailable
from baton.protocol.events import TokenEvent
from baton.protocol.messages import SubmitDecode, SubmitPrefill
from baton.protocol.request import RequestState
from baton.runtime.failpoints import FAILPOINTS
from router.store import guard as guards
from router.store.base import LOGGED, LogEntry, Move, OnAppended, WriteStatus
from router.store.catch_up import CatchUp
from router.store.guard import MAX_ENTRIES, StoreGuard
from router.store.memory_store import MemoryStore
from tests.router.clients import Client
from tests.router.fakes import FAST, fake_nodes, make_request, running_router
from tests.router.test_ledger import FlakyStore, tokens, write
from tests.waiting import eventually

S = RequestState


class Watched(FlakyStore):
    """Notes the calls that change a request, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def post_append(self, entries: Sequence[LogEntry], on_answer: OnAppended) -> None:
        self.told += [f"{e.request_id} {e.epoch}: {list(e.token_ids)}" for e in entries]
        super().post_append(entries, on_answer)

    async def move(self, move: Move) -> WriteStatus:
        self.told.append(f"{move.request_id} {move.state.value}")
        return await super().move(move)

    async def finish(self, move: Move) -> WriteStatus:
        last = [list(entry.token_ids) for entry in move.entries]
        self.told.append(f"{move.request_id} {move.state.value} with {last}")
        return await super().finish(move)


async def test_steps_are_joined_and_written_before_the_next_epoch_and_with_the_end() -> None:
    store = Watched()
    guard = StoreGuard(store, FAST)
    ledger = await guard.open(make_request("a"), {})
    for position in range(3):
        assert guard.note(tokens("a", position, 10 + position))
    assert not store.told
    await ledger.move(S.QUEUED)  # as a migration does it
    ledger.post(S.DECODE)
    assert guard.note(tokens("a", 2, 12, 13))  # the next node repeats what it was told
    await ledger.finish(S.FINISHED)
    assert store.told == ["a 1: [10, 11, 12]", "a queued", "a finished with [[12, 13]]"]
    record = await store.read("a")
    assert record is not None
    assert record.fields[LOGGED] == "4"


async def test_requests_share_a_call_soon() -> None:
    calls: list[int] = []

    class Counted(FlakyStore):
        def post_append(self, entries: Sequence[LogEntry], on_answer: OnAppended) -> None:
            calls.append(len(entries))
            super().post_append(entries, on_answer)

    store = Counted()
    guard = StoreGuard(store, FAST)
    names = [str(number) for number in range(MAX_ENTRIES + 3)]
    for name in names:
        await guard.open(make_request(name), {})
        assert guard.note(tokens(name, 0, 7))
        assert guard.note(TokenEvent(name, 1, 1, ()))  # an end without a token: nothing to log
    await eventually(lambda: written(store, names[-1]))
    assert calls == [MAX_ENTRIES, 3]


async def written(store: MemoryStore, name: str) -> bool:
    return bool(await store.read_log(name))


async def test_nobody_waits_for_a_store_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All is shown; the answers come after the end, and the log is whole."""
    monkeypatch.setattr(guards, "LATE_S", 0.0)
    answers: list[partial[None]] = []

    class Silent(MemoryStore):
        def post_append(self, entries: Sequence[LogEntry], on_answer: OnAppended) -> None:
            super().post_append(entries, lambda *it: answers.append(partial(on_answer, *it)))

    store = Silent("router", FAST, SystemClock())
    async with fake_nodes("p", "d") as (p, d), running_router([p, d], store) as router:
        client = Client(router, make_request())
        prefill = await p.hear(SubmitPrefill)
        p.export(prefill.request)
        p.tokens(prefill.request, 0, 41)
        assert (await client.next()).token_ids == (41,)
        decode = await d.hear(SubmitDecode)
        d.subscribe(decode.request)
        d.tokens(decode.request, 1, 42)
        assert (await client.next()).token_ids == (42,)
        d.finish(decode.request, 2, 43)
        assert await client.done() == [41, 42, 43]
        assert len(answers) >= 2
        for answer in answers:
            answer()
        assert await router.logged("r") == [41, 42, 43]
        assert (router.guard.stats.refused, router.guard.stats.outages) == (0, 0)


async def test_what_fails_beside_the_end_is_written_with_it_later() -> None:
    """The server goes away between the tokens and the end, and the answers come after both."""
    failing: list[partial[None]] = []

    class Breaking(FlakyStore):
        def post_append(self, entries: Sequence[LogEntry], on_answer: OnAppended) -> None:
            if not self.away:
                super().post_append(entries, on_answer)
                return
            failing.append(partial(on_answer, entries, StoreUnavailable("away")))

        async def finish(self, move: Move) -> WriteStatus:
            for fail in failing:
                fail()
            failing.clear()
            return await super().finish(move)

    store = Breaking()
    guard = StoreGuard(store, FAST)
    ledger = await guard.open(make_request("a"), {})
    ledger.post(S.DECODE)
    assert guard.note(tokens("a", 0, 1, 2))
    store.away = True
    await ledger.finish(S.FINISHED)
    assert guard.stats.away
    store.away = False
    await guard.beat()
    assert [e.token_ids for e in await store.read_log("a")] == [(1, 2)]
    record = await store.read("a")
    assert record is not None
    assert (record.state, record.fields[LOGGED]) == (S.FINISHED, "2")


async def test_an_end_brings_along_what_is_on_its_way() -> None:
    """The append is sent again behind the end, as when its keys are moving in a Cluster."""
    behind: list[Callable[[], None]] = []

    class Overtaken(FlakyStore):
        def post_append(self, entries: Sequence[LogEntry], on_answer: OnAppended) -> None:
            behind.append(partial(super().post_append, entries, on_answer))

    store = Overtaken()
    guard = StoreGuard(store, FAST)
    ledger = await guard.open(make_request("a"), {})
    ledger.post(S.DECODE)
    write(guard, tokens("a", 0, 1, 2))
    assert guard.note(tokens("a", 2, 3))
    await ledger.finish(S.FINISHED)
    [late] = behind
    late()  # it is answered `illegal`
    assert [e.token_ids for e in await store.read_log("a")] == [(1, 2), (3,)]
    assert (guard.stats.refused, ledger.owed.num_tokens) == (0, 0)


async def test_what_is_on_its_way_at_the_end_of_an_outage_is_owed_like_the_rest() -> None:
    """The store counts as away while an append has no answer; it fails after the end."""
    failing: list[Callable[[], None]] = []

    class Stalling(FlakyStore):
        def post_append(self, entries: Sequence[LogEntry], on_answer: OnAppended) -> None:
            failing.append(partial(on_answer, entries, StoreUnavailable("late")))

    store = Stalling()
    guard = StoreGuard(store, FAST)
    ledger = await guard.open(make_request("a"), {})
    ledger.post(S.DECODE)
    write(guard, tokens("a", 0, 1, 2))
    guard.lose(StoreUnavailable("a heartbeat failed"))
    write(guard, tokens("a", 2, 3))
    await ledger.finish(S.FINISHED)
    [fail] = failing
    fail()
    await guard.beat()
    assert [t for e in await store.read_log("a") for t in e.token_ids] == [1, 2, 3]
    record = await store.read("a")
    assert record is not None
    assert (record.state, record.fields[LOGGED]) == (S.FINISHED, "3")
    assert (guard.stats.refused, ledger.owed.num_tokens) == (0, 0)


async def test_an_error_at_the_failpoint_costs_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "LATE_S", 0.0)
    store = FlakyStore()
    guard = StoreGuard(store, FAST)
    await guard.open(make_request("a"), {})
    failing = True

    class Plan:
        def hit(self, name: str) -> bool:
            nonlocal failing
            if failing:
                failing = False
                raise InternalError("armed")
            return False

    monkeypatch.setattr(FAILPOINTS, "_plan", Plan())
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    assert guard.note(tokens("a", 0, 1))
    await eventually(lambda: answer(not failing))
    assert not await written(store, "a")
    assert guard.note(tokens("a", 1, 2))
    await eventually(lambda: written(store, "a"))
    assert [e.token_ids for e in await store.read_log("a")] == [(1, 2)]


async def answer(value: bool) -> bool:
    return value


async def test_the_failpoint_of_tokens_that_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[str] = []

    class Plan:
        def hit(self, name: str) -> bool:
            passed.append(name)
            return False

    store = FlakyStore()
    guard = StoreGuard(store, FAST)
    await guard.open(make_request("a"), {})
    monkeypatch.setattr(FAILPOINTS, "_plan", Plan())
    assert guard.note(tokens("a", 0, 1))
    assert not passed
    await eventually(lambda: written(store, "a"))
    assert passed == ["shown_not_logged"]


async def test_a_fence_gives_the_room_of_what_was_owed_back() -> None:
    store = FlakyStore()
    guard = StoreGuard(store, FAST)
    guard.catch_up = CatchUp(max_tokens=2)
    ledger = await guard.open(make_request("a"), {})
    store.away = True
    write(guard, tokens("a", 0, 1, 2))
    ledger.took(WriteStatus.FENCED)
    await guard.open(make_request("b"), {})
    write(guard, tokens("b", 0, 3, 4))
    assert guard.catch_up.stats.dropped == 0


STEPS = st.lists(
    st.sampled_from(["token", "other sample", "flush", "away", "back", "epoch", "beat"]),
    max_size=30,
)


@settings(max_examples=200, deadline=None)
@given(STEPS)
def test_whatever_comes_between_the_log_is_what_was_shown(steps: list[str]) -> None:
    async def live() -> None:
        store = FlakyStore()
        guard = StoreGuard(store, FAST)
        ledger = await guard.open(make_request("a"), {})
        ledger.post(S.DECODE)
        shown: dict[int, list[int]] = {0: [], 1: []}
        for number, step in enumerate(steps):
            if step in ("token", "other sample"):
                sample = int(step == "other sample")
                event = TokenEvent("a", 1, len(shown[sample]), (number,), sample=sample)
                assert guard.note(event)
                shown[sample].append(number)
            elif step == "flush":
                guard.flush()
            elif step in ("away", "back"):
                store.away = step == "away"
            elif step == "epoch":
                await ledger.settle()
                await ledger.move(S.QUEUED)
                ledger.post(S.DECODE)
            else:
                await guard.beat()
        await ledger.finish(S.FINISHED)
        store.away = False
        await guard.beat()
        logged: dict[int, list[int]] = {0: [], 1: []}
        for entry in await store.read_log("a"):
            assert entry.position == len(logged[entry.sample])
            logged[entry.sample] += entry.token_ids
        assert logged == shown
        record = await store.read("a")
        assert record is not None
        assert (record.state, guard.stats.refused) == (S.FINISHED, 0)
        assert record.fields[LOGGED] == str(sum(map(len, shown.values())))
        assert not ledger.owed.runs

    asyncio.run(live())
