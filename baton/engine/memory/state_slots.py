"""StateSlots: which sequence owns which slot of recurrent state (state_arena.py).

A running sequence of a model with recurrent state owns one slot, from its admission to its end, or
until it is preempted. State is not like KV: it says nothing of earlier tokens, so it is right for
one number of tokens only, that of the sequence's computed tokens. Hence
    a fork copies its parent's slot, at exactly the tokens that both share (stop_for_forks)
    no slot is shared, and no block is a prefix hit: the state behind it is gone
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from baton.engine.state.interface import NO_SLOT
from baton.engine.state.sequence import RequestGroup, SequenceState, shared_tokens
from baton.protocol.errors import InternalError


class SlotMemory(Protocol):
    """The bytes behind the slots, as in StateArena. Host copies are opaque to their holders."""

    @property
    def num_slots(self) -> int:
        """The number of slots."""
        ...

    def copy(self, source: int, target: int) -> None:
        """Copy a slot."""
        ...

    def read_slots(self, slots: list[int]) -> Any:
        """Return copies of slots in host memory; row i is slots[i]."""
        ...

    def write_slots(self, rows: Any, slots: list[int]) -> None:
        """Copy rows back into slots."""
        ...


@dataclass(frozen=True, slots=True)
class SwappedStates:
    """States in host memory: row i of `rows` is that of owners[i]."""

    owners: list[SequenceState]
    rows: Any


class StateSlots:
    """The slots of `memory`, all free at first; None = the model keeps no state, and no sequence
    takes a slot.
    """

    def __init__(self, memory: SlotMemory | None = None) -> None:
        self._memory = memory
        self.num_slots = 0 if memory is None else memory.num_slots
        self._free = list(range(self.num_slots))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def fit(self, groups: Iterable[RequestGroup]) -> bool:
        """Whether each sequence of `groups`, beams and followers to come included, can have a
        slot."""
        if self._memory is None:
            return True
        lacking = 0
        for group in groups:
            held = sum(sequence.state_slot != NO_SLOT for sequence in group.sequences)
            lacking += max(0, group.width - held)
        return lacking <= len(self._free)

    def take(self, sequence: SequenceState) -> None:
        """Give `sequence` a slot. Raises InternalError if none is free: see fit()."""
        if self._memory is None:
            return
        if not self._free or sequence.state_slot != NO_SLOT:
            raise InternalError(f"{sequence.request.id}: no state slot is free for a sequence")
        sequence.state_slot = self._free.pop()

    def fork(self, parent: SequenceState, child: SequenceState, num_tokens: int) -> None:
        """Give `child` a copy of the state behind its first `num_tokens` tokens. Raises
        InternalError if the parent's state is not that."""
        if self._memory is None:
            return
        if num_tokens and num_tokens != parent.num_computed:
            raise InternalError(
                f"{parent.request.id}: its state is that of {parent.num_computed} tokens, "
                f"not of {num_tokens}"
            )
        self.take(child)
        if num_tokens:
            self._memory.copy(parent.state_slot, child.state_slot)

    def give_back(self, sequence: SequenceState) -> None:
        """Free the slot of `sequence`, if it has one."""
        if sequence.state_slot != NO_SLOT:
            self._free.append(sequence.state_slot)
            sequence.state_slot = NO_SLOT

    def swap_out(self, sequences: Iterable[SequenceState]) -> SwappedStates:
        """Copy the slots of `sequences` to host memory and free them."""
        owners = [sequence for sequence in sequences if sequence.state_slot != NO_SLOT]
        if self._memory is None or not owners:
            return SwappedStates([], None)
        rows = self._memory.read_slots([sequence.state_slot for sequence in owners])
        for sequence in owners:
            self.give_back(sequence)
        return SwappedStates(owners, rows)

    def swap_in(self, swapped: SwappedStates) -> None:
        """Give the sequences slots with their states again."""
        for sequence in swapped.owners:
            self.take(sequence)
        if self._memory is not None and swapped.owners:
            self._memory.write_slots(swapped.rows, [owner.state_slot for owner in swapped.owners])

    def check(self, sequences: Iterable[SequenceState]) -> None:
        """Prove that each slot is free or owned by one of `sequences`, and that those with blocks
        have one. Raises InternalError if not."""
        if self._memory is None:
            return
        held = [
            s.state_slot
            for s in sequences
            if s.state_slot != NO_SLOT or any(t.blocks for t in s.tables)
        ]
        if sorted([*held, *self._free]) != list(range(self.num_slots)):
            raise InternalError("the state slots in use are not those of the sequences")

    def stop_for_forks(self, group: RequestGroup, sequence: SequenceState, num_tokens: int) -> int:
        """Return how many of `num_tokens` tokens `sequence` computes next, so that each follower
        can fork from the state behind exactly the tokens that it shares."""
        if self._memory is None or sequence is not group.leader:
            return num_tokens
        shared = (shared_tokens(sequence, each) for each in group.sequences[1:] if each.following)
        ahead = (count - sequence.num_computed for count in shared)
        return min([num_tokens, *(count for count in ahead if count > 0)])
