"""Fair queueing: shares by weight within a bound, order within a tenant, nobody starves."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.tenants.fair_queue import FairQueue


@dataclass(frozen=True, eq=False)
class Job:
    id: str
    tenant: str
    cost: float
    weight: float = 1.0


def jobs(tenant: str, *costs: float, weight: float = 1.0) -> list[Job]:
    return [Job(f"{tenant}{number}", tenant, cost, weight) for number, cost in enumerate(costs)]


def queue_of(*flows: list[Job]) -> FairQueue[Job]:
    queue: FairQueue[Job] = FairQueue()
    for flow in flows:
        for job in flow:
            queue.push(job)
    return queue


def served(queue: FairQueue[Job], count: int | None = None) -> list[str]:
    out: list[str] = []
    while len(queue) and (count is None or len(out) < count):
        assert queue.head() is not None
        out.append(queue.pop().id)
    return out


def test_equal_tenants_take_turns_however_many_each_sends() -> None:
    queue = queue_of(jobs("a", *[10] * 6), jobs("b", 10, 10))
    assert served(queue) == ["a0", "b0", "a1", "b1", "a2", "a3", "a4", "a5"]
    assert queue.head() is None
    assert (len(queue), queue.backlog) == (0, 0.0)


def test_cost_counts_not_requests() -> None:
    queue = queue_of(jobs("large", 30, 30), jobs("small", *[10] * 6))
    assert served(queue) == [
        "large0", "small0", "small1", "small2", "large1", "small3", "small4", "small5"
    ]  # fmt: skip


def test_weights_are_shares() -> None:
    queue = queue_of(jobs("a", *[10] * 30, weight=3.0), jobs("b", *[10] * 30))
    first = served(queue, 20)
    assert [name[0] for name in first].count("a") == 15


def test_idleness_is_not_saved_up() -> None:
    queue = queue_of(jobs("a", *[10] * 20))
    served(queue, 10)
    for job in jobs("b", *[10] * 20):
        queue.push(job)
    assert [name[0] for name in served(queue, 10)].count("b") == 5


def test_actual_cost_is_settled() -> None:
    queue = queue_of(jobs("a", *[10] * 10), jobs("b", *[10] * 10))
    served(queue, 2)
    queue.settle("a", 40)  # its first one took five times as long
    assert [name[0] for name in served(queue, 4)] == ["b"] * 4
    queue.settle("nobody", 5)


def test_removal_charges_nothing() -> None:
    first, second = jobs("a", 10, 20)
    queue = queue_of([first, second], jobs("b", 10))
    queue.remove(first)
    assert queue.backlog == 30
    assert served(queue) == ["a1", "b0"]


def test_the_fattest_by_weight() -> None:
    queue = queue_of(jobs("a", 30, 30, weight=4.0), jobs("b", 20, 10))
    assert queue.fattest() == ("b", 30.0)
    assert queue.last_of("a").id == "a1"
    assert (queue.share_of("a"), queue.share_of("nobody")) == (15.0, 0.0)


def test_what_is_served_before_a_ticket() -> None:
    queue = queue_of(jobs("a", *[10] * 6), jobs("b", 10))
    before = {job.id: ahead for job, ahead in queue.ahead()}
    assert before["a0"] == before["b0"] == 0
    assert before["a5"] == 60
    assert before["a1"] == 20
    assert queue.ahead_of_new("b", 1.0) == 20
    assert queue.ahead_of_new("a", 1.0) == 70
    assert queue.ahead_of_new("new", 1.0) == 0


WEIGHTS = st.sampled_from([0.25, 0.5, 1.0, 2.0, 5.0])
COST = st.integers(1, 100)


@settings(max_examples=200)
@given(
    weights=st.lists(WEIGHTS, min_size=2, max_size=5),
    costs=st.lists(COST, min_size=30, max_size=60),
    rounds=st.integers(10, 60),
)
def test_shares_by_weight_within_one_request_of_each(
    weights: list[float], costs: list[int], rounds: int
) -> None:
    """Among tenants that all wait the whole time, at every moment."""
    flows = [jobs(f"t{index}-", *costs * 3, weight=weight) for index, weight in enumerate(weights)]
    queue = queue_of(*flows)
    got = dict.fromkeys((flow[0].tenant for flow in flows), 0.0)
    weight_of = {flow[0].tenant: flow[0].weight for flow in flows}
    for _ in range(rounds):
        job = queue.pop()
        got[job.tenant] += job.cost / job.weight
        for one, mine in got.items():
            for other, theirs in got.items():
                bound = max(costs) / weight_of[one] + max(costs) / weight_of[other]
                assert abs(mine - theirs) <= bound + 1e-6


@settings(max_examples=200)
@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 4), COST, st.integers(0, 3)), min_size=1, max_size=80
    ),
    weights=st.lists(WEIGHTS, min_size=5, max_size=5),
)
def test_order_within_a_tenant_and_nobody_starves(
    arrivals: list[tuple[int, int, int]], weights: list[float]
) -> None:
    """Whatever arrives between what is served: a tenant's tickets come in their order, and no
    ticket waits for more of another tenant's tokens than their weights and one request allow."""
    queue: FairQueue[Job] = FairQueue()
    order: dict[str, list[str]] = {}
    # ticket -> [tokens of its own tenant before it, tokens of each other tenant meanwhile]
    waiting: dict[str, tuple[Job, float, dict[str, float]]] = {}

    def serve() -> None:
        if not len(queue):
            return
        job = queue.pop()
        assert order[job.tenant].pop(0) == job.id
        mine, own, others = waiting.pop(job.id)
        for tenant, tokens in others.items():
            fair = (own + 100) * weights[int(tenant)] / mine.weight + 100
            assert tokens <= fair + 1e-6
        for _, _, seen in waiting.values():
            seen[job.tenant] = seen.get(job.tenant, 0.0) + job.cost
        for entry in waiting.values():
            entry[2].pop(entry[0].tenant, None)

    for number, (tenant, cost, serves) in enumerate(arrivals):
        job = Job(str(number), str(tenant), cost, weights[tenant])
        own = sum(it[0].cost for it in waiting.values() if it[0].tenant == job.tenant)
        waiting[job.id] = (job, own, {})
        order.setdefault(job.tenant, []).append(job.id)
        queue.push(job)
        assert queue.backlog == pytest.approx(sum(it[0].cost for it in waiting.values()))
        for _ in range(serves):
            serve()
    while len(queue):
        serve()
    assert not waiting
