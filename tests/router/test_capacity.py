"""Room on nodes and promised times are arithmetic over snapshots."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from baton.protocol.block_hashes import block_hashes, root_hash
from baton.protocol.handles import NodeLoad, Role
from router.nodes.policy import NodeSnapshot
from router.request.gate.capacity import Capacity
from router.request.gate.service_levels import best_ttft_s, can_keep_tpot
from tests.router.fakes import make_request

RATE = 1000.0
IDLE = (0, 0)  # requests, and their tokens, that are on the way to a node


def node(role: Role, *, tokens: int = 0, assigned: int = 0, **load: Any) -> NodeSnapshot:
    """`tokens`: queued by this router. 100 blocks of 16 tokens."""
    state = NodeLoad(free_blocks=100, total_blocks=100, prefill_tokens_per_s=RATE)
    return NodeSnapshot(
        role.value, role.value, role, "m", "layout", 16, "float32",
        load=replace(state, **load), assigned=assigned, assigned_tokens=tokens,
    )  # fmt: skip


def p(**more: Any) -> NodeSnapshot:
    return node(Role.PREFILL, **more)


def d(**more: Any) -> NodeSnapshot:
    return node(Role.DECODE, **more)


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
    assert Capacity(nodes, prefill_window_s=0.5).has_room(prompt, *way) is room, why


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
