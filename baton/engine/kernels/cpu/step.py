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
from baton.engine.kernels.cpu.latent import (
    NO_LATENTS,
    CompiledLatents,
    LatentFields,
    LatentSizes,
    LatentWeights,
)
from baton.engine.kernels.cpu.library import (
    CpuKernels,
    DecodeLayer,
    HeadNorms,
    NormRule,
    ScaleFields,
)
from baton.engine.kernels.cpu.step_linears import LinearFields, StepLinear, StepLinears
from baton.engine.kernels.delta_rule import DeltaSizes
from baton.engine.kernels.rope import PairRotation, Rotation

BYTES: Final = 2  # of a number in bfloat16

_POINTER = ctypes.c_void_p
_SIZE = ctypes.c_int64


class _StepDelta(ctypes.Structure):
    """StepDelta of step_args.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("taps", "decay", "step_bias", "norm")),
        ("epsilon", ctypes.c_float),
    )


class _StepLatent(ctypes.Structure):
    """StepLatent of step_args.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("query_norm", "query_up")),
        ("by", LatentWeights),
    )


class _StepMixture(ctypes.Structure):
    """StepMixture of step_args.h."""

    _fields_ = tuple(
        (name, _POINTER) for name in ("router", "bias", "gate_ups", "downs", "shared_gate")
    )


class _StepLayer(ctypes.Structure):
    """StepLayer of step_args.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("input_norm", "mlp_norm", "query_norm", "key_norm")),
        *((name, _POINTER) for name in ("attention_output_norm", "mlp_output_norm")),
        ("linears", LinearFields * 4),  # qkv, output, gate_up, down
        ("rotation", _SIZE),
        ("inner", _SIZE),
        *((name, _POINTER) for name in ("delta", "latent", "mixture")),
    )


class _StepRotation(ctypes.Structure):
    """step_args.h's StepRotation."""

    _fields_ = (("cos", _POINTER), ("sin", _POINTER))


class _StepPool(ctypes.Structure):
    """StepPool of step_args.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("keys", "values", "sinks")),
        *((name, _SIZE) for name in ("key_block", "key_token", "key_head")),
        *((name, _SIZE) for name in ("value_block", "value_token", "value_head")),
        *((name, _SIZE) for name in ("window", "group")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
        ("scales", ScaleFields),
    )


class _StepState(ctypes.Structure):
    """StepState of step_args.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("conv", "matrices")),
        *((name, _SIZE) for name in ("conv_stride", "matrix_stride")),
    )


class _StepTable(ctypes.Structure):
    """StepTable of step_args.h."""

    _fields_ = (*((name, _POINTER) for name in ("slots", "blocks", "first")), ("width", _SIZE))


class StepArgs(ctypes.Structure):
    """StepArgs of step_args.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("layers", "pools", "states", "tables", "final_norm")),
        ("head", _POINTER),
        ("rotations", _StepRotation * 2),
        *((name, _POINTER) for name in ("embedding", "ids", "positions", "slots", "begins")),
        *((name, _POINTER) for name in ("residual", "out", "logits", "scratch")),
        *((name, _POINTER) for name in ("expert_scratch", "latent_scratch")),
        *((name, _SIZE) for name in ("wide", "narrow", "qkv", "attended")),
        ("vocabulary", _SIZE),
        *((name, _SIZE) for name in ("num_layers", "rows", "hidden", "inner")),
        *((name, _SIZE) for name in ("heads", "kv_heads", "dim", "block_size")),
        *((name, _SIZE) for name in ("rotated", "neighbours", "gelu", "gated")),
        *((name, _SIZE) for name in ("by_position", "embedded")),
        *((name, _SIZE) for name in ("key_heads", "value_heads", "key_dim", "value_dim", "taps")),
        ("expert_inner", _SIZE),
        ("choice", ChoiceFields),
        ("latent", LatentFields),
        ("norms", NormRule),
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
class StepLatents:
    """Latent attention's weights between the products whose inputs and outputs have the size
    `hidden`. `query_norm` [R] and `query_up` (one): of queries of a low rank R, or None."""

    latents: CompiledLatents
    query_norm: Tensor | None
    query_up: StepLinears | None


@dataclass(frozen=True, slots=True)
class StepLayer:
    """Weights of a layer; norms [hidden] bfloat16. `rotation`: which of the step's it takes.

    `delta`, `latents`: linear or latent attention's weights, whose inputs `qkv` makes; None =
    attention over heads.
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
    latents: StepLatents | None = None
    experts: StepExperts | None = None


NO_DELTA: Final = DeltaSizes(0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Sizes of a decoder, and what all its layers do: `hidden` and `inner` (the most gates of a
    layer) multiples of 16, `dim` of 32. `gelu`: gates are GELU's. `gated`: each query head has a
    gate behind it. `delta`: of the layers with linear attention. `latents`: of latent attention,
    whose keys are `kv_heads` 1 of `dim`, and the rank of its queries, or 0. `choice`,
    `expert_inner`: of mixtures."""

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
    latents: LatentSizes = NO_LATENTS
    query_rank: int = 0
    choice: ChoiceRule = NO_CHOICE
    expert_inner: int = 0

    @property
    def qkv(self) -> int:
        """How many numbers the first product makes of a row where it attends."""
        latents = self.latents
        if latents.heads:
            return (self.query_rank or latents.queries) + latents.key
        return (self.heads * (2 if self.gated else 1) + 2 * self.kv_heads) * self.dim

    @property
    def attended(self) -> int:
        """How many numbers the second product takes of a row where it attends."""
        return self.latents.outputs or self.heads * self.dim

    @property
    def wide(self) -> int:
        """The most numbers that a product makes of a row, but for those of size `hidden`."""
        return max(self.qkv, 2 * self.inner, self.delta.inputs, 2 * self.choice.experts)

    @property
    def narrow(self) -> int:
        """The most numbers that a product takes of a row, but for those of size `hidden`."""
        return max(self.attended, self.inner, self.delta.values, self.query_rank)

    @property
    def scratch(self) -> int:
        """Return how many numbers of scratch space a row needs."""
        return self.wide + self.narrow + self.hidden + (self.qkv if self.gated else 0)

    @property
    def latent_scratch(self) -> int:
        """Return how many numbers of scratch space the latent attention of a row needs."""
        return self.latents.scratch + (self.latents.queries if self.query_rank else 0)

    @property
    def expert_scratch(self) -> int:
        """Return how many numbers of scratch space the experts of a row need."""
        return self.choice.per_token * (2 * self.hidden + 3 * self.expert_inner)


@dataclass(frozen=True, slots=True)
class StepHead:
    """The product over the vocabulary, of `outputs` numbers."""

    linear: StepLinear
    outputs: int


@dataclass(frozen=True, slots=True)
class StepTable:
    """Where a layer group's KV of a step lies: slots [T], blocks [T, W] int64, first [T]."""

    slots: Tensor
    blocks: Tensor
    first: Sequence[int]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step of T rows, one new token each: token_ids and positions [T] int64, one or two rotations
    in bfloat16, alike but for their numbers, a table per layer group. `by_position`: the rotations
    are those of the positions from 0 on, else those of the rows. `residual`: the embeddings [T,
    hidden] bfloat16, which are overwritten; None = looked up by a model that has them. With linear
    attention int64 [T]: the slot of each row's state, and 1 where a row is a sequence's first.
    `logits`: those of all rows are wanted."""

    token_ids: Tensor
    positions: Tensor
    rotations: Sequence[Rotation]
    tables: Sequence[StepTable]
    by_position: bool = False
    residual: Tensor | None = None
    slots: Tensor | None = None
    begins: Tensor | None = None
    logits: bool = False


class StepPools:
    """The pool as the compiled step uses it: pointers to each layer's keys and values."""

    def __init__(self, layers: Mapping[int, DecodeLayer], group_of: Sequence[int]) -> None:
        """Take the layers that attend, all of one shape, by their index, and in `group_of` the
        layer group of each layer."""
        _, self.block_size, *self.shape = next(iter(layers.values())).keys.shape
        self._kept = dict(layers)
        self.pointers = (_StepPool * len(group_of))()
        for index, layer in layers.items():
            self.pointers[index] = _StepPool(
                layer.keys.data_ptr(), layer.values.data_ptr(),
                None if layer.sinks is None else layer.sinks.data_ptr(),
                *layer.keys.stride()[:3], *layer.values.stride()[:3],
                layer.window, group_of[index], layer.scale, layer.softcap, layer.scale_fields,
            )  # fmt: skip

    @staticmethod
    def suit(layers: Sequence[DecodeLayer | None]) -> bool:
        """Whether all layers that attend are known to the kernels and of one shape, with keys as
        long as values, or latents, of which a value is a part."""
        known = [x for x in layers if x is not None]
        shapes = {(x.keys.shape[1:], x.values.shape[1:]) for x in known}
        whole = all(
            x.keys.shape == x.values.shape or x.keys.data_ptr() == x.values.data_ptr()
            for x in known
        )
        return len(known) == len(layers) and len(shapes) == 1 and whole


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
        head: StepHead | None = None,
        embedding: Tensor | None = None,
    ) -> None:
        """`head`: None = logits are made elsewhere. `embedding` [vocabulary, hidden] bfloat16: None
        = rows are looked up elsewhere."""
        self.sizes = sizes
        self.embedding = None if embedding is None else embedding.contiguous()
        self._head = None if head is None else StepLinears([head.linear])
        self._vocabulary = 0 if head is None else head.outputs
        self._logits = torch.empty(0, self._vocabulary, dtype=torch.float32)
        self._weights = tuple(layers)
        self._kept = final_norm
        self._final_norm = final_norm.data_ptr()
        self._linears = [
            StepLinears((layer.qkv, layer.output, layer.gate_up, layer.down)) for layer in layers
        ]
        self._deltas = [_delta(layer.delta) for layer in layers]
        self._latents = [_latents(layer.latents) for layer in layers]
        self._mixtures = [_mixture(layer.experts) for layer in layers]
        self._layers = (_StepLayer * len(layers))(*map(self._pointers, range(len(layers))))
        self._constant = self._constants()
        # numbers of a row; the first ends with its residual
        residual = 0 if embedding is None else sizes.hidden
        self._scratch = sizes.scratch + residual, sizes.expert_scratch, sizes.latent_scratch
        self._call = kernels.library.baton_decode_step
        self.call_part = kernels.library.baton_layer_part
        self.call_part.restype = None

    def run(
        self, inputs: StepInputs, pools: StepPools, states: StepStates | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the hidden states [T, hidden] after the final norm, and the logits [T, vocabulary]
        float32 if they are wanted and there is a head, which the next call overwrites. Write the
        step's KV to the pool, and advance `states`, which layers with linear attention need. Raises
        IndexError for a token that the embedding has not, or a position that the rotations have
        not.
        """
        sizes, rows = self.sizes, inputs.positions.shape[0]
        head = self._head if inputs.logits else None
        logits = None if head is None else self._room_for_logits(rows)
        out = torch.empty(rows, sizes.hidden, dtype=torch.bfloat16)
        scratch, of_experts, of_latents = (_room(rows * each) for each in self._scratch)
        args, _kept = self.arguments(inputs, pools)
        args.states = None if states is None else ctypes.addressof(states.pointers)
        args.head = None if head is None else head.address
        args.by_position = len(inputs.rotations[0].cos) if inputs.by_position else 0
        args.slots, args.begins = _pointer(inputs.slots), _pointer(inputs.begins)
        args.out, args.logits, args.scratch = out.data_ptr(), _pointer(logits), _pointer(scratch)
        if inputs.residual is not None:
            args.embedding, args.residual = None, inputs.residual.data_ptr()
        else:
            assert self.embedding is not None, "rows are looked up here, or were"
            assert scratch is not None, "it ends with the residual"
            args.ids = inputs.token_ids.data_ptr()
            args.residual = scratch.data_ptr() + rows * sizes.scratch * BYTES
        args.expert_scratch, args.latent_scratch = _pointer(of_experts), _pointer(of_latents)
        if not self._call(ctypes.byref(args)):
            raise IndexError("a token id is outside the embedding, or a position too high")
        return out, logits

    def _room_for_logits(self, rows: int) -> Tensor:
        """Return [rows, vocabulary], kept: the kernel gives out so much memory page by page."""
        if len(self._logits) < rows:
            self._logits = torch.empty(rows, self._vocabulary, dtype=torch.float32)
        return self._logits[:rows]

    def arguments(self, inputs: StepInputs, pools: StepPools) -> tuple[StepArgs, object]:
        """Return the arguments that whole steps and parts have in common, but for `out` and
        `scratch`, and what must live as long as they."""
        sizes = self.sizes
        assert pools.shape == [sizes.kv_heads, sizes.dim]
        firsts = [(_SIZE * len(table.first))(*table.first) for table in inputs.tables]
        tables = (_StepTable * len(firsts))()
        for at, table in enumerate(inputs.tables):
            tables[at] = _StepTable(
                table.slots.data_ptr(), table.blocks.data_ptr(),
                ctypes.addressof(firsts[at]), table.blocks.shape[1],
            )  # fmt: skip
        args = StepArgs.from_buffer_copy(self._constant)
        args.pools, args.tables = ctypes.addressof(pools.pointers), ctypes.addressof(tables)
        for at, rotation in enumerate(inputs.rotations):
            args.rotations[at] = _StepRotation(rotation.cos.data_ptr(), rotation.sin.data_ptr())
        first = inputs.rotations[0]
        args.rotated, args.neighbours = first.rotated, first.pairs is PairRotation.NEIGHBOURS
        args.positions, args.rows = inputs.positions.data_ptr(), inputs.positions.shape[0]
        args.block_size = pools.block_size
        return args, (inputs, pools, firsts, tables)

    def _constants(self) -> StepArgs:
        """The arguments that are those of every step."""
        sizes, delta = self.sizes, self.sizes.delta
        return StepArgs(
            layers=ctypes.addressof(self._layers), final_norm=self._final_norm,
            embedding=_pointer(self.embedding),
            embedded=0 if self.embedding is None else len(self.embedding),
            wide=sizes.wide, narrow=sizes.narrow, qkv=sizes.qkv, attended=sizes.attended,
            vocabulary=self._vocabulary, num_layers=len(self._layers),
            hidden=sizes.hidden, inner=sizes.inner,
            heads=sizes.heads, kv_heads=sizes.kv_heads, dim=sizes.dim,
            gelu=sizes.gelu, gated=sizes.gated,
            key_heads=delta.key_heads, value_heads=delta.value_heads,
            key_dim=delta.key_dim, value_dim=delta.value_dim, taps=delta.taps,
            expert_inner=sizes.expert_inner, choice=sizes.choice.fields,
            latent=sizes.latents.fields, norms=NormRule(sizes.epsilon, sizes.norm_offset),
        )  # fmt: skip

    def _pointers(self, index: int) -> _StepLayer:
        layer = self._weights[index]
        norms, linears = layer.head_norms, self._linears[index]
        parts = (self._deltas[index], self._latents[index], self._mixtures[index])
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
            *(None if part is None else ctypes.addressof(part) for part in parts),
        )


def _latents(of: StepLatents | None) -> _StepLatent | None:
    if of is None:
        return None
    up = None if of.query_up is None else of.query_up.address
    return _StepLatent(_pointer(of.query_norm), up, of.latents.weights)


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


def _room(numbers: int) -> Tensor | None:
    return torch.empty(numbers, dtype=torch.bfloat16) if numbers else None


def _pointer(of: Tensor | None) -> int | None:
    return None if of is None else of.data_ptr()
