"""Stop strings over text that arrives in pieces: what may be shown, and when the output ends.

No I/O. The result does not depend on how the text was cut into pieces. A stop string, or a tail
that may still become one, is never shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopResult:
    """`text` may be shown now. `matched` is the stop string that ended the output, or None."""

    text: str
    matched: str | None = None


class StopMatcher:
    """Finds the stop string that is complete first; if several end together, the longest of them.

    push(piece)* -> flush(). After a match nothing more may be pushed.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        assert all(stops), "empty stop strings are refused at the door"
        self._stops = tuple(stops)
        self._include = include_stop
        self._held = ""
        self._longest = max((len(stop) for stop in stops), default=0)

    def push(self, piece: str, looking: bool = True) -> StopResult:
        """Add new text; return what may be shown.

        A tail that is shorter than the longest stop string may be held back. With `looking` False
        the caller knows that no stop string ends in this piece; one may still begin.
        """
        if not self._stops:
            return StopResult(piece)
        text = self._held + piece
        found = self._first_match(text, len(self._held)) if looking else None
        if found is not None:
            start, stop = found
            self._held = ""
            return StopResult(text[: start + len(stop)] if self._include else text[:start], stop)
        keep = self._possible_prefix(text)
        self._held = text[len(text) - keep :]
        return StopResult(text[: len(text) - keep])

    def flush(self) -> str:
        """Return the text held back; no more text follows."""
        text, self._held = self._held, ""
        return text

    def _first_match(self, text: str, looked: int) -> tuple[int, str] | None:
        """Return (start, stop) of the match that ends first; None without a match.

        Of several that end together it is the one that starts first. No match ends within the first
        `looked` characters, because these were searched before.
        """
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, looked + 1 - len(stop)))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else (best[1], best[2])

    def _possible_prefix(self, text: str) -> int:
        """Return the length of the longest tail of `text` with which some stop string begins."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
