"""MemoryStore: RequestStore in this process, for tests and for machines without Redis.

Nothing survives a crash. Several stores may share one `MemoryTables` (several routers in one test
process). The store passes the same contract tests as store/redis_store.py. Its time is the Clock's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from baton.protocol.clock import Clock
from baton.protocol.request import TRANSITIONS, RequestState
from baton.runtime.timing import Timing
from router.store.base import (
    ALIAS,
    END_MARK,
    LOGGED,
    MAX_TRIES,
    NO_FIELDS,
    SWEEP_LIMIT,
    TERMINAL_TTL_S,
    Claimed,
    LogEntry,
    Move,
    OnAnswer,
    OnAppended,
    RequestRecord,
    Swept,
    WriteStatus,
)
from router.store.documents import DocumentTable, MemoryDocuments

MAX_PLAIN: Final = 4096  # how many ended plain requests are kept


@dataclass(slots=True)
class _Row:
    state: RequestState
    epoch: int
    owner: str
    lease_until: float = 0.0
    tries: int = 0
    expires: float | None = None  # set at the end
    fields: dict[str, str] = field(default_factory=dict[str, str])
    lengths: Counter[int] = field(default_factory=Counter[int])  # tokens logged per sample
    log: list[LogEntry] = field(default_factory=list[LogEntry])
    ended: set[int] = field(default_factory=set[int])  # samples whose end is logged
    since: float = 0.0
    seen: float | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)  # replaced when it is set

    @property
    def resumable(self) -> bool:
        return self.fields.get("resumable") == "1"


@dataclass(slots=True)
class MemoryTables:
    rows: dict[str, _Row] = field(default_factory=dict[str, _Row])
    counts: Counter[RequestState] = field(default_factory=Counter[RequestState])
    plain: deque[str] = field(default_factory=deque[str])  # ended plain requests, in this order
    documents: DocumentTable = field(default_factory=DocumentTable)
    aliases: dict[str, str] = field(default_factory=dict[str, str])  # alias -> id

    def ended(self, request_id: str) -> None:
        """Note the end of a plain request; keep only the newest MAX_PLAIN of them."""
        self.plain.append(request_id)
        if len(self.plain) > MAX_PLAIN:
            oldest = self.plain.popleft()
            row = self.rows.get(oldest)
            if row is not None and row.state.terminal:
                del self.rows[oldest]


class MemoryStore:
    def __init__(
        self, owner: str, timing: Timing, clock: Clock, tables: MemoryTables | None = None
    ) -> None:
        self._owner = owner
        self._lease_s = timing.router_lease_s
        self._clock = clock
        self._tables = tables or MemoryTables()
        self.documents = MemoryDocuments(self._tables.documents, clock)
        self._connected_at = clock.monotonic()

    @property
    def name(self) -> str:
        return "memory"

    async def start(self) -> None:
        self._connected_at = self._clock.monotonic()

    async def stop(self) -> None:
        """Do nothing; the tables stay for the other stores that share them."""

    async def claim(
        self, request_id: str, fields: Mapping[str, str] = NO_FIELDS
    ) -> RequestRecord | None:
        row = self._claim(request_id, fields)
        return None if row is None else self._record(request_id, row)

    def post_claim(self, request_id: str, fields: Mapping[str, str], on_answer: Claimed) -> None:
        row = self._claim(request_id, fields)
        on_answer(None if row is None else row.epoch)

    def _claim(self, request_id: str, fields: Mapping[str, str]) -> _Row | None:
        found, now = self._found(request_id), self._clock.monotonic()
        if found is None:
            alias = fields.get(ALIAS)
            if alias is not None and self._found(alias):
                return None
            if alias is not None:
                self._tables.aliases[alias] = request_id
            row = _Row(RequestState.QUEUED, 1, self._owner, since=now)
            self._tables.rows[request_id] = row
            self._tables.counts[RequestState.QUEUED] += 1
        else:
            of, row = found
            waits = row.state is RequestState.QUEUED and row.owner in ("", self._owner)
            if of != request_id or not waits:
                return None
        row.owner = self._owner
        row.lease_until = now + self._lease_s
        row.fields.update(fields)
        return row

    async def move(self, move: Move) -> WriteStatus:
        assert not move.state.terminal, "a terminal state is `finish`'s"
        return self._write(move)

    def post(self, move: Move, on_answer: OnAnswer) -> None:
        assert not move.state.terminal, "a terminal state is `finish`'s"
        on_answer(self._write(move))

    async def finish(self, move: Move) -> WriteStatus:
        assert move.state.terminal, "a non-terminal state is `move`'s"
        return self._write(move)

    def _write(self, move: Move) -> WriteStatus:
        row = self._row(move.request_id)
        if row is None:
            return WriteStatus.GONE
        epoch = move.epoch + 1 if move.state is RequestState.QUEUED else move.epoch
        if row.owner != self._owner:
            return WriteStatus.FENCED
        if row.state is move.state and row.epoch == epoch:
            return WriteStatus.OK  # the answer to the first try was lost
        if row.epoch > move.epoch:
            return WriteStatus.FENCED
        behind = move.catch_up and not row.state.terminal
        if not behind and (row.epoch != move.epoch or move.state not in TRANSITIONS[row.state]):
            return WriteStatus.ILLEGAL
        if move.state.terminal:
            return self._end(move, row, epoch)
        self._enter(row, move.state, epoch)
        row.fields.update(move.fields)
        return WriteStatus.OK

    def _end(self, move: Move, row: _Row, epoch: int) -> WriteStatus:
        """Write a terminal state; answer GAP if the log lacks tokens or ends that were shown."""
        for entry in move.entries:
            if (status := self._append(entry)) is not WriteStatus.OK:
                return status
        logged = row.lengths.total()
        if logged < move.min_tokens or len(row.ended) < move.min_ends:
            return WriteStatus.GAP
        self._enter(row, move.state, epoch)
        row.fields.update(move.fields)
        row.fields[LOGGED] = str(logged)
        if not move.kept:
            del self._tables.rows[move.request_id]
        elif not row.resumable:
            self._tables.ended(move.request_id)
        return WriteStatus.OK

    async def append(self, entries: Sequence[LogEntry], *, safe: bool = False) -> list[WriteStatus]:
        return [self._append(entry) for entry in entries]

    def post_append(self, entries: Sequence[LogEntry], on_answer: OnAppended) -> None:
        on_answer(entries, [self._append(entry) for entry in entries])

    def _append(self, entry: LogEntry) -> WriteStatus:
        row = self._row(entry.request_id)
        if row is None:
            return WriteStatus.GONE
        if row.owner != self._owner or row.epoch > entry.epoch:
            return WriteStatus.FENCED
        if row.state.terminal:
            return WriteStatus.ILLEGAL
        known = row.lengths[entry.sample] - entry.position
        if known < 0:
            return WriteStatus.GAP
        fresh = entry.token_ids[known:]
        ends = entry.more.startswith(END_MARK)
        if fresh or (ends and entry.sample not in row.ended):
            if known:
                entry = msgspec.structs.replace(
                    entry, position=entry.position + known, token_ids=fresh
                )
            row.log.append(entry)
            row.lengths[entry.sample] += len(fresh)
            row.news.set()
            row.news = asyncio.Event()
        if ends:
            row.ended.add(entry.sample)
        return WriteStatus.OK

    async def beat(self, held: Collection[str]) -> list[str]:
        lost: list[str] = []
        for request_id in held:
            row = self._row(request_id)
            if row is None or row.state.terminal or row.owner != self._owner:
                lost.append(request_id)
            else:
                row.lease_until = self._clock.monotonic() + self._lease_s
        return lost

    async def sweep(self, limit: int = SWEEP_LIMIT) -> list[Swept]:
        now = self._clock.monotonic()
        if now - self._connected_at < 2 * self._lease_s:
            return []
        self._forget_expired(now)
        swept: list[Swept] = []
        for request_id, row in list(self._tables.rows.items()):
            if len(swept) == limit:
                break
            if row.state.terminal or row.lease_until > now:
                continue
            resumable = row.resumable and row.tries < MAX_TRIES
            state = RequestState.QUEUED if resumable else RequestState.CANCELLED
            row.tries += 1
            self._enter(row, state, row.epoch + 1)
            if state.terminal and not row.resumable:
                self._tables.ended(request_id)
            row.owner = ""
            swept.append(Swept(request_id, state, row.epoch))
        return swept

    async def read(self, request_id: str) -> RequestRecord | None:
        found = self._found(request_id)
        return None if found is None else self._record(*found)

    async def read_log(self, request_id: str) -> list[LogEntry]:
        row = self._row(request_id)
        return [] if row is None else list(row.log)

    async def tail(
        self, request_id: str, cursor: str, timeout_s: float
    ) -> tuple[list[LogEntry], str]:
        row, start = self._row(request_id), int(cursor or 0)
        if row is None:
            return [], cursor
        if len(row.log) <= start and timeout_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await row.news.wait()
        return row.log[start:], str(len(row.log))

    async def follow(self, request_id: str) -> None:
        row = self._row(request_id)
        if row is not None:
            row.seen = self._clock.monotonic()

    async def release(self, request_ids: Collection[str]) -> None:
        for request_id in request_ids:
            row = self._row(request_id)
            if row is not None and row.owner == self._owner and not row.state.terminal:
                row.lease_until = self._clock.monotonic()

    async def counts(self) -> dict[RequestState, int]:
        return dict(self._tables.counts)

    def _enter(self, row: _Row, state: RequestState, epoch: int) -> None:
        self._tables.counts[row.state] -= 1
        self._tables.counts[state] += 1
        row.state = state
        row.epoch = epoch
        if state.terminal:
            row.expires = self._clock.monotonic() + TERMINAL_TTL_S
        else:
            row.lease_until = self._clock.monotonic() + self._lease_s

    def _found(self, asked: str) -> tuple[str, _Row] | None:
        """Return the id and the row of the request with this id or alias; None if there is none."""
        row = self._row(asked)
        if row is None and asked in self._tables.aliases:
            asked = self._tables.aliases[asked]
            row = self._row(asked)
        return None if row is None else (asked, row)

    def _row(self, request_id: str) -> _Row | None:
        row = self._tables.rows.get(request_id)
        if row is not None and row.expires is not None and row.expires <= self._clock.monotonic():
            return None
        return row

    def _forget_expired(self, now: float) -> None:
        rows = self._tables.rows
        for request_id in [
            i for i, r in rows.items() if r.expires is not None and r.expires <= now
        ]:
            del rows[request_id]
        aliases = self._tables.aliases
        self._tables.aliases = {alias: id_ for alias, id_ in aliases.items() if id_ in rows}

    def _record(self, request_id: str, row: _Row) -> RequestRecord:
        now = self._clock.monotonic()
        return RequestRecord(
            request_id,
            row.state,
            row.epoch,
            row.owner,
            row.tries,
            dict(row.fields),
            age_s=now - row.since,
            idle_s=None if row.seen is None else now - row.seen,
        )
