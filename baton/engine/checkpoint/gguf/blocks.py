"""The blocks of a GGUF file: groups of small integers, each with a scale, and in some types with a
minimum.

    type               a weight is                  group   kept as
    Q4_0               d * (q - 8)                  32      4 bits
    Q5_0, Q8_0         d * (q - 16), d * q          32      8 bits
    Q4_1, Q5_1         d * q + m                    32      4, 8 bits with a zero
    Q4_K, Q5_K         (d * s) * q - dmin * m       32      4, 8 bits with a zero
    Q6_K               (d * s) * (q - 32)           16      8 bits

`widen_blocks` computes the weights in float32, as the `gguf` package does. `integers_of` keeps the
integers and turns a minimum into a zero point, which may be a fraction. Source: ggml-quants.c
(dequantize_row_*).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from baton.engine.quantization.int_weight import IntWeight

MOST_STEPS: Final = 65_000  # zero points up to this fit into float16; see integers_of
_K_SCALES: Final = 12  # bytes that hold 8 scales and 8 minima of 6 bits


@dataclass(frozen=True, slots=True)
class Blocks:
    """n blocks, whose weights are scales * numbers - minima.

    numbers: int8 [n, groups, inputs of a group], of `bits` bits, not negative if there are minima.
    scales and minima: float32 [n, groups, 1]; minima None = all are 0.
    """

    bits: int
    numbers: Tensor
    scales: Tensor
    minima: Tensor | None = None

    def is_finite(self) -> bool:
        """Whether all weights are finite."""
        parts = (self.scales, self.minima)
        return all(bool(part.isfinite().all()) for part in parts if part is not None)


def read_blocks(blocks: Tensor, kind: str) -> Blocks:
    """Take apart blocks uint8 [n, bytes of a block] of type `kind`."""
    return _READERS[kind](blocks.contiguous())


def widen_blocks(blocks: Tensor, kind: str) -> Tensor:
    """Widen blocks uint8 [n, bytes of a block] of type `kind` to float32 [n, weights of a
    block]."""
    parts = read_blocks(blocks, kind)
    numbers = parts.scales * parts.numbers.float()
    return (numbers if parts.minima is None else numbers - parts.minima).flatten(1)


def integers_of(blocks: Blocks, outputs: int) -> IntWeight:
    """Return the blocks of a matrix with so many `outputs` as one integer weight.

    Its weights equal those of widen_blocks up to float32's rounding. A group whose minimum is more
    than MOST_STEPS times its scale is kept as that minimum alone, with a relative error below
    2^-11.
    """
    bits, values = (4 if blocks.bits == 4 else 8), blocks.numbers
    if blocks.minima is None:
        return IntWeight(bits, values.reshape(outputs, -1), blocks.scales.view(outputs, -1))
    middle = 1 << blocks.bits - 1
    alone = blocks.minima.abs() > blocks.scales.abs() * MOST_STEPS
    scales = torch.where(alone, blocks.minima, blocks.scales)
    steps = torch.where(blocks.minima == 0, 0.0, blocks.minima / scales)  # 0 / 0 is no number
    zeros = torch.where(alone, 1.0, steps - middle)
    values = torch.where(alone, 0, values - middle)
    return IntWeight(
        bits, values.reshape(outputs, -1), scales.view(outputs, -1), zeros.view(outputs, -1)
    )


def _halfs(blocks: Tensor, at: int) -> Tensor:
    """Return the float16 at byte `at` of each block as float32 [n, 1, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float().unsqueeze(2)


def _nibbles(bytes_: Tensor, run: int) -> Tensor:
    """Return, for each run of `run` bytes, first the low halves and then the high halves: [n,
    2 * bytes]."""
    runs = bytes_.unflatten(1, (-1, 1, run))
    return torch.cat((runs & 15, runs >> 4), 2).flatten(1)


def _fifth_bits(bytes_: Tensor) -> Tensor:
    """Return the 32 bits of four bytes, the lowest bit first: [n, 32]."""
    return (bytes_.unsqueeze(2) >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1)


def _groups(numbers: Tensor, size: int, middle: int = 0) -> Tensor:
    """Return numbers uint8 [n, ...] minus `middle` as int8 [n, groups, size]."""
    return (numbers.view(torch.int8) - middle).view(len(numbers), -1, size)


def _q4_0(blocks: Tensor) -> Blocks:
    return Blocks(4, _groups(_nibbles(blocks[:, 2:], 16), 32, 8), _halfs(blocks, 0))


def _q4_1(blocks: Tensor) -> Blocks:
    numbers = _groups(_nibbles(blocks[:, 4:], 16), 32)
    return Blocks(4, numbers, _halfs(blocks, 0), -_halfs(blocks, 2))


def _q5_0(blocks: Tensor) -> Blocks:
    numbers = _nibbles(blocks[:, 6:], 16) | _fifth_bits(blocks[:, 2:6]) << 4
    return Blocks(5, _groups(numbers, 32, 16), _halfs(blocks, 0))


def _q5_1(blocks: Tensor) -> Blocks:
    numbers = _nibbles(blocks[:, 8:], 16) | _fifth_bits(blocks[:, 4:8]) << 4
    return Blocks(5, _groups(numbers, 32), _halfs(blocks, 0), -_halfs(blocks, 2))


def _q8_0(blocks: Tensor) -> Blocks:
    return Blocks(8, _groups(blocks[:, 2:].contiguous(), 32), _halfs(blocks, 0))


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales and the minima of a block's 8 groups, float32 [n, 8, 1] each."""
    packed = blocks[:, 4 : 4 + _K_SCALES]
    low, middle, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((low & 63, high & 15 | low >> 2 & 48), 1).float().unsqueeze(2)
    minima = torch.cat((middle & 63, high >> 4 | middle >> 2 & 48), 1).float().unsqueeze(2)
    return _halfs(blocks, 0) * scales, _halfs(blocks, 2) * minima


def _q4_k(blocks: Tensor) -> Blocks:
    numbers = _groups(_nibbles(blocks[:, 4 + _K_SCALES :], 32), 32)
    return Blocks(4, numbers, *_scales_and_minima(blocks))


def _q5_k(blocks: Tensor) -> Blocks:
    fifths = blocks[:, 4 + _K_SCALES : 4 + _K_SCALES + 32].unsqueeze(1)
    fifths = fifths >> torch.arange(8, dtype=torch.uint8)[:, None] & 1  # [n, 8, 32]
    numbers = _nibbles(blocks[:, 4 + _K_SCALES + 32 :], 32) | fifths.flatten(1) << 4
    return Blocks(5, _groups(numbers, 32), *_scales_and_minima(blocks))


def _q6_k(blocks: Tensor) -> Blocks:
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float().unsqueeze(2)
    high = blocks[:, 128:192].unflatten(1, (2, 1, 32))
    high = high >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None] & 3  # [n, 2, 4, 32]
    numbers = _nibbles(blocks[:, :128], 64) | high.flatten(1) << 4
    return Blocks(6, _groups(numbers, 16, 32), _halfs(blocks, 208) * scales)


_READERS: Final[Mapping[str, Callable[[Tensor], Blocks]]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q4_K": _q4_k,
    "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip
