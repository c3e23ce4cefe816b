"""Opens a checkpoint's tensors, widened if they are stored in a format of fewer bits.

config.json -> kinds.widened_kind -> the module of the format -> a TensorReader with the tensor
names of the unquantized checkpoint
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from baton.engine.checkpoint.bitsandbytes import widen_bits4, widen_bits8
from baton.engine.checkpoint.checkpoint import Checkpoint
from baton.engine.checkpoint.float4 import widen_float4
from baton.engine.checkpoint.float8 import widen_float8
from baton.engine.checkpoint.gguf.weights import gguf_tensors
from baton.engine.checkpoint.kinds import Kind, rounded_inputs, widened_kind
from baton.engine.checkpoint.quantized_checkpoint import IntegerLayout, layout_of
from baton.engine.checkpoint.stacked_experts import Stacking, unstack, unstack_rows
from baton.engine.checkpoint.stored import Readable, StoredTensor
from baton.engine.checkpoint.tensors import TensorReader, Widen
from baton.engine.kernels.cpu.quantized import integer_kernels_for
from baton.engine.kernels.gpu.support import float8_serves

_Format = Callable[[Mapping[str, Any], Mapping[str, StoredTensor]], Mapping[str, Readable]]
_FORMATS: Final[Mapping[Kind, _Format]] = {  # the formats of safetensors
    "fp8": widen_float8,
    "mxfp4": widen_float4,
    "nvfp4": widen_float4,
    "bitsandbytes 4-bit": widen_bits4,
    "bitsandbytes 8-bit": widen_bits8,
}
_DECODER: Final = "model."  # what the names of a decoder's tensors begin with


def open_tensors(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    *,
    prefix: str = "",
    unstacked: Stacking | None = None,
    kept: bool = False,
) -> TensorReader:
    """Open the checkpoint's tensors under the names of an unquantized checkpoint. Tensors of
    integer layouts keep the names they are stored by.

    `prefix`: only the tensors of the part of a model that it names are opened, by the names that
    they have in a checkpoint of that part alone: it is removed from the names, or replaced by
    "model." if it begins so; then the head is named without it. `unstacked`: how the experts of a
    layer are stored in one tensor; each gets tensors of its own. `kept`: the integers of a
    GGUF file can be read (TensorReader.kept), and 8-bit floats if the device multiplies them;
    stacked experts stay in MXFP4 if the kernels support it.

    Raises ModelRefused for a broken file and for tensors that do not fit their format.
    """
    config = checkpoint.config.get("quantization_config")
    kind = widened_kind(config)
    if kind == "gguf":
        (file,) = checkpoint.weight_files
        return TensorReader((), dtype, device, lambda _: gguf_tensors(file, integers=kept))
    if unstacked == "inputs first" and kind in (None, "mxfp4"):
        packed = kept and integer_kernels_for(dtype, device) is not None
        return TensorReader(
            checkpoint.weight_files, dtype, device, functools.partial(unstack, packed)
        )
    widen = None if kind is None else functools.partial(_FORMATS[kind], config or {})
    if kind == "fp8" and kept and float8_serves(device):
        widen = functools.partial(widen_float8, config or {}, kept=rounded_inputs(config or {}))
    if unstacked == "outputs first" and widen is None:
        widen = unstack_rows
    if prefix:
        widen = functools.partial(_within, prefix, widen)
    return TensorReader(checkpoint.weight_files, dtype, device, widen)


def _within(
    prefix: str, widen: Widen | None, stored: Mapping[str, StoredTensor]
) -> Mapping[str, Readable]:
    found = stored if widen is None else widen(stored)
    own = {n.removeprefix(prefix): each for n, each in found.items() if n.startswith(prefix)}
    if not prefix.startswith(_DECODER):
        return own
    outside = {name: each for name, each in found.items() if not name.startswith(_DECODER)}
    return {_DECODER + name: each for name, each in own.items()} | outside


def integer_layout(config: Mapping[str, Any] | None) -> IntegerLayout | None:
    """Return how integer weights are stored in the files; None for unquantized weights and for
    formats that are widened.

    Raises ModelRefused for other formats.
    """
    return None if config is None or widened_kind(config) is not None else layout_of(config)
