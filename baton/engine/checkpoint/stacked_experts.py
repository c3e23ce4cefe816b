"""Splits stacked experts, so that each expert has tensors of its own, as if stored by itself.

    PREFIX.experts.gate_up_proj       [E, in, 2 * I]    gate and up alternate along the outputs
    PREFIX.experts.gate_up_proj_bias  [E, 2 * I]
    PREFIX.experts.down_proj          [E, I, out]       its bias likewise
    ..._blocks, ..._scales            in place of a weight: MXFP4, [E, out, G, 16] and [E, out, G]

    -> PREFIX.experts.7.gate_proj.weight [I, in], .bias [I]; up_proj, down_proj likewise

    PREFIX.experts.gate_up_proj       [E, 2 * I, in]    gate, then up; the outputs come first
    PREFIX.experts.down_proj          [E, out, I]

    -> the same, without biases

So the code for ranks, rounding and sharing sees ordinary modules. Reading a tensor reads only the
bytes of its expert. Nothing in a file tells the two layouts apart: the family does.
Sources: transformers' GptOssExperts (inputs first), Qwen3_5MoeExperts (outputs first).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Final, Literal

from torch import Tensor

from baton.engine.checkpoint.float4 import expert_matrix
from baton.engine.checkpoint.stored import Readable, Slab, StoredTensor, WidenedTensor, refused

Stacking = Literal["inputs first", "outputs first"]
_STACKED: Final = re.compile(
    r"(?P<experts>.+\.experts\.)(?P<name>gate_up_proj|down_proj)(?P<kind>|_bias|_blocks|_scales)"
)
_PARTS: Final = {
    "gate_up_proj": {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)},
    "down_proj": {"down_proj": slice(None)},
}


def unstack(packed: bool, stored: Mapping[str, StoredTensor]) -> dict[str, Readable]:
    """Return all tensors, stacked experts split by expert. `packed`: MXFP4 stays as it is stored,
    as `weight_blocks` and `weight_scales` (float4.Float4Layout). Raises ModelRefused for stacked
    tensors of other shapes."""
    found: dict[str, Readable] = {}
    for name, tensor in stored.items():
        match = _STACKED.fullmatch(name)
        if match is None:
            found[name] = tensor
        elif match["kind"] != "_scales":
            scales = stored.get(name.removesuffix("_blocks") + "_scales")
            found.update(_experts(match, tensor, scales, packed))
    return found


def unstack_rows(stored: Mapping[str, StoredTensor]) -> dict[str, Readable]:
    """Return all tensors, those of stacked experts whose outputs come first split by expert. Raises
    ModelRefused for stacked tensors of other shapes."""
    found: dict[str, Readable] = {}
    for name, tensor in stored.items():
        match = _STACKED.fullmatch(name)
        if match is None:
            found[name] = tensor
            continue
        parts = ("gate_proj", "up_proj") if match["name"] == "gate_up_proj" else ("down_proj",)
        if match["kind"] or len(tensor.shape) != 3 or tensor.shape[1] % len(parts):
            raise refused(name, f"shape {tensor.shape}")
        outputs = tensor.shape[1] // len(parts)
        step = outputs * tensor.shape[2] * tensor.dtype.itemsize
        for expert in range(tensor.shape[0]):
            for index, part in enumerate(parts):
                start = tensor.start + (expert * len(parts) + index) * step
                shape = (outputs, tensor.shape[2])
                one = StoredTensor(tensor.path, tensor.dtype, shape, start)
                found[f"{match['experts']}{expert}.{part}.weight"] = one
    return found


def _experts(
    match: re.Match[str], stacked: StoredTensor, scales: StoredTensor | None, packed: bool
) -> Iterator[tuple[str, Readable]]:
    """Yield the names and tensors of all experts of one stacked tensor. `scales`: the tensor of
    scales, if `stacked` holds blocks of MXFP4."""
    kind = match["kind"]
    if len(stacked.shape) != {"": 3, "_bias": 2, "_blocks": 4}[kind]:
        raise refused(match[0], f"shape {stacked.shape}")
    if kind == "_blocks" and (scales is None or scales.shape != stacked.shape[:-1]):
        raise refused(match[0], f"scales {scales and scales.shape} for blocks {stacked.shape}")
    for expert in range(stacked.shape[0]):
        one = _one(stacked, expert)
        for part, rows in _PARTS[match["name"]].items():
            module = f"{match['experts']}{expert}.{part}"
            if kind == "_bias":
                yield f"{module}.bias", _rows(f"{module}.bias", one, rows)
            elif kind == "_blocks" and scales is not None:
                name, its = f"{module}.weight", _one(scales, expert)
                if packed:
                    yield f"{name}_blocks", _lines(f"{name}_blocks", one, rows)
                    yield f"{name}_scales", _lines(f"{name}_scales", its, rows)
                else:
                    yield name, expert_matrix(name, one, its, rows)
            else:
                yield f"{module}.weight", _rows(f"{module}.weight", one, rows)


def _one(stacked: StoredTensor, expert: int) -> StoredTensor:
    """Return the part of a stacked tensor that belongs to one expert. Its bytes are contiguous."""
    shape = stacked.shape[1:]
    start = stacked.start + expert * math.prod(shape) * stacked.dtype.itemsize
    return StoredTensor(stacked.path, stacked.dtype, shape, start)


def _lines(name: str, stored: StoredTensor, rows: slice) -> WidenedTensor:
    """Return the outputs `rows` of one expert's tensor [out, ...], in its own dtype."""
    count = len(range(stored.shape[0])[rows])

    def open_slabs() -> Slab:
        outputs = stored.read()[rows]
        return lambda start, stop: outputs[start:stop]

    return WidenedTensor(name, (count, *stored.shape[1:]), (stored,), open_slabs, stored.dtype)


def _rows(name: str, stored: StoredTensor, rows: slice) -> WidenedTensor:
    """Return the outputs `rows` of one expert's weight [in, out], transposed: [outputs, in]; of a
    bias [out] -> [outputs]."""
    count = len(range(stored.shape[-1])[rows])

    def open_slabs() -> Slab:
        outputs: Tensor = stored.read().t()[rows]
        return lambda start, stop: outputs[start:stop]

    return WidenedTensor(name, (count, *stored.shape[:-1]), (stored,), open_slabs, stored.dtype)
