"""A decode step of a dense decoder in one compiled call (step.h): its constants, and the call.

`StepModel` holds pointers into a model's weights, `StepPools` into a pool. Each is made once and
keeps alive what it points to. Not here: which steps may use it (models/compiled_step.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from baton.engine.kernels.cpu.delta_rule import CompiledDeltaRule
from baton.engine.kernels.cpu.gates import NO_CHOICE, ChoiceFields, ChoiceRule
from baton.engine.kernels.cpu.library import CpuKernels, DecodeLayer, HeadNorms, NormRule
from baton.engine.kernels.cpu.quantized import PackedInt8, PackedIntegers
from baton.engine.kernels.delta_rule import DeltaSizes
from baton.engine.kernels.rope import PairRotation, Rotation

_POINTER = ctypes.c_void_p
_SIZE = ctypes.c_int64


class _StepLinear(ctypes.Structure):
    """StepLinear of step_integers.h."""

    _fields_ = tuple((name, _POINTER) for name in ("panels", "bias", "integers"))


class _StepDelta(ctypes.Structure):
    """StepDelta of step.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("taps", "decay", "step_bias", "norm")),
        ("epsilon", ctypes.c_float),
    )


class _StepMixture(ctypes.Structure):
    """StepMixture of step.h."""

    _fields_ = tuple(
        (name, _POINTER) for name in ("router", "bias", "gate_ups", "downs", "shared_gate")
    )


class _StepLayer(ctypes.Structure):
    """StepLayer of step.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("input_norm", "mlp_norm", "query_norm", "key_norm")),
        *((name, _POINTER) for name in ("attention_output_norm", "mlp_output_norm")),
        ("linears", _StepLinear * 4),  # qkv, output, gate_up, down
        ("rotation", _SIZE),
        ("inner", _SIZE),
        *((name, _POINTER) for name in ("delta", "mixture")),
    )


class _StepRotation(ctypes.Structure):
    """step.h's StepRotation."""

    _fields_ = (("cos", _POINTER), ("sin", _POINTER))


class _StepIntegers(ctypes.Structure):
    """StepIntegers of step_integers.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("panels", "scales", "extra")),
        *((name, _SIZE) for name in ("groups", "bits", "has_zeros", "outputs", "stride")),
        ("next", _POINTER),
    )


class _StepPool(ctypes.Structure):
    """StepPool of step.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("keys", "values", "sinks")),
        *((name, _SIZE) for name in ("key_block", "key_token", "key_head")),
        *((name, _SIZE) for name in ("value_block", "value_token", "value_head")),
        *((name, _SIZE) for name in ("window", "group")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    )


class _StepState(ctypes.Structure):
    """StepState of step.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("conv", "matrices")),
        *((name, _SIZE) for name in ("conv_stride", "matrix_stride")),
    )


class _StepTable(ctypes.Structure):
    """StepTable of step.h."""

    _fields_ = (*((name, _POINTER) for name in ("slots", "blocks", "first")), ("width", _SIZE))


class _StepArgs(ctypes.Structure):
    """StepArgs of step.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("layers", "pools", "states", "tables", "final_norm")),
        ("rotations", _StepRotation * 2),
        *((name, _POINTER) for name in ("positions", "slots", "begins")),
        *((name, _POINTER) for name in ("residual", "out", "scratch", "expert_scratch")),
        *((name, _SIZE) for name in ("num_layers", "rows", "hidden", "inner")),
        *((name, _SIZE) for name in ("heads", "kv_heads", "dim", "block_size")),
        *((name, _SIZE) for name in ("rotated", "neighbours", "gelu", "gated")),
        *((name, _SIZE) for name in ("key_heads", "value_heads", "key_dim", "value_dim", "taps")),
        ("expert_inner", _SIZE),
        ("choice", ChoiceFields),
        ("norms", NormRule),
    )


@dataclass(frozen=True, slots=True)
class StepLinear:
    """The weights of a product, in bfloat16 (CpuKernels.pack) or integers, and its bias.

    Several PackedIntegers have outputs side by side and differ in format; experts have one. The
    bias is [outputs] bfloat16, or None.
    """

    weights: Tensor | PackedInt8 | tuple[PackedIntegers, ...]
    bias: Tensor | None


class StepLinears:
    """The weights of several products as C structs, one StepLinear after the other at `address`.
    None stands where a layer has no such product.
    """

    def __init__(self, linears: Sequence[StepLinear | None]) -> None:
        self._kept = tuple(linears)
        self._integers = [None if each is None else _integers(each.weights) for each in linears]
        self.array = (_StepLinear * len(linears))(*map(self._pointers, linears, self._integers))
        self.address = ctypes.addressof(self.array)

    @staticmethod
    def _pointers(
        linear: StepLinear | None, integers: ctypes.Array[_StepIntegers] | None
    ) -> _StepLinear:
        if linear is None:
            return _StepLinear()
        weights, bias = linear.weights, linear.bias
        return _StepLinear(
            weights.data_ptr() if isinstance(weights, Tensor) else None,
            None if bias is None else bias.data_ptr(),
            ctypes.addressof(integers) if integers else None,
        )


@dataclass(frozen=True, slots=True)
class StepExperts:
    """A mixture's weights: the router's panels, the bias of its choice [E] float32, what
    ExpertKernels hold, and the gate [H] of the expert that all rows share. `inner`: of an expert.
    """

    router: Tensor
    bias: Tensor | None
    gate_ups: StepLinears
    downs: StepLinears
    inner: int
    rule: ChoiceRule
    shared_gate: Tensor | None = None


@dataclass(frozen=True, slots=True)
class StepLayer:
    """Weights of a layer; norms [hidden] bfloat16. `rotation`: which of the step's it takes.

    `delta`: linear attention's weights, whose inputs `qkv` makes; None = attention over heads.
    `gate_up` and `down`, of `inner` gates, are the MLP's; in a mixture, which has `experts`, those
    of the expert that all rows share, or None.
    """

    input_norm: Tensor
    qkv: StepLinear
    head_norms: HeadNorms | None
    output: StepLinear
    mlp_norm: Tensor
    gate_up: StepLinear | None
    down: StepLinear | None
    inner: int
    attention_output_norm: Tensor | None = None
    mlp_output_norm: Tensor | None = None
    rotation: int = 0
    delta: CompiledDeltaRule | None = None
    experts: StepExperts | None = None


NO_DELTA: Final = DeltaSizes(0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Sizes of a decoder, and what all its layers do: `hidden` and `inner` (the most gates of a
    layer) multiples of 16, `dim` of 32. `gelu`: gates are GELU's. `gated`: each query head has a
    gate behind it. `delta`: of the layers with linear attention. `choice`, `expert_inner`: of
    mixtures."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    dim: int
    epsilon: float
    norm_offset: float = 0.0
    gelu: bool = False
    gated: bool = False
    delta: DeltaSizes = NO_DELTA
    choice: ChoiceRule = NO_CHOICE
    expert_inner: int = 0

    @property
    def scratch(self) -> int:
        """Return how many numbers of scratch space a row needs."""
        attended = self.heads * self.dim
        turned = attended + 2 * self.kv_heads * self.dim
        gates = attended if self.gated else 0
        wide = max(turned + gates, 2 * self.inner, self.delta.inputs, 2 * self.choice.experts)
        narrow = max(attended, self.inner, self.delta.values)
        return wide + narrow + self.hidden + (turned if self.gated else 0)

    @property
    def expert_scratch(self) -> int:
        """Return how many numbers of scratch space the experts of a row need."""
        return self.choice.per_token * (2 * self.hidden + 3 * self.expert_inner)


@dataclass(frozen=True, slots=True)
class StepTable:
    """Where a layer group's KV of a step lies, all int64: slots [T], blocks [T, W], first [T]."""

    slots: Tensor
    blocks: Tensor
    first: Tensor


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step of T rows, one new token each: residual [T, hidden] bfloat16, which is overwritten,
    one or two rotations in bfloat16, alike but for their numbers, positions [T] int64, a table per
    layer group. With linear attention int64 [T]: the slot of each row's state, and 1 where a row is
    a sequence's first."""

    residual: Tensor
    rotations: Sequence[Rotation]
    positions: Tensor
    tables: Sequence[StepTable]
    slots: Tensor | None = None
    begins: Tensor | None = None


class StepPools:
    """The pool as the compiled step uses it: pointers to each layer's keys and values."""

    def __init__(self, layers: Mapping[int, DecodeLayer], group_of: Sequence[int]) -> None:
        """Take the layers that attend, all of one shape, by their index, and in `group_of` the
        layer group of each layer."""
        _, self.block_size, self.kv_heads, self.dim = next(iter(layers.values())).keys.shape
        self._kept = dict(layers)
        self.pointers = (_StepPool * len(group_of))()
        for index, layer in layers.items():
            self.pointers[index] = _StepPool(
                layer.keys.data_ptr(), layer.values.data_ptr(),
                None if layer.sinks is None else layer.sinks.data_ptr(),
                *layer.keys.stride()[:3], *layer.values.stride()[:3],
                layer.window, group_of[index], layer.scale, layer.softcap,
            )  # fmt: skip

    @staticmethod
    def suit(layers: Sequence[DecodeLayer | None]) -> bool:
        """Whether all layers that attend are bfloat16 and of one shape, with keys as long as
        values."""
        shapes = {(x.keys.shape[1:], x.values.shape[1:]) for x in layers if x is not None}
        plain = all(x is not None and x.keys.dtype == torch.bfloat16 for x in layers)
        return plain and len(shapes) == 1 and all(keys == values for keys, values in shapes)


class StepStates:
    """The recurrent states as the compiled step uses them: pointers to each layer's part."""

    def __init__(self, layers: Mapping[int, tuple[Tensor, Tensor]], num_layers: int) -> None:
        """Take the convolution's inputs and the matrices of all slots, by the layer's index."""
        self._kept = dict(layers)
        self.pointers = (_StepState * num_layers)()
        for index, (conv, matrices) in layers.items():
            self.pointers[index] = _StepState(
                conv.data_ptr(), matrices.data_ptr(), conv.stride(0), matrices.stride(0)
            )


class StepModel:
    """A decoder's layers, ready for one call per step."""

    def __init__(
        self,
        kernels: CpuKernels,
        layers: Sequence[StepLayer],
        final_norm: Tensor,
        sizes: StepSizes,
    ) -> None:
        self.sizes = sizes
        self._kept = (tuple(layers), final_norm)
        self._final_norm = final_norm.data_ptr()
        self._linears = [
            StepLinears((layer.qkv, layer.output, layer.gate_up, layer.down)) for layer in layers
        ]
        self._deltas = [_delta(layer.delta) for layer in layers]
        self._mixtures = [_mixture(layer.experts) for layer in layers]
        self._layers = (_StepLayer * len(layers))(
            *map(self._pointers, layers, self._linears, self._deltas, self._mixtures)
        )
        self._call = kernels.library.baton_decode_step
        self._call.restype = None

    def run(self, inputs: StepInputs, pools: StepPools, states: StepStates | None = None) -> Tensor:
        """Return the hidden states [T, hidden] after the final norm. Write the step's KV to the
        pool, and advance `states`, which layers with linear attention need.
        """
        sizes, residual = self.sizes, inputs.residual
        delta = sizes.delta
        rows = residual.shape[0]
        assert (pools.kv_heads, pools.dim) == (sizes.kv_heads, sizes.dim)
        filled = [
            _StepTable(
                table.slots.data_ptr(),
                table.blocks.data_ptr(),
                table.first.data_ptr(),
                table.blocks.shape[1],
            )
            for table in inputs.tables
        ]
        tables = (_StepTable * len(filled))(*filled)
        turned = [_StepRotation(r.cos.data_ptr(), r.sin.data_ptr()) for r in inputs.rotations]
        first = inputs.rotations[0]
        out = torch.empty_like(residual)
        scratch = torch.empty(rows * sizes.scratch, dtype=torch.bfloat16)
        of_experts = torch.empty(rows * sizes.expert_scratch, dtype=torch.bfloat16)
        args = _StepArgs(
            ctypes.addressof(self._layers), ctypes.addressof(pools.pointers),
            None if states is None else ctypes.addressof(states.pointers),
            ctypes.addressof(tables), self._final_norm,
            (_StepRotation * 2)(*turned), inputs.positions.data_ptr(),
            _pointer(inputs.slots), _pointer(inputs.begins),
            residual.data_ptr(), out.data_ptr(), scratch.data_ptr(), of_experts.data_ptr(),
            len(self._layers), rows, sizes.hidden, sizes.inner,
            sizes.heads, sizes.kv_heads, sizes.dim, pools.block_size,
            first.rotated, first.pairs is PairRotation.NEIGHBOURS, sizes.gelu, sizes.gated,
            delta.key_heads, delta.value_heads, delta.key_dim, delta.value_dim, delta.taps,
            sizes.expert_inner, sizes.choice.fields,
            NormRule(sizes.epsilon, sizes.norm_offset),
        )  # fmt: skip
        self._call(ctypes.byref(args))
        return out

    @staticmethod
    def _pointers(
        layer: StepLayer,
        linears: StepLinears,
        delta: _StepDelta | None,
        mixture: _StepMixture | None,
    ) -> _StepLayer:
        norms = layer.head_norms
        return _StepLayer(
            layer.input_norm.data_ptr(),
            layer.mlp_norm.data_ptr(),
            None if norms is None else norms.query.data_ptr(),
            None if norms is None else norms.key.data_ptr(),
            _pointer(layer.attention_output_norm),
            _pointer(layer.mlp_output_norm),
            linears.array,
            layer.rotation,
            layer.inner,
            None if delta is None else ctypes.addressof(delta),
            None if mixture is None else ctypes.addressof(mixture),
        )


def _mixture(experts: StepExperts | None) -> _StepMixture | None:
    if experts is None:
        return None
    return _StepMixture(
        experts.router.data_ptr(), _pointer(experts.bias),
        experts.gate_ups.address, experts.downs.address, _pointer(experts.shared_gate),
    )  # fmt: skip


def _delta(rule: CompiledDeltaRule | None) -> _StepDelta | None:
    if rule is None:
        return None
    tensors = (rule.taps, rule.decay, rule.step_bias, rule.norm)
    return _StepDelta(*(each.data_ptr() for each in tensors), rule.epsilon)


def _pointer(weight: Tensor | None) -> int | None:
    return None if weight is None else weight.data_ptr()


def _integers(
    weights: Tensor | PackedInt8 | tuple[PackedIntegers, ...],
) -> ctypes.Array[_StepIntegers] | None:
    """The parts of a product, each of which points to the one behind it."""
    if isinstance(weights, Tensor):
        return None
    if isinstance(weights, PackedInt8):
        panels, outputs = weights.panels.data_ptr(), weights.scales.shape[0]
        part = _StepIntegers(
            panels, weights.scales.data_ptr(), weights.extra.data_ptr(), 1, 8, 0, outputs, outputs
        )
        return (_StepIntegers * 1)(part)
    stride = sum(part.peaks.shape[0] for part in weights)
    parts = (_StepIntegers * len(weights))(
        *(
            _StepIntegers(
                part.panels.data_ptr(), part.peaks.data_ptr(), None,
                part.groups, part.bits, part.has_zeros, part.peaks.shape[0], stride,
            )
            for part in weights
        )
    )  # fmt: skip
    for index in range(len(weights) - 1):
        parts[index].next = ctypes.addressof(parts[index + 1])
    return parts
