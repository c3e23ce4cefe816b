"""The keyed noise of sampling, in numbers: what torch, C++ and Triton must draw alike.

Source: SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
"""

from __future__ import annotations

from typing import Final

GOLDEN: Final = 0x9E3779B97F4A7C15
MULTIPLIERS: Final = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
BITS: Final = 52  # of a uniform: (bits + 0.5) / 2^52 is exact in float64 and never 0 or 1
# Approximate and exact noise differ by less than this even where float32 saturates (u < 2^-24).
FINALIST_MARGIN: Final = 1.0
