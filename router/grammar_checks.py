"""Grammars checked before any node hears of them: off the event loop, within a budget of time.

llguidance builds the grammar without a vocabulary, in about a millisecond; it releases the GIL.
What only another backend may know is left to the nodes.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from baton.errors import InvalidRequest, UnsupportedFeature
from baton.grammars import FIELD, check_grammar, check_size
from baton.sampling import GuidedDecoding

CHECK_S: Final = 3.0
THREADS: Final = 2
MAX_KNOWN: Final = 256


@dataclass(frozen=True, slots=True)
class Asked:
    """A constraint and the client's field that it came from."""

    guided: GuidedDecoding
    field: str


class GrammarChecker:
    """Checks grammars, each once as long as it remembers it. `close` twice is safe."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="grammars")
        self._known: OrderedDict[GuidedDecoding, None] = OrderedDict()

    async def check(self, guided: GuidedDecoding, field: str) -> None:
        """Raise InvalidRequest, naming `field`, for what no node could follow."""
        if guided in self._known:
            self._known.move_to_end(guided)
            return
        loop = asyncio.get_running_loop()
        try:
            check_size(guided)
            work = loop.run_in_executor(self._threads, _check, guided)
            await asyncio.wait_for(work, CHECK_S)
        except TimeoutError as error:
            message = f"{field}: the grammar could not be built within {CHECK_S:g} s"
            raise InvalidRequest(message, field=field) from error
        except InvalidRequest as error:
            message = f"{field}: {error.message.removeprefix(f'{FIELD}: ')}"
            raise type(error)(message, field=field) from error
        self._known[guided] = None
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _check(guided: GuidedDecoding) -> None:
    if guided.backend == "xgrammar":
        return
    try:
        check_grammar(guided)
    except UnsupportedFeature:
        if guided.backend == "llguidance":
            raise
