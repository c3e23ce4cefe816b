"""The gated delta rule over recurrent states in their slots. Twin: kernels/delta_rule.py's
TorchDeltaRule, where the algebra is.

    _mix_kernel    inputs of a row and of those before it -> queries, keys, values, float32
    _keep_kernel   the last inputs of each sequence -> its slot
    _rule_kernel   a part of a head's matrix stays in registers over the tokens of a span
    _gate_kernel   what queries read -> norm, times the gate

A prompt goes token by token, not in chunks: the matrices are read and written once per span, but
its tokens wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.delta_rule import DeltaSizes, DeltaWeights
from baton.engine.state.batch import Span

MAX_DIM: Final = 256  # numbers of a key head or value head
_CHANNELS: Final = 256  # channels of the convolution per program
_VALUES: Final = 32  # columns of a matrix per program


class _Spans(NamedTuple):
    """Four integers of each span: its first row, its rows, whether it goes on, its slot."""

    numbers: Any  # [S, 4] int64
    owners: Any  # [T] int64: the span of each row


@dataclass(frozen=True, slots=True)
class TritonDeltaRule:
    """Implements DeltaRule on a GPU, for any float dtype and heads that `suits` allows."""

    sizes: DeltaSizes
    weights: DeltaWeights

    @staticmethod
    def suits(sizes: DeltaSizes) -> bool:
        """Whether a head's queries, and its values, fit into one program."""
        return max(sizes.key_dim, sizes.value_dim) <= MAX_DIM

    def __call__(self, x: Tensor, conv: Tensor, matrices: Tensor, spans: Sequence[Span]) -> Tensor:
        """See DeltaRule. The states of a slot must be contiguous, slots may lie apart."""
        sizes, weights = self.sizes, self.weights
        assert conv[0].is_contiguous()
        assert matrices[0].is_contiguous()
        assert weights.conv.is_contiguous()
        x, count = x.contiguous(), len(spans)
        where = _on_device(spans, x.device)
        mixed = x.new_empty(len(x), sizes.channels, dtype=torch.float32)
        read = x.new_empty(len(x), sizes.values, dtype=torch.float32)
        out = x.new_empty(len(x), sizes.values)
        tile = min(_CHANNELS, triton.next_power_of_2(sizes.channels))
        parts = triton.cdiv(sizes.channels, tile)
        _mix_kernel[(len(x), parts)](
            x, conv, weights.conv, mixed, where, x.shape[1], conv.stride(0), sizes.channels,
            TAPS=sizes.taps, TILE=tile,
        )  # fmt: skip
        _keep_kernel[(count, parts)](
            x, conv, where, x.shape[1], conv.stride(0), sizes.channels, TAPS=sizes.taps, TILE=tile
        )
        columns = min(_VALUES, triton.next_power_of_2(sizes.value_dim))
        _rule_kernel[(count, sizes.value_heads, triton.cdiv(sizes.value_dim, columns))](
            mixed, x, weights.decay, weights.step_bias, matrices, read, where,
            x.shape[1], matrices.stride(0), sizes.key_heads, sizes.value_heads, sizes.key_dim,
            sizes.value_dim, sizes.key_dim**-0.5, KEYS=triton.next_power_of_2(sizes.key_dim),
            COLUMNS=columns,
        )  # fmt: skip
        _gate_kernel[(len(x), sizes.value_heads)](
            read, x, weights.norm, out, x.shape[1], sizes.channels, sizes.value_dim,
            weights.epsilon, VALUES=triton.next_power_of_2(sizes.value_dim), num_warps=1,
        )  # fmt: skip
        return out


def _on_device(spans: Sequence[Span], device: torch.device) -> _Spans:
    numbers = [(s.first_row, s.num_rows, int(s.start > 0), s.state_slot) for s in spans]
    owners = [index for index, span in enumerate(spans) for _ in range(span.num_rows)]
    return _Spans(torch.tensor(numbers, device=device), torch.tensor(owners, device=device))


@triton.jit
def _mix_kernel(x, conv, weight, mixed, spans, width, slot_size, channels, TAPS: tl.constexpr,
                TILE: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = channel < channels
    span = spans.numbers + 4 * tl.load(spans.owners + row)
    before = row - tl.load(span)  # tokens of the span before this one
    held = conv + tl.load(span + 3) * slot_size + channel * TAPS
    known = tl.load(span + 2) * channels  # 0: the sequence begins here
    total = tl.zeros([TILE], tl.float32)
    for tap in tl.static_range(TAPS):  # pyright: ignore[reportGeneralTypeIssues]
        back = TAPS - 1 - tap  # so many tokens before this one
        own = tl.where(before >= back, channels, 0)
        here = tl.load(x + (row - back) * width + channel, mask=channel < own, other=0.0)
        past = tl.load(held + TAPS + before - back, mask=channel < known - own, other=0.0)
        factor = tl.load(weight + channel * TAPS + tap, mask=inside, other=0.0)
        total += (here.to(tl.float32) + past.to(tl.float32)) * factor.to(tl.float32)
    tl.store(mixed + row * channels + channel, total * tl.sigmoid(total), mask=inside)


@triton.jit
def _keep_kernel(x, conv, spans, width, slot_size, channels, TAPS: tl.constexpr,
                 TILE: tl.constexpr):  # fmt: skip
    span = spans.numbers + 4 * tl.program_id(0)
    channel = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = channel < channels
    first, count = tl.load(span), tl.load(span + 1)
    held = conv + tl.load(span + 3) * slot_size + channel * TAPS
    known = tl.load(span + 2) * channels
    # In ascending order: what a tap gets from further behind has not been overwritten yet.
    for tap in tl.static_range(TAPS):  # pyright: ignore[reportGeneralTypeIssues]
        token = count - TAPS + tap  # of the span; negative: of those before it
        own = tl.where(token >= 0, channels, 0)
        here = tl.load(x + (first + token) * width + channel, mask=channel < own, other=0.0)
        past = tl.load(held + TAPS + token, mask=channel < known - own, other=0.0)
        kept = here.to(tl.float32) + past.to(tl.float32)
        tl.store(held + tap, kept.to(conv.dtype.element_ty), mask=inside)


@triton.jit
def _rule_kernel(
    mixed, x, decays, step_bias, matrices, read, spans, width, slot_size, key_heads, value_heads,
    key_dim, value_dim, scale, KEYS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    span = spans.numbers + 4 * tl.program_id(0)
    head = tl.program_id(1)
    key, column = tl.arange(0, KEYS), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    of_key, of_value = key < key_dim, column < value_dim
    inside = of_key[:, None] & of_value[None, :]
    first, count = tl.load(span), tl.load(span + 1)
    known = key[:, None] < tl.load(span + 2) * key_dim  # none if the sequence begins here
    cells = key[:, None] * value_dim + column[None, :]
    at = matrices + tl.load(span + 3) * slot_size + head * key_dim * value_dim + cells
    state = tl.load(at, mask=inside & known, other=0.0)
    keys, values = key_heads * key_dim, value_heads * value_dim
    channels = 2 * keys + values
    own_keys = head // (value_heads // key_heads) * key_dim + key
    own_values = head * value_dim + column
    decay, bias = tl.load(decays + head), tl.load(step_bias + head)
    for token in range(count):
        row = first + token
        inputs = mixed + row * channels
        q = tl.load(inputs + own_keys, mask=of_key, other=0.0)
        k = tl.load(inputs + keys + own_keys, mask=of_key, other=0.0)
        v = tl.load(inputs + 2 * keys + own_values, mask=of_value, other=0.0)
        q = q * (tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * scale)
        k = k * tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
        numbers = x + row * width + channels + values + head
        rate = tl.sigmoid(tl.load(numbers).to(tl.float32))
        step = tl.load(numbers + value_heads).to(tl.float32) + bias
        # Softplus, which is its argument once that is large.
        step = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(tl.minimum(step, 20.0))))
        state = state * tl.exp(decay * step)
        correction = (v - tl.sum(k[:, None] * state, 0)) * rate
        state = state + k[:, None] * correction[None, :]
        tl.store(read + row * values + own_values, tl.sum(q[:, None] * state, 0), mask=of_value)
    tl.store(at, state, mask=inside)


@triton.jit
def _gate_kernel(read, x, weight, out, width, channels, value_dim, epsilon,
                 VALUES: tl.constexpr):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, VALUES)
    inside = column < value_dim
    own = head * value_dim + column
    at = row * tl.num_programs(1) * value_dim + own
    y = tl.load(read + at, mask=inside, other=0.0)
    gate = tl.load(x + row * width + channels + own, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    y = y * tl.rsqrt(tl.sum(y * y, 0) / value_dim + epsilon) * factor * gate * tl.sigmoid(gate)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)
