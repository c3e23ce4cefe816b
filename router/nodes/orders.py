"""Orders: an operator's orders to one node, and the node's answers.

An order is for the node itself, not for one of its requests. Event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from baton.protocol.errors import BatonError, NodeLost, error_from_code
from baton.protocol.events import Controlled
from baton.protocol.messages import ControlNode


class Orders:
    """The orders of one session that wait for an answer. `send`: sends a message to the node."""

    def __init__(self, send: Callable[[ControlNode], None]) -> None:
        self._send = send
        self._open: dict[int, asyncio.Future[bytes]] = {}
        self._last = 0

    async def give(self, order: ControlNode, timeout_s: float) -> bytes:
        """Send an order, wait until the node has carried it out, and return what it told.

        Raises the node's error, or NodeLost if the node is lost or does not answer in time.
        """
        self._last += 1
        number = self._last
        done = self._open[number] = asyncio.get_running_loop().create_future()
        self._send(replace(order, number=number))
        try:
            async with asyncio.timeout(timeout_s):
                return await done
        except TimeoutError as error:
            raise NodeLost(f"no answer to {order.action} within {timeout_s:g} s") from error
        finally:
            self._open.pop(number, None)

    def answered(self, answers: Sequence[Controlled]) -> None:
        for answer in answers:
            done = self._open.get(answer.number)
            if done is None or done.done():
                continue
            if answer.code:
                done.set_exception(error_from_code(answer.code, answer.message, answer.field))
            else:
                done.set_result(answer.detail)

    def lost(self, error: BatonError) -> None:
        """Fail all open orders with `error`, because the session is over."""
        for done in self._open.values():
            if not done.done():
                done.set_exception(error)
