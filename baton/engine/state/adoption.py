"""Adoption: a sequence reads pages that lie in the pool of another node, without copying them.

The page ids are those of the view over all pools in reach (kv_cache.py), above all ids of the own
pool. So adopted pages are in no free list and in no prefix map, and a store to one ends the
process. Only full pages enter a block table. If the last page is partly filled, it is copied at
once, because the sequence will write into it.

Life: made when a hand-over is complete -> held by the block tables of one sequence -> given back
page by page (the request ends, is preempted, or its pages are copied) -> `release` is called once,
with the last page. If no table ever held the adoption, its maker ends it.

The pages may be read only while `safe()` is true: their owner has promised to keep them until
then, or the owner is dead and nobody writes them any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from baton.protocol.errors import InternalError


class Adoption:
    """The adopted pages of one request.

    `ids` are the pages of the hand-over's tokens, in order; only the last may be partly filled.
    `release` is called on the engine thread and must not block. `safe` is called on that thread
    before and after pages are read; once it is false, it stays false. `wanted` says whether the
    owner of the pages asks for them back.
    """

    def __init__(
        self,
        request_id: str,
        ids: Sequence[int],
        release: Callable[[], None],
        safe: Callable[[], bool],
        wanted: Callable[[], bool] = lambda: False,
    ) -> None:
        self.request_id = request_id
        self.ids = tuple(ids)
        self.safe = safe
        self.wanted = wanted
        self.since = 0.0  # monotonic seconds, when its request was added
        self.num_held = 0
        self._release = release
        self._wanted_at: float | None = None  # monotonic seconds
        self._ended = False

    @property
    def ended(self) -> bool:
        return self._ended

    def note_wanted(self, now: float) -> bool:
        """Ask `wanted` and return its answer; `wanted_for` counts from the first True in a row."""
        if not self.wanted():
            self._wanted_at = None
        elif self._wanted_at is None:
            self._wanted_at = now
        return self._wanted_at is not None

    def wanted_for(self, now: float) -> float:
        """Return for how many seconds the owner has wanted the pages back; 0 if it does not."""
        return 0.0 if self._wanted_at is None else now - self._wanted_at

    def hold(self, count: int) -> None:
        """Note that block tables name `count` more of these pages."""
        if self._ended:
            raise InternalError(f"{self.request_id}: its adopted pages have been given back")
        self.num_held += count

    def drop(self, count: int) -> None:
        """Note that block tables name `count` fewer of these pages; dropping the last calls
        `end`.
        """
        if count > self.num_held:
            raise InternalError(f"{self.request_id}: adopted pages are given back twice")
        self.num_held -= count
        if count and not self.num_held:
            self.end()

    def end(self) -> None:
        """Release the pages: nobody here reads them any more. Calling it twice is safe."""
        if not self._ended:
            self._ended = True
            self._release()
