"""--deterministic: a row's result depends on no batch mate, chunk border, prefix hit or preemption.

Kernels choose the order of their sums by the shape of the input, so every input gets one shape. A
step's rows go through the whole model in tiles of TILE_ROWS, one tile after the other; the last
tile is padded. Attention has its own fixed order (attention/fixed_order.py). So a row meets the
same kernels with the same shapes in a prompt's first chunk, after a prefix hit and in a decode
step.

    rows of a step   p p p p p p p p p p p p p p p p | p p p p p d d d d - - - - - - -
                     tile 0                            tile 1      (p prefill, d decode, - padding)

Rows of a tile may want different experts and adapters. In the lean decoder each expert or adapter
that any row wants computes the whole tile, and the rows that want it take their results. What
transformers' experts do cannot be seen from outside, so a model of the universal route with experts
gets tiles of one row.

The machine must guarantee one more thing: a row's place in its tile must not matter. `prove` tests
that on the loaded model with each of its adapters, and refuses a model that fails. Results are
equal bit for bit on the same kind of CPU, torch build and thread count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.attention.fixed_order import FixedOrderAttention
from baton.engine.memory.kv_cache import KVArena
from baton.engine.memory.layer_groups import one_group
from baton.engine.models.base import CausalModel, ModelAround
from baton.engine.state.batch import Batch, flatten
from baton.engine.state.interface import ModelInfo, SequenceChunk
from baton.protocol.errors import ConfigError
from baton.protocol.kv_spec import HeldBlocks

TILE_ROWS: Final = 16  # a product of 16 rows reads the weights once and costs little over one row
_PROOF_BLOCK: Final = 16


class FixedTiles(ModelAround):
    """Runs a model in tiles of `tile_rows` rows. The batch's attention must be FixedOrderAttention;
    adapters must be added before `prove`."""

    def __init__(self, model: CausalModel, tile_rows: int = TILE_ROWS) -> None:
        """`tile_rows`: 1 for a model whose products depend on which experts a tile's rows want."""
        super().__init__(model)
        self._tile_rows = tile_rows

    def forward(self, token_ids: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """See CausalModel.forward. `batch.on_layer` fires with the last tile: by then each layer
        holds the KV of all rows. `batch.tapped` gets the rows of all tiles."""
        hidden: list[Tensor] = []
        tapped: dict[int, list[Tensor]] = {layer: [] for layer in batch.taps}
        for rows in self._tiles(token_ids.shape[0]):
            ids, at = self._padded(token_ids[rows]), self._padded(positions[rows])
            part = _part(batch, rows, last=rows.stop == token_ids.shape[0])
            tile = self._model.forward(ids, at, part)
            hidden.append(tile[: rows.stop - rows.start])
            for layer, inputs in tapped.items():
                inputs.append(part.tapped[layer][: rows.stop - rows.start])
        batch.tapped.update((layer, torch.cat(inputs)) for layer, inputs in tapped.items())
        return torch.cat(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """See CausalModel.logits."""
        parts: list[Tensor] = []
        for rows in self._tiles(hidden.shape[0]):
            tile = self._model.logits(self._padded(hidden[rows]))
            parts.append(tile[: rows.stop - rows.start])
        return torch.cat(parts)

    def _tiles(self, rows: int) -> Iterator[slice]:
        size = self._tile_rows
        return (slice(at, min(at + size, rows)) for at in range(0, rows, size))

    def _padded(self, x: Tensor) -> Tensor:
        """Copy x [n, ...] into a new tensor [tile_rows, ...], padded with zeros."""
        padding = self._tile_rows - x.shape[0]
        return functional.pad(x, (0, 0) * (x.dim() - 1) + (0, padding)) if padding else x.clone()


@torch.inference_mode()
def prove(model: FixedTiles, info: ModelInfo, device: torch.device) -> None:
    """Test with each adapter that a row's result depends neither on its place in its tile nor on
    the other rows of the tile. Raises ConfigError if it does.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(info.vocab_size, (TILE_ROWS,), generator=generator).tolist()
    shift = TILE_ROWS * 5 // 16
    for adapter in ("", *info.adapters):
        mates = [adapter] * TILE_ROWS
        same = first_logits(model, info, device, [ids[0]] * TILE_ROWS, mates)
        plain = first_logits(model, info, device, ids, mates)
        turned = first_logits(model, info, device, ids[shift:] + ids[:shift], mates)
        others = [adapter, *[""] * (TILE_ROWS - 1)]
        proofs = (
            torch.equal(same, same[:1].expand_as(same)),
            torch.equal(plain[0], same[0]),
            torch.equal(turned, plain.roll(-shift, 0)),
            torch.equal(plain[0], first_logits(model, info, device, ids, others)[0]),
        )
        if not all(proofs):
            raise ConfigError(
                f"deterministic: on this machine, with {torch.get_num_threads()} threads, the "
                "result of a row depends on its place among others: try another --threads (a power "
                "of two) or --dtype bfloat16",
                field="deterministic",
            )


def first_logits(
    model: FixedTiles,
    info: ModelInfo,
    device: torch.device,
    ids: Sequence[int],
    adapters: Sequence[str],
) -> Tensor:
    """Return the logits of sequences of one token each, computed in one step. `ids` and `adapters`
    name the token and the adapter of each sequence."""
    arena = KVArena(one_group(info.layers), len(ids), _PROOF_BLOCK, info.kv_dtype, device)
    attention = FixedOrderAttention(arena, model.attention_layers)
    chunks = [
        SequenceChunk(str(i), [token], 0, (HeldBlocks([i]),), adapter=adapter)
        for i, (token, adapter) in enumerate(zip(ids, adapters, strict=True))
    ]
    step = flatten(chunks, attention, _PROOF_BLOCK, device)
    return model.logits(model.forward(step.token_ids, step.positions, step.batch))


def _part(batch: Batch, rows: slice, last: bool) -> Batch:
    """Return the part of `batch` that holds `rows`. `last`: it keeps `on_layer`."""
    _, spans, tables = batch.cut(
        [
            range(max(s.first_row, rows.start), min(s.first_row + s.num_rows, rows.stop))
            for s in batch.spans
        ]
    )
    return replace(
        batch,
        spans=spans,
        tables=tables,
        on_layer=batch.on_layer if last else None,
        plans={},
        tapped={},
        logits=None,  # products over the vocabulary are made in tiles, too
        read=None,  # tiles have all their rows
    )
