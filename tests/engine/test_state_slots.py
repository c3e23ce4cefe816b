"""StateArena and StateSlots: bytes of states, and who owns them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from baton.engine.memory.state_arena import StateArena
from baton.engine.memory.state_sizes import slot_bytes
from baton.engine.memory.state_slots import StateSlots
from baton.engine.state.interface import NO_SLOT, Task
from baton.engine.state.sequence import RequestGroup, SequenceState
from baton.protocol.errors import InternalError
from baton.protocol.kv_spec import LayerSpec, StateSpec, layout_fingerprint
from baton.protocol.request import Request
from baton.protocol.sampling import SamplingParams

KV = LayerSpec(2, 8, 8)
STATE = LayerSpec(0, 0, 0, kind="state", state=StateSpec((6, 4), (2, 3, 5)))
BOTH = LayerSpec(2, 8, 8, state=StateSpec((6, 3), conv_dtype="bfloat16"))
NOTHING = LayerSpec(0, 0, 0, kind="state")


def sequence(tokens: int = 6) -> SequenceState:
    request = Request("r", tuple(range(tokens)), SamplingParams(max_tokens=4, seed=0))
    return SequenceState(request, b"", list(range(tokens)))


def test_a_slot_has_the_states_of_all_layers() -> None:
    layers = (KV, STATE, BOTH, NOTHING)
    # Each part on 64 bytes: 96 -> 128, 120 -> 128, 36 -> 64.
    assert slot_bytes(layers) == 128 + 128 + 64
    assert slot_bytes((KV, NOTHING)) == 0
    arena = StateArena(layers, 3)
    assert arena.num_bytes == 3 * slot_bytes(layers)
    conv, recurrent = torch.randn(2, 6, 4), torch.randn(2, 2, 3, 5)
    arena.write(1, torch.tensor([2, 0]), conv, recurrent)
    arena.write(2, torch.tensor([2, 0]), torch.ones(2, 6, 3), None)
    arena.copy(2, 1)
    found = arena.read(1, torch.tensor([1, 0]))
    assert found[0] is not None
    assert torch.equal(found[0], conv)
    assert found[1] is not None
    assert torch.equal(found[1], recurrent)
    held, none = arena.read(2, torch.tensor([1]))
    assert none is None
    assert held is not None
    assert held.dtype is torch.bfloat16
    rows = arena.read_slots([1])
    arena.write(1, torch.tensor([1]), torch.zeros(1, 6, 4), torch.zeros(1, 2, 3, 5))
    arena.write_slots(rows, [0])
    restored, _ = arena.read(1, torch.tensor([0]))
    assert restored is not None
    assert torch.equal(restored[0], conv[0])


def test_a_slot_that_nobody_has_cannot_be_read() -> None:
    arena = StateArena((STATE,), 2)
    with pytest.raises((IndexError, RuntimeError)):
        arena.read(0, torch.tensor([NO_SLOT]))


def test_layers_without_state_keep_their_fingerprint() -> None:
    known = "7f003db5d43eedf7c807700f0945411ff76bbed8f9f103d7b16a6ed79aacc35b"
    plain = layout_fingerprint("digest", "rope", (KV,))
    assert plain != layout_fingerprint("digest", "rope", (BOTH,))
    assert plain == known  # as before layers had states: nodes of both kinds exchange KV


def test_how_ranks_cut_a_state_is_not_what_it_is() -> None:
    """So the routes' layers are equal, and nodes of any tensor parallel sizes exchange states."""
    cut = replace(STATE, state=StateSpec((6, 4), (2, 3, 5), segments=(2, 2, 2)))
    known = "f2af55e2921d1005a2425f2bea1e1d9cdb2f2142e914e4b18748a92c8828f42e"
    assert cut == STATE
    assert known == layout_fingerprint("digest", "rope", (STATE,))
    assert known == layout_fingerprint("digest", "rope", (cut,))


def test_each_slot_has_one_owner() -> None:
    slots = StateSlots(StateArena((STATE,), 2))
    first, second, third = sequence(), sequence(), sequence()
    slots.take(first)
    with pytest.raises(InternalError, match="no state slot"):
        slots.take(first)
    slots.take(second)
    with pytest.raises(InternalError, match="no state slot"):
        slots.take(third)
    slots.check([first, second, third])
    with pytest.raises(InternalError, match="not those of the sequences"):
        slots.check([first])
    slots.give_back(first)
    slots.give_back(first)
    assert slots.num_free == 1
    third.state_slot = second.state_slot
    with pytest.raises(InternalError, match="not those of the sequences"):
        slots.check([second, third])


def test_a_fork_is_of_the_very_tokens_that_the_state_has_seen() -> None:
    arena = StateArena((STATE,), 3)
    slots = StateSlots(arena)
    parent, child, other = sequence(), sequence(), sequence()
    slots.take(parent)
    parent.num_computed = 5
    arena.write(0, torch.tensor([parent.state_slot]), torch.ones(1, 6, 4), None)
    with pytest.raises(InternalError, match="state is that of 5 tokens, not of 4"):
        slots.fork(parent, child, 4)
    slots.fork(parent, child, 5)
    conv, _ = arena.read(0, torch.tensor([child.state_slot]))
    assert conv is not None
    assert bool((conv == 1).all())
    slots.fork(parent, other, 0)  # begins anew: nothing is copied
    slots.check([parent, child, other])


def test_a_leader_stops_where_followers_fork() -> None:
    slots = StateSlots(StateArena((STATE,), 4))
    leader, same, longer = sequence(), sequence(), sequence()
    leader.tokens += [70, 71, 72]
    longer.tokens += [70, 90]
    group = RequestGroup(leader.request, Task.LOCAL, 0, [leader, same, longer])
    same.following = longer.following = True
    assert slots.fit([group])
    assert not slots.fit(
        [group, RequestGroup(leader.request, Task.LOCAL, 1, [sequence(), sequence()])]
    )
    assert slots.stop_for_forks(group, leader, 9) == 5  # `same` computes the prompt's last token
    leader.num_computed, same.following = 5, False
    assert slots.stop_for_forks(group, leader, 4) == 2
    leader.num_computed, longer.following = 7, False
    assert slots.stop_for_forks(group, leader, 2) == 2
    assert slots.stop_for_forks(group, same, 1) == 1


def test_a_model_without_state_has_no_slots() -> None:
    slots, one = StateSlots(), sequence()
    slots.take(one)
    slots.fork(one, sequence(), 3)
    slots.give_back(one)
    slots.check([one])
    assert (slots.num_slots, one.state_slot) == (0, NO_SLOT)
    assert slots.fit([RequestGroup(one.request, Task.LOCAL, 0, [one])])
