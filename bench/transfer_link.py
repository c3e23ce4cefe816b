"""A child process of the transfer benchmark, and the questions put to it.

`ShapedLink.spawn` starts `python -m bench.transfer_peer`. Each question is one JSON line with a
number, so a long answer (a fetch that waits for a prefill) does not hold up the next question.
This module does not import torch, because `baton doctor` uses it, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Final

from baton.protocol.errors import BatonError, InternalError
from bench.children import ended

ANSWER_S: Final = 300.0  # the longest that one question may take; a model has to be loaded
STOP_S: Final = 20.0


class PeerError(BatonError):
    """The child could not do what it was asked; the message is the child's."""


class ShapedLink:
    """One child. Any number of questions may be open at once. Only the event loop may use this."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._open: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._count = 0
        self._reader = asyncio.create_task(self._read(), name="transfer-link")

    @classmethod
    @contextlib.asynccontextmanager
    async def spawn(cls, cores: Sequence[int] = ()) -> AsyncGenerator[ShapedLink, None]:
        """Start a child on `cores` (all cores if empty) and end it with the context."""
        flags = ["--cores", ",".join(map(str, cores))] if cores else []
        threads = str(max(1, len(cores)))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.transfer_peer", *flags),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
            limit=1 << 24,
        )
        link = cls(process)
        try:
            yield link
        finally:
            await link.close()

    async def ask(self, command: str, **given: Any) -> dict[str, Any]:
        """Return the answer. Raises PeerError, with the child's words or because the child is
        gone.
        """
        self._count += 1
        number = self._count
        answer = self._open[number] = asyncio.get_running_loop().create_future()
        assert self._process.stdin is not None, "it was given a pipe"
        if self._reader.done():
            raise PeerError(f"the child has ended before {command!r}")
        line = json.dumps({"number": number, "command": command, **given})
        self._process.stdin.write(line.encode() + b"\n")
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._process.stdin.drain()
                return await answer
        except TimeoutError as error:
            raise PeerError(f"no answer to {command!r} within {ANSWER_S} s") from error
        except OSError as error:
            raise PeerError(f"the child has ended before {command!r}: {error}") from error
        finally:
            self._open.pop(number, None)

    async def close(self) -> None:
        """End the child: close its input, and use force if that is not enough.

        A second call does nothing.
        """
        assert self._process.stdin is not None, "it was given a pipe"
        self._process.stdin.close()
        await ended(self._process, STOP_S)
        await asyncio.wait([self._reader])

    async def _read(self) -> None:
        assert self._process.stdout is not None, "it was given a pipe"
        async for line in self._process.stdout:
            answer = json.loads(line)
            waiting = self._open.get(answer.pop("number"))
            if waiting is None or waiting.done():
                continue
            if "error" in answer:
                waiting.set_exception(PeerError(answer["error"]))
            else:
                waiting.set_result(answer)
        for waiting in self._open.values():
            if not waiting.done():
                waiting.set_exception(PeerError("the child has ended"))


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median, the smallest and the largest value. Raises InternalError without
    values.
    """
    if not values:
        raise InternalError("nothing was measured")
    ordered = sorted(values)
    middle = len(ordered) // 2
    median = ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
    return {"median": median, "min": ordered[0], "max": ordered[-1]}
