"""StepPlan: what one engine step computes, as the scheduler decides it. Pure values."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.engine.state.interface import SequenceChunk, Task
from baton.engine.state.sequence import RequestGroup, SequenceState


@dataclass(frozen=True, slots=True)
class Row:
    """One chunk of a step, with the sequence and the group that it belongs to."""

    group: RequestGroup
    sequence: SequenceState
    chunk: SequenceChunk

    @property
    def gone(self) -> bool:
        """Whether its sequence ended, or was preempted, after the step was planned."""
        return not any(table.blocks for table in self.sequence.tables)


@dataclass(slots=True)
class StepPlan:
    """What one step computes.

    `rows` are in the runner's order. `admitted` are the groups whose first row is in this step;
    `seated` those whose KV came from elsewhere and that may run from now on. `begun`: groups that
    have got their first token by this step.
    """

    rows: list[Row] = field(default_factory=list)
    admitted: list[RequestGroup] = field(default_factory=list)
    seated: list[RequestGroup] = field(default_factory=list)
    begun: list[RequestGroup] = field(default_factory=list)
    num_tokens: int = 0
    num_prefill_tokens: int = 0
    num_preempted: int = 0  # requests preempted while planning; the next step uses their slots

    @property
    def num_pending(self) -> int:
        """Return the number of tokens of the exports that begin in this step."""
        exports = (group for group in self.admitted if group.task is Task.PREFILL)
        return sum(len(group.leader.tokens) for group in exports)

    @property
    def exact(self) -> bool:
        """Whether a row is one of an exact request (baton/engine/core/replay.py)."""
        return any(row.sequence.exact_chunk is not None for row in self.rows)

    @property
    def chunks(self) -> list[SequenceChunk]:
        return [row.chunk for row in self.rows]


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The most sequences that one step may run, and the most tokens that it may compute."""

    max_num_seqs: int
    max_num_batched_tokens: int
