"""Grammars checked before any node hears of them: off the event loop, within a budget.

Each is built once in a process that can be given up (baton/guided/trials.py), usually in
two milliseconds. What was found out is kept, refusals too: a bad grammar costs its budget once.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Final

from baton.guided.spec import FIELD, check_size
from baton.guided.trials import GrammarTrials
from baton.protocol.errors import BatonError, InvalidRequest, Unavailable
from baton.protocol.sampling import GuidedDecoding
from router.prompts.off_loop import OffLoop, WorkLane
from router.tenants.keys import EVERYBODY, Grant

MAX_KNOWN: Final = 256
TRIAL_S: Final = 0.005  # usually; the time that it took is charged afterwards
BLAMED: Final = (InvalidRequest, Unavailable)  # what may be said of a grammar


@dataclass(frozen=True, slots=True)
class Constraint:
    """A constraint and the client's field that it came from."""

    guided: GuidedDecoding
    field: str


class GrammarChecker:
    """Checks grammars, each once as long as it remembers it. `close` twice is safe."""

    def __init__(self, off_loop: OffLoop, trials: GrammarTrials | None = None) -> None:
        self.trials = trials or GrammarTrials()
        self._off_loop = off_loop
        self._known: OrderedDict[GuidedDecoding, InvalidRequest | None] = OrderedDict()
        self._coming: dict[GuidedDecoding, asyncio.Future[InvalidRequest | None]] = {}

    async def check(self, guided: GuidedDecoding, field: str, grant: Grant = EVERYBODY) -> None:
        """Raise InvalidRequest, naming `field`, for what no node could follow; Overloaded while too
        many others of the same key are checked; Unavailable if this machine is too busy to."""
        # A thought comes before the grammar, whatever the grammar is; all backends are one.
        grammar = replace(guided, starts_after="", thought_start="", most_thought=None, backend="")
        refusal: BatonError | None
        try:
            check_size(guided)
            refusal = None if guided.kind == "free" else await self._found(grammar, grant)
        except BLAMED as error:
            refusal = error
        if refusal is not None:
            raise blamed_on(refusal, field) from refusal

    def close(self) -> None:
        self.trials.close()

    async def _found(self, grammar: GuidedDecoding, grant: Grant) -> InvalidRequest | None:
        """Why it cannot be followed, None if it can."""
        if grammar in self._known:
            self._known.move_to_end(grammar)
            return self._known[grammar]
        coming = self._coming.get(grammar)
        if coming is None:
            work = self._off_loop.run(WorkLane.GRAMMAR, grant, TRIAL_S, lambda: self._try(grammar))
            coming = self._coming[grammar] = asyncio.ensure_future(work)
            coming.add_done_callback(lambda done: self._keep(grammar, done))
        return await asyncio.shield(coming)  # others may wait for the same one

    def _keep(self, grammar: GuidedDecoding, done: asyncio.Future[InvalidRequest | None]) -> None:
        del self._coming[grammar]
        if done.cancelled() or done.exception() is not None:
            return
        self._known[grammar] = done.result()
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def _try(self, grammar: GuidedDecoding) -> InvalidRequest | None:
        """On a thread."""
        try:
            self.trials.run(grammar)
        except InvalidRequest as error:
            return error
        return None


def blamed_on(error: BatonError, field: str) -> BatonError:
    """An error about `guided` in the words of whoever wrote `field`; any other as it is."""
    if error.field != FIELD:
        return error
    message = f"{field}: {error.message.removeprefix(f'{FIELD}: ')}"
    return type(error)(message, field=field, retry_after_s=error.retry_after_s)
