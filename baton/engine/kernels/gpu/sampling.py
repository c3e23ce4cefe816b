"""Tokens of rows without a filter: the maximum, or the keyed draw.

    program (row, split)    the best of one stretch of the vocabulary
    best of splits (row)    the highest score; the lowest id on ties

A keyed draw is that of sampler.py. float32 noise rules out almost every tile of the vocabulary;
tokens that may win get a float64 score. Twins: sampler.py's `_argmax` and `_choose_whole`.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.noise import BITS, FINALIST_MARGIN, GOLDEN, MULTIPLIERS

STRETCH: Final = 8192  # tokens of the vocabulary per program
TILE: Final = 1024

_MARGIN: tl.constexpr = tl.constexpr(FINALIST_MARGIN)
_STEP: tl.constexpr = tl.constexpr(GOLDEN)
_FIRST: tl.constexpr = tl.constexpr(MULTIPLIERS[0])
_SECOND: tl.constexpr = tl.constexpr(MULTIPLIERS[1])
_DROPPED: tl.constexpr = tl.constexpr(64 - BITS)
_UNIT: tl.constexpr = tl.constexpr(2.0**-BITS)
_WHOLE: tl.constexpr = tl.constexpr(1 << BITS)


class _Draws(NamedTuple):
    """Per row: its greatest logit, its temperature (float32) and its noise key (int64)."""

    greatest: Any
    temperature: Any
    key: Any


def greatest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the maximum of each row of logits [N, vocab] float32, and the lowest id that has it.

    The maxima are [N] float32, the ids [N] int64.
    """
    logits = logits.contiguous()
    rows, vocab = logits.shape
    splits = triton.cdiv(vocab, STRETCH)
    scores, ids = _room(logits, splits, torch.float32)
    _greatest_kernel[(rows, splits)](
        logits, scores, ids, vocab, STRETCH=STRETCH, TILE_WIDTH=TILE, num_warps=4
    )
    return _best_of_splits(scores, ids)


def keyed(logits: Tensor, temperatures: Tensor, keys: Tensor) -> Tensor:
    """Return the token ids [N] int64 with the highest logit / temperature + Gumbel noise.

    logits are [N, vocab] float32, temperatures [N] float32, keys [N] int64 (Draw.key in two's
    complement).
    """
    logits = logits.contiguous()
    rows, vocab = logits.shape
    splits = triton.cdiv(vocab, STRETCH)
    draws = _Draws(greatest(logits)[0], temperatures, keys)
    scores, ids = _room(logits, splits, torch.float64)
    _keyed_kernel[(rows, splits)](
        logits, draws, scores, ids, vocab, STRETCH=STRETCH, TILE_WIDTH=TILE, num_warps=4
    )
    return _best_of_splits(scores, ids)[1]


def _room(logits: Tensor, splits: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], splits)
    scores = torch.empty(shape, dtype=dtype, device=logits.device)
    return scores, torch.empty(shape, dtype=torch.int64, device=logits.device)


def _best_of_splits(scores: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    rows, splits = scores.shape
    best = torch.empty(rows, dtype=scores.dtype, device=scores.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=scores.device)
    _best_kernel[(rows,)](
        scores, ids, best, tokens, splits, WIDTH=triton.next_power_of_2(splits), num_warps=1
    )
    return best, tokens


@triton.jit
def _greatest_kernel(logits, scores, ids, vocab, STRETCH: tl.constexpr, TILE_WIDTH: tl.constexpr):
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin = split * STRETCH
    end = tl.minimum(begin + STRETCH, vocab)
    best = tl.full([TILE_WIDTH], float("-inf"), tl.float32)
    token = begin + tl.arange(0, TILE_WIDTH)
    for start in range(begin, end, TILE_WIDTH):
        column = start + tl.arange(0, TILE_WIDTH)
        score = tl.load(logits + row * vocab + column, mask=column < end, other=float("-inf"))
        higher = score > best
        best = tl.where(higher, score, best)
        token = tl.where(higher, column, token)
    top = tl.max(best, 0)
    lowest = tl.min(tl.where(best == top, token, vocab), 0)
    place = row * tl.num_programs(1) + split
    tl.store(scores + place, top)
    tl.store(ids + place, tl.minimum(lowest, vocab - 1).to(tl.int64))


@triton.jit
def _keyed_kernel(logits, draws, scores, ids, vocab, STRETCH: tl.constexpr,
                  TILE_WIDTH: tl.constexpr):  # fmt: skip
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin = split * STRETCH
    end = tl.minimum(begin + STRETCH, vocab)
    greatest = tl.load(draws.greatest + row)
    temperature = tl.load(draws.temperature + row)
    key = tl.load(draws.key + row).to(tl.uint64, bitcast=True)
    hopeful = tl.full([1], float("-inf"), tl.float32)
    best = tl.full([1], float("-inf"), tl.float64)
    token = tl.full([1], 0, tl.int64) + begin
    for start in range(begin, end, TILE_WIDTH):
        column = start + tl.arange(0, TILE_WIDTH)
        logit = tl.load(logits + row * vocab + column, mask=column < end, other=float("-inf"))
        shift = tl.full([TILE_WIDTH], 0.0, tl.float32)
        scaled = tl.div_rn(logit - greatest, shift + temperature)
        bits = _noise_bits(key, column)
        guess = scaled + _rough_gumbel(bits)
        top = tl.zeros([1], tl.float32) + tl.max(guess, 0)
        hopeful = tl.maximum(hopeful, top)
        if tl.max(guess, 0) >= tl.max(hopeful, 0) - _MARGIN:
            uniform = (bits.to(tl.float64) + 0.5) * _UNIT
            exact = scaled.to(tl.float64) - tl.log(-tl.log(uniform))
            # The twin looks at finalists only, so other tokens must not win by rounding.
            exact = tl.where(guess >= tl.max(hopeful, 0) - _MARGIN, exact, float("-inf"))
            highest = tl.max(exact, 0)
            lowest = tl.min(tl.where(exact == highest, column, vocab), 0)
            higher = best < highest
            best = tl.where(higher, highest, best)
            token = tl.where(higher, lowest.to(tl.int64), token)
    place = row * tl.num_programs(1) + split + tl.arange(0, 1)
    tl.store(scores + place, best)
    tl.store(ids + place, token)


@triton.jit
def _best_kernel(scores, ids, best, tokens, splits, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, WIDTH)
    score = tl.load(scores + row * splits + split, mask=split < splits, other=float("-inf"))
    token = tl.load(ids + row * splits + split, mask=split < splits, other=1 << 62)
    top = tl.max(score, 0)
    tl.store(best + row, top)
    tl.store(tokens + row, tl.min(tl.where(score == top, token, 1 << 62), 0))


@triton.jit
def _noise_bits(key, column):
    """Return the 52 random bits of (key, vocabulary id), uint64, as `_noise_bits` of sampler.py."""
    z = (column.to(tl.uint64) + 1) * _STEP + key
    z = (z ^ (z >> 30)) * _FIRST
    z = (z ^ (z >> 27)) * _SECOND
    return (z ^ (z >> 31)) >> _DROPPED


@triton.jit
def _rough_gumbel(bits):
    """Return Gumbel noise in float32, well within FINALIST_MARGIN of the exact noise."""
    # 1 - u: float32 holds it to full relative precision where scores are high.
    rest = ((-bits.to(tl.int64) + _WHOLE).to(tl.float32) - 0.5) * _UNIT
    rest = tl.minimum(rest, 1 - 2.0**-24)
    series = rest * (1.0 + rest * (0.5 + rest * (1.0 / 3)))
    return -tl.log(tl.where(rest < 2.0**-6, series, -tl.log(1.0 - rest)))
