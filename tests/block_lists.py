"""Block lists of a pool with one layer group, for tests that lay out sequences by hand."""

from __future__ import annotations

from collections.abc import Sequence

from baton.protocol.kv_spec import BlockLists, HeldBlocks


def held(ids: Sequence[int], first: int = 0) -> BlockLists:
    """Blocks [first, first + len(ids)) of a sequence."""
    return (HeldBlocks(ids, first),)
