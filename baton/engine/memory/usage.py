"""What the pool's blocks are used for at one moment."""

from __future__ import annotations

from collections.abc import Sequence

from baton.engine.memory.block_tables import count_blocks
from baton.engine.state.sequence import SequenceState
from baton.engine.state.stats import KVUsage


def usage_of(sequences: Sequence[SequenceState], size: int) -> KVUsage:
    """What blocks of `size` tokens hold for these sequences right now. Walks all block tables."""
    counts = count_blocks(sequences)
    filled: dict[int, int] = {}
    for sequence in sequences:
        for table in sequence.tables:
            for index, block in enumerate(table.blocks, table.num_freed):
                here = min(size, max(0, sequence.num_computed - index * size))
                filled[block] = max(here, filled.get(block, 0))
    return KVUsage(
        allocated_blocks=len(counts),
        table_blocks=counts.total(),
        shared_blocks=sum(1 for count in counts.values() if count > 1),
        allocated_slots=len(counts) * size,
        used_slots=sum(filled.values()),
    )
