"""A mixture of experts over flattened tokens: rows are sorted by expert, and each expert that any
row has chosen computes its rows in one product.

    rows t0 t1 t2, two experts each    chosen [[3, 0], [0, 2], [3, 2]]
    sorted by expert                   0: t0 t1 | 2: t1 t2 | 3: t0 t2     contiguous slices
    back in (token, choice) order, weighted, summed over the choices

A token's answers are summed in the order of its own choices, whatever other tokens chose. With
`fixed_shapes` (--deterministic) an expert that any row chose computes all rows, and the rows that
chose it take their results. So its products have one shape, whatever the rows chose. A gate decides
which experts a token gets (gates.py).

Experts may lie on several ranks (expert parallelism), whole ones on each. There are two ways:

    every rank has all rows       each rank computes the choices of its own experts, and adds zero
                                  for the others; the sum over the ranks is the whole answer
    every rank has its own rows   an `ExpertDispatch` sends rows to the ranks that hold their
                                  experts, and brings the answers back

Sources: Switch Transformer (arXiv 2101.03961), Mixtral (arXiv 2401.04088), GShard
(arXiv 2006.16668, section 3.2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.kernels.cpu.experts import ExpertKernels, SharedAnswers
from baton.engine.kernels.cpu.library import CpuKernels
from baton.engine.kernels.cpu.step import StepExperts
from baton.engine.kernels.cpu.step_linears import StepLinear
from baton.engine.models.compiled_step import step_linears
from baton.engine.models.config import ClampedGate
from baton.engine.models.layers.gates import CompiledGate, ExpertGate
from baton.engine.models.layers.projection import Mlp, Projection
from baton.engine.models.lora import AdapterRows
from baton.engine.quantization.linear import Int8Share, Linear

VECTOR = 16  # numbers in a vector; the rows of compiled experts must be whole vectors

# (hidden [T, H], weights [T, per_token], chosen [T, per_token]) -> [T, H], the weighted sum of the
# chosen experts' answers. `weights` has the dtype of hidden; `chosen` numbers the experts of the
# whole mixture.
Mix: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
# A Mix that also takes what a shared expert says, and adds it.
MixAll: TypeAlias = Callable[[Tensor, Tensor, Tensor, SharedAnswers | None], Tensor]


class ExpertDispatch(Protocol):
    """Sends the rows of this rank to experts on other ranks."""

    def __call__(self, hidden: Tensor, weights: Tensor, chosen: Tensor, own: Mix) -> Tensor:
        """Return the result of a Mix for this rank's rows over all chosen experts, on whichever
        rank those are. `own` computes this rank's experts alone, for rows of any rank. All ranks
        must call this at the same time, once per sparse layer; a rank without rows, too."""
        ...


@dataclass(frozen=True, slots=True)
class Expert:
    """One expert: H = hidden, I = its intermediate size."""

    gate_up: Linear  # [H] -> [2 * I]
    down: Linear  # [I] -> [H]
    clamped: ClampedGate | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Compute x [n, H] -> [n, H]. On a tensor-parallel rank this is the rank's part of a sum,
        whatever the weights' format."""
        inner, down = self.inner(x), self.down
        if isinstance(down, Int8Share):
            return down.partial(*down.rounded(inner))
        return down(inner)

    def inner(self, x: Tensor) -> Tensor:
        """Compute x [n, H] -> [n, I], the input of `down`."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        if self.clamped is None:
            return functional.silu(gate) * up
        limit, alpha = self.clamped.limit, self.clamped.alpha
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + 1) * (gate * torch.sigmoid(gate * alpha))


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """The expert that computes every token; its answer is multiplied by a sigmoid gate [1, H], if
    it has one. Adapters do not change an expert with a gate."""

    mlp: Mlp
    gate: Tensor | None

    @property
    def projections(self) -> list[Projection]:
        """The products that an adapter can change."""
        return self.mlp.projections if self.gate is None else []

    def answers(self, x: Tensor, groups: Sequence[AdapterRows]) -> SharedAnswers:
        """Compute x [T, H]; see Mlp.partial."""
        return SharedAnswers(self.mlp.partial(x, groups), self.gate)


@dataclass(frozen=True, slots=True)
class Experts:
    """A sparse layer: the experts that `gate` chooses compute a token, and the `shared` expert.

    `experts`: the experts of this rank; the first is number `first` of the whole mixture.
    `elsewhere`: other ranks hold further experts. `together`: a kernel that computes `_answers` in
    one call, if there is one; `mix`: one that computes `own`, and adds what is shared. `dispatch`:
    None = every rank has all rows.
    """

    gate: ExpertGate
    experts: tuple[Expert, ...]
    shared: SharedExpert | None
    fixed_shapes: bool = False
    together: Callable[[Tensor, Tensor], Tensor] | None = None
    first: int = 0
    elsewhere: bool = False
    dispatch: ExpertDispatch | None = None
    mix: MixAll | None = None

    @property
    def projections(self) -> list[Projection]:
        """The products that an adapter can change: those of the `shared` expert."""
        return [] if self.shared is None else self.shared.projections

    def __call__(self, hidden: Tensor, groups: Sequence[AdapterRows]) -> Tensor:
        """Compute hidden [T, H] -> [T, H]. On a tensor-parallel rank this is the rank's part of a
        sum. `groups` serve the `shared` expert only: adapters of the routed experts are refused
        when they are added."""
        weights, chosen = self.gate(hidden)
        weights = weights.to(hidden.dtype)
        shared = None if self.shared is None else self.shared.answers(hidden, groups)
        if self.dispatch is not None:
            mixed = self.dispatch(hidden, weights, chosen, self.own)
        elif self.mix is not None:
            return self.mix(hidden, weights, chosen, shared)
        else:
            mixed = self.own(hidden, weights, chosen)
        return mixed if shared is None else mixed + shared.gated(hidden)

    def own(self, hidden: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """See Mix: the weighted sum over those chosen experts that this rank holds."""
        if self.mix is not None:
            return self.mix(hidden, weights, chosen, None)
        answer = self._answers_of_all if self.fixed_shapes else self.together or self._answers
        if self.elsewhere:
            chosen = self._here(chosen)
        return (answer(hidden, chosen) * weights[..., None]).sum(dim=1)

    def step_experts(self) -> StepExperts | None:
        """Return the experts in the form of the compiled step; None if it does not support the
        gate or the gating of an expert, or if other ranks have experts."""
        gate, kernel = self.gate, self.together
        if not isinstance(gate, CompiledGate) or not isinstance(kernel, ExpertKernels):
            return None
        if kernel.clamped is not None or self.dispatch is not None:
            return None
        return StepExperts(
            gate.product.panels, gate.choice.bias, kernel.gate_ups, kernel.downs, kernel.inner,
            gate.choice.rule, None if self.shared is None else self.shared.gate,
        )  # fmt: skip

    def answer_others(self, hidden: Tensor, per_token: int) -> None:
        """Take part in a `dispatch` in which only other ranks have rows. hidden: [0, H]."""
        assert self.dispatch is not None, "without it, every rank has all rows"
        chosen = torch.zeros(0, per_token, dtype=torch.int64, device=hidden.device)
        self.dispatch(hidden, hidden.new_zeros(0, per_token), chosen, self.own)

    def _here(self, chosen: Tensor) -> Tensor:
        """Turn numbers of experts in the whole mixture into indices of `experts`. Experts of other
        ranks get the index len(experts)."""
        count = len(self.experts)
        local = chosen - self.first
        return local.masked_fill((local < 0) | (local >= count), count)

    def summed(
        self, hidden: Tensor, groups: Sequence[AdapterRows], reduce: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """See Mlp.summed."""
        return reduce(self(hidden, groups))

    def _answers(self, hidden: Tensor, chosen: Tensor) -> Tensor:
        """Return the answer of each chosen expert for each token, [T, per_token, H], not weighted.
        chosen [T, per_token]: indices as `_here` returns them. Experts of other ranks answer
        zeros."""
        count = len(self.experts)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=count + 1).tolist()
        of_each = order.split(counts)[:count]
        met = [each for each in zip(self.experts, of_each, strict=True) if len(each[1])]
        if not met:
            return hidden.new_zeros(*chosen.shape, hidden.shape[1])
        inner = torch.cat([expert.inner(hidden[rows // chosen.shape[1]]) for expert, rows in met])
        # Tensor-parallel ranks exchange the scales that rows are rounded by: once for all experts.
        share = next((e.down for e, _ in met if isinstance(e.down, Int8Share)), None)
        rounded, scales = (inner, inner) if share is None else share.rounded(inner)
        answers = hidden.new_zeros(len(order), hidden.shape[1])
        start = 0
        for expert, rows in met:
            part, down = slice(start, start + len(rows)), expert.down
            exchanged = isinstance(down, Int8Share)
            answers[rows] = (
                down.partial(rounded[part], scales[part]) if exchanged else down(inner[part])
            )
            start = part.stop
        return answers.view(*chosen.shape, -1)

    def _answers_of_all(self, hidden: Tensor, chosen: Tensor) -> Tensor:
        """Return the same as `_answers`; each expert that any row chose computes all rows."""
        answers = hidden.new_zeros(*chosen.shape, hidden.shape[1])
        for index in chosen.unique().tolist():
            if index == len(self.experts):
                continue  # elsewhere
            tokens, choices = (chosen == index).nonzero(as_tuple=True)
            answers[tokens, choices] = self.experts[index](hidden)[tokens]
        return answers


def compiled_experts(layer: Experts, kernels: CpuKernels) -> Experts:
    """Return `layer` with its experts in one compiled call (kernels/cpu/experts.h). Return `layer`
    itself if the kernel does not support a weight's format or a size, or with `fixed_shapes`."""
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
    kernel = ExpertKernels(kernels, gate_ups, downs, inner, clamped)
    if layer.elsewhere:
        return replace(layer, together=kernel.some)
    return replace(layer, together=kernel, mix=kernel.summed)


def _alike(linears: Sequence[StepLinear]) -> bool:
    """Whether all products have the same format, and so do all parts of a product."""
    formats = {_format(each) for each in linears}
    return len(formats) == 1 and all(len(each) == 1 for each in formats)


def _format(linear: StepLinear) -> tuple[object, ...]:
    weights = linear.weights
    if isinstance(weights, tuple):
        return tuple((each.groups, each.bits, each.has_zeros) for each in weights)
    return (type(weights),)


def _inputs(linear: StepLinear) -> int:
    weights = linear.weights
    if isinstance(weights, tuple):
        return weights[0].inputs
    return 2 * weights.shape[1] if isinstance(weights, Tensor) else weights.inputs
