"""ScriptQueue: runs the scripts of many requests over one connection, in pipelines.

The calls of one turn of the event loop are sent at the end of the turn in one write, in the order
of the calls; answers come in the same order. A pipeline needs no task, no timer and no connection
from a pool of its own: those would cost more than the scripts. redis-py makes the connection (URL,
TLS, AUTH, SELECT); from then on a hiredis reader here gets its bytes. A script costs 25 to 90 us of
CPU less than by redis.asyncio's pipeline, 4 to 15 % of a request (`python -m bench.redis_scripts`).
What a failure means is decided in router/store/redis_store.py.

When the connection breaks, a new one is made and unanswered calls are sent again, once. So every
script may run twice. The same is done if the server answers that it is not the primary (any more):
the new connection finds the primary (baton/runtime/redis/connections.py). If the server has lost
its scripts, they are loaded again, and the calls that failed for that run again in order. The same
is done, after a pause, with calls whose keys are just moving to another server of a Redis Cluster.

A call may be `safe`: then its answer comes when replicas have the write, too. One WAIT at the end
of a pipeline does this for all of its calls.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import hiredis
from redis.asyncio import Redis
from redis.commands.core import AsyncScript
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError

from baton.runtime.redis.connections import Following
from router.store.patience import Patience
from router.store.redis_calls import OnReply, ScriptCall, Wait

log = logging.getLogger(__name__)
LATE_S: Final = 0.05  # a timer that is later than this shows that this process did not run
MAX_CALLS: Final = 256  # calls in one pipeline: some 5 ms of Redis
MOVING_S: Final = 0.02  # pause before a call whose keys are moving is sent again
_NOTHING: Final = object()  # hiredis returns it while no whole answer is there
# The type stub of pack_command wrongly asks for tuples of one item.
_pack: Final = cast("Callable[[tuple[str | int, ...]], bytes]", hiredis.pack_command)


class ScriptQueue:
    """Calls of scripts that wait or were sent. `patience` limits the time from sending a call to
    its answer; if one answer is too late, all calls fail. `replicas_wanted`: how many replicas must
    have a safe call; it does not wait for more than there are (`set_replicas`). Event loop only."""

    def __init__(self, client: Redis, patience: Patience, replicas_wanted: int = 0) -> None:
        self._redis = client
        self._patience = patience
        self.replicas_wanted = replicas_wanted
        self._replicas = 0  # that safe calls wait for
        self._waiting: deque[ScriptCall] = deque()
        self._sent: deque[ScriptCall | Wait] = deque()
        self._unknown: list[ScriptCall] = []  # calls to send again, when all sent ones are answered
        self._pause_s = 0.0  # before that
        self._pausing: asyncio.TimerHandle | None = None
        self._link: _Link | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._flushing = False
        self._timer: asyncio.TimerHandle | None = None
        self._looked_late = False
        self._idle: asyncio.Future[None] | None = None  # somebody waits until nothing is under way
        self.pipelines = 0

    def set_replicas(self, count: int) -> None:
        """Note how many replicas follow the primary now."""
        most, before = min(count, self.replicas_wanted), self._replicas
        if most < before:
            log.warning("Redis: safe writes wait for %d replicas, not for %d", most, before)
        self._replicas = most

    def run(
        self,
        script: AsyncScript,
        keys: Sequence[str],
        args: Sequence[str | int],
        *,
        safe: bool = False,
    ) -> asyncio.Future[Any]:
        """Call a script; return a future of its answer, or of RedisError, OSError or TimeoutError.

        Nobody needs to await the future. If it is cancelled before its pipeline is sent, the script
        is not called.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        call = ScriptCall(script, (len(keys), *keys, *args), answer)
        call.safe = safe
        self._waiting.append(call)
        self._soon(loop)
        return answer

    def post(
        self, script: AsyncScript, keys: Sequence[str], args: Sequence[str | int], on_reply: OnReply
    ) -> None:
        """Call a script; `on_reply` gets the answer or the exception, once."""
        self._waiting.append(ScriptCall(script, (len(keys), *keys, *args), on_reply=on_reply))
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
        if self._flushing or self._connecting is not None or self._pausing is not None:
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
        most_ms = int(self._patience.seconds / 2 * 1000)  # so that its answer is in time
        wait = Wait(self._replicas, now)
        for _ in range(min(len(self._waiting), MAX_CALLS)):
            call = self._waiting.popleft()
            if call.answer is not None and call.answer.done():
                continue  # the caller has gone
            sha = call.script.sha
            if sha not in link.loaded:
                link.loaded.add(sha)
                data.append(_pack(("SCRIPT", "LOAD", cast(str, call.script.script))))
                self._sent.append(ScriptCall(call.script, (), sent_at=now))
            data.append(_pack(("EVALSHA", sha, *call.arguments)))
            call.sent_at = now
            call.asked_at = call.asked_at or now
            self._sent.append(call)
            if call.safe and wait.replicas:
                wait.add(call)
        if wait.calls:
            data.append(_pack(("WAIT", wait.replicas, most_ms)))
            self._sent.append(wait)
        return b"".join(data)

    # ---- answers ----

    def answered(self, link: _Link, reply: Any) -> None:
        """Take the server's next answer: it belongs to the call that was sent first."""
        if link is not self._link or not self._sent:
            return  # the answer came over a connection that was given up
        call = self._sent.popleft()
        self._patience.took(asyncio.get_running_loop().time() - call.sent_at)
        error = str(reply) if isinstance(reply, hiredis.ReplyError) else None
        if isinstance(call, Wait):
            call.settle(reply if error is None else ResponseError(error))
        elif error is None:
            call.answered(reply)
        elif link.follows and (error.startswith("MOVED") or "READONLY" in error):
            self._sent.appendleft(call)
            link.give_up()
            self.lost(link, ResponseError(error))
            return
        elif not self._sends_again(link, call, error):
            call.answered(ResponseError(error))
        if self._unknown and not self._sent:
            self._waiting.extendleft(reversed(self._unknown))
            self._unknown = []
            self._after_pause()
        self._look_idle()

    def _sends_again(self, link: _Link, call: ScriptCall, error: str) -> bool:
        """Note a call to send again, if its error says that this helps."""
        if error.startswith("NOSCRIPT") and not call.again:
            link.loaded.clear()
            call.again = True
        elif error.startswith(("TRYAGAIN", "ASK")) and link.follows:
            waited_s = asyncio.get_running_loop().time() - call.asked_at
            if waited_s > self._patience.seconds:
                return False
            self._pause_s = MOVING_S
        else:
            return False
        call.leave()  # its answer does not come with this WAIT
        self._unknown.append(call)
        return True

    def _after_pause(self) -> None:
        """Send the waiting calls, after the pause if there is one."""
        loop = asyncio.get_running_loop()
        pause_s, self._pause_s = self._pause_s, 0.0
        if not pause_s:
            self._soon(loop)
        elif self._pausing is None:
            self._pausing = loop.call_later(pause_s, self._paused)

    def _paused(self) -> None:
        self._pausing = None
        if self._waiting:
            self._soon(asyncio.get_running_loop())

    def lost(self, link: _Link, error: Exception | None) -> None:
        """Handle the end of the connection: send its unanswered calls again, once."""
        if link is not self._link:
            return
        self._link = None
        unanswered = [call for call in self._unsettled() if not call.is_load]
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

    def _unsettled(self) -> list[ScriptCall]:
        """Return the calls that were sent and have not been settled, in order."""
        waits = [sent for sent in self._sent if isinstance(sent, Wait)]
        # Those of a WAIT were sent before it, and are in `_sent`, too, until they are answered.
        kept = dict.fromkeys(call for wait in waits for call in wait.calls if call.is_answered)
        sent = [call for call in self._sent if isinstance(call, ScriptCall)]
        for call in (*kept, *sent):
            call.leave()
        return [*self._unknown, *kept, *sent]

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
        calls = [*self._unsettled(), *self._waiting]
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
        self.follows = isinstance(connection, Following)  # it can find another primary
        self._reader = hiredis.Reader(notEnoughData=_NOTHING)
        # Private to redis-py, which offers no way to write without waiting for each answer.
        self._transport: Any = connection._writer.transport
        self._before: Any = self._transport.get_protocol()
        self._transport.set_protocol(self)
        self.loaded: set[str] = set()

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def close(self) -> None:
        """Close at once: nothing is under way, or nobody waits for it any more."""
        self._connection._close()
        self._transport.abort()  # TLS would wait for the server's good-bye

    def give_up(self) -> None:
        """Close, because the server is not the primary."""
        self._connection.primary.doubt()
        self.close()

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
