"""One call of a script on its way, and a WAIT for replicas (router/store/redis_queue.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from redis.commands.core import AsyncScript

OnReply = Callable[[Any], None]
_NONE: Final = object()  # no answer yet


class ScriptCall:
    """One call of a script, or a SCRIPT LOAD of it.

    `arguments`: the number of keys, the keys, the arguments. A call's answer goes to the future
    `answer` or to the function `on_reply`. A load has neither. `safe`: its answer is kept back
    until replicas have the write, too. `asked_at`, `sent_at`: loop time when it was first and last
    sent. `again`: it was sent a second time.
    """

    __slots__ = (
        "_reply", "_wait", "again", "answer", "arguments", "asked_at", "on_reply", "safe", "script",
        "sent_at",
    )  # fmt: skip

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
        self.asked_at = 0.0
        self.again = False
        self.safe = False
        self._wait: Wait | None = None
        self._reply: Any = _NONE

    @property
    def is_load(self) -> bool:
        return self.answer is None and self.on_reply is None

    @property
    def is_answered(self) -> bool:
        """Whether it has an answer that its WAIT keeps back."""
        return self._reply is not _NONE

    def answered(self, reply: Any) -> None:
        """Take the answer, or the exception that came instead; deliver it now or with the WAIT."""
        if self._wait is None or isinstance(reply, Exception):
            self.leave()
            self.settle(reply)
        else:
            self._reply = reply

    def join(self, wait: Wait) -> None:
        """Let `wait` deliver the answer."""
        self._wait = wait

    def leave(self) -> None:
        """Forget the WAIT, and an answer that it has kept back."""
        if self._wait is not None:
            self._wait.calls.remove(self)
        self._wait, self._reply = None, _NONE

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

    def safe_now(self) -> None:
        """Deliver the answer that was kept back."""
        self.settle(self._reply)


class Wait:
    """A WAIT for `replicas` replicas, and the calls before it whose answers it keeps back."""

    __slots__ = ("calls", "replicas", "sent_at")

    def __init__(self, replicas: int, sent_at: float) -> None:
        self.calls: list[ScriptCall] = []
        self.replicas = replicas
        self.sent_at = sent_at

    def add(self, call: ScriptCall) -> None:
        self.calls.append(call)
        call.join(self)

    def settle(self, reply: Any) -> None:
        """Deliver the answers of the calls, or tell that too few replicas have them."""
        for call in self.calls:
            if isinstance(reply, Exception):
                call.settle(reply)
            elif reply < self.replicas:
                call.settle(TimeoutError(f"{reply} of {self.replicas} replicas have the write"))
            else:
                call.safe_now()
