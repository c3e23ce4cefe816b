"""Weights as bitsandbytes stores them, widened.

    4 bits   weight uint8 (the first number of a byte in its high half), weight.quant_map [16],
             weight.absmax [blocks of the flat numbers], float32; if rounded twice: uint8, with
             nested_quant_map [256], nested_absmax per nested block, and an offset;
             weight.quant_state.bitsandbytes__nf4 (or fp4): JSON with shape and block sizes
    8 bits   weight int8 [out, in], SCB [out]: w = weight * SCB / 127

Source: bitsandbytes functional.py (QuantState, dequantize_4bit, int8_vectorwise_dequant).
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from baton.engine.checkpoint.stored import Readable, Slab, StoredTensor, WidenedTensor, refused

_STATE: Final = ".quant_state.bitsandbytes__"
_ONE_127TH: Final = 7.874015718698502e-3  # as bitsandbytes writes it


def widen_bits4(
    config: Mapping[str, Any], stored: Mapping[str, StoredTensor]
) -> dict[str, Readable]:
    """Return all tensors under the names of the unquantized checkpoint, 4-bit weights widened.
    Raises ModelRefused for a weight whose state does not fit."""
    states = {name.partition(_STATE)[0]: name for name in stored if _STATE in name}
    found: dict[str, Readable] = {}
    for name, tensor in stored.items():
        owner = name.partition(".weight.")[0] + ".weight"
        if name in states:
            found[name] = _bits4(name, stored, states[name])
        elif owner not in states or name == owner:
            found[name] = tensor
    return found


def widen_bits8(
    config: Mapping[str, Any], stored: Mapping[str, StoredTensor]
) -> dict[str, Readable]:
    """Return all tensors under the names of the unquantized checkpoint, int8 weights widened.
    Raises ModelRefused for weights without fitting scales."""
    found: dict[str, Readable] = {}
    for name, tensor in stored.items():
        if name.endswith((".SCB", ".weight_format")):
            continue
        if tensor.dtype != torch.int8:
            found[name] = tensor
            continue
        scale = stored.get(f"{name.removesuffix('weight')}SCB")
        if scale is None or len(tensor.shape) != 2 or math.prod(scale.shape) != tensor.shape[0]:
            raise refused(name, "there is no SCB beside it that fits")
        layout = stored.get(f"{name}_format")
        if layout is not None and bool(layout.read().any()):
            raise refused(name, "its layout is not by rows")
        open_slabs = functools.partial(_open_bits8, tensor, scale)
        found[name] = WidenedTensor(name, tensor.shape, (tensor, scale), open_slabs)
    return found


def _open_bits8(weight: StoredTensor, scale: StoredTensor) -> Slab:
    values, factors = weight.read(), scale.read().float().view(-1, 1)
    return lambda start, stop: values[start:stop] * factors[start:stop] * _ONE_127TH


@dataclass(frozen=True, slots=True)
class _State:
    """The content of the JSON that is stored beside a 4-bit weight."""

    shape: tuple[int, ...]
    block: int
    nested_block: int
    offset: float

    @property
    def blocks(self) -> int:
        return -(-math.prod(self.shape) // self.block)


def _bits4(name: str, stored: Mapping[str, StoredTensor], state_name: str) -> WidenedTensor:
    state = _state(name, stored[state_name])
    ends = ["absmax", "quant_map"]
    nested = f"{name}.nested_absmax" in stored
    if nested:
        ends += ["nested_absmax", "nested_quant_map"]
    parts = [stored[name]]
    for end in ends:
        part = stored.get(f"{name}.{end}")
        if part is None:
            raise refused(name, f"there is no {name}.{end}")
        parts.append(part)
    sizes = [math.prod(part.shape) for part in parts[1:]]
    expected = [state.blocks, 16]
    expected += [-(-state.blocks // state.nested_block), 256] if nested else []
    if sizes != expected or parts[0].num_bytes != -(-math.prod(state.shape) // 2):
        raise refused(name, f"its parts of sizes {sizes} do not fit its shape {state.shape}")

    def open_slabs() -> Slab:
        return functools.partial(
            _slab4, parts[0].read().view(-1).view(torch.uint8), parts[2].read().float(),
            _largest(name, parts, state), state,
        )  # fmt: skip

    return WidenedTensor(name, state.shape, tuple(parts), open_slabs)


def _state(name: str, stored: StoredTensor) -> _State:
    """Read the state of weight `name`. Raises ModelRefused if it is broken."""
    try:
        said = json.loads(bytes(stored.read().view(-1).view(torch.uint8).tolist()))
        shape = tuple(int(size) for size in said["shape"])
        block, nested = int(said["blocksize"]), int(said.get("nested_blocksize", 256))
        offset = float(said.get("nested_offset", 0.0))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise refused(name, f"its quant_state cannot be read ({error!r})") from error
    if len(shape) != 2 or min(*shape, block, nested) <= 0 or not math.isfinite(offset):
        raise refused(name, f"its quant_state is of shape {shape}, blocks of {block}")
    return _State(shape, block, nested, offset)


def _largest(name: str, parts: list[StoredTensor], state: _State) -> Tensor:
    """Return the factor of each block, float32. Raises ModelRefused if one is not finite."""
    largest = parts[1].read().view(-1)
    if len(parts) > 3:
        if largest.dtype != torch.uint8:
            raise refused(name, f"its absmax is of {largest.dtype}, though it is rounded twice")
        groups = torch.arange(len(largest)) // state.nested_block
        outer = parts[3].read().float().view(-1)[groups]
        largest = parts[4].read().float().view(-1)[largest.int()] * outer + state.offset
    largest = largest.float()
    if not bool(torch.isfinite(largest).all()):
        raise refused(name, "a scale of it is not finite")
    return largest


def _slab4(
    packed: Tensor, numbers: Tensor, largest: Tensor, state: _State, start: int, stop: int
) -> Tensor:
    width = state.shape[1]
    first, last = start * width, stop * width
    bytes_ = packed[first // 2 : (last + 1) // 2]
    halves = torch.stack((bytes_ >> 4, bytes_ & 15), -1).flatten()
    halves = halves[first % 2 : first % 2 + last - first]
    factors = largest[torch.arange(first, last) // state.block]
    return (numbers.view(-1)[halves.int()] * factors).view(-1, width)
