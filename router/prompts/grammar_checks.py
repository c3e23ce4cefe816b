"""Check grammars before any node gets them: off the event loop, with limits of time and memory.

Each grammar is built once in a child process that can be killed (baton/guided/trials.py); that
usually takes two milliseconds. The result is cached, refusals too, so a bad grammar uses up its
time limit only once.
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
TRIAL_S: Final = 0.005  # expected time of a check; its tenant is charged the real time afterwards
BLAMED: Final = (InvalidRequest, Unavailable)  # errors of a check that name the client's field


@dataclass(frozen=True, slots=True)
class Constraint:
    """A constraint and the client's field that it came from."""

    guided: GuidedDecoding
    field: str


class GrammarChecker:
    """Checks grammars and caches the last MAX_KNOWN results. Calling `close` twice is safe."""

    def __init__(self, off_loop: OffLoop, trials: GrammarTrials | None = None) -> None:
        self.trials = trials or GrammarTrials()
        self._off_loop = off_loop
        self._known: OrderedDict[GuidedDecoding, InvalidRequest | None] = OrderedDict()
        self._coming: dict[GuidedDecoding, asyncio.Future[InvalidRequest | None]] = {}

    async def check(self, guided: GuidedDecoding, field: str, grant: Grant = EVERYBODY) -> None:
        """Check one grammar.

        Raises InvalidRequest, naming `field`, if no node could follow the grammar; Overloaded if
        too many grammars of the same tenant wait for a check; Unavailable if this machine is too
        busy to check it."""
        # The limits of the reasoning and the backend's name do not change whether it can be built.
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
        """Return why the grammar cannot be followed, or None if it can."""
        if grammar in self._known:
            self._known.move_to_end(grammar)
            return self._known[grammar]
        coming = self._coming.get(grammar)
        if coming is None:
            work = self._off_loop.run(WorkLane.GRAMMAR, grant, TRIAL_S, lambda: self._try(grammar))
            coming = self._coming[grammar] = asyncio.ensure_future(work)
            coming.add_done_callback(lambda done: self._keep(grammar, done))
        return await asyncio.shield(coming)  # other requests may wait for the same check

    def _keep(self, grammar: GuidedDecoding, done: asyncio.Future[InvalidRequest | None]) -> None:
        del self._coming[grammar]
        if done.cancelled() or done.exception() is not None:
            return
        self._known[grammar] = done.result()
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def _try(self, grammar: GuidedDecoding) -> InvalidRequest | None:
        """Build the grammar in a child process; return the refusal or None. Call it in a thread."""
        try:
            self.trials.run(grammar)
        except InvalidRequest as error:
            return error
        return None


def blamed_on(error: BatonError, field: str) -> BatonError:
    """Return an error about `guided` as an error about `field`, the client's own field. An error
    about another field is returned as it is."""
    if error.field != FIELD:
        return error
    message = f"{field}: {error.message.removeprefix(f'{FIELD}: ')}"
    return type(error)(message, field=field, retry_after_s=error.retry_after_s)
