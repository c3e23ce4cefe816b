"""Departure: a running request leaves with its KV, to go on in another engine. Pure.

Only a decoding request whose blocks are in the pool has KV worth moving. A request that waits,
prefills or was swapped out is computed anew elsewhere from its tokens, which the router knows. Of
several samples, the KV that they share leaves in one export, mostly the prompt's; the rest of each
is computed again in one prefill of known tokens. A beam search begins again, from the KV of its
prompt. A recurrent state is that behind the last computed token, so it leaves with the KV of a
single sample only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from baton.engine.state.interface import Task
from baton.engine.state.sequence import RequestGroup, shared_tokens, with_state
from baton.protocol.events import FirstToken
from baton.protocol.kv_spec import BlockLists, HeldBlocks, first_visible


class Leaving(StrEnum):
    """How much of a request's KV left with it; or why none did."""

    WHOLE = "whole"
    SHARED = "shared"  # what all its samples share
    PROMPT = "prompt"  # of a beam search
    UNCOMPUTED = "uncomputed"  # it waits, prefills or is swapped out; or its samples share nothing
    ADOPTED = "adopted"  # it has pages of another pool, and there was no room to copy them here
    # its KV was made in another precision, and an export would pass it as ours
    PRECISION = "precision"
    # its model keeps recurrent state, and that is behind other tokens than the KV that could leave
    STATE = "state"


@dataclass(frozen=True, slots=True)
class Departure:
    """What a request takes along.

    `blocks`: the KV of the first `num_tokens` tokens, as far as the next token can see it, and the
    recurrent state behind them; pinned once for an export. `first_tokens`: the known tokens beyond
    them, at least one per sample, none of a search. `num_left_behind`: tokens of all samples whose
    KV stays here.
    """

    blocks: BlockLists
    num_tokens: int
    first_tokens: tuple[FirstToken, ...]
    leaving: Leaving = Leaving.WHOLE
    num_left_behind: int = 0


def departure_of(group: RequestGroup, block_size: int, windows: Sequence[int]) -> Departure | None:
    """Return what `group` can take along; None if nothing is worth it. `windows`: of the layer
    groups.
    """
    sequence = group.leader
    if group.task is not Task.LOCAL or any(s.num_uncomputed != 1 for s in group.sequences):
        return None
    shared = [shared_tokens(sequence, other) for other in group.sequences[1:]]
    num_tokens = min([sequence.num_computed, *shared])
    leaving = Leaving.SHARED if shared else Leaving.WHOLE
    if group.beams is not None:
        num_tokens, leaving = min(num_tokens, sequence.num_prompt), Leaving.PROMPT
    if not num_tokens:
        return None  # nothing is computed, or the samples share nothing
    count = -(-num_tokens // block_size)
    held: list[HeldBlocks] = []
    for table, window in zip(sequence.tables, windows, strict=True):
        seen = first_visible(window, num_tokens)
        if table.end < count or seen < table.num_freed * block_size:
            return None  # one token less is held than a receiver may have to compute again
        held.append(HeldBlocks(tuple(table.blocks[: count - table.num_freed]), table.num_freed))
    first = num_tokens - sequence.num_prompt
    if first < 0:
        return None  # only the last token of the prompt is left to compute
    beyond = tuple(
        FirstToken(
            first + index,
            token,
            each.sample_index,
            drafts=each.drafts if num_tokens + index + 1 == len(each.tokens) else (),
        )
        for each in group.sequences
        if group.beams is None
        for index, token in enumerate(each.tokens[num_tokens:])
    )
    left_behind = sum(max(0, each.num_computed - num_tokens) for each in group.sequences)
    blocks = with_state(tuple(held), sequence.state_slot)
    return Departure(blocks, num_tokens, beyond, leaving, left_behind)
