"""PrefixIndex: blocks and state checkpoints of a node, as its events report them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.protocol.block_hashes import block_hashes, root_hash
from baton.protocol.events import BlockEvent, BlockEventKind
from router.nodes.policy import Ask, prefix_lengths
from router.nodes.prefix_index import PrefixIndex
from tests.router.test_policy import PROMPT, node

STORED, EVICTED, CLEARED = BlockEventKind.STORED, BlockEventKind.EVICTED, BlockEventKind.CLEARED
HASHES = tuple(block_hashes(root_hash("digest", "", "float32"), PROMPT[:80], 16))


def index_of(*events: BlockEvent) -> PrefixIndex:
    index = PrefixIndex()
    index.apply(0, events)
    return index


def test_checkpoints_are_no_blocks() -> None:
    index = index_of(
        BlockEvent(CLEARED, states=True),
        BlockEvent(STORED, HASHES),
        BlockEvent(STORED, HASHES[1:3], states=True),
        BlockEvent(EVICTED, HASHES[2:3], states=True),
        BlockEvent(EVICTED, HASHES[4:]),
    )
    assert index.hashes == set(HASHES[:4])
    assert index.checkpoints == {HASHES[1]}
    index.apply(9, [BlockEvent(STORED, HASHES[:1])])  # events between were lost
    assert (index.hashes, index.checkpoints, index.gaps) == ({HASHES[0]}, set(), 1)
    index.clear()
    assert (index.hashes, index.checkpoints) == (set(), None)


def test_a_model_without_state_has_no_checkpoints() -> None:
    index = index_of(BlockEvent(CLEARED), BlockEvent(STORED, HASHES))
    assert index.checkpoints is None


@pytest.mark.parametrize(
    ("checkpoints", "cached"),
    [(None, 80), ((), None), ((1, 3), 64), ((0,), 16), ((4,), 80)],
)
def test_a_prefix_counts_up_to_the_longest_checkpoint(
    checkpoints: tuple[int, ...] | None, cached: int | None
) -> None:
    kept = None if checkpoints is None else frozenset(HASHES[index] for index in checkpoints)
    holder = replace(node("d", holds=80), checkpoints=kept)
    assert prefix_lengths(Ask(PROMPT), [holder]).get(holder.boot_id) == cached


def test_a_checkpoint_behind_a_missing_block_does_not_count() -> None:
    held = node("d", holds=80)
    holder = replace(
        held, prefix={*HASHES} - {HASHES[2]}, checkpoints=frozenset((HASHES[1], HASHES[4]))
    )
    assert prefix_lengths(Ask(PROMPT), [holder]) == {holder.boot_id: 32}
