"""Asynchronous scheduling: the next step is planned, and waits, while one runs.

    engine thread   plan 1, plan 2 | outputs 1, plan 3 | outputs 2, plan 4 | ...
    step thread             run 1 .......| run 2 .............| run 3 .............| ...

So no work of the engine thread lies between two steps. If a step only decodes, each of its rows
draws one token, and the next step is planned before these tokens are known. PENDING stands for such
a token; the step thread replaces it. If the token ends its sample, the sample's row in the next
step is wasted: its result is dropped, and its blocks are free after that step (Scheduler.fly). A
request that arrives meanwhile waits one step longer.

There are two threads and no lock: a flight has block lists of its own, and does not need the past
of sequences (`history`), which grows meanwhile. Source: vLLM v1, --async-scheduling
(v1/core/sched/async_scheduler.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

import torch

from baton.engine.running.spare_cores import SpareCores
from baton.engine.state.interface import ChunkResult, Runner, SequenceChunk, Task
from baton.engine.state.step_plan import Row, StepPlan
from baton.protocol.errors import InternalError
from baton.protocol.kv_spec import HeldBlocks

PENDING: Final = -1  # stands for a token that a step under way will draw


@dataclass(slots=True)
class Flight:
    """A planned step. `results()` runs it, or waits until it has run.

    `ahead`: its result on the step thread; None = it does not run there. `behind`: it runs there
    right after another step.
    """

    plan: StepPlan
    results: Callable[[], list[ChunkResult]]
    ahead: Future[list[ChunkResult]] | None = None
    behind: bool = False

    def wait(self) -> None:
        """Wait until nothing of the step runs. Does not raise if it failed: results() does."""
        if self.ahead is not None:
            self.ahead.exception()


class RunAhead:
    """The step thread. `limit`: the most tokens of a sequence. `cores`: of other nodes, for
    steps."""

    def __init__(self, runner: Runner, limit: int, cores: SpareCores | None = None) -> None:
        self.runner = runner
        self._cores = cores
        self._limit = limit
        # A new thread has OpenMP's own number of threads until it asks torch for torch's.
        self.thread: Executor = ThreadPoolExecutor(
            1, thread_name_prefix="engine-step", initializer=torch.get_num_threads
        )

    def start(self, plan: StepPlan, before: Flight | None = None) -> Flight:
        """Run `plan` on the step thread, after `before` and with the tokens that `before` draws."""
        rows = () if before is None else before.plan.rows
        drawn = {row.sequence: index for index, row in enumerate(rows)}
        chunks = [_own(row.chunk) for row in plan.rows]
        pending = {
            index: drawn[row.sequence]
            for index, row in enumerate(plan.rows)
            if row.chunk.token_ids[-1] == PENDING
        }
        future = self.thread.submit(self._run, chunks, pending, before, plan.exact)
        return Flight(plan, future.result, future, before is not None)

    def _run(
        self,
        chunks: list[SequenceChunk],
        pending: dict[int, int],
        before: Flight | None,
        exact: bool,
    ) -> list[ChunkResult]:
        known = [] if before is None else before.results()  # raises the error of the step before
        for index, source in pending.items():
            sampled = known[source].sampled
            if sampled is None:
                raise InternalError(f"{chunks[index].request_id}: the step before drew nothing")
            chunks[index] = replace(chunks[index], token_ids=sampled.token_ids, history=())
        if self._cores is not None:
            self._cores.take(exact=exact)
        return self.runner.run(chunks)

    @contextmanager
    def foreseen(self, plan: StepPlan) -> Iterator[None]:
        """Inside the context, the plan's sequences look as if `plan` had run."""
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
    """Whether the step after `plan` can be planned before `plan` has run.

    True if each row draws one token that depends on the row's own computing alone.
    """
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
    """Return the chunk with copies of its block lists, which do not grow while it runs."""
    blocks = tuple([HeldBlocks(tuple(held.ids), held.first) for held in chunk.blocks])
    return replace(chunk, blocks=blocks)
