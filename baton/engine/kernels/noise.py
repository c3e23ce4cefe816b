"""Constants of the keyed sampling noise, which torch, C++ and Triton must compute alike.

Source: SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
"""

from __future__ import annotations

from typing import Final

GOLDEN: Final = 0x9E3779B97F4A7C15
MULTIPLIERS: Final = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
BITS: Final = 52  # of a uniform number: (bits + 0.5) / 2^52 is exact in float64, never 0 or 1
# Approximate and exact noise differ by less than this even where float32 saturates (u < 2^-24).
FINALIST_MARGIN: Final = 1.0
