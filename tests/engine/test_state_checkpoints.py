"""StateCheckpoints: which rows hold what, which goes first, and what listeners are told."""

from __future__ import annotations

import torch

from baton.engine.memory.block_pool import BlockPool
from baton.engine.memory.state_arena import StateArena
from baton.engine.memory.state_checkpoints import StateCheckpoints
from baton.engine.memory.state_sizes import checkpoints_within, slot_bytes, slots_per_sequence
from baton.engine.state.interface import NO_SLOT
from baton.engine.state.sequence import SequenceState, Table
from baton.engine.state.stats import EngineStats
from baton.protocol.events import BlockEvent, BlockEventKind
from baton.protocol.kv_spec import LayerSpec, StateSpec
from tests.fakes import request

SIZE = 4
STATE = LayerSpec(0, 0, 0, kind="state", state=StateSpec((4, 4)))  # 64 bytes
NUMBERS = tuple(range(40))


class Kept:
    """Checkpoints over an arena with one slot, a pool of 20 blocks, and sequences that have
    computed blocks of them."""

    def __init__(self, num_checkpoints: int, spacing: int = 1) -> None:
        self.pool, self.stats = BlockPool(20, SIZE), EngineStats()
        self.arena = StateArena((STATE,), 1, num_checkpoints=num_checkpoints)
        self.all = StateCheckpoints(self.pool, self.stats, self.arena, spacing)

    def sequence(self, num_tokens: int, salt: bytes = b"") -> SequenceState:
        """One that holds slot 0."""
        made = SequenceState(request(prompt=NUMBERS[:num_tokens]), salt, [*NUMBERS[:num_tokens]])
        made.state_slot = 0
        return made

    def computed(self, count: int, value: float, salt: bytes = b"") -> bytes:
        """Compute `count` blocks, whose state is `value`; return the key of its checkpoint."""
        sequence = self.sequence(count * SIZE, salt)
        blocks = self.pool.allocate(count)
        assert blocks is not None
        sequence.tables = [Table(blocks)]
        hashes = sequence.hashes(count, SIZE)
        for block, key, parent in zip(blocks, hashes, [salt, *hashes], strict=False):
            self.pool.register(block, key, parent)
        self.pool.unref(blocks)
        self.arena.write(0, torch.tensor([0]), torch.full((1, 4, 4), value), None)
        sequence.num_computed = count * SIZE
        sequence.checkpoint_at = (sequence.num_computed,)
        self.all.note(sequence)
        self.all.check()
        return hashes[-1]

    def resumed(self, num_hits: int, salt: bytes = b"") -> float:
        """The state with which a sequence begins behind `num_hits` blocks."""
        self.arena.write(0, torch.tensor([0]), torch.zeros(1, 4, 4), None)
        self.all.begin(self.sequence(num_hits * SIZE + 1, salt), num_hits, num_hits)
        state, _ = self.arena.read(0, torch.tensor([0]))
        assert state is not None
        return float(state[0, 0, 0])

    def holds(self, count: int, salt: bytes = b"") -> bool:
        hashes = self.sequence(count * SIZE, salt).hashes(count, SIZE)
        return self.all.longest(hashes, count) == count


def test_a_state_is_resumed_where_it_was_kept() -> None:
    kept = Kept(3)
    kept.computed(2, 2.0)
    kept.computed(3, 3.0)
    kept.computed(2, 7.0, b"another tenant")
    assert kept.all.longest(kept.sequence(36).hashes(9, SIZE), 9) == 3
    assert kept.all.longest(kept.sequence(36).hashes(9, SIZE), 2) == 2
    assert kept.all.longest(kept.sequence(36).hashes(9, SIZE), 1) == 0
    assert (kept.resumed(3), kept.resumed(2)) == (3.0, 2.0)
    assert kept.resumed(2, b"another tenant") == 7.0
    assert kept.stats.num_checkpoint_hits == 3
    kept.all.clear()
    assert not kept.holds(2)
    kept.all.check()


def test_a_state_is_kept_once_and_only_of_a_slot() -> None:
    kept, sequence = Kept(2), Kept(2).sequence(12)
    sequence.num_computed, sequence.state_slot = 8, NO_SLOT
    kept.all.note(sequence)
    assert kept.stats.num_checkpoints_stored == 0
    for value in (1.0, 5.0):
        kept.computed(2, value)
    assert kept.stats.num_checkpoints_stored == 1
    assert kept.resumed(2) == 1.0


def test_the_least_recently_used_is_replaced() -> None:
    kept = Kept(2)
    kept.computed(1, 1.0)
    kept.computed(2, 2.0)
    kept.resumed(1)
    kept.computed(3, 3.0)
    assert [kept.holds(count) for count in (1, 2, 3)] == [True, False, True]
    assert kept.stats.num_checkpoints_replaced == 1


def test_one_without_its_block_is_found_by_nobody_and_replaced_first() -> None:
    kept = Kept(2)
    kept.computed(1, 1.0, b"a")
    kept.computed(1, 2.0, b"b")
    blocks = kept.pool.allocate(20)  # evicts all
    assert blocks is not None
    kept.pool.unref(blocks)
    kept.computed(1, 2.0, b"b")  # comes back, and with it the checkpoint
    kept.resumed(1, b"a")  # even used last
    kept.computed(1, 3.0, b"c")
    assert [kept.holds(1, salt) for salt in (b"a", b"b", b"c")] == [False, True, True]


def test_a_prompt_stops_at_its_end_and_where_its_known_blocks_end() -> None:
    kept = Kept(2)
    sequence = kept.sequence(33)
    kept.all.begin(sequence, 0, 5)
    assert sequence.checkpoint_at == (20, 32)
    assert kept.all.stop(sequence, 99) == 20
    sequence.num_computed = 20
    assert kept.all.stop(sequence, 5) == 5
    assert kept.all.stop(sequence, 99) == 12
    sequence.num_computed = 32
    assert kept.all.stop(sequence, 1) == 1
    sequence.exact_chunk = 8  # chunks of its own
    kept.all.begin(sequence, 0, 5)
    assert sequence.checkpoint_at == ()


def test_checkpoints_keep_their_distance() -> None:
    kept = Kept(2, spacing=13)
    for known, stops in ((0, (32,)), (2, (32,)), (4, (16, 32)), (5, (20,)), (8, (32,))):
        sequence = kept.sequence(33)
        kept.all.begin(sequence, 0, known)
        assert sequence.checkpoint_at == stops
    short = kept.sequence(13)
    kept.all.begin(short, 0, 0)
    assert short.checkpoint_at == ()


def test_no_room_is_no_checkpoint() -> None:
    kept, sequence = Kept(0), Kept(1).sequence(33)
    kept.all.begin(sequence, 0, 5)
    assert sequence.checkpoint_at == ()
    assert StateCheckpoints(kept.pool, kept.stats).longest([b"x", b"y"], 2) == 2


def test_listeners_hear_what_changed() -> None:
    kept = Kept(1)
    stored, evicted, cleared = BlockEventKind.STORED, BlockEventKind.EVICTED, BlockEventKind.CLEARED
    first = kept.computed(1, 1.0)
    assert kept.all.tell([]) == [BlockEvent(stored, (first,), states=True)]
    assert kept.all.tell([]) == []
    second = kept.computed(2, 1.0)
    block = BlockEvent(stored, (b"k",), b"")
    assert kept.all.tell([block]) == [
        block,
        BlockEvent(evicted, (first,), states=True),
        BlockEvent(stored, (second,), states=True),
    ]
    assert kept.all.tell([BlockEvent(cleared), block]) == [
        BlockEvent(cleared, states=True),
        block,
        BlockEvent(stored, (second,), states=True),
    ]
    plain = StateCheckpoints(kept.pool, kept.stats)
    assert plain.tell([BlockEvent(cleared), block]) == [BlockEvent(cleared), block]


def test_how_many_memory_pays_for() -> None:
    layers = (LayerSpec(1, 8, 8), STATE)
    assert slot_bytes(layers) == 64
    each = 64 + 4096 * 64  # a checkpoint and the KV of its share of tokens
    assert checkpoints_within(10 * each, layers, "float32") == 10
    assert checkpoints_within(10 * each, layers, "float32", num_tokens=3 * 4096) == 3
    assert checkpoints_within(10 * each, layers, "float32", num_tokens=5) == 1
    assert checkpoints_within(64 * 8, (STATE,), "float32") == 2  # a quarter
    assert checkpoints_within(10 * each, layers[:1], "float32") == 0
    assert [slots_per_sequence(speculates=each) for each in (False, True)] == [1, 2]
