"""The compiled grammars of one engine. Each is compiled once, outside of every event loop.

`submit(guided)` returns a future. It is done at once for a grammar that is kept. Otherwise a thread
of its own compiles the grammar: at most WORKERS threads compile at a time, and at most MAX_WAITING
grammars wait. A request waits for its grammar outside of the engine, so it delays no other request.
A compilation cannot be stopped: llguidance's own limits bound it, and the router has tried the
grammar before (trials.py). The wait for it is limited, and the threads are daemons, so that no exit
waits for them. The tokenizer is loaded with the first grammar. Any thread may use the cache.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace
from typing import Final

from baton.guided.guide import Grammar
from baton.guided.matcher import FREE, GrammarCompiler
from baton.guided.spec import FIELD, check_size
from baton.guided.thought import ThoughtEnd, ThoughtLimit
from baton.guided.trials import too_busy
from baton.guided.vocabulary import Vocabulary
from baton.protocol.errors import BatonError, InternalError, Overloaded
from baton.protocol.sampling import GuidedDecoding

log = logging.getLogger(__name__)

WORKERS: Final = 2
MAX_WAITING: Final = 64
MAX_KEPT: Final = 256
COMPILE_S: Final = 30.0  # the longest wait for a grammar, including the tokenizer's loading


class GrammarCache:
    """The cache. `load` returns the vocabulary; a worker calls it once."""

    def __init__(self, load: Callable[[], Vocabulary]) -> None:
        self.num_compiled = 0
        self._load = load
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(WORKERS)
        self._kept: OrderedDict[GuidedDecoding, Grammar] = OrderedDict()
        self._coming: dict[GuidedDecoding, Future[Grammar]] = {}
        self._making = threading.Lock()  # held while vocabulary and compiler are made
        self._vocabulary: Vocabulary | None = None
        self._compiler: GrammarCompiler | None = None
        self._thoughts: dict[str, ThoughtEnd] = {}

    def submit(self, guided: GuidedDecoding) -> Future[Grammar]:
        """Return a future of the compiled grammar; the future raises the errors of compiling.

        Raises InvalidRequest (field `guided`) for a text that is obviously no grammar, Overloaded
        if too many grammars wait.
        """
        check_size(guided)
        # These fields do not change the compiled grammar.
        guided = replace(guided, most_thought=None, thought_start="", backend="")
        with self._lock:
            grammar = self._kept.get(guided)
            if grammar is not None:
                self._kept.move_to_end(guided)
                done: Future[Grammar] = Future()
                done.set_result(grammar)
                return done
            coming = self._coming.get(guided)
            if coming is not None:
                return coming
            if len(self._coming) >= MAX_WAITING:
                raise Overloaded("too many grammars wait to be compiled", field=FIELD)
            future = self._coming[guided] = Future[Grammar]()
        work = threading.Thread(
            target=self._work, args=(guided, future), name="grammar", daemon=True
        )
        work.start()
        return future

    def get(self, guided: GuidedDecoding) -> Grammar:
        """Return the compiled grammar, with the limit of its thought; wait for it within the
        budget.

        Raises the errors of `submit` and of compiling.
        """
        try:
            grammar = self.submit(guided).result(COMPILE_S)
        except FutureTimeout as error:
            raise too_busy() from error
        if guided.most_thought is None:
            return grammar
        return replace(grammar, limit=self._limit(guided, guided.most_thought))

    async def prepared(self, guided: GuidedDecoding) -> Grammar:
        """Wait, from asyncio, until a grammar is compiled, so that `get` then has it at once.

        The cache may forget the grammar unless the caller keeps the result. Raises the errors of
        `get`.
        """
        compiling = asyncio.wrap_future(self.submit(guided))
        try:
            # Shielded, because other requests may wait for the same compilation.
            return await asyncio.wait_for(asyncio.shield(compiling), COMPILE_S)
        except TimeoutError as error:
            raise too_busy() from error

    def _limit(self, guided: GuidedDecoding, most: int) -> ThoughtLimit:
        vocabulary = self._known_vocabulary()  # a grammar has been compiled with it by now
        start = self._thought(guided.thought_start) if guided.thought_start else None
        return ThoughtLimit(start, tuple(vocabulary.encode(guided.starts_after)), most)

    def _thought(self, marker: str) -> ThoughtEnd:
        vocabulary = self._known_vocabulary()
        with self._making:
            return self._thoughts.setdefault(marker, ThoughtEnd(marker, vocabulary))

    def _work(self, guided: GuidedDecoding, future: Future[Grammar]) -> None:
        try:
            with self._slots:
                grammar = self._compile(guided)
        except BaseException as error:
            self._ended(guided)
            if not isinstance(error, BatonError):
                log.exception("a grammar could not be compiled")
                error = InternalError("a grammar could not be compiled")
            future.set_exception(error)
        else:
            self._ended(guided, grammar)
            future.set_result(grammar)

    def _ended(self, guided: GuidedDecoding, grammar: Grammar | None = None) -> None:
        with self._lock:
            del self._coming[guided]
            if grammar is None:
                return
            self.num_compiled += 1
            self._kept[guided] = grammar
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)

    # ---- on a worker ----

    def _compile(self, guided: GuidedDecoding) -> Grammar:
        start = FREE if guided.kind == "free" else self._known_compiler().compile(guided)
        thought = self._thought(guided.starts_after) if guided.starts_after else None
        return Grammar(start, thought, frozenset(self._known_vocabulary().eos_token_ids))

    def _known_compiler(self) -> GrammarCompiler:
        vocabulary = self._known_vocabulary()
        with self._making:
            if self._compiler is None:
                self._compiler = GrammarCompiler(vocabulary)
            return self._compiler

    def _known_vocabulary(self) -> Vocabulary:
        with self._making:
            if self._vocabulary is None:
                self._vocabulary = self._load()
            return self._vocabulary
