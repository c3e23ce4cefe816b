"""Departure: a running request leaves with its KV, to go on in another engine. Pure.

Only a request that decodes has KV worth moving: one sample, no search, its blocks in the pool. What
waits, prefills or was swapped out is computed anew elsewhere from its tokens, which the router
knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.engine.interface import Task
from baton.engine.sequence import RequestGroup, num_samples
from baton.events import FirstToken
from baton.kv_spec import BlockLists, HeldBlocks, first_visible


@dataclass(frozen=True, slots=True)
class Departure:
    """`blocks` hold the KV of the first `num_tokens` tokens, as far as the next one can see it,
    pinned once for an export; `first_tokens`: the known tokens beyond them, at least one."""

    blocks: BlockLists
    num_tokens: int
    first_tokens: tuple[FirstToken, ...]


def departure_of(group: RequestGroup, block_size: int, windows: Sequence[int]) -> Departure | None:
    """What `group` can take along; None if nothing is worth it. `windows`: of the layer groups."""
    params, sequence = group.request.params, group.leader
    single = group.beams is None and len(group.sequences) == num_samples(params) == 1
    if not single or group.task is not Task.LOCAL or sequence.num_uncomputed != 1:
        return None
    num_tokens = sequence.num_computed
    count = -(-num_tokens // block_size)
    held: list[HeldBlocks] = []
    for table, window in zip(sequence.tables, windows, strict=True):
        seen = first_visible(window, num_tokens)
        if table.end < count or seen < table.num_freed * block_size:
            return None  # one token short of what a receiver may compute again
        held.append(HeldBlocks(tuple(table.blocks[: count - table.num_freed]), table.num_freed))
    first = num_tokens - sequence.num_prompt
    if first < 0:
        return None  # a prompt of whose tokens only the last one is left to compute
    beyond = tuple(
        FirstToken(first + index, token) for index, token in enumerate(sequence.tokens[num_tokens:])
    )
    return Departure(tuple(held), num_tokens, beyond)
