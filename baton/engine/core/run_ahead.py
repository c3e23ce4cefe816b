"""Asynchronous scheduling: the next step is planned, and waits, while one runs.

    engine thread   plan 1, plan 2 | outputs 1, plan 3 | outputs 2, plan 4 | ...
    step thread             run 1 .......| run 2 .............| run 3 .............| ...

So nothing of the engine lies between two steps. A step is planned before the tokens of the one
under way are known where that one only decodes: each of its rows draws one token, whatever it turns
out to be. PENDING stands for it while the next step is planned, and the step thread puts it in. If
it ends its sample, the sample's row in the next step is wasted: nobody takes what it yields, and
its blocks wait for that step's end (Scheduler.fly). Who came in meanwhile waits one step longer.

Two threads, and no lock: a flight has block lists of its own, and the past of sequences that grow
meanwhile (`history`) is not asked for.
Source: vLLM v1, --async-scheduling (v1/core/sched/async_scheduler.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

from baton.engine.state.interface import ChunkResult, Runner, SequenceChunk, Task
from baton.engine.state.step_plan import Row, StepPlan
from baton.protocol.errors import InternalError
from baton.protocol.kv_spec import HeldBlocks

PENDING: Final = -1  # a token that a step under way will draw


@dataclass(slots=True)
class Flight:
    """A step that is planned: `results()` runs it, or waits until it has run. `ahead`: on the step
    thread; `behind` another one, without a break."""

    plan: StepPlan
    results: Callable[[], list[ChunkResult]]
    ahead: Future[list[ChunkResult]] | None = None
    behind: bool = False

    def wait(self) -> None:
        """Until nothing of it runs; whether it failed is for results() to say."""
        if self.ahead is not None:
            self.ahead.exception()


class RunAhead:
    """The step thread. `limit`: most tokens of a sequence."""

    def __init__(self, runner: Runner, limit: int) -> None:
        self.runner = runner
        self._limit = limit
        self.thread: Executor = ThreadPoolExecutor(1, thread_name_prefix="engine-step")

    def start(self, plan: StepPlan, before: Flight | None = None) -> Flight:
        """Run `plan`, after `before` and with the tokens that this one draws."""
        rows = () if before is None else before.plan.rows
        drawn = {row.sequence: index for index, row in enumerate(rows)}
        chunks = [_own(row.chunk) for row in plan.rows]
        pending = {
            index: drawn[row.sequence]
            for index, row in enumerate(plan.rows)
            if row.chunk.token_ids[-1] == PENDING
        }
        future = self.thread.submit(self._run, chunks, pending, before)
        return Flight(plan, future.result, future, before is not None)

    def _run(
        self, chunks: list[SequenceChunk], pending: dict[int, int], before: Flight | None
    ) -> list[ChunkResult]:
        known = [] if before is None else before.results()  # raises what that one raised
        for index, source in pending.items():
            sampled = known[source].sampled
            if sampled is None:
                raise InternalError(f"{chunks[index].request_id}: the step before drew nothing")
            chunks[index] = replace(chunks[index], token_ids=sampled.token_ids, history=())
        return self.runner.run(chunks)

    @contextmanager
    def foreseen(self, plan: StepPlan) -> Iterator[None]:
        """Meanwhile its sequences are as if `plan` had run."""
        for row in plan.rows:
            row.sequence.num_computed = row.chunk.start + 1
            if not row.sequence.full(row.sequence.num_outputs + 1, self._limit):
                row.sequence.tokens.append(PENDING)
        try:
            yield
        finally:
            for row in plan.rows:
                if row.sequence.tokens[-1] == PENDING:
                    row.sequence.tokens.pop()
                if not row.gone:
                    row.sequence.num_computed = row.chunk.start


def decodes_plainly(plan: StepPlan) -> bool:
    """Whether what follows `plan` can be planned before it has run: each row draws one token, from
    what it computes alone."""
    return bool(plan.rows) and all(_draws_one(row) for row in plan.rows)


def _draws_one(row: Row) -> bool:
    group, chunk = row.group, row.chunk
    return (
        not row.gone
        and chunk.sample is not None
        and len(chunk.token_ids) == 1
        and not row.sequence.prefilling
        and group.task is Task.LOCAL
        and group.beams is None
        and not chunk.fan_out
        and chunk.guide is None
        and not chunk.sample.remembers
        and not any(sequence.following for sequence in group.sequences)
    )


def _own(chunk: SequenceChunk) -> SequenceChunk:
    """With block lists that do not grow while it runs."""
    blocks = tuple([HeldBlocks(tuple(held.ids), held.first) for held in chunk.blocks])
    return replace(chunk, blocks=blocks)
