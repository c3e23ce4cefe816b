"""Reservations: blocks and state slots held for prompts whose KV arrives from elsewhere.

    make()   -> held: nobody else gets its blocks and slots
    take()   -> the request has arrived: they are its own from now on
    cancel() -> free
When a reservation may be made at all is decided in scheduler.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from baton.engine.memory.block_tables import BlockTables, Taken
from baton.engine.state.interface import Reservation
from baton.engine.state.sequence import RequestGroup, Table, with_state
from baton.engine.state.stats import EngineStats
from baton.protocol.errors import InternalError, KVStale
from baton.protocol.kv_spec import HeldBlocks
from baton.protocol.request import Request


class Reservations:
    """The reservations of one engine. Counts prefix hits into `stats`."""

    def __init__(self, tables: BlockTables, stats: EngineStats) -> None:
        self._tables = tables
        self._stats = stats
        self._held: dict[Reservation, Taken] = {}
        self._num_made = 0

    @property
    def tables(self) -> Iterator[Table]:
        """The tables of all reservations."""
        return (table for taken in self._held.values() for table in taken.tables)

    @property
    def slots(self) -> Iterator[int]:
        """The state slots of all reservations."""
        return (slot for taken in self._held.values() for slot in taken.slots)

    def make(
        self,
        request: Request,
        hashes: Sequence[bytes],
        num_tokens: int,
        precision: str | None = None,
        adopting: bool = False,
    ) -> Reservation | None:
        """Reserve as Engine.reserve() says. Return None if there are too few blocks; slots for the
        states of all the request's sequences must be free."""
        size = self._tables.pool.block_size
        take = self._tables.take_to_adopt if adopting else self._tables.take_for_arrival
        taken = take(hashes, num_tokens)
        if taken is None:
            return None
        taken = replace(taken, slots=self._tables.states.reserve(num_sequences(request)))
        start = taken.num_hits * size
        self._stats.num_prefix_query_tokens += num_tokens
        self._stats.num_prefix_hit_tokens += start
        self._num_made += 1
        blocks = taken.blocks
        if adopting:
            whole = num_tokens // size
            start = whole * size
            blocks = (HeldBlocks((taken.tables[0].blocks[-1],), whole),)
        if taken.slots:
            blocks = with_state(blocks, taken.slots[0])
        reservation = Reservation(
            request.id, blocks, num_tokens, start, self._num_made, precision, adopting
        )
        self._held[reservation] = taken
        return reservation

    def take(self, reservation: Reservation, group: RequestGroup) -> Taken:
        """Hand over what is held for `group`.

        Raises InternalError for a reservation that is not held (cancelled, or used before); KVStale
        if a sequence of `group` cannot go on from the state that has arrived. Then it stays held.
        """
        taken = self._held.get(reservation)
        if taken is None:
            raise InternalError(f"{reservation.request_id}: this reservation is not held")
        if taken.slots and not _goes_on(group, reservation.num_tokens):
            raise KVStale(f"{reservation.request_id}: no token is known behind its recurrent state")
        del self._held[reservation]
        return taken

    def cancel(self, reservation: Reservation) -> None:
        """Free a reservation. Does nothing for one that is not held."""
        taken = self._held.pop(reservation, None)
        if taken is not None:
            self._tables.give_back(taken.tables)
            self._tables.states.cancel(taken.slots)


def num_sequences(request: Request) -> int:
    """Return how many sequences a request runs at once where it is decoded."""
    return request.params.beam_width or len(request.live_samples)


def _goes_on(group: RequestGroup, num_tokens: int) -> bool:
    """Whether the next token that each sequence computes is the one behind `num_tokens` tokens: a
    state cannot go back by a token, as KV can."""
    if group.leader.candidates is not None:
        return len(group.leader.tokens) >= num_tokens
    return all(len(sequence.tokens) > num_tokens for sequence in group.sequences)
