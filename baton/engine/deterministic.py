"""--deterministic: a row's result depends on no batch mate, chunk border, prefix hit or preemption.

Kernels choose their order of sums by the shape of their input; so every input gets one shape. A
step's rows go through the whole model in tiles of TILE_ROWS, one after the other, the last one
padded; attention has a fixed order of its own (attention/fixed_order.py). A row meets the same
kernels with the same shapes in a prompt's first chunk, after a prefix hit, and in a decode step.

    rows of a step   p p p p p p p p p p p p p p p p | p p p p p d d d d - - - - - - -
                     tile 0                            tile 1      (p prefill, d decode, - padding)

What the machine must give besides: a row's place in its tile must not matter. `prove` tries that on
the loaded model; one that fails is refused. Results are equal bit for bit on the same kind of CPU,
torch build and thread count. Not here: mixtures of experts and LoRA adapters, whose products have
as many rows as batch mates chose; they are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.attention.base import AttentionLayer
from baton.engine.attention.fixed_order import FixedOrderAttention
from baton.engine.batch import Batch, GroupTables, flatten
from baton.engine.interface import ModelInfo, SequenceChunk
from baton.engine.kv_cache import KVArena
from baton.engine.layer_groups import one_group
from baton.engine.lora import Adapter
from baton.engine.models.base import CausalModel
from baton.errors import ConfigError, InternalError
from baton.kv_spec import HeldBlocks, LayerSpec

TILE_ROWS: Final = 16  # a product of 16 rows reads the weights once and costs little over one row
_EXPERT_KEYS: Final = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_PROOF_BLOCK: Final = 16


class FixedTiles:
    """A CausalModel that runs another one in tiles of TILE_ROWS rows. Wants FixedOrderAttention."""

    def __init__(self, model: CausalModel) -> None:
        self._model = model

    @property
    def vocab_size(self) -> int:
        """See CausalModel."""
        return self._model.vocab_size

    @property
    def max_positions(self) -> int | None:
        """See CausalModel."""
        return self._model.max_positions

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """See CausalModel."""
        return self._model.layers

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        """See CausalModel."""
        return self._model.attention_layers

    def forward(self, token_ids: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """See CausalModel.forward. `batch.on_layer` fires with the last tile: by then each layer
        holds the KV of all rows."""
        hidden: list[Tensor] = []
        for rows in _tiles(token_ids.shape[0]):
            ids, at = _padded(token_ids[rows]), _padded(positions[rows])
            last = rows.stop == token_ids.shape[0]
            tile = self._model.forward(ids, at, _part(batch, rows, last))
            hidden.append(tile[: rows.stop - rows.start])
        return torch.cat(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """See CausalModel.logits."""
        tiles = _tiles(hidden.shape[0])
        parts = [self._model.logits(_padded(hidden[rows])) for rows in tiles]
        counts = (rows.stop - rows.start for rows in _tiles(hidden.shape[0]))
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def add_adapter(self, adapter: Adapter) -> None:
        """Never: the loader refuses adapters first. Raises InternalError."""
        raise InternalError(f"adapter {adapter.name} in deterministic mode")


def refuse_changing_shapes(config: Mapping[str, Any], lora_modules: Sequence[str]) -> None:
    """Raise ConfigError for what makes products of as many rows as the batch happens to choose."""
    if any(config.get(key) for key in _EXPERT_KEYS):
        raise ConfigError(
            "deterministic: mixtures of experts are not served in this mode (an expert's rows are "
            "those that batch mates leave it)",
            field="deterministic",
        )
    if lora_modules:
        raise ConfigError(
            "deterministic: LoRA adapters are not served in this mode", field="deterministic"
        )


@torch.inference_mode()
def prove(model: FixedTiles, info: ModelInfo, device: torch.device) -> None:
    """Try whether a row's place in its tile, and its tile mates, matter here.

    Raises ConfigError if they do.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(info.vocab_size, (TILE_ROWS,), generator=generator).tolist()
    same = first_logits(model, info, device, [ids[0]] * TILE_ROWS)
    plain = first_logits(model, info, device, ids)
    shift = TILE_ROWS * 5 // 16
    turned = first_logits(model, info, device, ids[shift:] + ids[:shift])
    proofs = (
        torch.equal(same, same[:1].expand_as(same)),
        torch.equal(plain[0], same[0]),
        torch.equal(turned, plain.roll(-shift, 0)),
    )
    if not all(proofs):
        raise ConfigError(
            f"deterministic: on this machine, with {torch.get_num_threads()} threads, the result "
            "of a row depends on its place among others: try another --threads (a power of two) or "
            "--dtype bfloat16",
            field="deterministic",
        )


def first_logits(
    model: FixedTiles, info: ModelInfo, device: torch.device, ids: Sequence[int]
) -> Tensor:
    """Logits of sequences of one token each, computed in one step."""
    arena = KVArena(one_group(info.layers), len(ids), _PROOF_BLOCK, info.kv_dtype, device)
    attention = FixedOrderAttention(arena, model.attention_layers)
    chunks = [SequenceChunk(str(i), [token], 0, (HeldBlocks([i]),)) for i, token in enumerate(ids)]
    step = flatten(chunks, attention, _PROOF_BLOCK, device)
    return model.logits(model.forward(step.token_ids, step.positions, step.batch))


def _tiles(rows: int) -> Iterator[slice]:
    return (slice(at, min(at + TILE_ROWS, rows)) for at in range(0, rows, TILE_ROWS))


def _padded(x: Tensor) -> Tensor:
    """x [n, ...] -> [TILE_ROWS, ...], a copy at an address of its own, zeros behind."""
    padding = TILE_ROWS - x.shape[0]
    return functional.pad(x, (0, 0) * (x.dim() - 1) + (0, padding)) if padding else x.clone()


def _part(batch: Batch, rows: slice, last: bool) -> Batch:
    """The batch of some of its rows."""
    spans = list(batch.spans)
    kept: list[int] = []
    parts = []
    for index, span in enumerate(spans):
        first = max(span.first_row, rows.start)
        stop = min(span.first_row + span.num_rows, rows.stop)
        if first < stop:
            kept.append(index)
            start = span.start + first - span.first_row
            moved = first - rows.start
            parts.append(replace(span, first_row=moved, num_rows=stop - first, start=start))
    tables = [
        GroupTables(
            table.slots[rows],
            table.blocks[torch.tensor(kept, device=table.blocks.device)],
            tuple(table.first[index] for index in kept),
        )
        for table in batch.tables
    ]
    return replace(
        batch,
        spans=tuple(parts),
        tables=tuple(tables),
        on_layer=batch.on_layer if last else None,
        plans={},
    )
