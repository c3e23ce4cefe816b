"""Which quantized checkpoints are widened while they are read, by their quantization_config alone,
and which 8-bit floats a GPU multiplies as they are.

A format that Baton does not multiply by itself is widened: the reader gives its tensors the names
and the values of an unquantized checkpoint, so no other code knows of the format. Scales of
activations and of KV are not read: activations stay as they are, and --kv-cache-dtype decides about
KV. Where a GPU multiplies 8-bit floats, activations are rounded, too (`rounded_inputs`). The lean
route keeps the integers of a GGUF file's products (gguf/blocks.py), unless it is asked to widen
them. No torch here, because `baton estimate` uses this too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from baton.protocol.errors import ModelRefused

Kind = Literal["fp8", "mxfp4", "nvfp4", "bitsandbytes 4-bit", "bitsandbytes 8-bit", "gguf"]
WIDENED_BITS: Final[Mapping[Kind, int]] = {  # of a weight, without its scales
    "fp8": 8, "mxfp4": 4, "nvfp4": 4, "bitsandbytes 4-bit": 4, "bitsandbytes 8-bit": 8, "gguf": 8,
}  # fmt: skip
# Bytes of a kept weight of each GGUF type, with its share of the scale and zero, which are float32.
GGUF_KEPT_BYTES: Final[Mapping[str, float]] = {
    "Q4_0": 0.625, "Q4_1": 0.75, "Q4_K": 0.75, "Q5_0": 1.125, "Q5_1": 1.25, "Q5_K": 1.25,
    "Q6_K": 1.25, "Q8_0": 1.125,
}  # fmt: skip
MXFP4_KEPT_BYTES: Final = 0.5625  # of a weight of gpt-oss's experts, whose scales are float16
FLOAT8_GROUP: Final = 128  # outputs, and inputs, of a block of 8-bit floats that products keep
_FLOAT8_BLOCKS: Final = ([FLOAT8_GROUP] * 2, "128x128")  # as configs spell it
_MODELOPT: Final[Mapping[str, Kind]] = {"FP8": "fp8", "NVFP4": "nvfp4"}


@dataclass(frozen=True, slots=True)
class Rounded:
    """How a checkpoint of 8-bit floats wants the inputs of its products rounded: by one scale that
    it states (`static`), or by each row's own, up to the magnitude `ceiling`. In products of blocks
    each group of inputs has its own instead."""

    static: bool = False
    ceiling: float | None = None


def rounded_inputs(config: Mapping[str, Any]) -> Rounded | None:
    """Return how the inputs of an fp8 checkpoint's products are rounded; None if they are not, or
    in several ways, or if weights have scales by group, in blocks of other sizes, or in blocks
    beside static scales of inputs. Such weights are widened on every device."""
    method, block = config.get("quant_method"), config.get("weight_block_size")
    if method == "compressed-tensors":
        groups = config.get("config_groups") or {}
        found = {_rounded_inputs(group) for group in groups.values()}
        return found.pop() if len(found) == 1 else None
    ceiling = config.get("activation_scale_ub") if method == "fbgemm_fp8" else None
    static = method == "modelopt" or config.get("activation_scheme") == "static"
    return Rounded(static, ceiling) if _multiplied(block, static) else None


def _rounded_inputs(group: Mapping[str, Any]) -> Rounded | None:
    weights, inputs = group.get("weights") or {}, group.get("input_activations") or {}
    if (inputs.get("num_bits"), inputs.get("type")) != (8, "float"):
        return None
    if weights.get("strategy") not in ("tensor", "channel", "block"):
        return None
    static = inputs.get("dynamic") is not True
    return Rounded(static) if _multiplied(weights.get("block_structure"), static) else None


def _multiplied(block: Any, static: bool) -> bool:
    """Whether products take weights in such blocks; None = in no blocks."""
    return not block or (block in _FLOAT8_BLOCKS and not static)


def widened_kind(config: Mapping[str, Any] | None) -> Kind | None:
    """Return the format that the weights of a `quantization_config` are widened from. None for
    unquantized weights, for integer formats, and for unknown methods (which `layout_of` refuses).

    Raises ModelRefused with the name of a variant that is not supported.
    """
    if config is None:
        return None
    find = _METHODS.get(str(config.get("quant_method")))
    return None if find is None else find(config)


def unstated_dtype(config: Mapping[str, Any]) -> str:
    """Return the dtype of a model whose config.json states none, and whose tensors show none
    (headers.py). gpt-oss is published so: experts in MXFP4, all other tensors in bfloat16."""
    quantized = config.get("quantization_config") or {}
    return "bfloat16" if quantized.get("quant_method") == "mxfp4" else "float32"


def _float8(config: Mapping[str, Any]) -> Kind:
    return "fp8"


def _microscaled(config: Mapping[str, Any]) -> Kind:
    return "mxfp4"


def _gguf(config: Mapping[str, Any]) -> Kind:
    return "gguf"


def _bitsandbytes(config: Mapping[str, Any]) -> Kind:
    if config.get("load_in_4bit") or config.get("_load_in_4bit"):
        return "bitsandbytes 4-bit"
    if config.get("load_in_8bit") or config.get("_load_in_8bit"):
        return "bitsandbytes 8-bit"
    raise unread("bitsandbytes checkpoints that say neither load_in_4bit nor load_in_8bit")


def _modelopt(config: Mapping[str, Any]) -> Kind:
    quantization = config.get("quantization") or config
    algorithm = str(quantization.get("quant_algo"))
    if algorithm not in _MODELOPT:
        raise unread(f"modelopt checkpoints of {algorithm} (only {', '.join(_MODELOPT)})")
    return _MODELOPT[algorithm]


def _compressed(config: Mapping[str, Any]) -> Kind | None:
    groups = config.get("config_groups") or {}
    weights = [group.get("weights") or {} for group in groups.values()]
    floats = [each for each in weights if each.get("type", "int") == "float"]
    if not floats:
        return None
    if len(floats) < len(weights):
        raise unread("compressed-tensors of integers and floats")
    sparsity = (config.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise unread(f"sparse checkpoints ({sparsity})")
    if not all(each.get("symmetric", True) for each in floats):
        raise unread("compressed-tensors of floats with zero points")
    kinds: set[Kind] = {_compressed_kind(each) for each in floats}
    if len(kinds) > 1:
        raise unread(f"compressed-tensors of {' and '.join(sorted(kinds))}")
    return kinds.pop()


def _compressed_kind(weights: Mapping[str, Any]) -> Kind:
    bits, group_size = weights.get("num_bits"), weights.get("group_size")
    if bits == 8:
        return "fp8"
    if bits == 4 and group_size in (16, 32):
        return "nvfp4" if group_size == 16 else "mxfp4"
    raise unread(f"compressed-tensors of {bits}-bit floats in groups of {group_size}")


def unread(what: str) -> ModelRefused:
    """Return the refusal of a kind of checkpoint."""
    return ModelRefused(f"{what} are not served: use the unquantized checkpoint", field="model")


_METHODS: Final[Mapping[str, Callable[[Mapping[str, Any]], Kind | None]]] = {
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed,
    "fbgemm_fp8": _float8,
    "fp8": _float8,
    "gguf": _gguf,
    "modelopt": _modelopt,
    "mxfp4": _microscaled,
}
