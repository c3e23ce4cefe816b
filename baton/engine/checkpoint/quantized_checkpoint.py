"""Quantized checkpoints: reads a module's integer weights from the tensors that each tool writes.

`quantization_config` of config.json names the tool. A setting that is not fully understood is
refused by name. Layouts (q = unsigned integer, "in / 8" = eight 4-bit numbers in an int32, lowest
bits first; `in` inputs, `out` outputs, `G` groups of inputs):

    compressed-tensors  int-quantized   weight int8 [out, in], weight_scale [out, G]
                        pack-quantized  weight_packed int32 [out, in / 8], q - 2^(bits - 1);
                                        weight_scale [out, G], weight_shape [2];
                                        asymmetric: weight_zero_point, packed along out
    gptq                qweight int32 [in / 8, out], scales [G, out], qzeros [G, out / 8] (stored
                        minus 1 unless checkpoint_format is gptq_v2), g_idx [in]: each input's group
    awq (gemm)          qweight int32 [in, out / 8], scales [G, out], qzeros [G, out / 8]; the
                        nibbles of a word hold outputs 0 2 4 6 1 3 5 7

Source: compressed_tensors/compressors/quantized_compressors/{int,pack}_quantized.py, AutoGPTQ
qlinear_cuda_old.py, GPTQModel utils/model.py (v1 against v2), AutoAWQ awq/utils/packing_utils.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

import torch
from torch import Tensor

from baton.engine.quantization.int_weight import IntWeight
from baton.protocol.errors import ModelRefused

AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)  # output in each nibble of a word, lowest first
_COMPRESSED_FORMATS: Final = ("int-quantized", "pack-quantized", "naive-quantized")


class StoredTensors(Protocol):
    """The part of tensors.TensorReader that layouts use."""

    @property
    def names(self) -> frozenset[str]: ...
    def read(self, *names: str) -> Tensor: ...
    def read_as_stored(self, name: str) -> Tensor: ...


class Layout(Protocol):
    """How one tool stores the weight of a module."""

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensors that only a quantized module has. Modules are recognized by the
        first."""
        ...

    def weight(self, module: str, stored: StoredTensors) -> IntWeight | Tensor:
        """Read the integer weight of `module`; a floating-point weight if the integers cannot be
        used. Raises ModelRefused for tensors that do not fit the layout."""
        ...


class IntegerLayout(Layout, Protocol):
    """A layout of integers, which a `quantization_config` describes."""

    def group_size(self, module: str) -> int | None:
        """How many inputs of `module` share a scale; None for a module that the config leaves
        plain, and for scales of whole rows."""
        ...


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """One scheme of compressed-tensors and the modules (`targets`) that use it."""

    targets: tuple[str, ...]
    bits: Literal[4, 8]
    int8_activations: bool
    group_size: int | None = None

    def covers(self, module: str) -> bool:
        return any(_matches(target, module) for target in self.targets)


@dataclass(frozen=True, slots=True)
class CompressedLayout:
    """The layouts of compressed-tensors: one scheme for each group of modules."""

    groups: tuple[TensorGroup, ...]
    ignored: tuple[str, ...] = ()
    tensors: tuple[str, ...] = (
        "weight_scale", "weight_packed", "weight_shape", "weight_zero_point", "weight_g_idx",
    )  # fmt: skip

    def group_size(self, module: str) -> int | None:
        """See IntegerLayout.group_size."""
        group = self._group(module)
        if group is None or any(_matches(each, module) for each in self.ignored):
            return None
        return group.group_size

    def weight(self, module: str, stored: StoredTensors) -> IntWeight:
        """See Layout.weight."""
        group = self._group(module)
        if group is None:
            raise ModelRefused(f"{module} is quantized, but no group names it", field="model")
        scales = stored.read_as_stored(f"{module}.weight_scale").float()
        packed = f"{module}.weight_packed" in stored.names
        if packed:
            words = stored.read_as_stored(f"{module}.weight_packed")
            outputs, inputs = stored.read_as_stored(f"{module}.weight_shape").tolist()
            values = unpack(words, group.bits)[:, :inputs] - (1 << group.bits - 1)
            values = values.to(torch.int8)
        else:
            values = stored.read_as_stored(f"{module}.weight")
            outputs = values.shape[0]
        if values.dtype != torch.int8:
            raise ModelRefused(f"{module}: weights stored as {values.dtype}", field="model")
        refuse_uneven(module, values.shape[1], group.group_size)
        zeros = self._zeros(module, stored, group.bits, outputs) if packed else None
        if not packed and f"{module}.weight_zero_point" in stored.names:
            zeros = _or_none(stored.read_as_stored(f"{module}.weight_zero_point").float())
        scales = scales.reshape(-1, 1) if scales.dim() < 2 else scales
        order = _order_of(module, stored, f"{module}.weight_g_idx", scales.shape[1])
        values = values if order is None else values[:, order]
        return checked(
            module,
            IntWeight(
                group.bits,
                values.contiguous(),
                scales.expand(outputs, -1).contiguous(),
                None if zeros is None else zeros.expand(outputs, -1).contiguous(),
                order,
                group.int8_activations,
            ),
        )

    def _group(self, module: str) -> TensorGroup | None:
        return next((group for group in self.groups if group.covers(module)), None)

    def _zeros(self, module: str, stored: StoredTensors, bits: int, outputs: int) -> Tensor | None:
        name = f"{module}.weight_zero_point"
        if name not in stored.names:
            return None
        words = stored.read_as_stored(name)  # packed along the outputs
        zeros = unpack(words.t(), bits)[:, :outputs].t() - (1 << bits - 1)
        return _or_none(zeros.float())


@dataclass(frozen=True, slots=True)
class GptqLayout:
    """The layout of GPTQ: [in, out], packed along the inputs."""

    bits: Literal[4, 8]
    zero_offset: int  # is added to the stored zeros
    groups_of: int | None = None
    products: tuple[str, ...] = ()  # what names of modules end with; () = all
    tensors: tuple[str, ...] = ("qweight", "qzeros", "scales", "g_idx")

    def group_size(self, module: str) -> int | None:
        """See IntegerLayout.group_size."""
        chosen = not self.products or f".{module}".endswith(self.products)
        return self.groups_of if chosen else None

    def weight(self, module: str, stored: StoredTensors) -> IntWeight:
        """See Layout.weight."""
        middle = 1 << self.bits - 1
        values = unpack(stored.read_as_stored(f"{module}.qweight").t(), self.bits)
        refuse_uneven(module, values.shape[1], self.groups_of)
        scales = stored.read_as_stored(f"{module}.scales").float().t().contiguous()
        zeros = unpack(stored.read_as_stored(f"{module}.qzeros"), self.bits).t()
        # Stored minus one, modulo 2^bits: a zero of 0 comes as all ones.
        zeros = (zeros + self.zero_offset) & (1 << self.bits) - 1
        order = _order_of(module, stored, f"{module}.g_idx", scales.shape[1])
        values = (values - middle).to(torch.int8)
        values = values if order is None else values[:, order]
        weight = IntWeight(
            self.bits, values.contiguous(), scales,
            _or_none((zeros - middle).float().contiguous()), order,
        )  # fmt: skip
        return checked(module, weight)


@dataclass(frozen=True, slots=True)
class AwqLayout:
    """The layout of AWQ, version gemm: [in, out], packed along the outputs in AWQ_ORDER."""

    groups_of: int | None = None
    plain: tuple[str, ...] = ()  # parts of the names of modules that are stored plain
    tensors: tuple[str, ...] = ("qweight", "qzeros", "scales")

    def group_size(self, module: str) -> int | None:
        """See IntegerLayout.group_size."""
        return None if any(part in module for part in self.plain) else self.groups_of

    def weight(self, module: str, stored: StoredTensors) -> IntWeight:
        """See Layout.weight."""
        values = _unpack_awq(stored.read_as_stored(f"{module}.qweight"))
        refuse_uneven(module, values.shape[0], self.groups_of)
        zeros = _unpack_awq(stored.read_as_stored(f"{module}.qzeros"))
        scales = stored.read_as_stored(f"{module}.scales").float()
        weight = IntWeight(
            4,
            (values - 8).to(torch.int8).t().contiguous(),
            scales.t().contiguous(),
            _or_none((zeros - 8).float().t().contiguous()),
        )
        return checked(module, weight)


def layout_of(config: Mapping[str, Any]) -> IntegerLayout:
    """Return the layout that a `quantization_config` describes.

    Raises ModelRefused with the name of what is not served.
    """
    method = str(config.get("quant_method", "unknown"))
    readers = {"compressed-tensors": _compressed, "gptq": _gptq, "awq": _awq}
    if method not in readers:
        raise ModelRefused(
            f"checkpoints quantized by {method} are not served (only {', '.join(readers)}); "
            "use the unquantized one, with --quantization if it is too large",
            field="model",
        )
    return readers[method](config)


def unpack(words: Tensor, bits: int) -> Tensor:
    """Unpack int32 words [rows, words], lowest bits first, to unsigned numbers int32 [rows,
    words * 32 / bits]."""
    shifts = torch.arange(0, 32, bits, device=words.device, dtype=torch.int32)
    return (words[:, :, None] >> shifts & (1 << bits) - 1).flatten(1)


def _unpack_awq(words: Tensor) -> Tensor:
    """Unpack AWQ's int32 words [rows, out / 8] to numbers [rows, out]."""
    numbers = unpack(words, 4).unflatten(1, (-1, len(AWQ_ORDER)))
    place = torch.tensor(AWQ_ORDER, device=words.device).argsort()  # nibble that holds each output
    return numbers[:, :, place].flatten(1)


def _compressed(config: Mapping[str, Any]) -> IntegerLayout:
    form = config.get("format")
    groups = config.get("config_groups") or {}
    # "mixed-precision" is a format per group.
    forms = {group.get("format") or form for group in groups.values()} or {form}
    unknown = sorted(str(form) for form in forms if form not in _COMPRESSED_FORMATS)
    if unknown:
        raise _refused(f"compressed-tensors of format {unknown[0]}")
    if config.get("kv_cache_scheme"):
        raise _refused("compressed-tensors with a kv_cache_scheme")
    sparsity = (config.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise _refused(f"sparse checkpoints ({sparsity})")
    if not groups:
        raise _refused("compressed-tensors without config_groups")
    found = tuple(_group(name, group) for name, group in sorted(groups.items()))
    return CompressedLayout(found, tuple(config.get("ignore") or ()))


def _group(name: str, group: Mapping[str, Any]) -> TensorGroup:
    weights, inputs = group.get("weights") or {}, group.get("input_activations")
    if group.get("output_activations"):
        raise _refused(f"compressed-tensors {name}: quantized outputs")
    kind, strategy = weights.get("type", "int"), weights.get("strategy")
    if kind != "int" or strategy not in ("tensor", "channel", "group"):
        raise _refused(f"compressed-tensors {name}: weights of type {kind} by {strategy}")
    bits = _bits(weights.get("num_bits", 8), "compressed-tensors")
    if inputs is not None:
        asked = (inputs.get("num_bits"), inputs.get("type", "int"), inputs.get("strategy"))
        if asked != (8, "int", "token") or inputs.get("dynamic") is not True:
            raise _refused(
                f"compressed-tensors {name}: activations {asked}, dynamic={inputs.get('dynamic')} "
                "(only dynamic int8 per token)"
            )
        symmetric = inputs.get("symmetric", True) and weights.get("symmetric", True)
        if not symmetric or (bits == 8 and strategy == "group"):
            raise _refused(
                f"compressed-tensors {name}: int8 activations beside anything but symmetric "
                "integers, those of 8 bits with a scale per channel"
            )
    size = _group_size(weights) if strategy == "group" else None
    return TensorGroup(tuple(group.get("targets") or ()), bits, inputs is not None, size)


def _gptq(config: Mapping[str, Any]) -> IntegerLayout:
    form = config.get("checkpoint_format") or "gptq"
    if form not in ("gptq", "gptq_v2"):
        raise _refused(f"GPTQ checkpoints of format {form}")
    if config.get("dynamic"):
        raise _refused("GPTQ checkpoints with dynamic (mixed) settings")
    offset = 1 if form == "gptq" else 0
    named = config.get("modules_in_block_to_quantize") or ()
    flat = [each for part in named for each in ([part] if isinstance(part, str) else part)]
    products = tuple(f".{each}" for each in flat)
    return GptqLayout(_bits(config.get("bits"), "gptq"), offset, _group_size(config), products)


def _awq(config: Mapping[str, Any]) -> IntegerLayout:
    version = str(config.get("version", "gemm")).lower()
    if version != "gemm" or config.get("bits", 4) != 4 or not config.get("zero_point", True):
        raise ModelRefused(
            f"AWQ checkpoints of version {version}, {config.get('bits', 4)} bits, zero_point="
            f"{config.get('zero_point', True)} are not served: only gemm, 4 bits, zero points",
            field="model",
        )
    return AwqLayout(_group_size(config), tuple(config.get("modules_to_not_convert") or ()))


def _group_size(config: Mapping[str, Any]) -> int | None:
    """Return the inputs of a group; None if a scale is for a whole row (-1), or no size is
    stated."""
    size = config.get("group_size") or config.get("q_group_size")
    return size if isinstance(size, int) and size > 0 else None


def _bits(bits: Any, tool: str) -> Literal[4, 8]:
    if bits == 4:
        return 4
    if bits == 8:
        return 8
    raise _refused(f"{tool} weights of {bits} bits (only 4 or 8)")


def refuse_uneven(module: str, inputs: int, group_size: int | None) -> None:
    """Raise ModelRefused if the inputs of `module` make no whole number of groups. Fewer inputs
    than a group has are one group."""
    if group_size is not None and inputs > group_size and inputs % group_size:
        raise ModelRefused(
            f"{module}: groups of {group_size} do not divide its {inputs} inputs", field="model"
        )


def _refused(what: str) -> ModelRefused:
    return ModelRefused(f"{what} are not served: use the unquantized checkpoint", field="model")


def _matches(target: str, module: str) -> bool:
    if target == "Linear":
        return True
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), module) is not None
    return target == module


def _order_of(module: str, stored: StoredTensors, name: str, num_groups: int) -> Tensor | None:
    """Return the indices of the inputs sorted by group; None if the inputs are in that order
    already.

    Raises ModelRefused for groups of unequal sizes.
    """
    if name not in stored.names:
        return None
    groups = stored.read_as_stored(name).long()
    if bool((groups < 0).any()):
        return None  # compressed-tensors writes -1 where the order is the inputs' own
    sizes = torch.bincount(groups, minlength=num_groups)
    if sizes.numel() != num_groups or bool((sizes != sizes[0]).any()):
        raise ModelRefused(f"{module}: its groups differ in size (g_idx)", field="model")
    if bool((groups.diff() >= 0).all()):
        return None
    return groups.argsort(stable=True)


def _or_none(zeros: Tensor) -> Tensor | None:
    return zeros if bool(zeros.any()) else None


def checked(module: str, weight: IntWeight) -> IntWeight:
    """Return `weight`. Raises ModelRefused if its scales or zeros do not fit the integers."""
    outputs, inputs = weight.values.shape
    fits = weight.scales.shape[0] == outputs and inputs % weight.num_groups == 0
    if not fits or (weight.zeros is not None and weight.zeros.shape != weight.scales.shape):
        raise ModelRefused(
            f"{module}: scales {tuple(weight.scales.shape)} do not fit weights {(outputs, inputs)}",
            field="model",
        )
    if weight.zeros is not None and weight.zeros.abs().max() > 1 << weight.bits - 1:
        raise ModelRefused(f"{module}: zeros beyond {weight.bits} bits", field="model")
    return weight


def widened(
    layout: Layout,
    module: str,
    stored: StoredTensors,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> Tensor:
    """Return the weight [out, in] of `module` on `device`, widened to `dtype`, by default float32.
    Raises ModelRefused as Layout.weight does."""
    weight, dtype = layout.weight(module, stored), dtype or torch.float32
    plain = weight.to(dtype) if isinstance(weight, Tensor) else weight.dequantized(dtype)
    return plain.to(device)


def module_names(names: Sequence[str] | frozenset[str], layout: Layout) -> frozenset[str]:
    """Return the paths of the modules whose weights are stored quantized."""
    proof = "." + layout.tensors[0]
    return frozenset(name.removesuffix(proof) for name in names if name.endswith(proof))
