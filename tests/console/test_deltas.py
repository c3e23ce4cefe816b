"""Deltas of the console: a watcher that hears them all has the state, and each one is bounded."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from router.api.timelines import RequestSummary
from router.console.deltas import MOST_NODES, after, delta_of, frame
from router.console.views import (
    ConsoleDelta,
    ConsoleSnapshot,
    FlowCard,
    LatencyPercentiles,
    LoadTotals,
    NodeCard,
    RequestCard,
    RequestCards,
    RouterFacts,
    StoreFacts,
)
from router.events import RouterEvent

ROUTER = RouterFacts("r", "1", ("tiny",), 1.0, draining=False, demo=False, needs_api_key=False)
STORE = StoreFacts("memory", ok=True, text="answers")
TOTALS = LoadTotals(
    1, 0, 0.5, 9.0, 3.0, 0.0, 0.0, 0.0, LatencyPercentiles(), LatencyPercentiles(1.0, 2.0, 3.0)
)


def state(**changes: Any) -> ConsoleSnapshot:
    whole = ConsoleSnapshot(0, 0.0, ROUTER, TOTALS, STORE, [], [], RequestCards([], 0, []), [])
    return msgspec.structs.replace(whole, **changes)


def summary(number: int) -> RequestSummary:
    return RequestSummary(
        f"cmpl-{number}",
        number,
        5.0,
        None,
        None,
        "finished",
        None,
        None,
        3,
        0,
        2,
        None,
        None,
        0,
        0,
        0,
    )


nodes = st.lists(
    st.builds(
        NodeCard,
        id=st.sampled_from([f"n{number}" for number in range(9)]),
        role=st.sampled_from(["prefill", "decode"]),
        state=st.sampled_from(["serving", "lost", "draining"]),
        address=st.just("127.0.0.1:1"),
        running=st.integers(0, 3),
    ),
    unique_by=lambda each: each.id,
)
flows = st.lists(st.builds(FlowCard, st.just("p"), st.just("d"), st.just("shm"), st.just(1.0)
                           , st.integers(0, 3).map(float)), max_size=2)  # fmt: skip
live = st.lists(
    st.builds(
        RequestCard,
        request_id=st.sampled_from(["a", "b"]),
        age_ms=st.just(1.0),
        stage=st.sampled_from(["prefill", "decode"]),
        prompt_tokens=st.just(3),
        output_tokens=st.integers(0, 2),
        prefill_node=st.none(),
        decode_node=st.just("d"),
        retries=st.just(0),
        migrations=st.just(0),
        tenant=st.none(),
    ),
    max_size=2,
)
steps = st.lists(st.tuples(nodes, flows, live, st.integers(0, 30), st.booleans()), min_size=1)


@given(steps, st.integers(1, 4))
def test_a_snapshot_and_its_deltas_are_the_next_snapshot(steps: Any, most: int) -> None:
    told, num_events = state(), 0
    for seq, (nodes, flows, live, more, away) in enumerate(steps, 1):
        ended = [summary(number) for number in range(num_events + more, 0, -1)][:50]
        num_events += more
        now = state(
            seq=seq,
            at=float(seq),
            store=msgspec.structs.replace(STORE, ok=not away),
            nodes=nodes,
            flows=flows,
            requests=RequestCards(live, len(live), ended),
            events=[RouterEvent(each, 0.0, "retry", "x") for each in range(1, num_events + 1)][
                -200:
            ],
        )
        heard = None
        while heard is None or by_id(told) != by_id(now):  # the nodes come in several parts
            before = len({(it.id, it.state) for it in told.nodes} & _states(now))
            heard = msgspec.json.decode(msgspec.json.encode(delta_of(told, now, most)),
                                        type=ConsoleDelta)  # fmt: skip
            assert len(heard.nodes or []) <= most
            told = after(told, heard)
            assert len({(it.id, it.state) for it in told.nodes} & _states(now)) >= before
        assert msgspec.structs.replace(told, nodes=now.nodes) == now


def _states(of: ConsoleSnapshot) -> set[tuple[str, str]]:
    return {(each.id, each.state) for each in of.nodes}


def by_id(of: ConsoleSnapshot) -> dict[str, NodeCard]:
    return {each.id: each for each in of.nodes}


def test_a_change_of_state_is_told_before_a_change_of_numbers() -> None:
    before = [NodeCard(f"n{each}", "decode", "serving", "x") for each in range(1000)]
    now = [msgspec.structs.replace(each, running=1) for each in before]
    now[997] = msgspec.structs.replace(before[997], state="lost")
    told, lost = state(nodes=before), now[997]
    first = delta_of(told, state(seq=1, nodes=now))
    assert isinstance(first.nodes, list)
    assert len(first.nodes) == MOST_NODES
    assert first.nodes[0] == lost
    told = after(told, first)
    second = delta_of(told, state(seq=2, nodes=now))
    assert isinstance(second.nodes, list)
    assert not {each.id for each in first.nodes} & {each.id for each in second.nodes}


def test_what_did_not_change_is_not_told() -> None:
    same = state(nodes=[NodeCard("n", "decode", "serving", "x")])
    told = msgspec.json.decode(msgspec.json.encode(delta_of(same, same)))
    assert set(told) == {"seq", "at", "totals"}
    flow = state(flows=[FlowCard("p", "d", "shm", 1.0, 2.0)])
    raw = frame(delta_of(same, flow))
    assert raw.startswith(b"event: delta\ndata: {")
    assert b'"from":"p","to":"d"' in raw
    assert b'"gone":["n"]' in raw
