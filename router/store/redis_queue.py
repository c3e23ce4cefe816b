"""ScriptQueue: runs the scripts of many requests over one connection, in pipelines.

The calls of one turn of the event loop are sent at the end of the turn in one write, in the order
of the calls; answers come in the same order. A pipeline needs no task, no timer and no connection
from a pool of its own: those would cost more than the scripts. redis-py makes the connection (URL,
TLS, AUTH, SELECT); from then on a hiredis reader here gets its bytes. A script costs 25 to 90 us of
CPU less than by redis.asyncio's pipeline, 4 to 15 % of a request (`python -m bench.redis_scripts`).
What a failure means is decided in router/store/redis_store.py.

When the connection breaks, a new one is made and unanswered calls are sent again, once. So every
script may run twice. If the server has lost its scripts, they are loaded again, and the calls that
failed for that run again in order.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import hiredis
from redis.asyncio import Redis
from redis.commands.core import AsyncScript
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError

from router.store.patience import Patience

LATE_S: Final = 0.05  # a timer that is later than this shows that this process did not run
MAX_CALLS: Final = 256  # calls in one pipeline: some 5 ms of Redis
OnReply = Callable[[Any], None]
_NOTHING: Final = object()  # hiredis returns it while no whole answer is there
# The type stub of pack_command wrongly asks for tuples of one item.
_pack: Final = cast("Callable[[tuple[str | int, ...]], bytes]", hiredis.pack_command)


class _Call:
    """One call of a script, or a SCRIPT LOAD of it.

    `arguments`: the number of keys, the keys, the arguments. A call's answer goes to the future
    `answer` or to the function `on_reply`. A load has neither.
    """

    __slots__ = ("again", "answer", "arguments", "on_reply", "script", "sent_at")

    def __init__(
        self,
        script: AsyncScript,
        arguments: tuple[str | int, ...],
        answer: asyncio.Future[Any] | None = None,
        on_reply: OnReply | None = None,
        sent_at: float = 0.0,
    ) -> None:
        self.script = script
        self.arguments = arguments
        self.answer = answer
        self.on_reply = on_reply
        self.sent_at = sent_at
        self.again = False  # the call is sent for the second time

    @property
    def is_load(self) -> bool:
        return self.answer is None and self.on_reply is None

    def settle(self, answer: Any) -> None:
        """Deliver the answer, or the exception that came instead."""
        future = self.answer
        if self.on_reply is not None:
            self.on_reply(answer)
        elif future is None or future.done():
            pass  # a script was loaded, or the caller has gone
        elif isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)


class ScriptQueue:
    """Calls of scripts that wait or were sent. `patience` limits the time from sending a call to
    its answer; if one answer is too late, all calls fail. Event loop only."""

    def __init__(self, client: Redis, patience: Patience) -> None:
        self._redis = client
        self._patience = patience
        self._waiting: deque[_Call] = deque()
        self._sent: deque[_Call] = deque()
        self._unknown: list[_Call] = []  # calls whose scripts the server had lost
        self._link: _Link | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._flushing = False
        self._timer: asyncio.TimerHandle | None = None
        self._looked_late = False
        self._idle: asyncio.Future[None] | None = None  # somebody waits until nothing is under way
        self.pipelines = 0

    def run(
        self, script: AsyncScript, keys: Sequence[str], args: Sequence[str | int]
    ) -> asyncio.Future[Any]:
        """Call a script; return a future of its answer, or of RedisError, OSError or TimeoutError.

        Nobody needs to await the future. If it is cancelled before its pipeline is sent, the script
        is not called.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        self._waiting.append(_Call(script, (len(keys), *keys, *args), answer))
        self._soon(loop)
        return answer

    def post(
        self, script: AsyncScript, keys: Sequence[str], args: Sequence[str | int], on_reply: OnReply
    ) -> None:
        """Call a script; `on_reply` gets the answer or the exception, once."""
        self._waiting.append(_Call(script, (len(keys), *keys, *args), on_reply=on_reply))
        self._soon(asyncio.get_running_loop())

    async def stop(self) -> None:
        """Wait until no call waits or is unanswered, then close the connection."""
        if not self._is_idle:
            self._idle = asyncio.get_running_loop().create_future()
            await self._idle
        if self._connecting is not None:
            await asyncio.wait({self._connecting})
        if self._link is not None:
            self._link.close()
        if self._timer is not None:
            self._timer.cancel()

    @property
    def _is_idle(self) -> bool:
        return not (self._sent or self._waiting or self._unknown)

    def _look_idle(self) -> None:
        """Wake `stop` if nothing is under way."""
        if self._idle is not None and self._is_idle and not self._idle.done():
            self._idle.set_result(None)

    # ---- sending ----

    def _soon(self, loop: asyncio.AbstractEventLoop) -> None:
        """Send the waiting calls at the end of this turn of the loop; connect first if need be."""
        if self._flushing or self._connecting is not None:
            return
        if self._link is None:
            self._connecting = loop.create_task(self._connect(), name="connect to redis")
        else:
            self._flushing = True
            loop.call_soon(self._flush)

    async def _connect(self) -> None:
        connection: Any = self._redis.connection_pool.make_connection()
        try:
            async with asyncio.timeout(self._patience.seconds):
                await connection.connect()
            self._link = _Link(connection, self)
        except (RedisError, OSError, TimeoutError) as error:
            await connection.disconnect(nowait=True)
            self._fail(error)
        finally:
            self._connecting = None
        if self._link is not None:
            self._flush()
        elif self._waiting:  # since the failure
            self._soon(asyncio.get_running_loop())

    def _flush(self) -> None:
        """Send one pipeline of the waiting calls; the rest goes in the next turn."""
        self._flushing = False
        link, waiting = self._link, self._waiting
        loop = asyncio.get_running_loop()
        if link is None and waiting:  # the connection was lost in this very turn
            self._soon(loop)
        # Calls whose scripts were lost go first; they wait until all sent calls are answered.
        if link is None or (self._unknown and self._sent) or not waiting:
            return
        now = loop.time()
        pipeline = self._take_pipeline(link, now)
        if pipeline:
            self.pipelines += 1
            link.write(pipeline)
            if self._timer is None:
                self._timer = loop.call_at(now + self._patience.seconds, self._look)
        if waiting:
            self._soon(loop)
        self._look_idle()

    def _take_pipeline(self, link: _Link, now: float) -> bytes:
        """Return at most MAX_CALLS of the waiting calls as bytes; they count as sent `now`."""
        data: list[bytes] = []
        for _ in range(min(len(self._waiting), MAX_CALLS)):
            call = self._waiting.popleft()
            if call.answer is not None and call.answer.done():
                continue  # the caller has gone
            sha = call.script.sha
            if sha not in link.loaded:
                link.loaded.add(sha)
                data.append(_pack(("SCRIPT", "LOAD", cast(str, call.script.script))))
                self._sent.append(_Call(call.script, (), sent_at=now))
            data.append(_pack(("EVALSHA", sha, *call.arguments)))
            call.sent_at = now
            self._sent.append(call)
        return b"".join(data)

    # ---- answers ----

    def answered(self, link: _Link, reply: Any) -> None:
        """Take the server's next answer: it belongs to the call that was sent first."""
        if link is not self._link or not self._sent:
            return  # the answer came over a connection that was given up
        call = self._sent.popleft()
        self._patience.took(asyncio.get_running_loop().time() - call.sent_at)
        if not isinstance(reply, hiredis.ReplyError):
            call.settle(reply)
        elif str(reply).startswith("NOSCRIPT") and not call.again:
            link.loaded.clear()
            call.again = True
            self._unknown.append(call)
        else:
            call.settle(ResponseError(str(reply)))
        if self._unknown and not self._sent:
            self._waiting.extendleft(reversed(self._unknown))
            self._unknown = []
            self._soon(asyncio.get_running_loop())
        self._look_idle()

    def lost(self, link: _Link, error: Exception | None) -> None:
        """Handle the end of the connection: send its unanswered calls again, once."""
        if link is not self._link:
            return
        self._link = None
        unanswered = [call for call in (*self._unknown, *self._sent) if not call.is_load]
        self._sent.clear()
        self._unknown = []
        failure = error or RedisConnectionError("the server closed the connection")
        for call in unanswered:
            if call.again:
                call.settle(failure)
        self._waiting.extendleft(reversed([call for call in unanswered if not call.again]))
        for call in unanswered:
            call.again = True
        if self._waiting:
            self._soon(asyncio.get_running_loop())
        self._look_idle()

    def _look(self) -> None:
        """Fail all calls if the oldest one has waited too long; else set the timer again."""
        timer, self._timer = self._timer, None
        if not self._sent or timer is None:
            return
        loop = asyncio.get_running_loop()
        now = loop.time()
        waited_s, patience_s = now - self._sent[0].sent_at, self._patience.seconds
        # A late timer means that this process did not run: an answer may be there, not yet read.
        self._looked_late = not self._looked_late and now - timer.when() > LATE_S
        if waited_s < patience_s or self._looked_late:
            self._timer = loop.call_later(max(patience_s - waited_s, LATE_S), self._look)
            return
        self._patience.took(waited_s)
        link, self._link = self._link, None
        if link is not None:
            link.close()
        # Calls that were not sent yet fail, too, so that no caller waits for two time-outs.
        self._fail(TimeoutError(f"no answer within {patience_s:g} s"))

    def _fail(self, error: Exception) -> None:
        calls = [*self._unknown, *self._sent, *self._waiting]
        self._unknown = []
        self._sent.clear()
        self._waiting.clear()
        for call in calls:
            call.settle(error)
        self._look_idle()


class _Link(asyncio.Protocol):
    """A connection that redis-py has made: reads its bytes and passes the answers to the queue.

    `loaded`: digests of the scripts that were loaded over this connection.
    """

    def __init__(self, connection: Any, queue: ScriptQueue) -> None:
        self._connection = connection
        self._queue = queue
        self._reader = hiredis.Reader(notEnoughData=_NOTHING)
        # Private to redis-py, which offers no way to write without waiting for each answer.
        self._transport: Any = connection._writer.transport
        self._before: Any = self._transport.get_protocol()
        self._transport.set_protocol(self)
        self.loaded: set[str] = set()

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def close(self) -> None:
        self._connection._close()

    def data_received(self, data: bytes) -> None:
        reader, answered = self._reader, self._queue.answered
        reader.feed(data)
        try:
            while (reply := reader.gets()) is not _NOTHING:
                if not isinstance(reply, hiredis.PushNotification):
                    answered(self, reply)
        except hiredis.ProtocolError as error:
            self._transport.abort()
            self._queue.lost(self, RedisConnectionError(str(error)))

    def connection_lost(self, exc: Exception | None) -> None:
        self._before.connection_lost(exc)  # redis-py's own stream ends, too
        self.close()
        self._queue.lost(self, exc)
