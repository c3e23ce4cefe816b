"""A request: what is asked (frozen), its states, and the only table of legal transitions.

Prompt and output ids are kept apart for the whole life of a request, also on a retry. A position is
the absolute index in the output, so limits, penalties and noise never restart. The Redis scripts
(router/store/redis_store.py) are generated from TRANSITIONS.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, TypeAlias

from baton.protocol.errors import IllegalTransition
from baton.protocol.images import ImageInput
from baton.protocol.sampling import SamplingParams


class RequestState(enum.StrEnum):
    QUEUED = "queued"
    PREFILL = "prefill"
    TRANSFER = "transfer"
    DECODE = "decode"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"

    __hash__ = str.__hash__  # faster than Enum's own hash, which is Python code

    @property
    def terminal(self) -> bool:
        return self in TERMINAL


TERMINAL: Final = frozenset({RequestState.FINISHED, RequestState.FAILED, RequestState.CANCELLED})

# How a request continues after its node was lost. fast: one prefill of all known tokens. exact: the
# engine repeats the shapes of the first computation, so the result is equal bit for bit
# (baton/engine/core/replay.py).
Resume: TypeAlias = Literal["fast", "exact"]

_S = RequestState
# QUEUED -> TRANSFER: there is a leased handle, or a node drains. QUEUED -> DECODE: local prefill.
# Any non-terminal state may go back to QUEUED, with epoch + 1 (failover).
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

    `output_ids[s]` are the tokens of sample s that were emitted under earlier epochs (empty at
    first), so the next token of sample s has position `len(output_ids[s])`. `deadline` is monotonic
    seconds in this process (messages carry the remaining milliseconds), None for no deadline.
    `ended` lists samples that are no longer computed, whatever their tokens are; the router finds
    their end by stop strings, which nodes do not know.
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
    resume: Resume = "fast"
    arrival: float = field(default=0.0, compare=False)
    ended: tuple[int, ...] = ()
    images: tuple[ImageInput, ...] = ()
    # Empty, or its message without the deadline: it is serialized once for both nodes (wire.py).
    encoded: list[bytes] = field(default_factory=list[bytes], init=False, repr=False, compare=False)

    @property
    def live_samples(self) -> tuple[int, ...]:
        """The samples to compute; a beam search counts as one sample."""
        return tuple(s for s in range(self.params.num_samples) if s not in self.ended)

    def emitted(self, sample: int) -> tuple[int, ...]:
        """Return the known output tokens of a sample. A beam search has none: it starts anew."""
        known = sample < len(self.output_ids) and not self.params.beam_width
        return self.output_ids[sample] if known else ()

    @property
    def known_ids(self) -> tuple[int, ...]:
        """The tokens that a prefill computes: the prompt, then the longest common prefix of the
        outputs.

        Outputs are those of the live samples. With one sample the prefix is its whole output.
        """
        if self.params.width == 1:
            return self.prompt_ids + self.emitted(0)
        outputs = [self.emitted(sample) for sample in self.live_samples]
        return self.prompt_ids + (_common(outputs) if outputs else ())

    def retried(self, output_ids: tuple[tuple[int, ...], ...]) -> Request:
        """Return this request for its next owner: with epoch + 1 and the tokens emitted so far."""
        return replace(self, output_ids=output_ids, epoch=self.epoch + 1)


def _common(outputs: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the longest prefix that all outputs share."""
    shortest = min(outputs, key=len)
    for index, token in enumerate(shortest):
        if any(ids[index] != token for ids in outputs):
            return shortest[:index]
    return shortest
