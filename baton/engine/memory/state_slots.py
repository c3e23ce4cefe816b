"""StateSlots: which sequence owns which slot of recurrent state (state_arena.py).

A running sequence of a model with recurrent state owns one slot, from its admission to its end, or
until it is preempted. A reservation owns as many slots as its request runs sequences. The slot of
an exported prompt is pinned: it is free when the export is over and its sequence has ended. State
is not like KV: it says nothing of earlier tokens, so it is right for one number of tokens only,
that of the sequence's computed tokens. Hence
    a fork copies its parent's slot, at exactly the tokens that both share (stop_for_forks)
    no slot is shared, and a prefix hit begins with a copied state (state_checkpoints.py)
    a step with drafts keeps the state before it: after a refused draft the sequence goes back
    there, and the next step computes the accepted tokens again (keep, settle)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
        self._pinned: set[int] = set()
        self._left: set[int] = set()  # pinned slots that no sequence owns any more

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_pinned(self) -> int:
        """The number of slots that exports hold."""
        return len(self._pinned)

    def fit(self, groups: Iterable[RequestGroup], more: int = 0) -> bool:
        """Whether each sequence of `groups`, beams and followers to come included, can have a
        slot, and `more` sequences beside them."""
        if self._memory is None:
            return True
        lacking = more
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

    def keep(self, sequence: SequenceState) -> bool:
        """Keep the state of `sequence` for a step with drafts; False if no slot is free for it."""
        if self._memory is None:
            return True
        if not self._free:
            return False
        sequence.kept_slot = self._free.pop()
        self._memory.copy(sequence.state_slot, sequence.kept_slot)
        return True

    def settle(self, sequence: SequenceState, *, refused: bool) -> bool:
        """End the step that keep() began. Return whether the state went back: after `refused`
        drafts."""
        if sequence.kept_slot == NO_SLOT:
            return False
        if refused:
            slots = sequence.kept_slot, sequence.state_slot
            sequence.state_slot, sequence.kept_slot = slots
        self._free.append(sequence.kept_slot)
        sequence.kept_slot = NO_SLOT
        return refused

    def give_back(self, sequence: SequenceState) -> None:
        """Free the slots of `sequence`, if it has some; a pinned slot is free after its unpin()."""
        self.settle(sequence, refused=False)
        if sequence.state_slot == NO_SLOT:
            return
        if sequence.state_slot in self._pinned:
            self._left.add(sequence.state_slot)
        else:
            self._free.append(sequence.state_slot)
        sequence.state_slot = NO_SLOT

    # ---- hand-over ----

    def reserve(self, count: int) -> tuple[int, ...]:
        """Take `count` slots for a request whose state arrives from elsewhere; () for a model that
        keeps none. Raises InternalError if so many are not free: see fit()."""
        if self._memory is None:
            return ()
        if count > len(self._free):
            raise InternalError(f"{count} state slots are not free")
        return tuple(self._free.pop() for _ in range(count))

    def cancel(self, slots: Iterable[int]) -> None:
        """Free reserved slots. Nobody may write into them any more."""
        self._free.extend(slots)

    def seat(self, sequence: SequenceState, slots: Sequence[int]) -> None:
        """Give `sequence` the first of its request's reserved slots, in which its state is. The
        others are free for the sequences that fork from it."""
        if slots:
            sequence.state_slot = slots[0]
            self.cancel(slots[1:])

    def pin(self, slot: int) -> None:
        """Keep a slot as it is until unpin(), whoever owns it: an export is read. Raises
        InternalError for a slot that is pinned already."""
        if slot in self._pinned:
            raise InternalError(f"state slot {slot} is pinned already")
        self._pinned.add(slot)

    def unpin(self, slot: int) -> None:
        """Undo pin(). Raises InternalError for a slot that is not pinned."""
        if slot not in self._pinned:
            raise InternalError(f"state slot {slot} is unpinned, but was not pinned")
        self._pinned.remove(slot)
        if slot in self._left:
            self._left.remove(slot)
            self._free.append(slot)

    def swap_out(self, sequences: Iterable[SequenceState]) -> SwappedStates:
        """Copy the slots of `sequences` to host memory and free them. Those without a slot are left
        out."""
        owners = [sequence for sequence in sequences if sequence.state_slot != NO_SLOT]
        if self._memory is None or not owners:
            return SwappedStates([], None)
        rows = self._memory.read_slots([sequence.state_slot for sequence in owners])
        for sequence in owners:
            self.give_back(sequence)
        return SwappedStates(owners, rows)

    def swap_in(self, swapped: SwappedStates) -> None:
        """Give the owners of `swapped` slots again, with the states that swap_out() copied. Raises
        InternalError if too few are free: see fit()."""
        for sequence in swapped.owners:
            self.take(sequence)
        if self._memory is not None and swapped.owners:
            self._memory.write_slots(swapped.rows, [owner.state_slot for owner in swapped.owners])

    def check(self, sequences: Iterable[SequenceState], reserved: Iterable[int] = ()) -> None:
        """Prove that each slot is free, owned by one of `sequences`, `reserved`, or left to its
        export, and that sequences with blocks have one. Raises InternalError if not."""
        if self._memory is None:
            return
        held = [*reserved, *self._left]
        held += [
            s.state_slot
            for s in sequences
            if s.state_slot != NO_SLOT or any(t.blocks for t in s.tables)
        ]
        if sorted([*held, *self._free]) != list(range(self.num_slots)):
            raise InternalError("the state slots in use are not those of the sequences")
        if not self._left <= self._pinned <= set(held):
            raise InternalError("the pinned state slots are not in use")

    def stop_for_forks(self, group: RequestGroup, sequence: SequenceState, num_tokens: int) -> int:
        """Return how many of `num_tokens` tokens `sequence` computes next, so that each follower
        can fork from the state behind exactly the tokens that it shares."""
        if self._memory is None or sequence is not group.leader:
            return num_tokens
        shared = (shared_tokens(sequence, each) for each in group.sequences[1:] if each.following)
        ahead = (count - sequence.num_computed for count in shared)
        return min([num_tokens, *(count for count in ahead if count > 0)])
