"""The gated delta rule of linear attention (Gated DeltaNet): its sizes, its weights, and its twin
in torch.

A head keeps a matrix S [key_dim, value_dim] per sequence. For each token, with decay a and rate b:

    S = a S + k (b (v - a S^T k))^T        the value that S predicts for k moves towards v
    o = S^T q

q, k and v first pass a causal convolution over the last `taps` inputs, which are state as well.
A prompt is computed in chunks. Within a chunk of C tokens the corrections u_t = b (v_t - ...) solve
a triangular system, so S is read and written once per chunk (the WY form). With G the logarithms of
the decays, summed from the chunk's start:

    u_t = b_t (v_t - e^G_t S^T k_t) - sum over s < t of b_t e^(G_t - G_s) (k_t . k_s) u_s
    o_t = e^G_t S^T q_t + sum over s <= t of e^(G_t - G_s) (q_t . k_s) u_s
    S   = e^G_C S + sum over s of e^(G_C - G_s) k_s u_s^T

Sources: Gated Delta Networks (arXiv 2412.06464); DeltaNet in chunks (arXiv 2406.06484);
transformers' Qwen3NextGatedDeltaNet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.state.batch import Span

CHUNK: Final = 64  # tokens; the twin's
_TINY: Final = 1e-6  # added to the squared length of queries and keys


@dataclass(frozen=True, slots=True)
class DeltaSizes:
    """Heads of one layer. Each key head serves value_heads / key_heads neighbouring value heads."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int

    @property
    def segments(self) -> tuple[int, int, int]:
        """Numbers of a token's queries, keys and values, in the order of the convolution."""
        keys = self.key_heads * self.key_dim
        return keys, keys, self.values

    @property
    def channels(self) -> int:
        """Numbers of a token that pass the convolution: queries, keys, values."""
        return sum(self.segments)

    @property
    def values(self) -> int:
        """Numbers of a token's values, and of its output."""
        return self.value_heads * self.value_dim

    @property
    def inputs(self) -> int:
        """Numbers of a row: queries, keys, values, gates of the output, rates, decays."""
        return self.channels + self.values + 2 * self.value_heads


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """Weights of one layer besides its products."""

    conv: Tensor  # [channels, taps]
    decay: Tensor  # [value_heads] float32, negative: -exp(A_log)
    step_bias: Tensor  # [value_heads] float32
    norm: Tensor  # [value_dim]
    epsilon: float  # of the norm


class DeltaRule(Protocol):
    """One layer's convolution, delta rule and gated norm over the rows of a step."""

    def __call__(self, x: Tensor, conv: Tensor, matrices: Tensor, spans: Sequence[Span]) -> Tensor:
        """Return [T, values] for rows x [T, inputs], both in the model's dtype.

        conv [slots, channels, taps] and matrices [slots, value_heads, key_dim, value_dim] float32
        are the layer's states. Those in the spans' slots are advanced in place. A span that begins
        at token 0 reads no state.
        """
        ...


@dataclass(frozen=True, slots=True)
class TorchDeltaRule:
    """Implements DeltaRule by torch operations in float32, for any dtype and device. Single tokens
    are computed together, longer spans one by one."""

    sizes: DeltaSizes
    weights: DeltaWeights

    def __call__(self, x: Tensor, conv: Tensor, matrices: Tensor, spans: Sequence[Span]) -> Tensor:
        """See DeltaRule."""
        out = x.new_empty(len(x), self.sizes.values)
        singles = [span for span in spans if span.num_rows == 1 and span.start]
        if singles:
            rows = torch.tensor([span.first_row for span in singles], device=x.device)
            slots = torch.tensor([span.state_slot for span in singles], device=x.device)
            found = self._advance(x[rows][:, None], conv[slots], matrices[slots])
            out[rows] = found[0][:, 0]
            conv[slots], matrices[slots] = found[1:]
        for span in spans:
            if span.num_rows == 1 and span.start:
                continue
            rows, at = slice(span.first_row, span.first_row + span.num_rows), span.state_slot
            held = conv[at : at + 1], matrices[at : at + 1]
            if not span.start:
                held = torch.zeros_like(held[0]), torch.zeros_like(held[1])
            found = self._advance(x[None, rows], *held)
            out[rows] = found[0][0]
            conv[at], matrices[at] = found[1][0], found[2][0]
        return out

    def _advance(self, x: Tensor, conv: Tensor, matrices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return [B, T, values] for x [B, T, inputs], and both states behind the last token."""
        sizes, weights = self.sizes, self.weights
        parts = (sizes.channels, sizes.values, sizes.value_heads, sizes.value_heads)
        mixed, gate, rate, decay = x.split(parts, dim=-1)
        window = torch.cat((conv, mixed.transpose(1, 2)), dim=-1)
        summed = functional.conv1d(
            window[..., 1:].float(), weights.conv.float()[:, None], groups=sizes.channels
        )
        of_heads = functional.silu(summed).split(sizes.segments, dim=1)
        query, key, value = (
            each.unflatten(1, (heads, -1)).transpose(2, 3)
            for each, heads in zip(
                of_heads, (sizes.key_heads, sizes.key_heads, sizes.value_heads), strict=True
            )
        )
        shared = sizes.value_heads // sizes.key_heads
        query = (_of_length_one(query) * sizes.key_dim**-0.5).repeat_interleave(shared, dim=1)
        key = _of_length_one(key).repeat_interleave(shared, dim=1)
        rates = rate.float().sigmoid().transpose(1, 2)
        decays = weights.decay * functional.softplus(decay.float() + weights.step_bias)
        rule = one_token if x.shape[1] == 1 else in_chunks
        read, matrices = rule(query, key, value, decays.transpose(1, 2), rates, matrices)
        read = read.transpose(1, 2)
        normal = functional.rms_norm(read, (sizes.value_dim,), None, weights.epsilon)
        gates = functional.silu(gate.float().unflatten(-1, (sizes.value_heads, -1)))
        out = normal * weights.norm.float() * gates
        return out.flatten(2).to(x.dtype), window[..., -sizes.taps :], matrices


def one_token(
    query: Tensor, key: Tensor, value: Tensor, decays: Tensor, rates: Tensor, matrices: Tensor
) -> tuple[Tensor, Tensor]:
    """Advance matrices [B, N, key_dim, value_dim] by one token. Return what its query reads,
    [B, N, 1, value_dim], and the new matrices.

    query and key are [B, N, 1, key_dim], value [B, N, 1, value_dim]; decays (logarithms) and rates
    [B, N, 1]. All are float32.
    """
    matrices = matrices * decays.exp()[..., None]
    correction = (value - key @ matrices) * rates[..., None]
    matrices = matrices + key.transpose(2, 3) * correction
    return query @ matrices, matrices


def in_chunks(
    query: Tensor, key: Tensor, value: Tensor, decays: Tensor, rates: Tensor, matrices: Tensor
) -> tuple[Tensor, Tensor]:
    """Do what `one_token` does for T tokens, in chunks. Dimension 2 of all inputs is T."""
    read: list[Tensor] = []
    for at in range(0, query.shape[2], CHUNK):
        rows = slice(at, at + CHUNK)
        q, k, b = query[:, :, rows], key[:, :, rows], rates[:, :, rows, None]
        sums = decays[:, :, rows].cumsum(dim=2)
        # Masked before the exponential: above the diagonal it would overflow.
        between = (sums[..., None] - sums[..., None, :]).tril()
        passed, since = sums.exp()[..., None], between.exp().tril()
        system = (k @ k.transpose(2, 3)) * since * b
        wanted = b * (value[:, :, rows] - passed * (k @ matrices))
        corrections = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        read.append(passed * (q @ matrices) + ((q @ k.transpose(2, 3)) * since) @ corrections)
        left = (sums[..., -1:] - sums).exp()[..., None]
        matrices = passed[:, :, -1:] * matrices + (k * left).transpose(2, 3) @ corrections
    return torch.cat(read, dim=2), matrices


def _of_length_one(heads: Tensor) -> Tensor:
    return heads * torch.rsqrt(heads.square().sum(dim=-1, keepdim=True) + _TINY)
