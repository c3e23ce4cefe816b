"""The compiled grammars of one engine, each compiled once, off every loop.

submit(guided) -> a future: at once for a grammar that is kept, else from a thread of its own, at
most WORKERS at a time and MAX_WAITING in line. A request waits for it outside of the engine, so it
keeps nobody else from running. A compilation cannot be stopped from outside: llguidance bounds it
by its own limits, and the router has tried it (trials.py). The wait has a budget, and threads are
daemons, so that no exit waits for one. The tokenizer is loaded with the first grammar. Safe to use
from several threads.
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
COMPILE_S: Final = 30.0  # most that a request waits for its grammar, the tokenizer's loading too


class GrammarCache:
    """`load` gives the vocabulary (once, on a worker)."""

    def __init__(self, load: Callable[[], Vocabulary]) -> None:
        self.num_compiled = 0
        self._load = load
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(WORKERS)
        self._kept: OrderedDict[GuidedDecoding, Grammar] = OrderedDict()
        self._coming: dict[GuidedDecoding, Future[Grammar]] = {}
        self._making = threading.Lock()  # vocabulary and compiler: made once, slowly
        self._vocabulary: Vocabulary | None = None
        self._compiler: GrammarCompiler | None = None
        self._thoughts: dict[str, ThoughtEnd] = {}

    def submit(self, guided: GuidedDecoding) -> Future[Grammar]:
        """The grammar, when it is compiled. Raises InvalidRequest (field `guided`) for what can be
        seen to be none, Overloaded if too many wait; the future, what compiling raises."""
        check_size(guided)
        # The same grammar for all.
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
        """The grammar, with the limit of its thought; waits for it, within the budget. Raises as
        `submit` and compiling do."""
        try:
            grammar = self.submit(guided).result(COMPILE_S)
        except FutureTimeout as error:
            raise too_busy() from error
        if guided.most_thought is None:
            return grammar
        return replace(grammar, limit=self._limit(guided, guided.most_thought))

    async def prepared(self, guided: GuidedDecoding) -> Grammar:
        """Wait, from asyncio, until a grammar is compiled: `get` then has it at once. Whoever keeps
        what this returns keeps it from being forgotten. Raises the same exceptions as `get`."""
        compiling = asyncio.wrap_future(self.submit(guided))
        try:
            # Shielded: others may wait for the same one.
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
