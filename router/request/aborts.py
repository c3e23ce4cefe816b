"""Ending requests by name wherever they are: on this router, and on all that share its Redis.

Connections are spread over `--workers` and over routers, so whoever asks for an end seldom reaches
the one that has the request. The asking router publishes the question. Each router that listens
ends the requests that it knows and pushes their ids to a Redis list made for this question. The
asking router waits for as many answers as there were listeners, for ANSWER_S at most. Without
Redis, or while Redis is away, only this router's own requests are ended.

The life: made -> run() until cancelled; `everywhere` at any time.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Protocol, cast

import orjson
from redis.asyncio import Redis
from redis.exceptions import RedisError

from baton.protocol.request import Request
from baton.runtime.redis.keys import ABORTS, aborted_key
from router.request.request_ids import names
from router.request.trace import RequestTrace

log = logging.getLogger(__name__)
ANSWER_S: Final = 1.0
WAIT_S: Final = 0.2  # longest wait of one BLPOP for answers: below any socket's own time limit
LISTEN_S: Final = 30.0
RETRY_S: Final = 1.0
KEPT_MS: Final = 10_000  # answers that came too late for their question are kept in Redis so long
_FAILED: Final = (RedisError, OSError, TimeoutError)


class Requests(Protocol):
    """What Aborts needs of the dispatcher (router/request/dispatcher.py)."""

    def live(self) -> list[tuple[Request, RequestTrace]]: ...
    def waiting(self) -> list[tuple[Request, RequestTrace]]: ...
    def abort(self, request_id: str, by_operator: bool = False) -> bool: ...


@dataclass(frozen=True, slots=True)
class _Question:
    """Which requests to end: those that `names` name, or all if `everything` is set.

    `domain`: only requests of tenants in this domain; None: of all tenants.
    """

    names: Sequence[str]
    by_operator: bool
    domain: str | None
    everything: bool = False


class Aborts:
    """Ends requests here and on the other routers. `redis` None: there are no other routers."""

    def __init__(self, requests: Requests, redis: Redis | None = None) -> None:
        self.listening = asyncio.Event()
        self._requests = requests
        self._redis = redis
        self._id = secrets.token_hex(8)

    async def everywhere(
        self, asked: Sequence[str], by_operator: bool = False, domain: str | None = None
    ) -> list[str]:
        """End the requests that `asked` names; return the ids of those that were ended.

        An operator may also name requests by reply id or by `x-request-id`; the clients of what an
        operator ends get the output so far. `domain`: end only requests of tenants in this domain.
        """
        question = _Question(tuple(asked), by_operator, domain)
        found = self.here(question)
        if self._redis is not None and len(found) < len(asked):
            try:
                found += await self._elsewhere(self._redis, question)
            except _FAILED as error:
                log.warning("only this router was asked to end requests: %s", error)
        return found

    async def everything(self) -> list[str]:
        """End all requests and return their ids. Their clients get the output so far."""
        question = _Question((), by_operator=True, domain=None, everything=True)
        found = self.here(question)
        if self._redis is not None:
            try:
                found += await self._elsewhere(self._redis, question)
            except _FAILED as error:
                log.warning("only this router was asked to end requests: %s", error)
        return found

    def here(self, question: _Question) -> list[str]:
        known = [
            each.id
            for each, trace in (*self._requests.live(), *self._requests.waiting())
            if question.domain in (None, trace.terms.grant.domain)
        ]
        operator = question.by_operator
        meant = [
            id_
            for id_ in known
            if question.everything
            or any(names(one, id_) if operator else one == id_ for one in question.names)
        ]
        return [id_ for id_ in meant if self._requests.abort(id_, by_operator=operator)]

    async def run(self) -> None:
        """Answer the questions of other routers, until cancelled. Return at once without Redis."""
        if self._redis is None:
            return
        told = False
        while True:
            try:
                await self._listen(self._redis)
            except _FAILED as error:
                if not told:
                    log.warning("not listening for requests to end: %s", error)
                told = True
            self.listening.clear()
            await asyncio.sleep(RETRY_S)  # a back-off: its Redis is away

    async def _listen(self, redis: Redis) -> None:
        async with redis.pubsub(ignore_subscribe_messages=True) as channel:
            await channel.subscribe(ABORTS)
            self.listening.set()
            while True:
                message = await channel.get_message(timeout=LISTEN_S)
                if message is not None:
                    await self._answer(redis, cast("bytes", message["data"]))

    async def _answer(self, redis: Redis, data: bytes) -> None:
        question: Any = orjson.loads(data)
        own = question["from"] == self._id
        asked = _Question(
            question["names"], bool(question["by_operator"]), question["domain"],
            bool(question.get("everything")),
        )  # fmt: skip
        found = [] if own else self.here(asked)
        key = aborted_key(question["id"])
        async with redis.pipeline(transaction=False) as pipe:
            pipe.rpush(key, orjson.dumps(found))
            pipe.pexpire(key, KEPT_MS)
            await pipe.execute()

    async def _elsewhere(self, redis: Redis, question: _Question) -> list[str]:
        id_ = secrets.token_hex(16)
        message = {"id": id_, "from": self._id, **asdict(question)}
        listeners = await redis.publish(ABORTS, orjson.dumps(message))
        found: list[str] = []
        deadline = asyncio.get_running_loop().time() + ANSWER_S
        while listeners > 0 and asyncio.get_running_loop().time() < deadline:
            reply: Any = redis.blpop([aborted_key(id_)], timeout=WAIT_S)
            answer = await reply
            if answer is not None:
                listeners -= 1
                found += orjson.loads(answer[1])
        return found
