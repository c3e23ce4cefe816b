"""Gates of a mixture: which experts a token meets, and with which weights.

    softmax   weights are the softmax over all experts (Mixtral, Qwen, DeepSeek-V2)
    chosen    weights are the softmax over the chosen experts' logits (GPT-OSS)
    sigmoid   weights are each expert's own sigmoid; a bias, learned to balance the load, takes part
              in the choice alone (DeepSeek-V3, GLM-4 MoE Lite, Kimi K2: `noaux_tc`)

With groups a token chooses its experts out of its best groups only. Sources: transformers'
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


class ExpertGate(Protocol):
    """E = experts, H = hidden size."""

    @property
    def router(self) -> Tensor:
        """[E, H], in the dtype that it is multiplied in."""
        ...

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """hidden [T, H] -> weights [T, per_token] float32, experts [T, per_token] int64."""
        ...


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """`count` groups of as many experts each, of which a token chooses out of the best `kept`."""

    count: int
    kept: int

    def others(self, scores: Tensor, best: int) -> Tensor:
        """scores [T, E] -> [T, E], true for experts outside the kept groups. A group is as good as
        the sum of its `best` greatest scores."""
        grouped = scores.unflatten(1, (self.count, -1))
        chosen = grouped.topk(best, dim=-1).values.sum(dim=-1).topk(self.kept, dim=-1).indices
        outside = torch.ones(len(scores), self.count, dtype=torch.bool, device=scores.device)
        outside.scatter_(1, chosen, False)
        return outside.repeat_interleave(grouped.shape[2], dim=1)


@dataclass(frozen=True, slots=True)
class SoftmaxGate:
    """`normalized`: the chosen experts' weights sum to 1; `scaling`: of them, after that."""

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
    """`bias` [E] is the router's."""

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
    """`bias` [E] float32 is added for the choice; the rest as in SoftmaxGate."""

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
