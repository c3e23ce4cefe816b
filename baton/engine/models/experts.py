"""A mixture of experts over flattened tokens: rows sorted by expert, one product per expert met.

    rows t0 t1 t2, two experts each    chosen [[3, 0], [0, 2], [3, 2]]
    sorted by expert                   0: t0 t1 | 2: t1 t2 | 3: t0 t2     contiguous slices
    back in (token, choice) order, weighted, summed over the choices

The sum's order is a token's own choices, never its batch mates'. With `fixed_shapes`
(--deterministic) an expert met computes all rows, and those that chose it take theirs: its products
have one shape, whatever the others chose. Which experts a token meets is a gate's business
(gates.py). Source: Switch Transformer (arXiv 2101.03961), Mixtral (arXiv 2401.04088).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.kernels.cpu.experts import ExpertKernels
from baton.engine.kernels.cpu.library import CpuKernels
from baton.engine.kernels.cpu.quantized import PackedIntegers
from baton.engine.kernels.cpu.step import StepLinear
from baton.engine.models.compiled_step import step_linears
from baton.engine.models.config import ClampedGate
from baton.engine.models.layers.gates import ExpertGate
from baton.engine.models.layers.projection import Mlp, Projection
from baton.engine.models.lora import AdapterRows
from baton.engine.quantization.linear import Linear, W8A8Share

VECTOR = 16  # numbers: rows of compiled experts are a multiple of them


@dataclass(frozen=True, slots=True)
class Expert:
    """One expert: H = hidden, I = its intermediate size."""

    gate_up: Linear  # [H] -> [2 * I]
    down: Linear  # [I] -> [H]
    clamped: ClampedGate | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """x [n, H] -> [n, H]; of a rank its part of a sum, whatever the format."""
        inner, down = self.inner(x), self.down
        if isinstance(down, W8A8Share):
            return down.partial(*down.rounded(inner))
        return down(inner)

    def inner(self, x: Tensor) -> Tensor:
        """x [n, H] -> [n, I], what `down` takes."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        if self.clamped is None:
            return functional.silu(gate) * up
        limit, alpha = self.clamped.limit, self.clamped.alpha
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + 1) * (gate * torch.sigmoid(gate * alpha))


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """The expert that every token visits, behind a sigmoid gate [1, H]."""

    expert: Expert
    gate: Tensor

    def __call__(self, x: Tensor, groups: Sequence[AdapterRows]) -> Tensor:
        """x [n, H] -> [n, H]. Adapters do not reach it."""
        return functional.linear(x, self.gate).sigmoid() * self.expert(x)


@dataclass(frozen=True, slots=True)
class Experts:
    """A sparse layer: each token meets the experts that `gate` chooses, and what is `shared`."""

    gate: ExpertGate
    experts: tuple[Expert, ...]
    shared: SharedExpert | Mlp | None
    fixed_shapes: bool = False
    together: Callable[[Tensor, Tensor], Tensor] | None = None  # _answers in one go

    @property
    def projections(self) -> list[Projection]:
        """What an adapter can reach."""
        return self.shared.projections if isinstance(self.shared, Mlp) else []

    def __call__(self, hidden: Tensor, groups: Sequence[AdapterRows]) -> Tensor:
        """hidden [T, H] -> [T, H]. Adapters do not reach experts: the loader refuses such ones."""
        weights, chosen = self.gate(hidden)
        answer = self._answers_of_all if self.fixed_shapes else self.together or self._answers
        answers = answer(hidden, chosen)
        answers = answers * weights.to(hidden.dtype)[..., None]
        mixed = answers.sum(dim=1)
        return mixed if self.shared is None else mixed + self.shared(hidden, groups)

    def summed(
        self, hidden: Tensor, groups: Sequence[AdapterRows], reduce: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """See Mlp.summed."""
        return reduce(self(hidden, groups))

    def _answers(self, hidden: Tensor, chosen: Tensor) -> Tensor:
        """What each choice of each token says: chosen [T, per_token] -> [T, per_token, H]."""
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=len(self.experts)).tolist()
        met = [each for each in zip(self.experts, order.split(counts), strict=True) if len(each[1])]
        inner = torch.cat([expert.inner(hidden[rows // chosen.shape[1]]) for expert, rows in met])
        # The ranks exchange what rows are rounded by: once, not for each expert.
        share = next((e.down for e, _ in met if isinstance(e.down, W8A8Share)), None)
        rounded, scales = (inner, inner) if share is None else share.rounded(inner)
        answers = hidden.new_empty(len(order), hidden.shape[1])
        start = 0
        for expert, rows in met:
            part, down = slice(start, start + len(rows)), expert.down
            exchanged = isinstance(down, W8A8Share)
            answers[rows] = (
                down.partial(rounded[part], scales[part]) if exchanged else down(inner[part])
            )
            start = part.stop
        return answers.view(*chosen.shape, -1)

    def _answers_of_all(self, hidden: Tensor, chosen: Tensor) -> Tensor:
        """As _answers, each expert met having computed all of hidden."""
        answers = hidden.new_empty(*chosen.shape, hidden.shape[1])
        for index in chosen.unique().tolist():
            tokens, choices = (chosen == index).nonzero(as_tuple=True)
            answers[tokens, choices] = self.experts[index](hidden)[tokens]
        return answers


def compiled_experts(layer: Experts, kernels: CpuKernels) -> Experts:
    """`layer` with its experts in one compiled call (kernels/cpu/experts.h); `layer` itself if a
    weight's format or a size is not for it, or if its shapes are to be fixed."""
    gate_ups = step_linears([expert.gate_up for expert in layer.experts])
    downs = step_linears([expert.down for expert in layer.experts])
    if gate_ups is None or downs is None or layer.fixed_shapes:
        return layer
    if not (_alike(gate_ups) and _alike(downs)):
        return layer
    hidden, inner = _inputs(gate_ups[0]), _inputs(downs[0])
    if hidden % VECTOR or inner % VECTOR:
        return layer
    gating = layer.experts[0].clamped
    clamped = None if gating is None else (gating.limit, gating.alpha)
    return replace(layer, together=ExpertKernels(kernels, gate_ups, downs, inner, clamped))


def _alike(linears: Sequence[StepLinear]) -> bool:
    """Whether they have one format."""
    return len({_format(each) for each in linears}) == 1


def _format(linear: StepLinear) -> tuple[object, ...]:
    weights = linear.weights
    if isinstance(weights, PackedIntegers):
        return type(weights), weights.groups, weights.bits, weights.has_zeros
    return (type(weights),)


def _inputs(linear: StepLinear) -> int:
    weights = linear.weights
    return 2 * weights.shape[1] if isinstance(weights, Tensor) else weights.inputs
