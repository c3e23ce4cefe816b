"""LoRA adapters in PEFT's format: how they are read, and applied to the rows that ask for them.

    y = W x  +  (alpha / r) B (A x)        for the rows of requests that name the adapter

All rows share the base weights, and adapters are never merged into them. So one step serves any mix
of adapters: its rows are grouped by adapter, and each group costs two narrow products per adapted
layer. An adapter that needs more (DoRA, embeddings, a head of its own, trained biases) is refused
with the name of what is not served. Source: LoRA (arXiv 2106.09685); PEFT's adapter_config.json and
adapter_model.safetensors.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.checkpoint.checkpoint import adapter_files
from baton.engine.checkpoint.tensors import TensorReader
from baton.engine.state.batch import Batch
from baton.protocol.adapters import adapter_id
from baton.protocol.errors import ModelRefused

_TENSOR: Final = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
# Keys of adapter_config.json that do not change the rule above: those of _IGNORED whatever their
# value, those of _PLAIN only with a value listed there. Other keys must have a value of _EMPTY.
_IGNORED: Final = {
    "base_model_name_or_path", "revision", "inference_mode", "lora_dropout", "task_type",
    "peft_version", "auto_mapping", "target_modules", "exclude_modules", "r", "lora_alpha",
    "rank_pattern", "alpha_pattern", "use_rslora", "fan_in_fan_out", "runtime_config",
    "layers_to_transform", "layers_pattern", "megatron_config", "megatron_core", "peft_type",
    "ensure_weight_tying", "qalora_group_size",
}  # fmt: skip
# PiSSA, OLoRA, CorDA and their like also change the base weights. PEFT converts such adapters when
# it saves them with `path_initial_model_for_weight_conversion`, and then writes true.
_PLAIN: Final[dict[str, tuple[Any, ...]]] = {
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal", "mica"),
}
_EMPTY: Final = (None, False, [], {}, "")


@dataclass(frozen=True, slots=True)
class LowRank:
    """One layer's delta: `down` [r, in] is A, `up` [out, r] is B times alpha / r."""

    down: Tensor
    up: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Return what is added to the layer's output, [n, out], for its input x [n, in]."""
        return functional.linear(functional.linear(x, self.down), self.up)


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter in memory. `deltas`: by module path, as the checkpoint spells paths."""

    name: str
    digest: str  # hex SHA-256 over its config and tensors
    deltas: Mapping[str, LowRank]

    @property
    def id(self) -> str:
        """The id by which requests on this node name the adapter."""
        return adapter_id(self.name, self.digest)

    @property
    def num_bytes(self) -> int:
        """Bytes of the adapter's weights."""
        return sum(delta.down.nbytes + delta.up.nbytes for delta in self.deltas.values())


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """Rows [n] int64 of a flattened step that want one adapter, by its id.

    `fixed_shapes`: the adapter computes all rows of the step, so that the shape of its products
    does not depend on how many rows want it (--deterministic). Otherwise it computes `rows` alone.
    """

    id: str
    rows: Tensor
    fixed_shapes: bool = False


def rows_by_adapter(batch: Batch, fixed_shapes: bool = False) -> tuple[AdapterRows, ...]:
    """Group the step's rows by adapter. Rows that want no adapter are in no group.

    `fixed_shapes`: as in AdapterRows.
    """
    rows: dict[str, list[int]] = {}
    for span in batch.spans:
        if span.adapter:
            first = span.first_row
            rows.setdefault(span.adapter, []).extend(range(first, first + span.num_rows))
    device = batch.tables[0].slots.device
    return tuple(
        AdapterRows(id_, torch.tensor(r).to(device), fixed_shapes) for id_, r in rows.items()
    )


def of_kept(groups: Sequence[AdapterRows], batch: Batch) -> Sequence[AdapterRows]:
    """Return `groups` by the rows that the layer keeps; see Batch.kept."""
    if batch.only is None or not groups:
        return groups
    return rows_by_adapter(batch.only.batch)


def apply_deltas(
    x: Tensor, y: Tensor, deltas: Mapping[str, LowRank], groups: Sequence[AdapterRows]
) -> Tensor:
    """Add each group's delta to its rows of y [T, out], given the layer's input x [T, in]; mutates
    y."""
    for group in groups:
        delta = deltas.get(group.id)
        if delta is not None:
            added = delta(x)[group.rows] if group.fixed_shapes else delta(x[group.rows])
            y.index_add_(0, group.rows, added.to(y.dtype))
    return y


def merge_parts(parts: Iterable[tuple[slice, LowRank]], num_outputs: int) -> LowRank:
    """Merge the deltas of a layer that stacks several projections of one input along its outputs.

    Each part comes with the outputs it adds to. The rank of the result is the sum of the parts'
    ranks.
    """
    held = list(parts)
    down = torch.cat([delta.down for _, delta in held])
    up = down.new_zeros(num_outputs, down.shape[0])
    at = 0
    for outputs, delta in held:
        rank = delta.down.shape[0]
        up[outputs, at : at + rank] = delta.up
        at += rank
    return LowRank(down, up)


def read_adapter(name: str, path: Path, dtype: torch.dtype, device: torch.device) -> Adapter:
    """Read the adapter in directory `path`. Raises ModelRefused if it cannot be served exactly."""
    config_path, weights = adapter_files(name, path)
    try:
        config = json.loads(config_path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelRefused(
            f"adapter {name}: cannot read {config_path}: {error}", field="lora_modules"
        ) from error
    _refuse(name, config)
    reader = TensorReader([weights], dtype, device)
    deltas = {
        module: _delta(name, module, sides, config, reader)
        for module, sides in sorted(_modules(name, reader.names).items())
    }
    total = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    with weights.open("rb") as file:
        total.update(hashlib.file_digest(file, "sha256").digest())
    return Adapter(name, total.hexdigest(), deltas)


def _refuse(name: str, config: Any) -> None:
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise ModelRefused(f"adapter {name} is not of PEFT's type LORA", field="lora_modules")
    for key, value in sorted(config.items()):
        if key not in _IGNORED and value not in _PLAIN.get(key, ()) and value not in _EMPTY:
            raise ModelRefused(
                f"adapter {name}: {key} = {value!r} is not served", field="lora_modules"
            )


def _modules(name: str, tensors: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return the tensors' names by module and side (A or B). Raises ModelRefused for other tensors,
    and for a module that lacks a side."""
    found: dict[str, dict[str, str]] = {}
    for tensor in tensors:
        match = _TENSOR.fullmatch(tensor)
        if match is None:
            raise ModelRefused(
                f"adapter {name}: tensor {tensor} is not served", field="lora_modules"
            )
        found.setdefault(match["module"], {})[match["side"]] = tensor
    for module, sides in found.items():
        if len(sides) != 2:
            raise ModelRefused(f"adapter {name}: {module} lacks A or B", field="lora_modules")
    if not found:
        raise ModelRefused(f"adapter {name} holds no tensors", field="lora_modules")
    return found


def _delta(
    name: str,
    module: str,
    sides: Mapping[str, str],
    config: Mapping[str, Any],
    reader: TensorReader,
) -> LowRank:
    down, up = reader.read(sides["A"]), reader.read(sides["B"])
    if down.dim() != 2 or up.dim() != 2 or down.shape[0] != up.shape[1]:
        raise ModelRefused(f"adapter {name}: {module} has A and B that do not fit", field="model")
    rank = _by_pattern(config.get("rank_pattern"), module, config.get("r"))
    alpha = _by_pattern(config.get("alpha_pattern"), module, config.get("lora_alpha"))
    if rank != down.shape[0] or alpha is None:
        raise ModelRefused(
            f"adapter {name}: {module} has rank {down.shape[0]}, its config says {rank}",
            field="lora_modules",
        )
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return LowRank(down, up * scale)


def _by_pattern(patterns: Mapping[str, float] | None, module: str, default: Any) -> Any:
    """Return the value of the first pattern (a regular expression) that matches the end of the
    module's path, as PEFT does; `default` if none matches."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default
