"""One engine step as the model sees it: the new tokens of all chunks as rows, and where KV lies.

    chunk 0 (prefill, 5 tokens)   chunk 1 (decode)   chunk 2 (prefill, 3 tokens)
    rows 0 1 2 3 4                5                  6 7 8

The batch travels through the model as an argument and carries the attention backend. So a model has
neither globals nor a pool of its own. A batch lives for one forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from baton.engine.state.attention import Attention
from baton.engine.state.images import StepImages, step_images
from baton.engine.state.interface import NO_SLOT, SequenceChunk
from baton.protocol.kv_spec import HeldBlocks

Numbers: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"


@dataclass(frozen=True, slots=True)
class Span:
    """Rows [first_row, first_row + num_rows) hold tokens [start, start + num_rows) of a sequence.

    `adapter` names the LoRA adapter of the request; "" means none. `state_slot` is the slot of its
    recurrent state. `mutual`: ranges (from, to) of tokens, some of them in the span, that see each
    other, also later ones; the span does not end inside one. The sequence's first `num_prompt`
    tokens are its prompt.
    """

    first_row: int
    num_rows: int
    start: int
    adapter: str = ""
    state_slot: int = NO_SLOT
    mutual: tuple[tuple[int, int], ...] = ()
    num_prompt: int = 0

    @property
    def num_tokens(self) -> int:
        """Return how many of the sequence's tokens have KV once this step has written its own."""
        return self.start + self.num_rows


@dataclass(frozen=True, slots=True)
class GroupTables:
    """Where the KV of a step lies in one layer group.

    `slots` [T] int64: the flat pool slot (block * block_size + offset) of each row. `blocks` [S, W]
    int64: row s lists the blocks of span s from its block `first[s]` on, padded with its last
    block. Blocks before `first[s]` have left the window of the group's layers.
    """

    slots: Tensor
    blocks: Tensor
    first: tuple[int, ...]


class States(Protocol):
    """What a model needs of the recurrent states, as in StateArena."""

    def views(self, layer: int) -> tuple[Tensor | None, Tensor | None]:
        """Return a layer's convolution inputs and matrices of all slots, without a copy."""
        ...

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return copies [N, ...] of a layer's convolution inputs and matrices in `slots` [N]."""
        ...

    def write(
        self, layer: int, slots: Tensor, conv: Tensor | None, recurrent: Tensor | None
    ) -> None:
        """Store what read() returns, in `slots` [N]."""
        ...


@dataclass(slots=True)
class StepLogits:
    """A wish for the logits of all rows of a step, which a model may make together with their
    hidden states. `made` [T, vocab] float32, overwritten by the next step; None =
    `CausalModel.logits` has to make them."""

    made: Tensor | None = None


@dataclass(frozen=True, slots=True)
class ReadRows:
    """The rows of a step whose hidden states somebody reads: their numbers [R] int64 in the step,
    and a batch of them alone."""

    index: Tensor
    batch: Batch


@dataclass(frozen=True, slots=True)
class Batch:
    """Layout of one step: the spans of its rows, and a table per layer group.

    `on_layer(layer)` is called after the KV of each layer is written. `plans` is scratch space of
    the attention backend: index tensors that it computes at the first layer of a step. `states`:
    None for a model without recurrent state. `tapped` gets what goes into the layers `taps`,
    [T, H] each, for a draft head. `images`: None if no sequence of the step has images. `logits`:
    None unless each row's are wanted. `read`: of how many rows at the end of each span somebody
    reads the hidden states; None = of all. `only`: see `in_last_layer`.
    """

    spans: tuple[Span, ...]
    tables: tuple[GroupTables, ...]
    attention: Attention
    on_layer: Callable[[int], None] | None = None
    plans: dict[Any, Any] = field(default_factory=dict)
    states: States | None = None
    taps: tuple[int, ...] = ()
    tapped: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    images: StepImages | None = None
    logits: StepLogits | None = None
    read: tuple[int, ...] | None = None
    only: ReadRows | None = None

    @property
    def mutual(self) -> bool:
        """Whether some tokens of the step see later ones, which kernels do not support."""
        return any(span.mutual for span in self.spans)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k, v [T, kv_heads, dim], then attend with those rows of q [T, query_heads, dim]
        that `kept` keeps."""
        self.store(layer, k, v)
        batch = self if self.only is None else self.only.batch
        return self.attention.attend(layer, self.kept(q), batch)

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write k, v [T, kv_heads, dim], and call `on_layer`."""
        table = self.tables[self.attention.group_of[layer]]
        self.attention.write(layer, k, v, table.slots)
        if self.on_layer is not None:
            self.on_layer(layer)

    def in_last_layer(self) -> Batch:
        """Return the batch for the last layer. It writes the KV of all rows, but nothing behind it
        mixes rows, so what follows is computed for the rows that are read alone; for at least one,
        as ranks sum their parts of it."""
        if self.read is None or self.mutual:
            return self
        counts = [
            min(count, span.num_rows) for count, span in zip(self.read, self.spans, strict=True)
        ]
        counts[-1] = counts[-1] if any(counts) else 1
        ends = [span.first_row + span.num_rows for span in self.spans]
        kept = [range(end - count, end) for end, count in zip(ends, counts, strict=True)]
        rows, spans, tables = self.cut(kept)
        return replace(self, only=ReadRows(rows, Batch(spans, tables, self.attention)))

    def cut(
        self, kept: Sequence[range]
    ) -> tuple[Tensor, tuple[Span, ...], tuple[GroupTables, ...]]:
        """Return some rows [R] int64, their spans and their tables: of each span the rows that
        `kept` names, side by side from row 0 on. A span of which no row is kept is left out."""
        members = [index for index, part in enumerate(kept) if part]
        spans: list[Span] = []
        first = 0
        for index in members:
            span, part = self.spans[index], kept[index]
            start = span.start + part.start - span.first_row
            spans.append(replace(span, first_row=first, num_rows=len(part), start=start))
            first += len(part)
        device = self.tables[0].slots.device
        rows = torch.tensor([row for part in kept for row in part]).to(device)
        chosen = torch.tensor(members).to(device)
        tables = [
            GroupTables(t.slots[rows], t.blocks[chosen], tuple([t.first[i] for i in members]))
            for t in self.tables
        ]
        return rows, tuple(spans), tuple(tables)

    def kept(self, x: Tensor) -> Tensor:
        """Return the rows of x [T, ...] that the layer computes."""
        return x if self.only is None else x[self.only.index]


@dataclass(frozen=True, slots=True)
class Step:
    """A batch with its inputs: token_ids [T] and positions [T], int64, on the model's device."""

    token_ids: Tensor
    positions: Tensor
    batch: Batch


def flatten(
    chunks: Sequence[SequenceChunk],
    attention: Attention,
    block_size: int,
    device: torch.device,
    on_layer: Callable[[int], None] | None = None,
    states: States | None = None,
) -> Step:
    """Lay the chunks out as one step, in their order."""
    spans: list[Span] = []
    token_ids: list[int] = []
    positions: list[int] = []
    counts: list[int] = []
    for chunk in chunks:
        count = len(chunk.token_ids)
        images = chunk.images
        mutual = () if images is None else images.mutual_ranges(chunk.start, count)
        spans.append(
            Span(
                len(token_ids), count, chunk.start, chunk.adapter, chunk.state_slot, mutual,
                chunk.num_prompt,
            )
        )  # fmt: skip
        token_ids.extend(chunk.token_ids)
        positions.extend(range(chunk.start, chunk.start + count))
        counts.append(count)
    # Built on the host and moved in one copy each: many small copies cost more than their bytes.
    tables: list[GroupTables] = []
    single = set(counts) == {1}
    for group in range(len(chunks[0].blocks)):
        held = [chunk.blocks[group] for chunk in chunks]
        width = max([len(each.ids) for each in held])
        padded: list[int] = []
        for each in held:
            padded += each.ids
            padded += [each.ids[-1]] * (width - len(each.ids))
        blocks = np.array(padded, np.int64).reshape(-1, width)
        first = tuple([each.first for each in held])
        if single:
            slots = np.array(_single_slots(positions, held, block_size), np.int64)
        else:
            slots = _slots(np.array(positions), np.array(counts), blocks, first, block_size)
        tables.append(GroupTables(_moved(slots, device), _moved(blocks, device), first))
    seen = step_images(
        [(chunk.images, chunk.start, count) for chunk, count in zip(chunks, counts, strict=True)],
        device,
    )
    batch = Batch(
        tuple(spans), tuple(tables), attention, on_layer, states=states, images=seen,
        logits=StepLogits() if all(map(_samples_its_row, chunks)) else None,
    )  # fmt: skip
    ids = np.array(token_ids, np.int64)
    return Step(_moved(ids, device), _moved(np.array(positions, np.int64), device), batch)


def _samples_its_row(chunk: SequenceChunk) -> bool:
    """Whether the chunk has one row, and one draw that needs its logits."""
    return chunk.sample is not None and len(chunk.token_ids) == 1 and not chunk.fan_out


def _single_slots(
    positions: Sequence[int], held: Sequence[HeldBlocks], block_size: int
) -> list[int]:
    """Return the slots of rows of which each sequence has one. In plain Python: behind a step that
    has read all weights each first call of numpy takes tens of microseconds."""
    return [
        each.ids[position // block_size - each.first] * block_size + position % block_size
        for position, each in zip(positions, held, strict=True)
    ]


def _slots(
    positions: Numbers, counts: Numbers, blocks: Numbers, first: Sequence[int], block_size: int
) -> Numbers:
    """Return the slots [T] of rows at `positions` [T], `counts` [S] of each sequence, whose blocks
    [S, W] begin with block `first` [S]."""
    owner = np.repeat(np.arange(len(counts)), counts)
    column, offset = np.divmod(positions, block_size)
    return blocks[owner, column - np.array(first)[owner]] * block_size + offset


def _moved(numbers: Numbers, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(numbers)
    return tensor if device.type == "cpu" else tensor.to(device)
