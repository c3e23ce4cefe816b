"""RedisStore: RequestStore over a real Redis or Valkey, one Lua call per write and key group.

Scripts are called by EVALSHA and loaded again on NOSCRIPT. Those for single requests go in
pipelines (router/store/redis_queue.py); beat and sweep are sent on their own. A call for requests
of several key groups is one script for each group (router/store/redis_links.py). What a router does
without its store is in router/store/guard.py.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Awaitable, Collection, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Final, cast

from baton.protocol.clock import Clock
from baton.protocol.errors import StoreUnavailable
from baton.protocol.request import RequestState
from baton.runtime.timing import Timing
from router.store import redis_scripts
from router.store.base import (
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
from router.store.patience import Patience
from router.store.pending_moves import PendingMoves
from router.store.redis_claims import RedisClaims
from router.store.redis_documents import RedisDocuments
from router.store.redis_links import GroupLink, Links, RedisServers, together
from router.store.redis_records import (
    flatten,
    log_entry_of,
    pairs,
    record_of,
    request_of,
    values_of,
)

logger = logging.getLogger(__name__)
_STATUS: Final = {status.value.encode(): status for status in WriteStatus}
BEAT_CHUNK: Final = 1000  # request keys in one BEAT: ~3.5 ms of Redis


def longest_s(timing: Timing, timeout_s: float) -> float:
    """Return the longest wait for one answer, in seconds.

    It is half a lease, so that a heartbeat arrives within a lease, or `timeout_s` if that is more.
    """
    return max(timeout_s, timing.router_lease_s / 2)


class RedisStore:
    """RequestStore in Redis.

    Each call may take `timeout_s`, or longer if answers took longer of late (patience.py), up to
    `longest_s`. The lease is `timing.router_lease_s`, measured by Redis TIME.
    """

    def __init__(
        self, servers: RedisServers, owner: str, timing: Timing, clock: Clock, timeout_s: float
    ) -> None:
        self._owner = owner
        self._lease_s = timing.router_lease_s
        self._lease_ms = int(timing.router_lease_s * 1000)
        self._ttl_ms = int(TERMINAL_TTL_S * 1000)
        self._clock = clock
        self._patience = Patience(clock, timeout_s, longest_s(timing, timeout_s))
        self._links = links = Links(servers, clock, self._patience)
        register = links.all[0].client.register_script  # a script does not know its server
        self._move = register(redis_scripts.MOVE)
        self._beat = register(redis_scripts.BEAT)
        self._sweep = register(redis_scripts.SWEEP)
        self._append = register(redis_scripts.APPEND)
        self._read = register(redis_scripts.READ)
        self._follow = register(redis_scripts.FOLLOW)
        self._release = register(redis_scripts.RELEASE)
        self._claims = RedisClaims(links, owner, self._lease_ms)
        self._pending = PendingMoves(self._write_pending)
        self.documents = RedisDocuments(links)

    @property
    def name(self) -> str:
        return "redis"

    async def start(self) -> None:
        await self._links.each(self._begin)

    async def _begin(self, link: GroupLink) -> None:
        async def ping() -> None:
            reply: Any = link.client.ping()  # typed as bool | Awaitable[bool]
            await reply

        await self._links.call(ping)
        await self._count_replicas(link)

    async def stop(self) -> None:
        self._pending.flush()
        await self._links.stop()

    async def claim(
        self, request_id: str, fields: Mapping[str, str] = NO_FIELDS
    ) -> RequestRecord | None:
        return await self._claims.claim(request_id, fields)

    def post_claim(self, request_id: str, fields: Mapping[str, str], on_answer: Claimed) -> None:
        def settle(answer: list[bytes] | Exception) -> None:
            if isinstance(answer, Exception):
                on_answer(self._links.failed(answer))
            else:
                self._links.reached()
                on_answer(int(pairs(answer)[b"epoch"]) if answer else None)

        self._claims.post(request_id, fields, settle)

    async def move(self, move: Move) -> WriteStatus:
        assert not move.state.terminal, "a terminal state is `finish`'s"
        return await self._write(move)

    def post(self, move: Move, on_answer: OnAnswer) -> None:
        assert not move.state.terminal, "a terminal state is `finish`'s"
        self._pending.hold(move, on_answer)

    def _write_pending(self, move: Move, callbacks: Sequence[OnAnswer]) -> None:
        def settle(answer: bytes | Exception) -> None:
            if isinstance(answer, Exception):
                _notify(callbacks, self._links.failed(answer))
            else:
                self._links.reached()
                _notify(callbacks, _STATUS[answer])

        link = self._links.of(move.request_id)
        link.scripts.post(self._move, *self._moving(link, move), settle)

    async def finish(self, move: Move) -> WriteStatus:
        assert move.state.terminal, "a non-terminal state is `move`'s"
        return await self._write(move)

    async def _write(self, move: Move) -> WriteStatus:
        move, callbacks = self._pending.taken_along(move)
        link = self._links.of(move.request_id)
        try:
            answer = await self._links.run(link, self._move, *self._moving(link, move))
        except StoreUnavailable as error:
            _notify(callbacks, error)
            raise
        if isinstance(answer, list):
            answer, alias = answer
            self._claims.fade(alias.decode(), move.request_id, self._ttl_of(move))
        status = _STATUS[answer]
        _notify(callbacks, status)
        return status

    def _moving(self, link: GroupLink, move: Move) -> tuple[Sequence[str], Sequence[str | int]]:
        """Return keys and arguments of MOVE."""
        names, id_ = link.keys, move.request_id
        keys = (
            names.request_key(id_), names.leases, names.events, names.states, names.log_key(id_),
        )  # fmt: skip
        args = (
            self._owner, move.epoch, move.state, int(move.catch_up),
            self._lease_ms, self._ttl_of(move), move.min_tokens, move.min_ends,
            len(move.entries), *values_of(move.entries), *flatten(move.fields),
        )  # fmt: skip
        return keys, args

    def _ttl_of(self, move: Move) -> int:
        return self._ttl_ms if move.kept else 0

    async def append(self, entries: Sequence[LogEntry], *, safe: bool = False) -> list[WriteStatus]:
        parts = self._links.split(enumerate(entries), lambda placed: placed[1].request_id)
        answers = await together([
            self._links.run(
                link, self._append, *self._appended(link, [entry for _, entry in part]), safe=safe
            )
            for link, part in parts
        ])  # fmt: skip
        statuses = [WriteStatus.OK] * len(entries)
        for (_, part), words in zip(parts, answers, strict=True):
            for (place, _), word in zip(part, words, strict=True):
                statuses[place] = _STATUS[word]
        return statuses

    def post_append(self, entries: Sequence[LogEntry], on_answer: OnAppended) -> None:
        for link, part in self._links.split(entries, attrgetter("request_id")):
            link.scripts.post(
                self._append, *self._appended(link, part), partial(self._settle, part, on_answer)
            )

    def _settle(
        self, entries: Sequence[LogEntry], on_answer: OnAppended, answer: list[bytes] | Exception
    ) -> None:
        if isinstance(answer, Exception):
            on_answer(entries, self._links.failed(answer))
        else:
            self._links.reached()
            on_answer(entries, [_STATUS[word] for word in answer])

    def _appended(
        self, link: GroupLink, entries: Sequence[LogEntry]
    ) -> tuple[Sequence[str], Sequence[str | int]]:
        """Return keys and arguments of APPEND."""
        keys: list[str] = []
        for entry in entries:
            keys += [link.keys.request_key(entry.request_id), link.keys.log_key(entry.request_id)]
        return keys, [self._owner, *values_of(entries)]

    async def beat(self, held: Collection[str]) -> list[str]:
        parts = {link.keys.tag: ids for link, ids in self._links.split(held, str)}
        lost = await self._links.each(
            lambda link: self._beat_of(link, parts.get(link.keys.tag, ()))
        )
        return [request_id for part in lost for request_id in part]

    async def _beat_of(self, link: GroupLink, ids: Sequence[str]) -> list[str]:
        """Renew the leases of a key group's requests; also without any, to see that it answers."""
        lost: list[str] = []
        names = link.keys
        for start in range(0, max(1, len(ids)), BEAT_CHUNK):
            chunk = ids[start : start + BEAT_CHUNK]
            keys = [names.leases, names.router_key(self._owner), *map(names.request_key, chunk)]
            args = [self._owner, self._lease_ms]
            places: list[int] = await self._links.evaluate(link, self._beat, keys, args)
            lost += [chunk[place - 1] for place in places]
        await self._count_replicas(link)
        return lost

    async def _count_replicas(self, link: GroupLink) -> None:
        """Learn how many replicas a write can wait for."""
        if link.scripts.replicas_wanted:
            found = await self._links.call(lambda: link.client.info("replication"))
            link.scripts.set_replicas(online_replicas(found))

    async def sweep(self, limit: int = SWEEP_LIMIT) -> list[Swept]:
        connected = self._links.connected_at
        if connected is None or self._clock.monotonic() - connected < 2 * self._lease_s:
            return []
        swept = await self._links.each(lambda link: self._sweep_of(link, limit))
        return [each for part in swept for each in part]

    async def _sweep_of(self, link: GroupLink, limit: int) -> list[Swept]:
        keys = [link.keys.leases, link.keys.events, link.keys.states]
        args = [limit, self._ttl_ms, self._lease_ms]
        rows: list[tuple[bytes, bytes, int]] = await self._links.evaluate(
            link, self._sweep, keys, args
        )
        return [
            Swept(request_of(key.decode()), RequestState(state.decode()), epoch)
            for key, state, epoch in rows
        ]

    async def read(self, request_id: str) -> RequestRecord | None:
        self._pending.flush()
        answer = await self._read_key(request_id)
        if isinstance(answer, bytes):
            request_id = request_of(answer.decode())
            answer = await self._read_key(request_id)
        return record_of(request_id, pairs(answer)) if answer and isinstance(answer, list) else None

    async def _read_key(self, name: str) -> list[bytes] | bytes:
        """Return READ's answer about this id or alias."""
        link = self._links.of(name)
        return await self._links.run(link, self._read, [link.keys.request_key(name)], [])

    async def read_log(self, request_id: str) -> list[LogEntry]:
        link = self._links.of(request_id)
        log = link.keys.log_key(request_id)
        rows: Any = await self._links.call(lambda: link.client.xrange(log))
        return [log_entry_of(request_id, row) for _, row in rows]

    async def tail(
        self, request_id: str, cursor: str, timeout_s: float
    ) -> tuple[list[LogEntry], str]:
        # Half of a call's time limit, so that an answer at the end of the wait is still in time.
        wait_s = min(timeout_s, self._patience.seconds / 2)
        wait_ms = int(1000 * wait_s) or None
        link = self._links.of(request_id)
        log: dict[Any, Any] = {link.keys.log_key(request_id): cursor or "0"}
        streams: Any = await self._links.call(lambda: link.client.xread(log, block=wait_ms), wait_s)
        if not streams:
            return [], cursor
        rows = streams[0][1]
        return [log_entry_of(request_id, row) for _, row in rows], rows[-1][0].decode()

    async def follow(self, request_id: str) -> None:
        link = self._links.of(request_id)
        await self._links.run(link, self._follow, [link.keys.request_key(request_id)], [])

    async def release(self, request_ids: Collection[str]) -> None:
        self._pending.flush()  # a move that was written later would renew its lease
        await together([
            self._links.run(
                link, self._release, [link.keys.leases, *map(link.keys.request_key, ids)],
                [self._owner],
            )
            for link, ids in self._links.split(request_ids, str)
        ])  # fmt: skip

    async def counts(self) -> dict[RequestState, int]:
        total: Counter[RequestState] = Counter()
        for part in await self._links.each(self._counts_of):
            total.update({RequestState(state.decode()): int(n) for state, n in part.items()})
        return dict(total)

    async def _counts_of(self, link: GroupLink) -> dict[bytes, bytes]:
        states = link.keys.states
        return await self._links.call(
            lambda: cast(Awaitable[dict[bytes, bytes]], link.client.hgetall(states))
        )


def online_replicas(replication: Mapping[str, Any]) -> int:
    """Return how many replicas follow the server, by `INFO replication`.

    One that is silent follows until the server gives it up (its `repl-timeout`).
    """
    rows = [row for name, row in replication.items() if re.fullmatch(r"slave\d+", name)]
    return sum(row["state"] == "online" for row in rows)


def _notify(callbacks: Sequence[OnAnswer], answer: WriteStatus | StoreUnavailable) -> None:
    for each in callbacks:
        each(answer)
