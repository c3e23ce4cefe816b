"""A mixture of experts over flattened tokens: rows sorted by expert, one product per expert met.

    rows t0 t1 t2, two experts each    chosen [[3, 0], [0, 2], [3, 2]]
    sorted by expert                   0: t0 t1 | 2: t1 t2 | 3: t0 t2     contiguous slices
    back in (token, choice) order, weighted, summed over the choices

The sum's order is a token's own choices, never its batch mates'. With `fixed_shapes`
(--deterministic) an expert met computes all rows, and those that chose it take theirs: its products
have one shape, whatever the others chose. Which experts a token meets is a gate's business
(gates.py).

Experts may lie on several ranks (expert parallelism), whole ones on each. There are two ways:

    every rank has all rows       a choice of an expert elsewhere adds nothing here, and is not
                                  computed; the sum over the ranks is the whole answer
    every rank has its own rows   an `ExpertDispatch` sends rows to the ranks that hold their
                                  experts, and brings back what those say

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

from baton.engine.kernels.cpu.experts import ExpertKernels
from baton.engine.kernels.cpu.library import CpuKernels
from baton.engine.kernels.cpu.step import StepLinear
from baton.engine.models.compiled_step import step_linears
from baton.engine.models.config import ClampedGate
from baton.engine.models.layers.gates import ExpertGate
from baton.engine.models.layers.projection import Mlp, Projection
from baton.engine.models.lora import AdapterRows
from baton.engine.quantization.linear import Linear, W8A8Share

VECTOR = 16  # numbers: rows of compiled experts are a multiple of them

# hidden [T, H], weights [T, per_token] in the dtype of hidden, experts chosen [T, per_token], by
# their numbers in the whole mixture -> [T, H]: the experts' answers, weighted and summed.
Mix: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]


class ExpertDispatch(Protocol):
    """How rows that lie on this rank alone reach experts that lie on others."""

    def __call__(self, hidden: Tensor, weights: Tensor, chosen: Tensor, own: Mix) -> Tensor:
        """See Mix: what all chosen experts say of this rank's rows, wherever they lie. `own` mixes
        the experts that lie here alone, for any rank's rows. All ranks call at the same time, each
        once per sparse layer, also one without rows."""
        ...


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

    def partial(self, x: Tensor, groups: Sequence[AdapterRows]) -> Tensor:
        """x [n, H] -> [n, H]; see Mlp.partial. Adapters do not reach it."""
        return functional.linear(x, self.gate).sigmoid() * self.expert(x)


@dataclass(frozen=True, slots=True)
class Experts:
    """A sparse layer: each token meets the experts that `gate` chooses, and what is `shared`.

    `experts`: those that lie here, from number `first` of the whole mixture on; `elsewhere`: there
    are others. `together`: _answers in one go. `dispatch`: None = every rank has all rows.
    """

    gate: ExpertGate
    experts: tuple[Expert, ...]
    shared: SharedExpert | Mlp | None
    fixed_shapes: bool = False
    together: Callable[[Tensor, Tensor], Tensor] | None = None
    first: int = 0
    elsewhere: bool = False
    dispatch: ExpertDispatch | None = None

    @property
    def projections(self) -> list[Projection]:
        """What an adapter can reach."""
        return self.shared.projections if isinstance(self.shared, Mlp) else []

    def __call__(self, hidden: Tensor, groups: Sequence[AdapterRows]) -> Tensor:
        """hidden [T, H] -> [T, H], of a rank its part of a sum. Adapters do not reach experts: the
        loader refuses such ones."""
        weights, chosen = self.gate(hidden)
        weights = weights.to(hidden.dtype)
        if self.dispatch is None:
            mixed = self.own(hidden, weights, chosen)
        else:
            mixed = self.dispatch(hidden, weights, chosen, self.own)
        return mixed if self.shared is None else mixed + self.shared.partial(hidden, groups)

    def own(self, hidden: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """See Mix: of the experts that lie here alone."""
        answer = self._answers_of_all if self.fixed_shapes else self.together or self._answers
        if self.elsewhere:
            chosen = self._here(chosen)
        return (answer(hidden, chosen) * weights[..., None]).sum(dim=1)

    def answer_others(self, hidden: Tensor, per_token: int) -> None:
        """Take part in the `dispatch` of others' rows, with none of this rank's; hidden [0, H]."""
        assert self.dispatch is not None, "without it, every rank has all rows"
        chosen = torch.zeros(0, per_token, dtype=torch.int64, device=hidden.device)
        self.dispatch(hidden, hidden.new_zeros(0, per_token), chosen, self.own)

    def _here(self, chosen: Tensor) -> Tensor:
        """Numbers of experts in the whole mixture -> among `experts`; one behind the last for all
        that lie elsewhere."""
        count = len(self.experts)
        local = chosen - self.first
        return local.masked_fill((local < 0) | (local >= count), count)

    def summed(
        self, hidden: Tensor, groups: Sequence[AdapterRows], reduce: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """See Mlp.summed."""
        return reduce(self(hidden, groups))

    def _answers(self, hidden: Tensor, chosen: Tensor) -> Tensor:
        """What each choice of each token says: chosen [T, per_token], see _here ->
        [T, per_token, H], zeros for experts elsewhere."""
        count = len(self.experts)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=count + 1).tolist()
        of_each = order.split(counts)[:count]
        met = [each for each in zip(self.experts, of_each, strict=True) if len(each[1])]
        if not met:
            return hidden.new_zeros(*chosen.shape, hidden.shape[1])
        inner = torch.cat([expert.inner(hidden[rows // chosen.shape[1]]) for expert, rows in met])
        # The ranks exchange what rows are rounded by: once, not for each expert.
        share = next((e.down for e, _ in met if isinstance(e.down, W8A8Share)), None)
        rounded, scales = (inner, inner) if share is None else share.rounded(inner)
        answers = hidden.new_zeros(len(order), hidden.shape[1])
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
        answers = hidden.new_zeros(*chosen.shape, hidden.shape[1])
        for index in chosen.unique().tolist():
            if index == len(self.experts):
                continue  # elsewhere
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
    kernel = ExpertKernels(kernels, gate_ups, downs, inner, clamped)
    return replace(layer, together=kernel.some if layer.elsewhere else kernel)


def _alike(linears: Sequence[StepLinear]) -> bool:
    """Whether they have one format, also within."""
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
