"""Local or remote prefill is arithmetic: a table of situations, and bursts against stale loads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.protocol.block_hashes import block_hashes, root_hash
from baton.protocol.handles import NodeLoad, Role
from router.nodes.placement import Prompt, handover_s_per_token, placement_costs, queued_tokens
from router.nodes.policy import Ask, NodeSnapshot, PolicySettings, Route, choose_route

RATE = 1000.0  # tokens per second, of both nodes
AUTO = PolicySettings(placement="auto")
PROMPT = tuple(range(1, 801))


def node(role: Role, *, holds: int = 0, assigned: int = 0, **load: float) -> NodeSnapshot:
    """A node with 1 ms of tail per 100 moved tokens; `holds`: cached tokens of PROMPT."""
    state = NodeLoad(
        free_blocks=1000,
        total_blocks=1000,
        own_prefill_tokens_per_s=RATE,
        kv_token_bytes=100,
        kv_sent_bytes=1_000_000,
        kv_tail_seconds=0.1,
    )
    return NodeSnapshot(
        node_id=role.value,
        boot_id=role.value,
        role=role,
        model_digest="m",
        fingerprint="layout",
        block_size=16,
        kv_dtype="float32",
        load=replace(state, **load),  # type: ignore[arg-type]
        prefix=frozenset(block_hashes(root_hash("m", "", "float32"), PROMPT[:holds], 16)),
        assigned=assigned,
    )


def prefill(**more: float) -> NodeSnapshot:
    return node(Role.PREFILL, **more)  # type: ignore[arg-type]


def decode(**more: float) -> NodeSnapshot:
    return node(Role.DECODE, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("p", "d", "local", "why"),
    [
        (prefill(), decode(), False, "both idle: the tail of 8 ms is nothing beside 800 ms"),
        (prefill(kv_tail_seconds=2.0), decode(), True, "a slow link: 160 ms of tail"),
        (prefill(kv_tail_seconds=2.0), decode(running=1), False, "but somebody decodes there"),
        (prefill(), decode(running=8, holds=784), True, "16 tokens to compute, 8 wait 16 ms"),
        (prefill(holds=784), decode(running=8, holds=784), False, "P has it cached as well"),
        (prefill(), decode(running=60, holds=784), False, "60 streams would wait"),
        (prefill(waiting_tokens=3000), decode(running=1), True, "P's queue is 3 s long"),
        (prefill(waiting_tokens=3000), decode(running=8), False, "8 streams would wait 0.8 s each"),
        (prefill(waiting_tokens=300), decode(waiting_tokens=3000), False, "D prefills already"),
        (prefill(), decode(own_prefill_tokens_per_s=4000.0), True, "D is four times as fast"),
        (prefill(), decode(own_prefill_tokens_per_s=0.0, holds=784), True, "D's rate taken from P"),
        (
            prefill(own_prefill_tokens_per_s=0.0),
            decode(holds=784),
            False,
            "nothing is measured yet",
        ),
        (prefill(), decode(prefill_tokens_per_s=4000.0), False, "by P's cores, which P has, too"),
        (prefill(kv_sent_bytes=0), decode(), False, "no hand-over was measured: it counts nothing"),
        (prefill(), decode(assigned=60, holds=784), True, "60 are on their way, none streams yet"),
        (prefill(waiting_tokens=50), decode(fetching=9, waiting=9), False, "P's queue is short"),
        (prefill(waiting_tokens=900), decode(fetching=9, waiting=9), True, "who fetches can wait"),
    ],
)
def test_situations(p: NodeSnapshot, d: NodeSnapshot, local: bool, why: str) -> None:
    assert (choose_route(Ask(PROMPT), [p, d], AUTO, 0.0).prefill is None) is local, why


@pytest.mark.parametrize(
    ("behind", "running", "prefillers", "local", "why"),
    [
        (0, 0, 1, False, "nobody waits"),
        (40, 0, 1, True, "forty wait, nobody streams"),
        (40, 3, 1, True, "forty that wait count as four that stream"),
        (40, 4, 1, False, "but not clearly more than four"),
        (40, 1, 2, True, "two prefill nodes: twenty wait for each"),
        (40, 2, 2, False, "and count as two that stream"),
        (400, 30, 1, True, "a long line"),
    ],
)
def test_who_waits_at_the_router_counts(
    behind: int, running: int, prefillers: int, local: bool, why: str
) -> None:
    prefills = [replace(prefill(), boot_id=str(number)) for number in range(prefillers)]
    nodes = [*prefills, decode(running=running)]
    route = choose_route(Ask(PROMPT, behind=behind), nodes, AUTO, 0.0)
    assert (route.prefill is None) is local, why


def test_the_other_placements_do_not_weigh() -> None:
    nodes = [prefill(waiting_tokens=10**6), decode(holds=784)]
    for settings, local in (
        (PolicySettings(placement="remote", local_prefill_tokens=10**6), False),
        (PolicySettings(placement="threshold", local_prefill_tokens=16), True),
        (PolicySettings(placement="threshold", local_prefill_tokens=15), False),
        (PolicySettings(), False),
    ):
        assert (choose_route(Ask(PROMPT), nodes, settings, 0.0).prefill is None) is local


def test_costs_are_seconds() -> None:
    costs = placement_costs(Prompt(800, 300, 400), prefill(waiting_tokens=200), decode(running=3))
    assert costs is not None
    assert costs.remote_s == pytest.approx((200 + 500) / RATE + 400 * 1e-5)
    assert costs.local_s == pytest.approx(400 / RATE * 4)
    waited_for = placement_costs(Prompt(800, 300, 400, behind=30), prefill(), decode())
    assert waited_for is not None
    assert waited_for.remote_s == pytest.approx(500 * (1 + 3) / RATE + 400 * 1e-5)
    assert handover_s_per_token(prefill().load) == pytest.approx(1e-5)
    assert handover_s_per_token(NodeLoad()) == 0.0


@pytest.mark.parametrize(
    ("reported", "unreported", "assigned", "queued"),
    [(100, 0, 0, 100), (100, 50, 50, 150), (0, 0, 70, 70), (100, 50, 400, 400)],
)
def test_the_queue_counts_what_no_report_tells_yet(
    reported: int, unreported: int, assigned: int, queued: int
) -> None:
    snapshot = replace(
        prefill(waiting_tokens=reported), unreported_tokens=unreported, assigned_tokens=assigned
    )
    assert queued_tokens(snapshot) == queued


@pytest.mark.parametrize(
    ("size", "running", "local", "why"),
    [
        (20, 0, True, "20 tokens there, or a forward of 256 first"),
        (20, 10, True, "ten streams wait 20 ms each: still less"),
        (20, 30, False, "thirty wait longer than the prompt would"),
        (800, 1, False, "a forward more does not matter to a long prompt"),
    ],
)
def test_a_node_that_pools_lets_short_prompts_wait(
    size: int, running: int, local: bool, why: str
) -> None:
    busy, d = replace(prefill(), pooling=1), decode(running=running)
    assert (choose_route(Ask(PROMPT[:size]), [busy, d], AUTO, 0.0).prefill is None) is local, why
    idle = replace(prefill(), boot_id="idle")
    assert choose_route(Ask(PROMPT[:size]), [busy, idle, d], AUTO, 0.0).prefill == idle
    # It is not queued: what never ends by itself would shut everybody out.
    assert queued_tokens(busy) == 0


def place(p: NodeSnapshot, d: NodeSnapshot, size: int) -> tuple[NodeSnapshot, NodeSnapshot, Route]:
    """One request more, as the sessions would count it: no load report in between."""
    route = choose_route(Ask(PROMPT[:size]), [p, d], AUTO, 0.0)
    if route.prefill is None:
        d = replace(
            d,
            assigned=d.assigned + 1,
            assigned_tokens=d.assigned_tokens + size,
            unreported_tokens=d.unreported_tokens + size,
        )
    else:
        p = replace(
            p,
            assigned=p.assigned + 1,
            assigned_tokens=p.assigned_tokens + size,
            unreported_tokens=p.unreported_tokens + size,
        )
    return p, d, route


@pytest.mark.parametrize("size", [50, 400])
def test_a_burst_under_stale_loads_does_not_run_to_one_side(size: int) -> None:
    """P was reported to have a long queue, D to be idle: D gets more of 80 requests, not all."""
    p, d = prefill(waiting_tokens=2000), decode()
    sides: list[bool] = []
    for _ in range(80):
        p, d, route = place(p, d, size)
        sides.append(route.prefill is None)
    assert sides[0], "the first one stays on the idle node"
    assert 1 <= sum(sides) < 70, "not all of the others follow it"
    # The queues stay comparable: nobody is sent to the worse side by more than one request.
    remote = (2000 + p.assigned_tokens) / RATE
    local = d.assigned_tokens / RATE
    assert local < remote


def test_the_decision_is_stable_under_its_own_effect() -> None:
    """Alternating reports of the two nodes do not make all requests swing from one to the other."""
    swings = 0
    p, d = prefill(), decode()
    before = None
    for turn in range(30):
        p, d, route = place(p, d, 100)
        local = route.prefill is None
        swings += before is not None and before is not local
        before = local
        if turn % 2:  # each report says: all computed; D keeps what it decodes
            p = replace(p, assigned_tokens=0, unreported_tokens=0, assigned=0)
            load = replace(d.load, running=d.assigned)
            d = replace(d, assigned_tokens=0, unreported_tokens=0, load=load)
    assert swings <= 2


def test_a_burst_on_idle_nodes_spreads_evenly() -> None:
    """Nobody streams yet: each prompt goes where it is computed first."""
    p, d = prefill(), decode()
    for _ in range(12):
        p, d, _ = place(p, d, 200)
    assert abs(p.assigned_tokens - d.assigned_tokens) <= 400
    assert p.assigned_tokens >= d.assigned_tokens, "separation is the rule"
