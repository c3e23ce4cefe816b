"""RedisStore: RequestStore over a real Redis (6.2 or newer), one Lua call per write.

Scripts are called by EVALSHA and loaded again on NOSCRIPT. Those for single requests go in
pipelines (router/store/redis_queue.py); beat and sweep are sent on their own. Every error of the
server or the connection, and every time-out, becomes StoreUnavailable. What a router does without
its store is in router/store/guard.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Any, Final

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.commands.core import AsyncScript
from redis.exceptions import RedisError

from baton.protocol.clock import Clock
from baton.protocol.errors import StoreUnavailable
from baton.protocol.request import RequestState
from baton.runtime.redis_connections import heed_cancellation
from baton.runtime.redis_keys import (
    EVENTS,
    LEASES,
    REQUEST_PREFIX,
    STATES,
    log_key,
    request_key,
    router_key,
)
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
    RequestRecord,
    Swept,
    WriteStatus,
)
from router.store.patience import Patience
from router.store.pending_moves import PendingMoves
from router.store.redis_documents import RedisDocuments
from router.store.redis_queue import ScriptQueue

logger = logging.getLogger(__name__)
_STATUS: Final = {status.value.encode(): status for status in WriteStatus}
BEAT_CHUNK: Final = 1000  # request keys in one BEAT: ~3.5 ms of Redis


def longest_s(timing: Timing, timeout_s: float) -> float:
    """Return the longest wait for one answer, in seconds.

    It is half a lease, so that a heartbeat arrives within a lease, or `timeout_s` if that is more.
    """
    return max(timeout_s, timing.router_lease_s / 2)


def connect(url: str, timeout_s: float) -> Redis:
    """Return a client whose calls fail after `timeout_s`. `url` has passed `check_redis_url`.

    A call over a broken connection is repeated once over a new one. A cancelled call ends at once.
    """
    client = Redis.from_url(
        url,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=Retry(NoBackoff(), 1),
        decode_responses=False,
    )
    return heed_cancellation(client)


class RedisStore:
    """RequestStore in Redis.

    Each call may take `timeout_s`, or longer if answers took longer of late (patience.py), up to
    `longest_s`. The lease is `timing.router_lease_s`, measured by Redis TIME.
    """

    def __init__(
        self, client: Redis, owner: str, timing: Timing, clock: Clock, timeout_s: float
    ) -> None:
        self._redis = client
        self._owner = owner
        self._lease_s = timing.router_lease_s
        self._lease_ms = int(timing.router_lease_s * 1000)
        self._ttl_ms = int(TERMINAL_TTL_S * 1000)
        self._clock = clock
        self._patience = Patience(clock, timeout_s, longest_s(timing, timeout_s))
        self._connected_at: float | None = None
        self._move = client.register_script(redis_scripts.MOVE)
        self._claim = client.register_script(redis_scripts.CLAIM)
        self._beat = client.register_script(redis_scripts.BEAT)
        self._sweep = client.register_script(redis_scripts.SWEEP)
        self._append = client.register_script(redis_scripts.APPEND)
        self._read = client.register_script(redis_scripts.READ)
        self._follow = client.register_script(redis_scripts.FOLLOW)
        self._release = client.register_script(redis_scripts.RELEASE)
        self._scripts = ScriptQueue(client, self._patience)
        self._pending = PendingMoves(self._write_pending)
        self.documents = RedisDocuments(client, self._call)

    @property
    def name(self) -> str:
        return "redis"

    async def start(self) -> None:
        async with self._call():
            reply: Any = self._redis.ping()  # typed as bool | Awaitable[bool]
            await reply

    async def stop(self) -> None:
        self._pending.flush()
        await self._scripts.stop()
        await self._redis.aclose()

    async def claim(
        self, request_id: str, fields: Mapping[str, str] = NO_FIELDS
    ) -> RequestRecord | None:
        flat: list[bytes] = await self._run(self._claim, *self._claiming(request_id, fields))
        return _record(request_id, _pairs(flat)) if flat else None

    def post_claim(self, request_id: str, fields: Mapping[str, str], on_answer: Claimed) -> None:
        def settle(answer: list[bytes] | Exception) -> None:
            if isinstance(answer, Exception):
                on_answer(self._failed(answer))
            else:
                self._reached()
                on_answer(int(_pairs(answer)[b"epoch"]) if answer else None)

        self._scripts.post(self._claim, *self._claiming(request_id, fields), settle)

    def _claiming(
        self, request_id: str, fields: Mapping[str, str]
    ) -> tuple[Sequence[str], Sequence[str | int]]:
        """Return keys and arguments of CLAIM."""
        keys = (request_key(request_id), LEASES, EVENTS, STATES)
        return keys, (self._owner, self._lease_ms, *_flatten(fields))

    async def move(self, move: Move) -> WriteStatus:
        assert not move.state.terminal, "a terminal state is `finish`'s"
        return await self._write(move)

    def post(self, move: Move, on_answer: OnAnswer) -> None:
        assert not move.state.terminal, "a terminal state is `finish`'s"
        self._pending.hold(move, on_answer)

    def _write_pending(self, move: Move, callbacks: Sequence[OnAnswer]) -> None:
        def settle(answer: bytes | Exception) -> None:
            if isinstance(answer, Exception):
                _notify(callbacks, self._failed(answer))
            else:
                self._reached()
                _notify(callbacks, _STATUS[answer])

        self._scripts.post(self._move, *self._moving(move), settle)

    async def finish(self, move: Move) -> WriteStatus:
        assert move.state.terminal, "a non-terminal state is `move`'s"
        return await self._write(move)

    async def _write(self, move: Move) -> WriteStatus:
        move, callbacks = self._pending.taken_along(move)
        try:
            status = _STATUS[await self._run(self._move, *self._moving(move))]
        except StoreUnavailable as error:
            _notify(callbacks, error)
            raise
        _notify(callbacks, status)
        return status

    def _moving(self, move: Move) -> tuple[Sequence[str], Sequence[str | int]]:
        """Return keys and arguments of MOVE."""
        keys = (request_key(move.request_id), LEASES, EVENTS, STATES, log_key(move.request_id))
        args = (
            self._owner, move.epoch, move.state, int(move.catch_up),
            self._lease_ms, self._ttl_ms if move.kept else 0, move.min_tokens, move.min_ends,
            *_flatten(move.fields),
        )  # fmt: skip
        return keys, args

    async def append(self, entries: Sequence[LogEntry]) -> list[WriteStatus]:
        if not entries:
            return []
        keys: list[str] = []
        args: list[str | int] = [self._owner]
        for entry in entries:
            keys += [request_key(entry.request_id), log_key(entry.request_id)]
            tokens = ",".join(map(str, entry.token_ids))
            args += [entry.epoch, entry.sample, entry.position, len(entry.token_ids), tokens]
            args.append(entry.more)
        words: list[bytes] = await self._run(self._append, keys, args)
        return [_STATUS[word] for word in words]

    async def beat(self, held: Collection[str]) -> list[str]:
        ids = list(held)
        lost: list[str] = []
        for start in range(0, max(1, len(ids)), BEAT_CHUNK):
            chunk = ids[start : start + BEAT_CHUNK]
            keys = [LEASES, router_key(self._owner), *map(request_key, chunk)]
            async with self._call():
                places: list[int] = await self._beat(keys=keys, args=[self._owner, self._lease_ms])
            lost += [chunk[place - 1] for place in places]
        return lost

    async def sweep(self, limit: int = SWEEP_LIMIT) -> list[Swept]:
        connected = self._connected_at
        if connected is None or self._clock.monotonic() - connected < 2 * self._lease_s:
            return []
        async with self._call():
            rows: list[tuple[bytes, bytes, int]] = await self._sweep(
                keys=[LEASES, EVENTS, STATES], args=[limit, self._ttl_ms, self._lease_ms]
            )
        return [
            Swept(key.decode().removeprefix(REQUEST_PREFIX), RequestState(state.decode()), epoch)
            for key, state, epoch in rows
        ]

    async def read(self, request_id: str) -> RequestRecord | None:
        self._pending.flush()
        flat: list[bytes] = await self._run(self._read, [request_key(request_id)], [])
        if not flat:
            return None
        raw = _pairs(flat)
        return _record(raw[b"key"].decode().removeprefix(REQUEST_PREFIX), raw)

    async def read_log(self, request_id: str) -> list[LogEntry]:
        async with self._call():
            rows: Any = await self._redis.xrange(log_key(request_id))
        return [_entry(request_id, row) for _, row in rows]

    async def tail(
        self, request_id: str, cursor: str, timeout_s: float
    ) -> tuple[list[LogEntry], str]:
        # Half of a call's time limit, so that an answer at the end of the wait is still in time.
        wait_s = min(timeout_s, self._patience.seconds / 2)
        wait_ms = int(1000 * wait_s) or None
        key = log_key(request_id)
        async with self._call(wait_s):
            streams: Any = await self._redis.xread({key: cursor or "0"}, block=wait_ms)
        if not streams:
            return [], cursor
        rows = streams[0][1]
        return [_entry(request_id, row) for _, row in rows], rows[-1][0].decode()

    async def follow(self, request_id: str) -> None:
        await self._run(self._follow, [request_key(request_id)], [])

    async def release(self, request_ids: Collection[str]) -> None:
        self._pending.flush()  # a move that was written later would renew its lease
        await self._run(self._release, [LEASES, *map(request_key, request_ids)], [self._owner])

    async def counts(self) -> dict[RequestState, int]:
        async with self._call():
            raw = await self._hgetall(STATES)
        return {RequestState(state.decode()): int(count) for state, count in raw.items()}

    async def _run(
        self, script: AsyncScript, keys: Sequence[str], args: Sequence[str | int]
    ) -> Any:
        """Run a script in a pipeline and return its answer. Raises StoreUnavailable."""
        try:
            answer = await self._scripts.run(script, keys, args)
        except (RedisError, OSError, TimeoutError) as error:
            raise self._failed(error) from error
        self._reached()
        return answer

    def _reached(self) -> None:
        """Note that the server has answered; remember when the connection came up."""
        if self._connected_at is None:
            self._connected_at = self._clock.monotonic()

    def _failed(self, error: Exception) -> StoreUnavailable:
        self._connected_at = None
        return StoreUnavailable(f"Redis: {type(error).__name__}: {error}")

    async def _hgetall(self, key: str) -> dict[bytes, bytes]:
        reply: Any = self._redis.hgetall(key)  # typed as dict | Awaitable[dict]
        return await reply

    @contextlib.asynccontextmanager
    async def _call(self, asked_s: float = 0.0) -> AsyncIterator[None]:
        """Limit the time of one call, and translate its failures to StoreUnavailable.

        `asked_s`: the seconds for which the server was asked to wait if it had no answer.
        """
        began, patience_s = self._clock.monotonic(), self._patience.seconds
        try:
            async with asyncio.timeout(patience_s):
                yield
        except (RedisError, OSError, TimeoutError) as error:
            if isinstance(error, TimeoutError):
                self._patience.took(patience_s)
            raise self._failed(error) from error
        self._patience.took(self._clock.monotonic() - began - asked_s)
        self._reached()


def _notify(callbacks: Sequence[OnAnswer], answer: WriteStatus | StoreUnavailable) -> None:
    for each in callbacks:
        each(answer)


def _flatten(fields: Mapping[str, str]) -> list[str]:
    return [part for item in fields.items() for part in item]


def _entry(request_id: str, row: Mapping[bytes, bytes]) -> LogEntry:
    tokens = row[b"t"]
    return LogEntry(
        request_id,
        epoch=int(row[b"e"]),
        position=int(row[b"p"]),
        token_ids=tuple(map(int, tokens.split(b","))) if tokens else (),
        sample=int(row[b"s"]),
        more=row.get(b"m", b"").decode(),
    )


def _pairs(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _record(request_id: str, raw: Mapping[bytes, Any]) -> RequestRecord:
    now, seen = int(raw[b"now"]), raw.get(b"seen")
    return RequestRecord(
        id=request_id,
        state=RequestState(raw[b"state"].decode()),
        epoch=int(raw[b"epoch"]),
        owner=raw[b"owner"].decode(),
        tries=int(raw[b"tries"]),
        fields={
            name[2:].decode(): value.decode() for name, value in raw.items() if name[:2] == b"f:"
        },
        age_s=(now - int(raw.get(b"since", now))) / 1000,
        idle_s=None if seen is None else (now - int(seen)) / 1000,
    )
