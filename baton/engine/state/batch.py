"""One engine step as the model sees it: all new tokens flattened to rows, and where KV lives.

    chunk 0 (prefill, 5 tokens)   chunk 1 (decode)   chunk 2 (prefill, 3 tokens)
    rows 0 1 2 3 4                5                  6 7 8

The batch travels through the model as an argument and carries the attention backend, so a model has
no global and no pool of its own. It lives for one forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from baton.engine.state.attention import Attention
from baton.engine.state.interface import SequenceChunk


@dataclass(frozen=True, slots=True)
class Span:
    """Rows [first_row, first_row + num_rows): tokens [start, start + num_rows) of a sequence.

    `adapter` names the LoRA adapter of its request, "" = none.
    """

    first_row: int
    num_rows: int
    start: int
    adapter: str = ""

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence whose KV exists once this step has written."""
        return self.start + self.num_rows


@dataclass(frozen=True, slots=True)
class GroupTables:
    """Where one layer group's KV of a step lies.

    `slots` [T] int64: flat pool slot (block * block_size + offset) of each row. `blocks` [S, W]
    int64: each span's blocks from its block `first[s]` on (the others have left its layers'
    window), padded with a block of its own.
    """

    slots: Tensor
    blocks: Tensor
    first: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """Layout of one step: its rows' spans, and a table per layer group.

    `on_layer(layer)` fires after each layer's write. `plans` is the attention backend's scratch:
    index tensors computed at a step's first layer.
    """

    spans: tuple[Span, ...]
    tables: tuple[GroupTables, ...]
    attention: Attention
    on_layer: Callable[[int], None] | None = None
    plans: dict[Any, Any] = field(default_factory=dict)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k, v [T, kv_heads, dim], call `on_layer`, attend with q [T, query_heads, dim]."""
        table = self.tables[self.attention.group_of[layer]]
        self.attention.write(layer, k, v, table.slots)
        if self.on_layer is not None:
            self.on_layer(layer)
        return self.attention.attend(layer, q, self)


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
) -> Step:
    """Lay the chunks out as one step, in their order."""
    spans: list[Span] = []
    token_ids: list[int] = []
    positions: list[int] = []
    counts: list[int] = []
    for chunk in chunks:
        count = len(chunk.token_ids)
        spans.append(Span(len(token_ids), count, chunk.start, chunk.adapter))
        token_ids.extend(chunk.token_ids)
        positions.extend(range(chunk.start, chunk.start + count))
        counts.append(count)
    # Built on the host and moved once each: small copies to a device cost more than their bytes.
    position = _int64(positions)
    owner = torch.from_numpy(np.repeat(np.arange(len(counts)), counts))
    column, offset = position // block_size, position % block_size
    tables: list[GroupTables] = []
    for group in range(len(chunks[0].blocks)):
        held = [chunk.blocks[group] for chunk in chunks]
        width = max([len(each.ids) for each in held])
        padded: list[int] = []
        for each in held:
            padded += each.ids
            padded += [each.ids[-1]] * (width - len(each.ids))
        blocks = _int64(padded).view(-1, width)
        first = tuple([each.first for each in held])
        here = column - _int64(first)[owner] if any(first) else column
        slots = blocks[owner, here] * block_size + offset
        tables.append(GroupTables(slots.to(device), blocks.to(device), first))
    batch = Batch(tuple(spans), tuple(tables), attention, on_layer)
    return Step(_int64(token_ids).to(device), position.to(device), batch)


def _int64(numbers: Sequence[int]) -> Tensor:
    # By way of numpy: torch.tensor took 4 to 8 times as long over 5,000 numbers in lists.
    return torch.from_numpy(np.array(numbers, dtype=np.int64))
