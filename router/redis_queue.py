"""ScriptQueue: scripts of many requests over one connection, as pipelines.

What is asked while one pipeline is under way goes with the next, in order: under load a round trip
serves dozens of requests, and redis-py's costs per call (a connection from the pool, a write, a
wake-up) are paid once. Nothing waits for company: alone, a call goes out at once. Not here: what a
failure means (router/redis_store.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

from hiredis import pack_command
from redis.asyncio import Redis
from redis.commands.core import AsyncScript
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError, ResponseError

MAX_CALLS: Final = 256  # in one pipeline: some 5 ms of Redis


@dataclass(slots=True, eq=False)
class _Call:
    script: AsyncScript
    arguments: Sequence[str | int]  # number of keys, keys, arguments
    answer: asyncio.Future[Any] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class ScriptQueue:
    """`timeout_s` bounds each pipeline. A pipeline that fails fails its calls, no others."""

    def __init__(self, client: Redis, timeout_s: float) -> None:
        self._redis = client
        self._timeout_s = timeout_s
        self._waiting: list[_Call] = []
        self._task: asyncio.Task[None] | None = None
        self.pipelines = 0

    async def run(self, script: AsyncScript, keys: Sequence[str], args: Sequence[str | int]) -> Any:
        """The script's answer. Raises RedisError, OSError, TimeoutError.

        A caller that is cancelled before its pipeline is sent takes its call along.
        """
        call = _Call(script, (len(keys), *keys, *args))
        self._waiting.append(call)
        if self._task is None:
            self._task = asyncio.create_task(self._work(), name="redis scripts")
        return await call.answer

    async def stop(self) -> None:
        """Returns when nothing is under way any more."""
        if self._task is not None:
            await asyncio.wait({self._task})

    async def _work(self) -> None:
        """Pipelines until nothing waits."""
        try:
            while self._waiting:
                some, self._waiting = self._waiting[:MAX_CALLS], self._waiting[MAX_CALLS:]
                calls = [call for call in some if not call.answer.done()]
                try:
                    async with asyncio.timeout(self._timeout_s):
                        answers = await self._send(calls)
                except (RedisError, OSError, TimeoutError) as error:
                    # Whoever came meanwhile has waited as long: nobody waits for two failures.
                    calls, self._waiting = calls + self._waiting, []
                    answers = [error] * len(calls)
                for call, answer in zip(calls, answers, strict=True):
                    _settle(call.answer, answer)
        finally:
            self._task = None

    async def _send(self, calls: Sequence[_Call]) -> list[Any]:
        """One pipeline; scripts that the server has lost (a restart) are loaded and sent again."""
        answers = await self._pipeline(calls)
        unknown = [i for i, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
        if unknown:
            again = [calls[i] for i in unknown]
            for script in {call.script.sha: call.script.script for call in again}.values():
                await self._redis.script_load(script)
            for i, answer in zip(unknown, await self._pipeline(again), strict=True):
                answers[i] = answer
        return answers

    async def _pipeline(self, calls: Sequence[_Call]) -> list[Any]:
        """The answers, errors of single scripts among them. Not redis-py's Pipeline: that packs in
        Python, 50 us a call."""
        self.pipelines += 1
        # Its stub asks for tuples of one item.
        pack = cast("Callable[[tuple[str | int, ...]], bytes]", pack_command)
        data = [pack(("EVALSHA", call.script.sha, *call.arguments)) for call in calls]
        pool = self._redis.connection_pool
        connection: Any = await pool.get_connection()
        try:
            try:
                return await self._exchange(connection, data)
            except RedisConnectionError:
                # A restarted server: once more on a new connection. Every script may run twice.
                await connection.disconnect()
                return await self._exchange(connection, data)
        except BaseException:
            await connection.disconnect()  # answers are under way that nobody would read
            raise
        finally:
            await pool.release(connection)

    @staticmethod
    async def _exchange(connection: Any, data: Sequence[bytes]) -> list[Any]:
        await connection.send_packed_command(data)
        answers: list[Any] = []
        for _ in data:
            try:
                answers.append(await connection.read_response())
            except ResponseError as error:
                answers.append(error)
        return answers


def _settle(future: asyncio.Future[Any], answer: Any) -> None:
    if future.done():
        return  # its caller has gone
    if isinstance(answer, Exception):
        future.set_exception(answer)
    else:
        future.set_result(answer)
