"""What a resumable request notes of its appends to the log, for its timeline."""

from __future__ import annotations

from collections.abc import Sequence

from router.resumable.replay import Told
from router.resumable.run_log import RunLog
from router.store.base import LogEntry, WriteStatus
from router.store.guard import StoreGuard
from tests.router.fakes import FAST, FakeClock, make_request
from tests.router.test_ledger import FlakyStore, details, tokens


async def test_a_resumable_request_notes_how_long_its_appends_take() -> None:
    """An append of several entries counts once; failed ones and late ones count, too."""
    clock = FakeClock(100.0)

    class Slow(FlakyStore):
        async def append(
            self, entries: Sequence[LogEntry], *, safe: bool = False
        ) -> list[WriteStatus]:
            clock.advance(0.5 if self.away else 0.25)
            return await super().append(entries, safe=safe)

    store = Slow()
    guard = StoreGuard(store, FAST)
    log = RunLog(Told(1), clock)
    guard.expect("a", log)
    await guard.open(make_request("a"), {})
    await guard.open(make_request("b"), {})
    await guard.append([details(0, 1), details(1, 2), tokens("b", 0, 1)])
    assert [(each.start, each.end) for each in log.appends.spans] == [(100.0, 100.25)]
    await guard.append([tokens("b", 1, 2)])
    assert log.appends.count == 1, "a plain request's"
    store.away = True
    await guard.append([details(2, 3)])
    assert (log.appends.count, log.appends.total_s) == (2, 0.75)
    await guard.append([details(3, 4)])
    assert log.appends.count == 2, "while the store is away nobody asks it"
    store.away = False
    await guard.beat()
    assert (log.appends.count, log.appends.total_s) == (3, 1.0)
