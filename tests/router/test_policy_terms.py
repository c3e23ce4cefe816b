"""What a client's terms change in the choice of nodes: sessions, service levels, scores; two
choices."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.protocol.messages import SubmitDecode
from router.nodes.policy import Ask, NodeSnapshot, PolicySettings, choose_route
from router.nodes.slo import Slo
from router.request.scores import MOST_SCORES, scores_of
from router.request.sessions import SessionMap, session_key, tie_of
from router.request.terms import Terms
from tests.router.clients import Client, cluster, first_of
from tests.router.fakes import FakeNode, make_request
from tests.router.test_policy import PROMPT, node

PLAIN = PolicySettings()
TWO = PolicySettings(two_choices=True)


def chosen(nodes: list[NodeSnapshot], tie: float = 0.0, **ask: Any) -> tuple[str | None, str]:
    settings = ask.pop("settings", PLAIN)
    route = choose_route(Ask(PROMPT, **ask), nodes, settings, tie)
    return None if route.prefill is None else route.prefill.node_id, route.decode.node_id


# ---- sessions ----


@pytest.mark.parametrize(
    ("home", "other", "stays"),
    [
        (node("d1"), node("d2"), True),
        (node("d1", running=3), node("d2"), True),
        (node("d1", running=5), node("d2"), False),
        (node("d1", running=40), node("d2", running=25), True),
        (node("d1", running=60), node("d2", running=25), False),
        (node("d1", running=2, waiting=3), node("d2"), False),
        (node("d1", running=2, swapped=1), node("d2"), False),
        (node("d1", free_blocks=2), node("d2", running=30), False),
        (replace(node("d1"), load=replace(node("d1").load, draining=True)), node("d2"), False),
        (node("d1"), node("d2", holds=384), True),
    ],
)
def test_a_session_stays_with_its_node_unless_that_is_overloaded(
    home: NodeSnapshot, other: NodeSnapshot, stays: bool
) -> None:
    names = {chosen([node("p"), home, other], tie, session_boot="boot-d1") for tie in (0.0, 0.9)}
    assert names == {("p", "d1" if stays else "d2")}


def test_sessions_are_a_tenants_own_and_bounded() -> None:
    assert session_key("a", "") == b""
    assert session_key("a", "bc") != session_key("ab", "c")
    assert 0 <= tie_of(session_key("a", "b")) < 1
    sessions = SessionMap(capacity=2)
    for name in ("a", "b", "a", "c"):
        sessions.served_by(name.encode(), f"boot-{name}")
    assert (len(sessions), sessions.node_of(b"b"), sessions.node_of(b"a")) == (2, "", "boot-a")


def test_new_sessions_are_spread_the_same_way_by_every_router() -> None:
    nodes = [node("p"), *(node(f"d{number}") for number in range(4))]
    ties = [tie_of(session_key("", f"session {number}")) for number in range(400)]
    homes = Counter(chosen(nodes, tie)[1] for tie in ties)
    assert len(homes) == 4
    assert min(homes.values()) >= 60


# ---- service levels ----


def test_nodes_that_keep_the_service_level_come_first() -> None:
    quick = node("p1", waiting_tokens=600, prefill_tokens_per_s=10_000)  # 100 ms
    slow = node("p2", prefill_tokens_per_s=1000)  # 400 ms
    nodes = [quick, slow, node("d")]
    assert chosen(nodes)[0] == "p2", "fewest tokens before it"
    assert chosen(nodes, slo=Slo(ttft_s=0.2))[0] == "p1"
    assert chosen(nodes, slo=Slo(ttft_s=0.05))[0] == "p2", "nobody can: as without"
    assert chosen([replace_load(quick, free_blocks=1), *nodes[1:]], slo=Slo(ttft_s=0.2))[0] == "p2"
    cached = node("p2", holds=384, prefill_tokens_per_s=1000)  # 16 ms
    assert chosen([quick, cached, node("d")], slo=Slo(ttft_s=0.05))[0] == "p2"


def test_decode_nodes_with_quick_steps_come_first() -> None:
    slow = replace_load(node("d1", running=2), step_seconds=0.05)
    quick = replace_load(node("d2", running=5), step_seconds=0.02)
    assert chosen([node("p"), slow, quick])[1] == "d1"
    assert chosen([node("p"), slow, quick], slo=Slo(tpot_s=0.03))[1] == "d2"
    assert chosen([node("p"), slow, quick], slo=Slo(tpot_s=0.01))[1] == "d1"


def replace_load(snapshot: NodeSnapshot, **load: Any) -> NodeSnapshot:
    return replace(snapshot, load=replace(snapshot.load, **load))


# ---- two choices ----


@given(
    loads=st.lists(st.integers(0, 50), min_size=3, max_size=12),
    tie=st.floats(0, 1, exclude_max=True),
)
def test_two_choices_never_take_the_worst(loads: list[int], tie: float) -> None:
    nodes = [node(f"d{number}", running=load) for number, load in enumerate(loads)]
    _, name = chosen(nodes, tie, settings=TWO)
    taken = loads[int(name[1:])]
    assert sum(load * 1.05 >= taken for load in loads) >= 2, "equal within 5 %"


def test_two_choices_draw_every_pair_alike_and_respect_prefix_and_session() -> None:
    nodes = [node(f"d{number}", running=number) for number in range(4)]
    drawn = Counter(chosen(nodes, (number + 0.5) / 1200, settings=TWO)[1] for number in range(1200))
    # The k-th best of 4 wins in 3 - k of 6 pairs.
    assert drawn == {"d0": 600, "d1": 400, "d2": 200}
    holder = node("d9", holds=320, running=1)
    for number in range(12):
        tie = number / 12
        assert chosen([*nodes, holder], tie, settings=TWO)[1] == "d9"
        assert chosen(nodes, tie, settings=TWO, session_boot="boot-d3")[1] == "d3"


# ---- scores ----


def test_scores_tell_why() -> None:
    nodes = [
        node("p1", holds=320, waiting_tokens=50, prefill_tokens_per_s=1000),
        node("p2"),
        replace_load(node("d1", running=2), step_seconds=0.02),
        node("d2"),
    ]
    ask = Ask(PROMPT, session_boot="boot-d1", slo=Slo(ttft_s=0.2, tpot_s=0.03))
    route = choose_route(ask, nodes, PLAIN, 0.0)
    scores = scores_of(ask, nodes, PLAIN, (route.prefill, route.decode))
    assert [(it.node, it.role, it.chosen) for it in scores] == [
        ("d1", "decode", True), ("p1", "prefill", True), ("d2", "decode", False),
        ("p2", "prefill", False),
    ]  # fmt: skip
    d1, p1, _, p2 = scores
    assert (d1.cost, d1.queued, d1.session, d1.expected_ms) == (-2.0, 2, 4.0, 20.0)
    tighter = replace(ask, slo=Slo(tpot_s=0.01))
    assert not scores_of(tighter, nodes, PLAIN, (None, route.decode))[0].meets_slo
    assert (p1.cost, p1.cached_tokens, p1.expected_ms, p1.meets_slo) == (130.0, 320, 130.0, True)
    assert (p2.cost, p2.expected_ms, p2.meets_slo) == (400.0, None, True)
    many = [node(f"d{number}") for number in range(40)]
    assert len(scores_of(ask, many, PolicySettings(prefix_weight=0.0), (many[3],))) == MOST_SCORES


async def test_a_session_comes_back_through_the_dispatcher() -> None:
    """Its node has more to do by then; others go elsewhere, and another tenant's session too."""
    terms = Terms(session=session_key("t", "chat-1"), receipt=True)
    async with cluster("d1", "d2") as (router, nodes):
        first = Client(router, make_request("a"), terms)
        home = (await first_that_hears(nodes)).record.node_id
        by_name = {it.record.node_id: it for it in nodes}
        by_name[home].finish(make_request("a"), 0, 41)
        assert await first.done() == [41]
        busy = [Client(router, make_request(f"busy{number}")) for number in range(4)]
        for _ in range(2):
            for it in nodes:
                await it.hear(SubmitDecode)  # the load is even: two each
        again = Client(router, make_request("b"), terms)
        await by_name[home].hear(SubmitDecode)
        by_name[home].finish(make_request("b"), 0, 42)
        assert await again.done() == [42]
        assert again.trace.decode_node == home
        assert {score.node for score in again.trace.scores if score.session} == {home}
        for client in busy:
            client.task.cancel()


async def first_that_hears(nodes: list[FakeNode]) -> FakeNode:
    found = await first_of(nodes, SubmitDecode)
    await found.hear(SubmitDecode)
    return found
