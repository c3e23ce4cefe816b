"""Multi-head latent attention (MLA) over a cache of latents: the algebra, and how transformers'
modelling code is made to follow it.

DeepSeek's attention expands one latent per token into every head's keys and values. Attending needs
no expansion: with k_h = W_uk_h c and v_h = W_uv_h c,

    q_h . k_h  = (W_uk_h^T q_h) . c          (absorbed into the query, before attention)
    sum p v_h  = W_uv_h (sum p c)            (applied once, after attention)

so the pool stores the latent c and the rotated part of the key, which all heads share: one head of
rank + rope dims, and no V. Source: DeepSeek-V2 (arXiv 2405.04434, section 2.1); the method
`expand_kv` of transformers' DeepseekV3Attention and similar classes, which `absorb_latents`
replaces on the instances.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from baton.protocol.errors import ModelRefused


@dataclass(frozen=True, slots=True)
class Absorbed:
    """Both halves of one layer's up-projection, as views: `key` [heads, nope, rank] is W_uk,
    `value` [heads, v_dim, rank] is W_uv."""

    key: Tensor
    value: Tensor

    @property
    def rank(self) -> int:
        """Dims of the latent without its rotated part."""
        return self.key.shape[2]

    @property
    def v_dim(self) -> int:
        """Dims of one head's value."""
        return self.value.shape[1]

    def queries(self, q: Tensor) -> Tensor:
        """Turn queries without their rotated part [T, heads, nope] into [T, heads, rank], which
        attention multiplies with latents."""
        return torch.bmm(q.transpose(0, 1), self.key).transpose(0, 1)

    def values(self, attended: Tensor) -> Tensor:
        """Turn averages of latents [T, heads, rank] into the heads' outputs [T, heads, v_dim]."""
        return torch.bmm(attended.transpose(0, 1), self.value.transpose(1, 2)).transpose(0, 1)


def absorb(weight: Tensor, nope: int, v_dim: int) -> Absorbed:
    """Split kv_b_proj's `weight` [heads * (nope + v_dim), rank] into its halves."""
    by_head = weight.unflatten(0, (-1, nope + v_dim))
    return Absorbed(by_head[:, :nope], by_head[:, nope:])


def absorb_latents(causal: nn.Module) -> dict[nn.Module, Absorbed]:
    """Make each MLA module of `causal` pass its latents to attention. Return the weights that
    queries and outputs need then, by module.

    Mutates the instances (`expand_kv`), never their classes. Raises ModelRefused for a latent
    attention that this algebra does not cover.
    """
    absorbed: dict[nn.Module, Absorbed] = {}
    for module in causal.modules():
        if not hasattr(module, "expand_kv"):
            continue
        absorbed[module] = _absorbed(module)
        # An instance's attribute, found before its class's method.
        object.__setattr__(module, "expand_kv", _keep_latents)
    return absorbed


def _absorbed(module: Any) -> Absorbed:
    name = type(module).__name__
    projection = getattr(module, "kv_b_proj", None)
    if not isinstance(projection, nn.Linear) or projection.bias is not None:
        raise ModelRefused(f"{name} expands its latents in a way that cannot be absorbed")
    return absorb(projection.weight, module.qk_nope_head_dim, module.v_head_dim)


def _keep_latents(latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """Replace expand_kv: return latent [1, 1, T, rank] and rotated [1, 1, T, rope] as one key head,
    and values of no dims."""
    return torch.cat((latent, rotated), dim=-1), latent[..., :0]
