"""How a fetch went on over the layers: what a conversation notes becomes groups of layers."""

from __future__ import annotations

import pytest

from baton.protocol.events import LayersCame, layers_came
from kv_transfer.fetcher import MOST_GROUPS, Arrivals, grouped


def test_each_layer_of_a_small_model() -> None:
    arrivals: Arrivals = {1: (10.25, 10.75, 300), 0: (10.0, 10.25, 100)}
    assert layers_came(grouped([arrivals], 2, 9.5)) == [
        LayersCame(0, 0, 500_000, 750_000, 100),
        LayersCame(1, 1, 750_000, 1_250_000, 300),
    ]


def test_ranks_that_send_parts_of_the_same_layer() -> None:
    ranks: list[Arrivals] = [{0: (1.5, 2.0, 10)}, {0: (1.0, 1.75, 20)}]
    assert layers_came(grouped(ranks, 1, 1.0)) == [LayersCame(0, 0, 0, 1_000_000, 30)]


@pytest.mark.parametrize("num_layers", [1, MOST_GROUPS, MOST_GROUPS + 1, 28, 61, 80, 1000])
def test_groups_of_one_size_that_cover_all_layers(num_layers: int) -> None:
    arrivals = {layer: (layer + 1.0, layer + 2.0, 7) for layer in range(num_layers)}
    came = layers_came(grouped([arrivals], num_layers, 1.0))
    assert len(came) <= MOST_GROUPS
    told = [layer for each in came for layer in range(each.first, each.last + 1)]
    assert told == list(range(num_layers))
    assert len({each.last - each.first for each in came[:-1]}) <= 1
    assert sum(each.kv_bytes for each in came) == 7 * num_layers
    for each in came:
        assert (each.start_us, each.end_us) == (each.first * 10**6, (each.last + 1) * 10**6)


def test_groups_of_which_nothing_came_are_not_told() -> None:
    assert grouped([{}], 40, 1.0) == ()
    (only,) = layers_came(grouped([{39: (1.0, 2.0, 5)}], 40, 1.0))
    assert (only.first, only.last, only.kv_bytes) == (39, 39, 5)
