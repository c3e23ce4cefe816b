"""Rotary position embedding: a checkpoint's rule, and the rotation of query and key heads.

The rule is also part of the KV layout fingerprint (stored keys are rotated keys), so its text is
canonical. Source: RoFormer (arXiv 2104.09864); llama3 scaling as in
transformers/modeling_rope_utils.py.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

LEAN_KINDS: Final = ("default", "linear", "llama3")  # what `inverse_frequencies` can compute
DEFAULT_THETA: Final = 10000.0


@dataclass(frozen=True, slots=True)
class RopeRule:
    """`kind` is Hugging Face's rope_type; `parameters` are the other keys of the rule, sorted by
    name."""

    kind: str
    theta: float
    parameters: tuple[tuple[str, Any], ...] = ()

    @property
    def text(self) -> str:
        """Canonical text, for fingerprints."""
        return json.dumps([self.kind, self.theta, dict(self.parameters)], sort_keys=True)

    def number(self, name: str) -> float:
        """A numeric parameter. Raises KeyError if the rule lacks it."""
        return float(dict(self.parameters)[name])


def rope_rule(config: dict[str, Any]) -> RopeRule | None:
    """Read either spelling (`rope_parameters`, or `rope_theta` + `rope_scaling`); None without
    RoPE."""
    keys = ("rope_parameters", "rope_scaling", "rope_theta")
    if all(config.get(key) is None for key in keys):
        return None
    merged = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    legacy_kind = merged.pop("type", "default")
    kind = str(merged.pop("rope_type", legacy_kind))
    theta = merged.pop("rope_theta", None) or config.get("rope_theta") or DEFAULT_THETA
    return RopeRule(kind, float(theta), tuple(sorted(merged.items())))


def inverse_frequencies(rule: RopeRule, head_dim: int) -> Tensor:
    """Angle per position of each pair of dimensions: [head_dim / 2] float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rule.theta**exponents)
    if rule.kind == "linear":
        return frequencies / rule.number("factor")
    if rule.kind == "llama3":
        return _llama3(frequencies, rule)
    assert rule.kind == "default", rule.kind
    return frequencies


def _llama3(frequencies: Tensor, rule: RopeRule) -> Tensor:
    """Slow down the long wavelengths by `factor`, keep the short ones, blend in between."""
    low, high = rule.number("low_freq_factor"), rule.number("high_freq_factor")
    original = rule.number("original_max_position_embeddings")
    wavelengths = 2 * math.pi / frequencies
    slowed = frequencies / rule.number("factor")
    share = (original / wavelengths - low) / (high - low)
    blended = (1 - share) * slowed + share * frequencies
    scaled = torch.where(wavelengths > original / low, slowed, frequencies)
    medium = (wavelengths >= original / high) & (wavelengths <= original / low)
    return torch.where(medium, blended, scaled)


@dataclass(frozen=True, slots=True)
class Rotation:
    """cos and sin [T, 1, head_dim / 2] of one step's positions, in the model's dtype."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def at(cls, positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> Rotation:
        """positions [T] int64, frequencies [head_dim / 2] float32."""
        angles = positions[:, None].float() * frequencies
        return cls(angles.cos().to(dtype)[:, None], angles.sin().to(dtype)[:, None])

    def rotate(self, heads: Tensor) -> Tensor:
        """heads [T, n, head_dim] (first half paired with the second) -> the same, rotated."""
        first, second = heads.chunk(2, dim=-1)
        return torch.cat(
            (
                first * self.cos - second * self.sin,
                second * self.cos + first * self.sin,
            ),
            dim=-1,
        )
