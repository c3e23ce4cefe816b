"""StepPlan: what one engine step computes, as the scheduler decides it. Pure values."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.engine.state.interface import SequenceChunk, Task
from baton.engine.state.sequence import RequestGroup, SequenceState


@dataclass(frozen=True, slots=True)
class Row:
    """One chunk of a step, and whose it is."""

    group: RequestGroup
    sequence: SequenceState
    chunk: SequenceChunk

    @property
    def gone(self) -> bool:
        """Its sequence ended, or lost its place, after the step was planned."""
        return not any(table.blocks for table in self.sequence.tables)


@dataclass(slots=True)
class StepPlan:
    """What one step computes: `rows` in the runner's order; `admitted` have their first one now."""

    rows: list[Row] = field(default_factory=list)
    admitted: list[RequestGroup] = field(default_factory=list)
    num_tokens: int = 0
    num_prefill_tokens: int = 0
    num_preempted: int = 0  # requests that lost their place: the next step finds others a slot

    @property
    def num_pending(self) -> int:
        """Tokens of the exports that begin in this step."""
        exports = (group for group in self.admitted if group.task is Task.PREFILL)
        return sum(len(group.leader.tokens) for group in exports)

    @property
    def chunks(self) -> list[SequenceChunk]:
        return [row.chunk for row in self.rows]


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Of one step: sequences that run at once, tokens that it computes."""

    max_num_seqs: int
    max_num_batched_tokens: int
