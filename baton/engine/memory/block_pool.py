"""BlockPool: who holds which KV block. Integers only: it knows neither tensors nor requests.

Life of a block:
    free, plain --allocate--> used --register(hash)--> used, in the prefix map
    used --last unref--> free, plain           (no hash: its content is worthless)
    used --last unref--> free, cached          (hash: still answers lookups, until evicted)
    free, cached --ref--> used                 (a prefix hit brings it back)
    free, cached --allocate--> used            (least recently used first; EVICTED is reported)

Every block is in exactly one of used, free plain, free cached, so free + used == total. A block in
the prefix map is full and is never written again; only a sequence's last block, which is not
registered, is written. A key names one block: a second block with equal content stays unregistered
(append-only block tables are worth more than de-duplication). Keys are block hashes; in further
layer groups the group's number is appended. No event reports those, as only this pool uses them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

from baton.protocol.errors import InternalError
from baton.protocol.events import BlockEvent, BlockEventKind


class BlockPool:
    """Ref counts, free blocks in eviction order, and the prefix map of `num_blocks` blocks.

    Not thread-safe: the engine thread owns it.
    """

    def __init__(
        self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise InternalError(f"no pool of {num_blocks} blocks of {block_size} tokens")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._refs = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._parents: list[bytes | None] = [None] * num_blocks  # None: no event reports the block
        self._by_hash: dict[bytes, int] = {}
        self.hits = Counter[int]()  # by block, since it entered the prefix map
        self._plain = list(range(num_blocks - 1, -1, -1))  # a stack: the warmest block goes first
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self.idle: Collection[int] = self._cached  # free blocks that the prefix map still knows
        self._events = _EventLog(limit=max(1024, 4 * num_blocks))

    @property
    def num_free(self) -> int:
        """The number of blocks that allocate() can hand out, cached ones included."""
        return len(self._plain) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        """The number of blocks in the prefix map, used or free."""
        return len(self._by_hash)

    def copy_of_state(self) -> tuple[list[int], list[bytes | None], list[bytes | None], list[int]]:
        """Return copies per block: references, key in the prefix map, its parent's key, hits."""
        hits = [self.hits[block] for block in range(self.num_blocks)]
        return self._refs[:], self._hashes[:], self._parents[:], hits

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def first_seen(self, window: int, position: int) -> int:
        """Return the first block that a token at `position` sees; `window` 0 = all tokens."""
        return max(0, position - window + 1) // self.block_size if window else 0

    def ref_count(self, block: int) -> int:
        return self._refs[block]

    def writable(self, block: int) -> bool:
        """Whether its one holder may write it: nobody shares it and no lookup can find it."""
        return self._refs[block] == 1 and self._hashes[block] is None

    def hash_of(self, block: int) -> bytes | None:
        """Return the key by which the prefix map knows the block; None if it is not there."""
        return self._hashes[block]

    # ---- taking and giving back ----

    def allocate(self, count: int) -> list[int] | None:
        """Return `count` blocks with one reference each; None (and nothing changed) if fewer are
        free.

        Evicts cached blocks, least recently used first, once the plain ones are used up.
        """
        if count > self.num_free:
            return None
        blocks: list[int] = []
        for _ in range(count):
            block = self._plain.pop() if self._plain else self._evict()
            self._refs[block] = 1
            blocks.append(block)
        return blocks

    def ref(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block; a free block must be cached (a prefix hit)."""
        for block in blocks:
            if self._refs[block] == 0:
                if block not in self._cached:
                    raise InternalError(f"block {block} is free and holds nothing to refer to")
                del self._cached[block]
            self._refs[block] += 1

    def unref(self, blocks: Sequence[int]) -> None:
        """Remove a reference from each block; the last one frees the block.

        Goes from the last block to the first, so that a prompt's tail is evicted before its head.
        """
        for block in reversed(blocks):
            if self._refs[block] == 0:
                raise InternalError(f"block {block} is given back twice")
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if self._hashes[block] is None:
                    self._plain.append(block)
                else:
                    self._cached[block] = None

    def copy_on_write(self, block: int) -> int | None:
        """Return a block that the holder of one reference to `block` may write; None = no room.

        It is `block` itself if nobody shares it and no lookup can find it. Otherwise it is a fresh
        one, to which the caller's reference moves: the caller copies the content before it writes.
        """
        if self._refs[block] == 0:
            raise InternalError(f"block {block} is free and cannot be written")
        if self.writable(block):
            return block
        fresh = self.allocate(1)
        if fresh is None:
            return None
        self.unref([block])
        return fresh[0]

    # ---- prefix map ----

    def lookup(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the blocks of the longest known prefix of `hashes`. Takes no references, changes
        nothing.
        """
        blocks: list[int] = []
        for block_hash in hashes:
            block = self._by_hash.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def find(self, block_hash: bytes) -> int | None:
        """Return the block that the prefix map knows by this key, or None."""
        return self._by_hash.get(block_hash)

    def register(self, block: int, block_hash: bytes, parent: bytes | None) -> None:
        """Offer a full, computed block to later lookups.

        `parent`: the hash of the block before it; None: no event reports this block.
        """
        if self._refs[block] == 0:
            raise InternalError(f"block {block} is free and cannot enter the prefix map")
        if not self.enable_prefix_caching or block_hash in self._by_hash:
            return
        if self._hashes[block] is not None:
            raise InternalError(f"block {block} is already in the prefix map")
        self._hashes[block] = block_hash
        self._parents[block] = parent
        self.hits.pop(block, None)
        self._by_hash[block_hash] = block
        if parent is not None:
            self._events.stored(block_hash, parent)

    def take_events(self) -> list[BlockEvent]:
        """Return the changes of the prefix map since the last call, in order.

        After an overflow (nobody called this for long) return `snapshot_events()` instead.
        """
        events = self._events.take()
        return self.snapshot_events() if events is None else events

    def snapshot_events(self) -> list[BlockEvent]:
        """Return CLEARED, then STORED for the whole map: the state for a listener that
        starts now.
        """
        log = _EventLog(limit=self.num_blocks + 1)
        for block_hash, block in self._by_hash.items():
            parent = self._parents[block]
            if parent is not None:
                log.stored(block_hash, parent)
        return [BlockEvent(BlockEventKind.CLEARED), *(log.take() or [])]

    def clear_cache(self) -> None:
        """Empty the prefix map: used blocks stay with their holders, free ones become plain.

        Reports one CLEARED.
        """
        for block in self._by_hash.values():
            self._hashes[block] = self._parents[block] = None
        self._by_hash.clear()
        self._plain.extend(self._cached)
        self._cached.clear()
        self._events.cleared()

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        block_hash = self._hashes[block]
        assert block_hash is not None, "a cached block has a hash"
        del self._by_hash[block_hash]
        self._hashes[block] = None
        if self._parents[block] is not None:
            self._events.evicted(block_hash)
        self._parents[block] = None
        return block

    # ---- proof ----

    def check(self, owned: Mapping[int, int] | None = None) -> None:
        """Prove the invariants of the module docstring. Raises InternalError if one is broken.

        With `owned` (block -> references that the caller can account for) prove as well that there
        is no other reference.
        """
        used = sum(1 for refs in self._refs if refs > 0)
        free = [*self._plain, *self._cached]
        _prove(self.num_free + used == self.num_blocks, "free + used == total")
        _prove(len(set(free)) == len(free), "no block is free twice")
        _prove(all(self._refs[block] == 0 for block in free), "a free block has no reference")
        _prove(all(refs >= 0 for refs in self._refs), "no reference count is negative")
        _prove(all(self._hashes[b] is None for b in self._plain), "a plain block has no hash")
        _prove(all(self._hashes[b] is not None for b in self._cached), "a cached block has a hash")
        hashed = {h: b for b, h in enumerate(self._hashes) if h is not None}
        _prove(hashed == self._by_hash, "the prefix map mirrors the blocks' hashes")
        if owned is not None:
            held = {block: refs for block, refs in enumerate(self._refs) if refs}
            claimed = {block: refs for block, refs in owned.items() if refs}
            _prove(held == claimed, f"references {held} are those of the owners {claimed}")


class _EventLog:
    """Block events; neighbours are merged, so a prompt of 100 blocks is one. At most `limit`
    hashes.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._runs: list[tuple[BlockEventKind, list[bytes], bytes]] = []
        self._num_hashes = 0

    def stored(self, block_hash: bytes, parent: bytes) -> None:
        self._append(BlockEventKind.STORED, block_hash, parent)

    def evicted(self, block_hash: bytes) -> None:
        self._append(BlockEventKind.EVICTED, block_hash, b"")

    def cleared(self) -> None:
        """Replace all events by CLEARED, as they no longer matter."""
        self._runs, self._num_hashes = [(BlockEventKind.CLEARED, [], b"")], 0

    def take(self) -> list[BlockEvent] | None:
        """Return and forget the events; None if there were too many to keep."""
        overflowed = self._num_hashes > self._limit
        events = [BlockEvent(kind, tuple(hashes), parent) for kind, hashes, parent in self._runs]
        self._runs, self._num_hashes = [], 0
        return None if overflowed else events

    def _append(self, kind: BlockEventKind, block_hash: bytes, parent: bytes) -> None:
        self._num_hashes += 1
        if self._num_hashes > self._limit:
            self._runs.clear()
            return
        if self._runs:
            last_kind, hashes, _ = self._runs[-1]
            follows = kind is BlockEventKind.EVICTED or parent in hashes[-1:]
            if last_kind is kind and follows:
                hashes.append(block_hash)
                return
        self._runs.append((kind, [block_hash], parent))


def _prove(holds: bool, invariant: str) -> None:
    if not holds:
        raise InternalError(f"block pool invariant broken: {invariant}")


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
