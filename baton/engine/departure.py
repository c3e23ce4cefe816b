"""Departure: a running request leaves with its KV, to go on in another engine. Pure.

Only a request that decodes has KV worth moving: one sample, no search, all blocks in the pool. What
waits, prefills, was swapped out, or whose window has let go of blocks, is computed anew elsewhere
from its tokens, which the router knows.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.engine.interface import Task
from baton.engine.sequence import RequestGroup, num_samples
from baton.events import FirstToken


@dataclass(frozen=True, slots=True)
class Departure:
    """`blocks` hold the KV of the first `num_tokens` tokens, in order, pinned once for an export;
    `first_tokens`: the known tokens beyond them, at least one."""

    blocks: tuple[int, ...]
    num_tokens: int
    first_tokens: tuple[FirstToken, ...]


def departure_of(group: RequestGroup, block_size: int) -> Departure | None:
    """What `group` can take along; None if nothing is worth it."""
    params, sequence = group.request.params, group.leader
    single = group.beams is None and len(group.sequences) == num_samples(params) == 1
    if not single or group.task is not Task.LOCAL or sequence.num_uncomputed != 1:
        return None
    num_tokens = sequence.num_computed
    count = -(-num_tokens // block_size)
    if not 0 < count <= len(sequence.blocks) or sequence.num_freed:
        return None
    first = num_tokens - sequence.num_prompt
    if first < 0:
        return None  # a prompt of whose tokens only the last one is left to compute
    beyond = tuple(
        FirstToken(first + index, token) for index, token in enumerate(sequence.tokens[num_tokens:])
    )
    return Departure(tuple(sequence.blocks[:count]), num_tokens, beyond)
