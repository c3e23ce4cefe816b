"""Adoption: pages of another node's pool that a sequence here reads where they lie.

Their ids are those of the view over all pools in reach (kv_cache.py), all beyond the own pool's:
they are in no free list and in no prefix map, and a store to one ends the process. Only full ones
enter a table; the last one, if it is not, is copied at once, for the sequence goes on in it.

Life: made when a hand-over is complete -> held by the block tables of one sequence -> given back
page by page (the request ends, is preempted, or its pages are copied) -> with the last one
`release` is called, exactly once. An adoption that no table ever held is ended by who made it.

Its pages may be read only as long as `safe()`: their owner has promised to keep them until then, or
is dead, and nobody writes them any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from baton.protocol.errors import InternalError


class Adoption:
    """`ids`: the pages of the hand-over's tokens, in order; only the last may be partly filled.
    `release` is called on the engine thread and must not block; `safe` on that thread, before and
    after pages are read: once false it stays so. `wanted`: the owner would have them back soon.
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
        """Ask its owner; `wanted_for` counts from the first of the answers that say so."""
        if not self.wanted():
            self._wanted_at = None
        elif self._wanted_at is None:
            self._wanted_at = now
        return self._wanted_at is not None

    def wanted_for(self, now: float) -> float:
        """Seconds for which it has been wanted back, 0 if it is not."""
        return 0.0 if self._wanted_at is None else now - self._wanted_at

    def hold(self, count: int) -> None:
        """So many more places in block tables name its pages."""
        if self._ended:
            raise InternalError(f"{self.request_id}: its adopted pages have been given back")
        self.num_held += count

    def drop(self, count: int) -> None:
        """So many fewer; the last one ends it."""
        if count > self.num_held:
            raise InternalError(f"{self.request_id}: adopted pages are given back twice")
        self.num_held -= count
        if count and not self.num_held:
            self.end()

    def end(self) -> None:
        """Nobody here reads its pages any more. Idempotent."""
        if not self._ended:
            self._ended = True
            self._release()
