"""Prompts and answers of the requests that ended last, for the key that asked and for operators.

Kept only with --timeline-text or --console-show-text; without them there is no such object. Texts
live as long as the timelines do: of as many requests, and MOST_BYTES of all. What is kept are the
tokens' ids, which are decoded when somebody asks. A text belongs to one key, not to its tenant.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from baton.protocol.request import Request
from router.tenants.keys import Grant

MOST_BYTES: Final = 32 << 20
MOST_TOKENS: Final = 1 << 16  # of a prompt, and of all answers to it
ID_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class RequestTokens:
    """Token ids of a request: its prompt, and each of its answers. `holder`: of the key that asked.
    `cut`: there were more."""

    holder: str
    prompt: array[int]
    answers: tuple[array[int], ...]
    cut: bool

    @property
    def num_bytes(self) -> int:
        return ID_BYTES * (len(self.prompt) + sum(map(len, self.answers)))


class TextRing:
    """What was asked and answered last; the oldest goes first. Event loop only."""

    def __init__(self, capacity: int, most_bytes: int = MOST_BYTES) -> None:
        self._capacity = capacity
        self._most_bytes = most_bytes
        self._kept: OrderedDict[str, RequestTokens] = OrderedDict()
        self.num_bytes = 0

    def add(self, request: Request, grant: Grant, answers: Sequence[Sequence[int]]) -> None:
        """Keep what a request that has ended asked, and its answers."""
        left, kept = MOST_TOKENS, list["array[int]"]()
        for answer in answers:
            kept.append(array("I", answer[:left]))
            left -= len(kept[-1])
        whole = len(request.prompt_ids) <= MOST_TOKENS and sum(map(len, answers)) <= MOST_TOKENS
        prompt = array("I", request.prompt_ids[:MOST_TOKENS])
        self._forget(request.id)
        self._kept[request.id] = tokens = RequestTokens(
            grant.holder, prompt, tuple(kept), not whole
        )
        self.num_bytes += tokens.num_bytes
        while len(self._kept) > self._capacity or self.num_bytes > self._most_bytes:
            self._forget(next(iter(self._kept)))

    def find(self, request_id: str, holder: str | None) -> RequestTokens | None:
        """Return the tokens of a request by its engine id. `holder`: only if this key asked it;
        None: whoever did."""
        found = self._kept.get(request_id)
        return found if found is not None and holder in (None, found.holder) else None

    def _forget(self, request_id: str) -> None:
        gone = self._kept.pop(request_id, None)
        self.num_bytes -= 0 if gone is None else gone.num_bytes
