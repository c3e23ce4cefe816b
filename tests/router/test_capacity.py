"""Room on nodes and promised times are arithmetic over snapshots."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from baton.protocol.block_hashes import block_hashes, root_hash
from baton.protocol.handles import NodeLoad, Role
from router.nodes.policy import NodeSnapshot, PolicySettings
from router.request.gate.capacity import Capacity
from router.request.gate.service_levels import best_ttft_s, can_keep_tpot
from tests.router.fakes import make_request

RATE = 1000.0
IDLE = (0, 0)  # requests, and their tokens, that are on the way to a node


def node(role: Role, *, tokens: int = 0, assigned: int = 0, **load: Any) -> NodeSnapshot:
    """`tokens`: queued by this router. 100 blocks of 16 tokens."""
    state = NodeLoad(free_blocks=100, total_blocks=100, prefill_tokens_per_s=RATE)
    state = replace(state, **load)
    state = replace(state, own_prefill_tokens_per_s=state.prefill_tokens_per_s)
    return NodeSnapshot(
        role.value, role.value, role, "m", "layout", 16, "float32",
        load=state, assigned=assigned, assigned_tokens=tokens,
    )  # fmt: skip


def p(**more: Any) -> NodeSnapshot:
    return node(Role.PREFILL, **more)


def d(**more: Any) -> NodeSnapshot:
    return node(Role.DECODE, **more)


def large(**more: Any) -> NodeSnapshot:
    """A decode node of 1000 blocks."""
    return d(free_blocks=1000, total_blocks=1000, **more)


@pytest.mark.parametrize(
    ("nodes", "way", "prompt", "room", "why"),
    [
        ([], IDLE, 100, True, "nothing to wait for"),
        ([p()], IDLE, 100, True, "no decode node: the dispatcher says so"),
        ([p(), d()], IDLE, 9000, True, "idle nodes take anything"),
        ([p(), d(draining=True)], IDLE, 9000, True, "a draining one is none"),
        ([p(tokens=300), d(running=1)], IDLE, 200, True, "500 ms of work: the window"),
        ([p(tokens=300), d(running=1)], IDLE, 201, False, "beyond the window"),
        ([p(), d(running=1)], (1, 300), 201, False, "as if it were queued"),
        ([p(tokens=300), p(), d(running=1)], IDLE, 1200, True, "one of them is idle"),
        ([p(tokens=300), p(), d(running=1)], (1, 100), 601, False, "another took it"),
        ([p(tokens=300), p(), d(running=1)], (1, 100), 600, True, "two windows"),
        ([p(tokens=1500, prefill_tokens_per_s=0.0), d()], IDLE, 9, True, "has measured nothing"),
        ([p(), d(running=9, waiting=3)], IDLE, 10, False, "the decode node is full"),
        ([p(), d(running=9, waiting=2)], IDLE, 10, True, "they came in with this step"),
        ([p(), d(running=64, waiting=9)], IDLE, 10, False, "a queue"),
        ([p(), d(running=64, waiting=8)], IDLE, 10, True, "a few"),
        ([p(), d(running=9, swapped=1)], IDLE, 10, False, "it has swapped out"),
        ([p(), d(waiting=9), d(running=1)], IDLE, 10, True, "another is not full"),
        ([p(), d(running=1, free_blocks=10)], IDLE, 320, True, "fits into the free blocks"),
        ([p(), d(running=1, free_blocks=10)], IDLE, 321, False, "does not fit"),
        ([p(tokens=100), d(running=1, free_blocks=10)], IDLE, 221, False, "nor beside the queue"),
        ([p(), d(running=1, total_blocks=0, free_blocks=0)], IDLE, 999, True, "not told"),
        ([d(running=3, tokens=400)], IDLE, 101, False, "alone: it prefills itself"),
        ([d(running=3, tokens=400)], IDLE, 100, True, "within its window"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_room(
    nodes: list[NodeSnapshot], way: tuple[int, int], prompt: int, room: bool, why: str
) -> None:
    assert Capacity(nodes, 0.5, PolicySettings()).has_room(prompt, *way) is room, why


@pytest.mark.parametrize(
    ("nodes", "way", "prompt", "room", "why"),
    [
        ([p(tokens=9000), large()], IDLE, 10, True, "D is idle: nobody waits 9 s for P"),
        ([p(tokens=9000), large()], IDLE, 5000, True, "nor does a long prompt"),
        ([p(tokens=9000), large()], IDLE, 9000, False, "but P would be done with it as soon"),
        ([p(tokens=9000), large(running=4)], IDLE, 100, True, "4 streams wait 0.1 s each"),
        ([p(tokens=600), large(running=8)], IDLE, 100, False, "8 streams would wait 0.8 s in all"),
        ([p(tokens=9000), large(tokens=400)], IDLE, 100, True, "within D's window"),
        ([p(tokens=9000), large(tokens=400)], IDLE, 101, False, "beyond D's window"),
        ([p(tokens=9000), large()], (1, 450), 51, False, "others may be on their way to D"),
        ([p(tokens=9000), p(tokens=600), large(running=8)], IDLE, 100, False, "the other P"),
        ([large(running=3, tokens=9000)], IDLE, 10, False, "without P nobody else computes it"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_short_prompt_does_not_wait_for_a_long_one(
    nodes: list[NodeSnapshot], way: tuple[int, int], prompt: int, room: bool, why: str
) -> None:
    auto = PolicySettings(placement="auto")
    assert Capacity(nodes, 0.5, auto).has_room(prompt, *way) is room, why
    remote = PolicySettings(placement="remote")
    assert not Capacity(nodes, 0.5, remote).has_room(prompt, *way)


@pytest.mark.parametrize(
    ("nodes", "behind", "room"),
    [
        ([p(tokens=450), large(running=4)], 20, False),
        ([p(tokens=450), large(running=4)], 40, True),
        ([p(tokens=450), p(tokens=950), large(running=4)], 40, False),  # twenty wait for each
        ([p(tokens=450), p(tokens=950), large(running=4)], 80, True),
        ([p(tokens=450), large(running=4, tokens=450)], 900, False),  # D's window is full as well
    ],
)
def test_in_a_burst_the_decode_node_gets_a_part(
    nodes: list[NodeSnapshot], behind: int, room: bool
) -> None:
    auto = PolicySettings(placement="auto")
    assert Capacity(nodes, 0.5, auto).has_room(600, *IDLE, behind=behind) is room


def test_short_prompts_of_decode_nodes_do_not_wait_for_prefill_nodes() -> None:
    room = Capacity([p(tokens=9000), large()], 0.5, PolicySettings(local_prefill_tokens=32))
    assert room.has_room(32, *IDLE)
    assert not room.has_room(33, *IDLE)


def test_the_best_time_to_token_1() -> None:
    request = make_request(prompt=200)
    assert best_ttft_s(request, [p(tokens=300), p(tokens=100), d()], 9.0) == pytest.approx(0.2)
    assert best_ttft_s(request, [p(tokens=300), d(prefill_tokens_per_s=0.0)], 9.0) == 0.5
    unmeasured = p(prefill_tokens_per_s=0.0)
    assert best_ttft_s(request, [p(), unmeasured, d()], 9.0) is None
    assert best_ttft_s(request, [p(draining=True), d(tokens=100)], 9.0) == pytest.approx(0.3)
    assert best_ttft_s(request, [], 9.0) is None


def test_a_cached_prefix_is_looked_up_before_anybody_is_refused() -> None:
    request = make_request(prompt=200)
    hashes = block_hashes(root_hash("m", "", "float32"), request.prompt_ids[:192], 16)
    holder = replace(p(), prefix=frozenset(hashes))
    slow = d(prefill_tokens_per_s=0.0)
    assert best_ttft_s(request, [holder, slow], 0.2) == pytest.approx(0.2)
    assert best_ttft_s(request, [holder, slow], 0.1) == pytest.approx(0.008)


def test_time_per_token_is_judged_by_nodes_that_run() -> None:
    slow, fast = d(running=3, step_seconds=0.05), d(running=9, step_seconds=0.02)
    assert can_keep_tpot([p(), slow, fast], 0.03)
    assert not can_keep_tpot([p(), slow], 0.03)
    assert can_keep_tpot([d(step_seconds=0.05)], 0.03), "what it was says nothing of an idle node"
    assert can_keep_tpot([p()], 0.03)
