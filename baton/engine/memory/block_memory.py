"""BlockMemory: what block tables ask of the memory behind the blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class BlockMemory(Protocol):
    """The bytes behind the blocks, as in KVArena. Host copies are opaque to their holders."""

    def copy_block(self, source: int, target: int) -> None:
        """Copy a block. `source` may be an adopted one."""
        ...

    def clear_block(self, block: int) -> None:
        """Zero a block that will be written only in part."""
        ...

    def read_blocks(self, blocks: Sequence[int]) -> Any:
        """Return copies of `blocks` in host memory; row i is blocks[i]."""
        ...

    def write_blocks(self, host: Any, rows: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy these rows of `host` into `blocks`."""
        ...
