"""Decode steps as CUDA graphs: recorded once per size, then replayed with one launch.

Without a graph a step needs hundreds of launches.

    sizes      1 2 4 8 16 24 32 ...                   a step of 5 rows replays the record of 8
    buffers    token ids, positions, slots, tables    fixed addresses, refilled before each replay
    padding    slot -1, 0 tokens                      written nowhere, attends to nothing

A size is recorded at the first step that needs it, after warm runs that compile the kernels. Only
steps with one new token per sequence are recorded: without prefill, LoRA adapters and a callback
per layer. Any other step runs without a graph. A `Recorder` does the recording; the rest is plain
tensors and is tested without a GPU. Not here: sampling, which differs from row to row.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from torch import Tensor

from baton.engine.kernels.gpu.support import triton_serves
from baton.engine.loading.loading import LoadedModel
from baton.engine.state.attention import Attention
from baton.engine.state.batch import Batch, GroupTables, Span, Step

if TYPE_CHECKING:  # imports triton
    from baton.engine.attention.triton_backend import TritonAttention

logger = logging.getLogger(__name__)
SWITCH: Final = "BATON_CUDA_GRAPHS"  # "off": every step is launched kernel by kernel
SMALL_SIZES: Final = (1, 2, 4)
STEP: Final = 8  # distance between the larger sizes
MAX_ROWS: Final = 256
WARM_RUNS: Final = 2

Forward = Callable[[Tensor, Tensor, Batch], Tensor]


class Recorder(Protocol):
    """Records the GPU work of a function, so that it can be replayed."""

    def record(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """Call `work` at least once; return the tensor that each replay fills, and the replay.

        Raises RuntimeError for work that cannot be recorded.
        """
        ...


class CudaRecorder:
    """Records CUDA graphs. They share one memory pool, because they never run at the same time."""

    def __init__(self) -> None:
        self._pool: Any = None  # an opaque handle

    def record(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """See Recorder.record."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_RUNS):
                work()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads copy KV meanwhile; "thread_local" keeps their calls out of this graph.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = work()
        self._pool = graph.pool()
        return result, graph.replay


@dataclass(frozen=True, slots=True)
class Buffers:
    """The inputs of one size, at fixed addresses.

    `numbers` has, per layer group, a tensor [4, rows] int64 as in GpuDecodeRows.
    """

    step: Step
    numbers: tuple[Tensor, ...]

    @property
    def rows(self) -> int:
        return len(self.step.batch.spans)

    @property
    def width(self) -> int:
        """Return how many blocks a row's table has room for."""
        return self.step.batch.tables[0].blocks.shape[1]

    def fill(self, step: Step) -> None:
        """Copy the rows of `step` (at most `rows`) into the buffers; the other rows become
        padding.
        """
        count = len(step.batch.spans)
        self.step.token_ids[:count].copy_(step.token_ids)
        self.step.positions[:count].copy_(step.positions)
        tokens = [span.num_tokens for span in step.batch.spans]
        for mine, table, numbers in zip(
            self.step.batch.tables, step.batch.tables, self.numbers, strict=True
        ):
            mine.slots[:count].copy_(table.slots)
            mine.slots[count:].fill_(-1)
            mine.blocks[:count, : table.blocks.shape[1]].copy_(table.blocks)
            numbers.copy_(torch.tensor(_numbers(tokens, table.first, self.rows)))


@dataclass(frozen=True, slots=True)
class Recorded:
    """The record of one size: `replay` computes `hidden` [rows, H] from what the buffers hold."""

    buffers: Buffers
    hidden: Tensor
    replay: Callable[[], None]


class DecodeGraphs:
    """The recorded steps of one model. Used by the engine thread alone."""

    def __init__(
        self,
        forward: Forward,
        attention: TritonAttention,
        width: int,
        recorder: Recorder,
        sizes: Sequence[int],
    ) -> None:
        """`width`: blocks of the longest sequence; `sizes`: rows of the records, ascending."""
        self._forward = forward
        self._attention = attention
        self._width = width
        self._recorder = recorder
        self._sizes = tuple(sizes)
        self._recorded: dict[int, Recorded] = {}

    @property
    def num_recorded(self) -> int:
        return len(self._recorded)

    def forward(self, step: Step) -> Tensor | None:
        """Return the hidden states [T, H] of a decode step, in a tensor that the caller may keep.

        Returns None if no record fits the step.
        """
        rows = size_for(len(step.batch.spans), self._sizes)
        if rows is None or not self._fits(step.batch):
            return None
        recorded = self._recorded.get(rows) or self._record(rows, step)
        if recorded is None:
            return None
        recorded.buffers.fill(step)
        recorded.replay()
        return recorded.hidden[: len(step.batch.spans)].clone()

    def _fits(self, batch: Batch) -> bool:
        """Whether each sequence has one new token, and the batch has nothing that graphs cannot
        hold.
        """
        widest = max(table.blocks.shape[1] for table in batch.tables)
        plain = all(span.num_rows == 1 and not span.adapter for span in batch.spans)
        return plain and batch.on_layer is None and widest <= self._width

    def _record(self, rows: int, step: Step) -> Recorded | None:
        """Record a size by running `step`, which writes its KV more than once; None if it fails."""
        buffers = buffers_for(rows, self._width, step, self._attention)
        buffers.fill(step)
        fixed = buffers.step
        try:
            hidden, replay = self._recorder.record(
                lambda: self._forward(fixed.token_ids, fixed.positions, fixed.batch)
            )
        except RuntimeError as error:
            logger.warning("decode steps are not recorded as CUDA graphs: %s", error)
            self._sizes = ()
            return None
        logger.info("recorded decode steps of up to %d sequences", rows)
        self._recorded[rows] = Recorded(buffers, hidden, replay)
        return self._recorded[rows]


def choose_graphs(
    loaded: LoadedModel, attention: Attention, block_size: int
) -> DecodeGraphs | None:
    """Return graphs for a lean model on a GPU whose layers all use Triton attention, else None."""
    if not triton_serves(loaded.device) or os.environ.get(SWITCH) == "off":
        return None
    from baton.engine.attention.triton_backend import TritonAttention  # imports triton

    if not isinstance(attention, TritonAttention) or not attention.knows_all:
        return None
    if loaded.info.model_impl != "lean":
        return None  # transformers' own code may look at its tensors on the host
    width = -(-loaded.info.max_model_len // block_size)
    return DecodeGraphs(loaded.forward, attention, width, CudaRecorder(), sizes_up_to(MAX_ROWS))


def sizes_up_to(most: int) -> tuple[int, ...]:
    """Return the sizes of the records: close together, so that few padding rows are computed."""
    larger = range(STEP, most + STEP, STEP)
    return tuple(size for size in (*SMALL_SIZES, *larger) if size <= most)


def size_for(count: int, sizes: Sequence[int]) -> int | None:
    """Return the smallest of `sizes` (ascending) that holds `count` rows; None if none does."""
    return next((size for size in sizes if size >= count), None)


def buffers_for(rows: int, width: int, step: Step, attention: TritonAttention) -> Buffers:
    """Return empty buffers of this size, with the layer groups and the device of `step`."""
    from baton.engine.attention.triton_backend import TritonPlan, plan_key  # imports triton
    from baton.engine.kernels.gpu.decode_attention import GpuDecodeRows

    def empty(*size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int64, device=step.token_ids.device)

    groups = range(len(step.batch.tables))
    numbers = tuple(empty(4, rows) for _ in groups)
    tables = tuple(GroupTables(empty(rows) - 1, empty(rows, width), (0,) * rows) for _ in groups)
    spans = tuple(Span(row, 1, 0) for row in range(rows))
    batch = Batch(spans, tables, attention)
    for group in groups:
        rows_of = GpuDecodeRows(numbers[group], tables[group].blocks)
        batch.plans[plan_key(group)] = TritonPlan(rows_of, None)
    return Buffers(Step(empty(rows), empty(rows), batch), numbers)


def _numbers(tokens: Sequence[int], first: Sequence[int], rows: int) -> list[list[int]]:
    """Return the numbers of DecodeRows; rows beyond `tokens` are padding."""
    own, spare = list(range(rows)), [0] * (rows - len(tokens))
    return [own, own, [*tokens, *spare], [*first, *spare]]
