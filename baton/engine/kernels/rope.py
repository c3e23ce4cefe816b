"""Rotary position embedding: a checkpoint's rule, and the rotation of query and key heads.

The rule is also part of the KV layout fingerprint, because stored keys are rotated keys. So its
text is canonical. Sources: RoFormer (arXiv 2104.09864), YaRN (arXiv 2309.00071); llama3, yarn and
dynamic scaling as in transformers/modeling_rope_utils.py.

A row's rotation may depend on its own position only, because a key is stored once and read by every
request with the same prefix. Two rules of transformers break this: `dynamic` (NTK) and `longrope`
change all frequencies once the longest sequence of a forward call passes a length. Up to that
length they do not, so Baton serves them up to there; `position_limit` returns that length.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import torch
from torch import Tensor

# What `inverse_frequencies` can compute: (required parameters, optional parameters).
LEAN_KINDS: Final[dict[str, tuple[set[str], set[str]]]] = {
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "dynamic": ({"factor"}, set()),
    "llama3": (
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
        set(),
    ),
    "yarn": (
        {"factor", "original_max_position_embeddings"},
        {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
    ),
}
DEFAULT_THETA: Final = 10000.0
_LENGTH_KEYS: Final = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")


@dataclass(frozen=True, slots=True)
class RopeRule:
    """A rule of rotary embedding.

    `kind` is Hugging Face's rope_type; `parameters` are the other keys of the rule, sorted by name.
    """

    kind: str
    theta: float
    parameters: tuple[tuple[str, Any], ...] = ()

    @property
    def text(self) -> str:
        """Return the rule as canonical text, for fingerprints."""
        return json.dumps([self.kind, self.theta, dict(self.parameters)], sort_keys=True)

    def number(self, name: str) -> float:
        """Return a numeric parameter. Raises KeyError if the rule lacks it."""
        return float(dict(self.parameters)[name])

    def optional(self, name: str) -> float | None:
        """Return a numeric parameter, None if the rule lacks it."""
        value = dict(self.parameters).get(name)
        return None if value is None else float(value)


def rope_rule(config: dict[str, Any]) -> RopeRule | None:
    """Read the rule in either spelling; None for a model without RoPE.

    The spellings are `rope_parameters`, and `rope_theta` with `rope_scaling`.
    """
    keys = ("rope_parameters", "rope_scaling", "rope_theta")
    if all(config.get(key) is None for key in keys):
        return None
    merged = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    legacy_kind = merged.pop("type", "default")
    kind = str(merged.pop("rope_type", legacy_kind))
    theta = merged.pop("rope_theta", None) or config.get("rope_theta") or DEFAULT_THETA
    return RopeRule(kind, float(theta), tuple(sorted(merged.items())))


def inverse_frequencies(rule: RopeRule, head_dim: int) -> Tensor:
    """Return the angle per position of each pair of dimensions: [head_dim / 2] float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rule.theta**exponents)
    if rule.kind == "linear":
        return frequencies / rule.number("factor")
    if rule.kind == "llama3":
        return _llama3(frequencies, rule)
    if rule.kind == "yarn":
        return _yarn(frequencies, rule, head_dim)
    if rule.kind == "longrope":  # below its limit the short factors hold
        factors = torch.tensor(dict(rule.parameters)["short_factor"], dtype=torch.float32)
        return 1.0 / (factors * rule.theta**exponents)
    assert rule.kind in ("default", "dynamic"), rule.kind  # dynamic: below its limit nothing scales
    return frequencies


def attention_factor(rule: RopeRule) -> float:
    """What cos and sin are multiplied with: 1, but for YaRN and longrope, which sharpen attention
    so. longrope's must be given."""
    if rule.kind not in ("yarn", "longrope"):
        return 1.0
    given = rule.optional("attention_factor")
    if given is not None:
        return given
    assert rule.kind == "yarn"
    factor = rule.number("factor")
    mscale, all_dim = rule.optional("mscale"), rule.optional("mscale_all_dim")
    if mscale and all_dim:
        return _yarn_scale(factor, mscale) / _yarn_scale(factor, all_dim)
    return _yarn_scale(factor, 1.0)


def softmax_factor(rule: RopeRule) -> float:
    """Return the factor of DeepSeek's attention scale: 1, except with YaRN and mscale_all_dim."""
    all_dim = None if rule.kind == "default" else rule.optional("mscale_all_dim")
    if not all_dim:
        return 1.0
    return _yarn_scale(rule.number("factor"), all_dim) ** 2


def position_limit(config: dict[str, Any]) -> int | None:
    """Return how many positions a model's config allows; None if it does not say.

    YaRN: factor times its original length, if that is more than the config's own number. longrope:
    its original length, beyond which transformers changes the frequencies of all rows.
    """
    stated = next((config[key] for key in _LENGTH_KEYS if config.get(key) is not None), None)
    for rule in _rules(config):
        kind = rule.get("rope_type", rule.get("type"))
        original = rule.get("original_max_position_embeddings")
        original = original or config.get("original_max_position_embeddings")
        if stated is None or original is None:
            continue
        if kind == "yarn" and rule.get("factor"):
            stated = max(stated, int(original * rule["factor"]))
        if kind in ("longrope", "su"):
            stated = min(stated, original)
    return stated


def _rules(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the RoPE rules of a config: a single one, or one per layer type."""
    found: list[dict[str, Any]] = []
    for key in ("rope_scaling", "rope_parameters"):
        rule = config.get(key) or {}
        found += [rule, *(value for value in rule.values() if isinstance(value, dict))]
    return found


def _llama3(frequencies: Tensor, rule: RopeRule) -> Tensor:
    """Divide the frequencies of long wavelengths by `factor`, keep the short ones, blend
    between.
    """
    low, high = rule.number("low_freq_factor"), rule.number("high_freq_factor")
    original = rule.number("original_max_position_embeddings")
    wavelengths = 2 * math.pi / frequencies
    slowed = frequencies / rule.number("factor")
    share = (original / wavelengths - low) / (high - low)
    blended = (1 - share) * slowed + share * frequencies
    scaled = torch.where(wavelengths > original / low, slowed, frequencies)
    medium = (wavelengths >= original / high) & (wavelengths <= original / low)
    return torch.where(medium, blended, scaled)


def _yarn(frequencies: Tensor, rule: RopeRule, head_dim: int) -> Tensor:
    """Divide the frequencies of slowly turning dimensions by `factor`, keep those that turn fast.

    A ramp over the dimensions lies between `beta_fast` and `beta_slow` turns in the original
    length.
    """
    original = rule.number("original_max_position_embeddings")

    def dimension(turns: float) -> float:
        """Return which dimension turns that many times within the original length."""
        ratio = math.log(original / (turns * 2 * math.pi))
        return head_dim * ratio / (2 * math.log(rule.theta))

    low = dimension(rule.optional("beta_fast") or 32.0)
    high = dimension(rule.optional("beta_slow") or 1.0)
    if dict(rule.parameters).get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return frequencies / rule.number("factor") * (1 - kept) + frequencies * kept


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


FEWEST_KEPT: Final = 1024  # positions of a Frequencies' table
MOST_BYTES: Final = 16 << 20  # of such a table


class PairRotation(StrEnum):
    """Which dims of a head are rotated together, and where they are written."""

    HALVES = "halves"  # dim i with dim i + D / 2, both in place
    NEIGHBOURS = "neighbours"  # dim 2i with dim 2i + 1, both in place
    REGROUPED = "regrouped"  # dim 2i with dim 2i + 1, written as halves

    def __call__(self, heads: Tensor, rotation: Rotation) -> Tensor:
        """Return heads [T, n, D] rotated."""
        if self is PairRotation.HALVES:
            return rotation.rotate(heads)
        first, second = heads.unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = rotation.cos, rotation.sin
        rotated = first * cos - second * sin, second * cos + first * sin
        if self is PairRotation.REGROUPED:
            return torch.cat(rotated, dim=-1)
        return torch.stack(rotated, dim=-1).flatten(-2)


@dataclass(frozen=True, slots=True)
class Rotation:
    """cos and sin [T, 1, R / 2] of a step's positions, or of those from 0 on, scaled, in the
    model's dtype, for the first R dims of each head.

    `pairs` says which of them rotate together, in `rotate`: halves or neighbours.
    """

    cos: Tensor
    sin: Tensor
    pairs: PairRotation = PairRotation.HALVES

    @classmethod
    def at(
        cls,
        positions: Tensor,
        frequencies: Tensor,
        dtype: torch.dtype,
        factor: float = 1.0,
        pairs: PairRotation = PairRotation.HALVES,
    ) -> Rotation:
        """positions [T] int64, frequencies [R / 2] float32; see attention_factor."""
        angles = positions[:, None, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        if factor != 1.0:
            cos, sin = cos * factor, sin * factor
        return cls(cos.to(dtype), sin.to(dtype), pairs)

    @property
    def rotated(self) -> int:
        """R."""
        return 2 * self.cos.shape[-1]

    def rotate(self, heads: Tensor) -> Tensor:
        """heads [T, n, head_dim] -> the same, rotated."""
        turned, kept = heads[..., : self.rotated], heads[..., self.rotated :]
        if self.pairs is not PairRotation.HALVES:
            turned = self.pairs(turned, self)
        else:
            first, second = turned.chunk(2, dim=-1)
            turned = torch.cat(
                (
                    first * self.cos - second * self.sin,
                    second * self.cos + first * self.sin,
                ),
                dim=-1,
            )
        return torch.cat((turned, kept), dim=-1) if kept.shape[-1] else turned


@dataclass(frozen=True, slots=True)
class Frequencies:
    """How the heads of some layers rotate: `each` [R / 2] float32, the angle per position of each
    pair; `factor` as attention_factor says. On a CPU the cosines and sines of the first positions
    are kept, as many as steps have asked for."""

    each: Tensor
    factor: float
    pairs: PairRotation
    _kept: dict[torch.dtype, Rotation] = field(
        default_factory=dict[torch.dtype, "Rotation"], init=False, compare=False, repr=False
    )

    @classmethod
    def of(
        cls, rule: RopeRule, rotated: int, pairs: PairRotation, device: torch.device
    ) -> Frequencies:
        """Those of a rule, for heads of which `rotated` dims rotate."""
        return cls(inverse_frequencies(rule, rotated).to(device), attention_factor(rule), pairs)

    def at(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """positions [T] int64 -> cos and sin of these."""
        if self.each.device.type != "cpu":
            return self._of(positions, dtype)
        table = self.table(int(positions.max()) if len(positions) else 0, dtype)
        if table is None:
            return self._of(positions, dtype)
        cos, sin = (part.index_select(0, positions) for part in (table.cos, table.sin))
        return Rotation(cos, sin, self.pairs)

    def table(self, last: int, dtype: torch.dtype) -> Rotation | None:
        """Return cos and sin of the positions from 0 on, up to `last` and more; None if that is too
        many to be kept. CPU."""
        kept = self._kept.get(dtype)
        if kept is not None and last < len(kept.cos):
            return kept
        count = max(FEWEST_KEPT, 1 << last.bit_length())
        if 2 * count * len(self.each) * dtype.itemsize > MOST_BYTES:
            return None
        added = self._of(torch.arange(0 if kept is None else len(kept.cos), count), dtype)
        if kept is not None:
            cos, sin = torch.cat((kept.cos, added.cos)), torch.cat((kept.sin, added.sin))
            added = Rotation(cos, sin, self.pairs)
        self._kept[dtype] = added
        return added

    def _of(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        return Rotation.at(positions, self.each, dtype, self.factor, self.pairs)
