"""The policy is arithmetic over snapshots: affinity, load overriding it, room, pairs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.protocol.block_hashes import block_hashes, root_hash
from baton.protocol.errors import ContextLengthExceeded, Overloaded, Unavailable
from baton.protocol.handles import NodeLoad, Role
from router.nodes.policy import (
    Ask,
    NodeSnapshot,
    PolicySettings,
    choose_decode,
    choose_route,
    prefix_lengths,
)

PREFIX_AWARE = PolicySettings()
LEAST_LOADED = PolicySettings(prefix_weight=0.0)
PROMPT = tuple(range(1, 401))


def node(name: str, *, holds: int = 0, block_size: int = 16, **load: int) -> NodeSnapshot:
    """`holds`: leading tokens of PROMPT in its prefix map. The first letter is the role."""
    root = root_hash("digest", "", "float32")
    return NodeSnapshot(
        node_id=name,
        boot_id=f"boot-{name}",
        role=Role.PREFILL if name[0] == "p" else Role.DECODE,
        model_digest="digest",
        fingerprint="layout",
        block_size=block_size,
        kv_dtype="float32",
        load=replace(NodeLoad(free_blocks=100, total_blocks=100), **load),
        prefix=frozenset(block_hashes(root, PROMPT[:holds], block_size)),
    )


def names(
    nodes: list[NodeSnapshot], ask: Ask | None = None, tie: float = 0.0
) -> tuple[str | None, str]:
    route = choose_route(ask or Ask(PROMPT), nodes, PREFIX_AWARE, tie)
    return None if route.prefill is None else route.prefill.node_id, route.decode.node_id


def test_affinity_to_the_node_that_holds_the_prefix() -> None:
    nodes = [
        node("p1"),
        node("p2", holds=320),
        node("p3", holds=64),
        node("d1"),
        node("d2", holds=320),
    ]
    for tie in (0.0, 0.5, 0.99):
        assert names(nodes, tie=tie) == ("p2", "d2")
    route = choose_route(Ask(PROMPT), nodes, PREFIX_AWARE, 0.0)
    assert (route.prefill_cached, route.decode_cached) == (320, 320)


def test_load_overrides_affinity() -> None:
    """320 cached tokens are worth a queue of up to 320 tokens, not more."""
    free, holder = node("p1"), node("p2", holds=320, waiting_tokens=250)
    assert names([free, holder, node("d")])[0] == "p2"
    assert names([free, node("p2", holds=320, waiting_tokens=400), node("d")])[0] == "p1"
    # What this router has assigned counts before the node has told.
    assert names([free, replace(holder, assigned_tokens=400), node("d")])[0] == "p1"
    assert names([node("p"), node("d1"), node("d2", holds=400, running=1)])[1] == "d2"
    assert names([node("p"), node("d1"), node("d2", holds=400, running=3)])[1] == "d1"


def test_least_loaded_ignores_prefixes() -> None:
    nodes = [
        node("p1"),
        node("p2", holds=320, waiting_tokens=50),
        node("d1"),
        node("d2", holds=320, running=1),
    ]
    route = choose_route(Ask(PROMPT), nodes, LEAST_LOADED, 0.0)
    assert route.prefill is not None
    assert (route.prefill.node_id, route.decode.node_id) == ("p1", "d1")


def test_ties_are_spread() -> None:
    nodes = [node("p1"), node("p2"), node("p3"), node("d1"), node("d2")]
    chosen = {names(nodes, tie=tie / 12) for tie in range(12)}
    assert {p for p, _ in chosen} == {"p1", "p2", "p3"}
    assert {d for _, d in chosen} == {"d1", "d2"}


def test_each_node_hashes_with_its_own_block_size_and_precision() -> None:
    small, large = node("p1", holds=96, block_size=16), node("p2", holds=96, block_size=64)
    other = replace(node("p3", holds=96), kv_dtype="int8")
    assert prefix_lengths(Ask(PROMPT), [small, large, other]) == {"boot-p1": 96, "boot-p2": 64}
    assert prefix_lengths(Ask(PROMPT, tenant_salt="x"), [small, large, other]) == {}


def test_the_last_token_is_always_computed() -> None:
    full = node("p", holds=400, block_size=16)
    assert prefix_lengths(Ask(PROMPT), [full]) == {"boot-p": 384}
    assert prefix_lengths(Ask(PROMPT[:17]), [full]) == {"boot-p": 16}
    assert prefix_lengths(Ask(PROMPT[:16]), [full]) == {}


def test_a_node_without_room_comes_last() -> None:
    full, busy = node("p1", free_blocks=3), node("p2", waiting_tokens=900)
    assert names([full, busy, node("d1", free_blocks=0), node("d2", running=50)]) == ("p2", "d2")


def test_a_prompt_larger_than_every_pool() -> None:
    small = {"free_blocks": 10, "total_blocks": 10}
    with pytest.raises(ContextLengthExceeded):
        names([node("p", **small), node("d")])
    with pytest.raises(ContextLengthExceeded):
        names([node("p"), node("d", **small)])
    assert names([node("p1", **small), node("p2", waiting_tokens=10**6), node("d")])[0] == "p2"
    assert names([node("p", free_blocks=0, total_blocks=0), node("d")])[0] == "p"  # not told yet


def test_draining_and_excluded_nodes_are_not_used() -> None:
    draining = replace(node("p1"), load=NodeLoad(draining=True))
    assert names([draining, node("p2"), node("d")])[0] == "p2"
    nodes = [node("p1"), node("p2"), node("d1"), node("d2")]
    full = Overloaded("full")
    ask = Ask(PROMPT, excluded={"boot-p1": full, "boot-d2": full})
    assert names(nodes, ask, tie=0.99) == ("p2", "d1")
    with pytest.raises(Unavailable):
        names(nodes, Ask(PROMPT, excluded={"boot-d1": full, "boot-d2": full}))


def test_what_refusals_count_for() -> None:
    nodes, ask = [node("d1"), node("d2")], Ask(PROMPT)
    ask.refused("boot-d1", Unavailable("draining"))
    ask.refused("boot-d2", Overloaded("full"))
    with pytest.raises(Overloaded):  # who has nothing yet is told why
        names(nodes, ask)
    ask.begun = True
    with pytest.raises(Unavailable, match="no decode node"):  # waits if another one is expected
        names(nodes, ask)
    assert names(nodes, ask.later()) == (None, "d1"), "that one may come as another boot"
    ask.refused("boot-d3", full := Overloaded("full"))
    ask.served("boot-d3")  # which decoded it, and then refused it as well
    assert (ask.refusal, names([*nodes, node("d3")], ask)[1]) == (full, "d1")
    ask.served("boot-d1")
    assert (ask.refusal, names(nodes[1:], ask)) == (None, (None, "d2"))


def test_avoided_nodes_are_used_when_nobody_else_is_left() -> None:
    ask = Ask(PROMPT, avoided=frozenset({"boot-p1", "boot-d1"}))
    assert names([node("p1"), node("p2", waiting_tokens=5000), node("d1")], ask) == ("p2", "d1")
    assert names([node("p1"), node("d1")], ask) == ("p1", "d1")


def test_no_prefill_node_means_local_prefill() -> None:
    assert names([node("d1", running=4), node("d2")]) == (None, "d2")
    with pytest.raises(Unavailable):
        names([node("p1")])
    with pytest.raises(Unavailable):
        names([])


def test_whose_kv_is_lost_on_every_way_is_prefilled_where_it_decodes() -> None:
    assert names([node("p1"), node("d1")], Ask(PROMPT, local=True)) == (None, "d1")


def test_a_pair_shares_its_kv_layout() -> None:
    alien = replace(node("p1"), fingerprint="other")
    assert names([alien, node("p2", waiting_tokens=900), node("d")]) == ("p2", "d")
    assert names([alien, node("d")]) == (None, "d")
    far = replace(node("d2"), fingerprint="other")
    assert names([alien, node("d1"), far], tie=0.0) == ("p1", "d2")
    with pytest.raises(Unavailable):
        choose_decode(Ask(PROMPT), [node("d1"), node("p1")], "other", PREFIX_AWARE, 0.0)
    assert choose_decode(Ask(PROMPT), [node("d1"), far], "other", PREFIX_AWARE, 0.9) is far


def test_a_request_stays_with_its_model_and_its_adapter() -> None:
    new = replace(node("d2"), model_digest="new")
    assert names([node("d1", running=9), new], Ask(PROMPT, model_digest="digest"))[1] == "d1"
    with_adapter = replace(node("d2", running=9), adapters=("lora",))
    assert names([node("d1"), with_adapter], Ask(PROMPT, adapter="lora"))[1] == "d2"


def test_a_short_uncached_rest_is_prefilled_where_it_is_decoded() -> None:
    settings = PolicySettings(local_prefill_tokens=32)
    nodes = [node("p"), node("d", holds=384)]
    route = choose_route(Ask(PROMPT), nodes, settings, 0.0)
    assert route.prefill is None
    assert route.decode_cached == 384
    assert (
        choose_route(Ask(PROMPT), [node("p"), node("d", holds=320)], settings, 0.0).prefill
        is not None
    )
    assert choose_route(Ask(PROMPT), nodes, PREFIX_AWARE, 0.0).prefill is not None


@given(
    loads=st.lists(
        st.tuples(st.integers(0, 2000), st.integers(0, 400), st.integers(0, 100)),
        min_size=1,
        max_size=8,
    ),
    tie=st.floats(0, 1, exclude_max=True),
)
def test_never_a_clearly_worse_node(loads: list[tuple[int, int, int]], tie: float) -> None:
    """Whatever the tie, the chosen node computes at most 5 % more before token 1 than the best."""
    nodes = [
        node(f"p{index}", waiting_tokens=waiting, holds=holds)
        for index, (waiting, holds, _) in enumerate(loads)
    ]
    cached = prefix_lengths(Ask(PROMPT), nodes)
    costs = {n.node_id: n.load.waiting_tokens + 400 - cached.get(n.boot_id, 0) for n in nodes}
    chosen, _ = names([*nodes, node("d")], tie=tie)
    assert chosen is not None
    assert costs[chosen] <= 1.05 * min(costs.values())


def test_decode_nodes_that_run_fewer_sequences_are_passed_over() -> None:
    small = replace(node("d1"), max_num_seqs=4)
    large = replace(node("d2", running=3), max_num_seqs=8)
    unknown = replace(node("d3", running=9), max_num_seqs=0)
    prefill = replace(node("p"), max_num_seqs=1)  # makes token 1 of all of them at once
    assert names([prefill, small, large], Ask(PROMPT, width=4)) == ("p", "d1")
    assert names([prefill, small, large], Ask(PROMPT, width=5)) == ("p", "d2")
    assert names([prefill, small, unknown], Ask(PROMPT, width=99)) == ("p", "d3")
    with pytest.raises(Unavailable):
        names([prefill, small, large], Ask(PROMPT, width=9))
    wide = Ask(PROMPT, width=8)
    assert choose_decode(wide, [small, large], "layout", PREFIX_AWARE, 0.0).node_id == "d2"
