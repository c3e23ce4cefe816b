"""A request: what is asked (frozen), the states it passes, and the only table of legal transitions.

Prompt and output ids stay apart for the whole life, also on a retry: a position is the absolute
index in the output, so limits, penalties and noise never restart. The Redis scripts
(router/redis_store.py) are generated from TRANSITIONS.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from baton.errors import IllegalTransition
from baton.sampling import SamplingParams


class RequestState(enum.StrEnum):
    QUEUED = "queued"
    PREFILL = "prefill"
    TRANSFER = "transfer"
    DECODE = "decode"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        return self in TERMINAL


TERMINAL: Final = frozenset({RequestState.FINISHED, RequestState.FAILED, RequestState.CANCELLED})

_S = RequestState
# QUEUED -> TRANSFER: a leased handle or a drain. QUEUED -> DECODE: local prefill. Any non-terminal
# state may go back to QUEUED, with epoch + 1 (failover).
TRANSITIONS: Final[dict[RequestState, frozenset[RequestState]]] = {
    _S.QUEUED: frozenset({_S.PREFILL, _S.TRANSFER, _S.DECODE, _S.QUEUED, _S.FAILED, _S.CANCELLED}),
    _S.PREFILL: frozenset({_S.TRANSFER, _S.FINISHED, _S.QUEUED, _S.FAILED, _S.CANCELLED}),
    _S.TRANSFER: frozenset({_S.DECODE, _S.FINISHED, _S.QUEUED, _S.FAILED, _S.CANCELLED}),
    _S.DECODE: frozenset({_S.FINISHED, _S.QUEUED, _S.FAILED, _S.CANCELLED}),
    _S.FINISHED: frozenset(),
    _S.FAILED: frozenset(),
    _S.CANCELLED: frozenset(),
}
MAX_NODE_DEATHS: Final = (
    3  # after so many node deaths a request is FAILED: it may be what kills them
)


def check_transition(current: RequestState, new: RequestState) -> None:
    """Raise IllegalTransition, naming both states, unless TRANSITIONS allows the step."""
    if new not in TRANSITIONS[current]:
        raise IllegalTransition(f"illegal transition {current} -> {new}")


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Request:
    """One request as every layer sees it.

    `output_ids[s]` are the tokens of sample s emitted under earlier epochs (empty at first), so the
    next token of sample s has position `len(output_ids[s])`. `deadline` is monotonic seconds in
    this process (it travels as remaining milliseconds), None for no deadline.
    """

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    output_ids: tuple[tuple[int, ...], ...] = ((),)
    adapter: str = ""
    priority: int = 0
    tenant_salt: str = ""
    deadline: float | None = None
    epoch: int = 1
    traceparent: str = ""
    resume: Literal["fast", "exact"] = "fast"
    arrival: float = field(default=0.0, compare=False)

    @property
    def known_ids(self) -> tuple[int, ...]:
        """Prompt, then the emitted tokens of sample 0: what a prefill computes."""
        return self.prompt_ids + self.output_ids[0]

    def retried(self, output_ids: tuple[tuple[int, ...], ...]) -> Request:
        """The same request for its next owner: epoch + 1, with what has been emitted so far."""
        return replace(self, output_ids=output_ids, epoch=self.epoch + 1)
