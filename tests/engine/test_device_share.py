"""What a rank is estimated to hold beyond an even part of the weights, by hand.

Against models that are loaded: test_tensor_parallel_quantized.py and _mixtures.py.
"""

from __future__ import annotations

import pytest

from baton.engine.performance.device_share import longest_group
from tests.engine.test_estimate import LLAMA, run


def test_ranks_that_share_kv_heads_hold_their_weights_each() -> None:
    """Of 8 KV heads over 16 ranks each rank has one, so an eighth of k and v."""
    both = 32 * 2 * 8 * 128 * 4096 * 2
    assert run(LLAMA, tensor_parallel_size=8).weight_bytes == 16_060_522_496 // 8
    assert run(LLAMA, tensor_parallel_size=16).weight_bytes == 16_060_522_496 // 16 + both // 16


def test_act_order_lengthens_groups_over_ranks() -> None:
    """Of 128 inputs of a group the longest on one of 2 ranks has about 1.2 times 64."""
    assert 1.19 < longest_group(4096, 128, 2) / 64 < 1.22
    assert longest_group(4096, 128, 1) == pytest.approx(128)
    assert longest_group(512, 512, 4) == pytest.approx(128), "one group of all inputs"
