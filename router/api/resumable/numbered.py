"""The stream of a resumable request: server-sent events with ids, after the reader's position.

An event's id is the position after it (router/resumable/terms.py, Position): the number of tokens
per choice, as `12` or `12,9`; `12.1` between two events of one token; `12,9;1` for an event after
the end of all choices. For every reader all frames are made from the first token on, and the frames
it has seen are left out. If a stream must be cut, it gets no final event: the connection breaks,
and the reader may read on, from this router or another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing, suppress

from starlette.types import Receive, Scope, Send

from baton.protocol.errors import Cancelled
from router.api.exchange import GRACE_S, Exchange, FrameWriter
from router.api.http.connection import while_connected
from router.api.http.web_errors import error_response
from router.request.completion import CallRunner
from router.request.failures import as_baton_error, log_failure
from router.resumable.replay import StreamCut
from router.resumable.terms import Position


class NumberedReply:
    """The ASGI answer with an exchange's events after `seen`. The exchange has one completion."""

    def __init__(self, exchange: Exchange, runner: CallRunner, seen: Position) -> None:
        self._exchange = exchange
        self._runner = runner
        self._numbers = Numbers(exchange.completions[0].num_choices, seen)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = FrameWriter(send)
        try:
            async with asyncio.timeout(self._exchange.timeout_s + GRACE_S):
                await while_connected(receive, self._run(writer))
        except Cancelled as error:
            log_failure(error, error)
        except StreamCut as cut:
            if not writer.started:
                await error_response(cut)(scope, receive, send)
        except Exception as error:  # noqa: BLE001  every failure becomes the stream's end
            found = as_baton_error(error)
            log_failure(found, error)
            if writer.started:
                with suppress(Cancelled):  # the client is gone by now; the failure is in the log
                    await writer.write(self._numbers.tail(self._exchange.broken(found)), more=False)
            else:
                await error_response(found)(scope, receive, send)
        finally:
            writer.close()

    async def _run(self, writer: FrameWriter) -> None:
        [completion] = self._exchange.completions
        frames = self._exchange.frames(0)
        openings = [each.opening() for each in frames]
        # One writer per choice. A dialect has one choice and one writer.
        async with aclosing(completion.deltas(self._runner)) as deltas:
            async for delta in deltas:
                data = openings[delta.sample] + frames[delta.sample].delta(delta)
                openings[delta.sample] = b""
                fresh = self._numbers.step(delta.sample, data)
                if fresh:
                    await writer.write(fresh)
        await writer.write(self._numbers.tail(await self._exchange.tail()), more=False)


class Numbers:
    """Adds ids to events, and leaves out the events up to the position `seen`."""

    def __init__(self, num_choices: int, seen: Position) -> None:
        self._seen = seen
        self._steps = [0] * num_choices

    def step(self, choice: int, data: bytes) -> bytes:
        """Return those events of a choice's next step that are new, with ids. `data`: all events of
        that step."""
        step = self._steps[choice] + 1
        steps, known = self._seen.of(choice)
        if step <= steps:
            self._steps[choice] = step
            return b""
        events = list(_events(data))
        out = b""
        for index, event in enumerate(events, 1):
            last = index == len(events)
            if last:
                self._steps[choice] = step
            if index > known or step > steps + 1:
                out += self._id(b"" if last else b".%d" % index, choice) + event
        self._steps[choice] = step  # a step without events is counted with the next event's id
        return out

    def tail(self, data: bytes) -> bytes:
        """Return the new events after the end of all choices, with ids. The last event is always
        sent, even if the reader has seen it."""
        events = list(_events(data))
        out = b""
        for index, event in enumerate(events, 1):
            if index > self._seen.tail or index == len(events):
                out += self._id(b";%d" % index) + event
        return out

    def _id(self, more: bytes, choice: int | None = None) -> bytes:
        told = [b"%d" % step for step in self._steps]
        if choice is None:
            return b"id: " + b",".join(told) + more + b"\n"
        told[choice] += more
        return b"id: " + b",".join(told) + b"\n"


def _events(data: bytes) -> Iterator[bytes]:
    """Split `data` into events. JSON has no raw line breaks, so an empty line ends an event."""
    for event in data.split(b"\n\n"):
        if event:
            yield event + b"\n\n"
