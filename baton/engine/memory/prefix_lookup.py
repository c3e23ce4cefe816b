"""PrefixLookup: how many leading blocks of a prompt the prefix map has, where they are of use.

In a group that sees all tokens, every block must be there; in a windowed group those that the next
token sees; and a model with recurrent state needs a checkpoint behind the last one. The answers
depend on each other: fewer blocks move the window back, and a window moves the last checkpoint. So
they are asked in turn until none takes a block away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from baton.engine.memory.block_pool import BlockPool
from baton.engine.memory.state_checkpoints import StateCheckpoints


class PrefixLookup:
    """Looks blocks up in `pool`. `windows`: per layer group, the most tokens that its layers see
    (0 = all)."""

    def __init__(
        self, pool: BlockPool, windows: Sequence[int], checkpoints: StateCheckpoints
    ) -> None:
        self._pool = pool
        self._windows = windows
        self._checkpoints = checkpoints

    def num_hits(
        self, hashes: Sequence[bytes], start_of: Callable[[int], int], resumes: bool
    ) -> int:
        """Return how many leading blocks of `hashes` every group has, where it looks at them.

        `start_of(count)`: the first token to compute behind `count` hits. `resumes`: a state behind
        the hits is needed.
        """
        count = len(hashes)
        for group, window in enumerate(self._windows):
            if not window:
                keys = (key_of(each, group) for each in hashes[:count])
                count = len(self._pool.lookup(keys))
        before = -1
        while count != before:
            before = count
            for group, window in enumerate(self._windows):
                if window:
                    count = self._windowed_hits(group, hashes, count, start_of)
            if resumes:
                count = self._checkpoints.longest(hashes, count)
        return count

    def _windowed_hits(
        self, group: int, hashes: Sequence[bytes], count: int, start_of: Callable[[int], int]
    ) -> int:
        """Do as num_hits for one group and at most `count` blocks, from the end backwards."""
        window, index = self._windows[group], count - 1
        while index >= self._pool.first_seen(window, start_of(count)):
            if self._pool.find(key_of(hashes[index], group)) is None:
                count = index
            index -= 1
        return count


def key_of(block_hash: bytes, group: int) -> bytes:
    """Return the prefix map's key of a block: in group 0 its hash, which routers know as well."""
    return block_hash if group == 0 else block_hash + bytes((group,))
