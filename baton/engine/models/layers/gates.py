"""Gates of a mixture of experts: they choose a token's experts, and the weights of their answers.

    softmax   weights are the softmax over all experts (Mixtral, Qwen, DeepSeek-V2)
    chosen    weights are the softmax over the chosen experts' logits (GPT-OSS)
    sigmoid   weights are the sigmoids of the experts' logits; a bias, learned to balance the load,
              changes only the choice (DeepSeek-V3, GLM-4 MoE Lite, Kimi K2: `noaux_tc`)

With groups, a token chooses its experts only from its best groups. Sources: transformers'
MixtralTopKRouter, Qwen2MoeTopKRouter, DeepseekV2TopkRouter, DeepseekV3TopkRouter,
GptOssTopKRouter; DeepSeek-V2 (arXiv 2405.04434, section 2.2.2), DeepSeek-V3 (arXiv 2412.19437,
section 2.1.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.kernels.cpu.gates import ChoiceKernel, ChoiceRule
from baton.engine.kernels.cpu.library import CpuKernels
from baton.engine.quantization.linear import PanelLinear


class ExpertGate(Protocol):
    """Chooses experts for tokens. E = experts, H = hidden size."""

    @property
    def router(self) -> Tensor:
        """The router's weight [E, H], in the dtype in which it is multiplied."""
        ...

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Choose experts for hidden [T, H]. Return their weights [T, per_token], in float32 or as
        hidden, and their numbers [T, per_token] int64."""
        ...


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """`count` groups of equally many experts. A token chooses its experts from its best `kept`."""

    count: int
    kept: int

    def others(self, scores: Tensor, best: int) -> Tensor:
        """Return a mask [T, E] for scores [T, E], true for experts outside the kept groups. Groups
        are ranked by the sum of their `best` greatest scores."""
        grouped = scores.unflatten(1, (self.count, -1))
        chosen = grouped.topk(best, dim=-1).values.sum(dim=-1).topk(self.kept, dim=-1).indices
        outside = torch.ones(len(scores), self.count, dtype=torch.bool, device=scores.device)
        outside.scatter_(1, chosen, False)
        return outside.repeat_interleave(grouped.shape[2], dim=1)


@dataclass(frozen=True, slots=True)
class SoftmaxGate:
    """The gate `softmax`, see above. `normalized`: the chosen experts' weights are divided by their
    sum. `scaling`: the weights are then multiplied by it."""

    router: Tensor
    per_token: int
    normalized: bool
    groups: ExpertGroups | None = None
    scaling: float = 1.0

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """See ExpertGate."""
        logits = functional.linear(hidden.to(self.router.dtype), self.router)
        scores = logits.float().softmax(dim=-1)
        if self.groups is not None:
            scores = scores.masked_fill(self.groups.others(scores, 1), 0.0)
        weights, chosen = scores.topk(self.per_token, dim=-1)
        if self.normalized:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return (weights if self.scaling == 1.0 else weights * self.scaling), chosen


@dataclass(frozen=True, slots=True)
class ChosenGate:
    """The gate `chosen`, see above. `bias` [E]: the router's."""

    router: Tensor
    bias: Tensor
    per_token: int

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """See ExpertGate."""
        logits = functional.linear(hidden, self.router, self.bias)
        best, chosen = logits.topk(self.per_token, dim=-1)
        return best.float().softmax(dim=-1), chosen


@dataclass(frozen=True, slots=True)
class SigmoidGate:
    """The gate `sigmoid`, see above. `bias` [E] float32 is added to the scores for the choice only.
    The other fields mean what they mean in SoftmaxGate."""

    router: Tensor
    bias: Tensor
    per_token: int
    normalized: bool
    groups: ExpertGroups | None = None
    scaling: float = 1.0

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """See ExpertGate."""
        scores = functional.linear(hidden.to(self.router.dtype), self.router).sigmoid()
        wanted = scores + self.bias
        if self.groups is not None:
            wanted = wanted.masked_fill(self.groups.others(wanted, 2), -torch.inf)
        chosen = wanted.topk(self.per_token, dim=-1).indices
        weights = scores.gather(1, chosen)
        if self.normalized:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return weights * self.scaling, chosen


@dataclass(frozen=True, slots=True)
class CompiledGate:
    """A SoftmaxGate or a SigmoidGate in two compiled calls: in a bfloat16 model on a CPU. Of equal
    scores the first expert goes first; its weights are rounded to bfloat16."""

    router: Tensor
    product: PanelLinear  # [H] -> [E]
    choice: ChoiceKernel

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """See ExpertGate."""
        return self.choice(self.product.wide(hidden))


def compiled_gate(
    gate: SoftmaxGate | SigmoidGate, kernels: CpuKernels
) -> SoftmaxGate | SigmoidGate | CompiledGate:
    """Return `gate`, of a bfloat16 model, in compiled calls; `gate` itself if the sizes of its
    router do not allow it.

    A router in float32 holds numbers of bfloat16: products of these are exact in the kernel, too.
    """
    count, inputs = gate.router.shape
    if inputs % 2:
        return gate
    router, groups = gate.router.bfloat16(), gate.groups or ExpertGroups(1, 1)
    rule = ChoiceRule(
        count, gate.per_token, gate.normalized, gate.scaling, groups.count, groups.kept,
        isinstance(gate, SigmoidGate), gate.router.dtype == torch.bfloat16,
    )  # fmt: skip
    bias = gate.bias.float().contiguous() if isinstance(gate, SigmoidGate) else None
    product = PanelLinear(kernels, router, None)
    return CompiledGate(router, product, ChoiceKernel(kernels, rule, bias))
