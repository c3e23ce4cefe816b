"""Admission is bookkeeping over tickets: order, bounds, limits per key, refusals in time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from baton.protocol.images import ImageInput, digest_of
from baton.protocol.request import Request
from baton.protocol.sampling import SamplingParams
from router.request.gate.admission import (
    LONGEST_RETRY_S,
    AdmissionQueue,
    Bounds,
    Reason,
    Ticket,
    TicketState,
)
from router.request.terms import Terms
from router.request.trace import RequestTrace
from router.tenants.keys import Grant

ALICE, BOB = Grant("alice", "alice"), Grant("bob", "bob")
ADMITTED, QUEUED, REFUSED = TicketState.ADMITTED, TicketState.QUEUED, TicketState.REFUSED


def room(_: Ticket) -> bool:
    return True


def no_room(_: Ticket) -> bool:
    return False


def wanted(name: str, grant: Grant = ALICE, *, by_slo: bool = False, **changes: Any) -> Ticket:
    values: dict[str, Any] = {"prompt_tokens": 100, "max_tokens": 100, **changes}
    request = Request(
        name, (0,) * values["prompt_tokens"], SamplingParams(max_tokens=values["max_tokens"]),
        priority=values.get("priority", 0), deadline=values.get("latest_start"),
    )  # fmt: skip
    ticket = Ticket(request, RequestTrace(Terms(grant)))
    ticket.by_slo = by_slo
    return ticket


def queue_with(live: int = 1, queued: int = 8) -> AdmissionQueue:
    return AdmissionQueue(Bounds(live, queued))


def filled(queued: int = 8) -> tuple[AdmissionQueue, Ticket]:
    """One place, and it is taken."""
    queue = queue_with(1, queued)
    ticket = queue.offer(wanted("running"), 0.0, room)
    assert ticket.state is ADMITTED
    return queue, ticket


def serve_all(queue: AdmissionQueue, running: Ticket, now: float = 0.0) -> list[str]:
    """End whoever runs, again and again; the order in which the others come in."""
    order: list[str] = []
    current: Ticket | None = running
    while current is not None:
        queue.release(current, current.cost, 0, now)
        came = [it for it in queue.pump(now, room) if it.state is ADMITTED]
        assert len(came) <= 1
        current = came[0] if came else None
        order += [it.id for it in came]
    return order


def refused(ticket: Ticket) -> Reason:
    assert ticket.state is REFUSED
    assert ticket.refusal is not None
    assert 1 <= ticket.refusal.retry_after_s <= LONGEST_RETRY_S
    return ticket.refusal.reason


def test_with_room_nobody_waits() -> None:
    queue = queue_with(live=2)
    for name in "ab":
        assert queue.offer(wanted(name), 1.0, room).trace.admitted_at == 1.0
    assert queue.offer(wanted("c"), 1.0, room).state is QUEUED
    assert (queue.num_live, queue.num_queued) == (2, 1)
    assert queue.pump(1.0, room) == []


def test_urgent_ones_first_then_fairly_then_in_order() -> None:
    queue, running = filled()
    for name, grant, priority in (
        ("a1", ALICE, 0), ("a2", ALICE, 0), ("later", ALICE, 5), ("b1", BOB, 0),
        ("b-urgent", BOB, -1),
    ):  # fmt: skip
        queue.offer(wanted(name, grant=grant, priority=priority), 0.0, room)
    assert serve_all(queue, running) == ["b-urgent", "a1", "b1", "a2", "later"]
    assert (queue.num_live, queue.num_queued, queue.queued_tokens) == (0, 0, 0)


def test_nobody_passes_a_head_without_room() -> None:
    queue = queue_with(live=8)
    large = queue.offer(wanted("large", prompt_tokens=5000), 0.0, no_room)

    def small_only(ticket: Ticket) -> bool:
        return ticket.prompt_tokens < 1000

    small = queue.offer(wanted("small"), 0.0, small_only)
    assert queue.pump(0.0, small_only) == []
    assert (large.state, small.state) == (QUEUED, QUEUED)
    assert queue.pump(0.0, room) == [large, small]


def test_a_full_queue_refuses_with_the_time_that_it_takes() -> None:
    queue, _ = filled(queued=2)
    assert queue.offer(wanted("a"), 0.0, room).state is QUEUED
    assert queue.offer(wanted("b"), 0.0, room).state is QUEUED
    assert refused(queue.offer(wanted("c"), 0.0, room)) is Reason.QUEUE_FULL
    assert refused(AdmissionQueue(Bounds(1, 0)).offer(wanted("d"), 0.0, no_room)) is (
        Reason.QUEUE_FULL
    )
    assert queue.stats.refused[Reason.QUEUE_FULL] == 1


def test_a_flood_pushes_out_itself_only() -> None:
    queue, _ = filled(queued=4)
    flood = [queue.offer(wanted(f"a{i}"), 0.0, room) for i in range(4)]
    fair = queue.offer(wanted("b", grant=BOB), 0.0, room)
    assert fair.state is QUEUED
    assert refused(flood[3]) is Reason.QUEUE_FULL
    assert queue.pump(0.0, room) == [flood[3]]
    assert refused(queue.offer(wanted("a9"), 0.0, room)) is Reason.QUEUE_FULL
    assert queue.queued_by_tenant() == {"alice": 3, "bob": 1}


def test_an_urgent_one_takes_the_place_of_the_least_urgent() -> None:
    queue, _ = filled(queued=2)
    first = queue.offer(wanted("a", grant=BOB, priority=3), 0.0, room)
    second = queue.offer(wanted("b", priority=3, max_tokens=200), 0.0, room)
    urgent = queue.offer(wanted("c"), 0.0, room)
    assert (first.state, urgent.state) == (QUEUED, QUEUED)
    assert refused(second) is Reason.QUEUE_FULL
    assert refused(queue.offer(wanted("d", priority=9), 0.0, room)) is Reason.QUEUE_FULL


def test_a_key_has_so_many_at_once() -> None:
    limited = Grant("alice", "alice", max_concurrency=2)
    queue = queue_with(live=1)
    running = queue.offer(wanted("a", grant=limited), 0.0, room)
    waiting = queue.offer(wanted("b", grant=limited), 0.0, room)
    assert refused(queue.offer(wanted("c", grant=limited), 0.0, room)) is Reason.CONCURRENCY
    assert queue.offer(wanted("d", grant=BOB), 0.0, room).state is QUEUED
    queue.cancel(waiting, 0.0)
    queue.cancel(waiting, 0.0)
    assert waiting.state is TicketState.OVER
    again = queue.offer(wanted("e", grant=limited), 0.0, room)
    assert again.state is QUEUED
    assert serve_all(queue, running) == ["d", "e"]
    assert queue.stats.cancelled == 1


def test_a_key_has_its_tokens_per_minute() -> None:
    limited = Grant("alice", "alice", tokens_per_minute=600)
    queue = queue_with(live=10)
    first = queue.offer(wanted("a", grant=limited, max_tokens=400), 0.0, room)
    assert first.cost == 500
    late = queue.offer(wanted("b", grant=limited), 0.0, room)
    assert refused(late) is Reason.TOKEN_RATE
    assert late.refusal is not None
    assert late.refusal.retry_after_s == 10  # 100 tokens are missing
    queue.release(first, 110, 10, 0.0)  # of 500
    # Answers have 10 tokens of late: that is what is charged now.
    assert queue.offer(wanted("c", grant=limited), 0.0, room).cost == 110
    assert queue.offer(wanted("d", grant=BOB), 0.0, room).state is ADMITTED


def test_whoever_is_refused_or_leaves_is_charged_nothing() -> None:
    limited = Grant("carol", "carol", tokens_per_minute=200)
    queue, _ = filled(queued=1)
    waiting = queue.offer(wanted("a", grant=limited), 0.0, room)
    assert waiting.state is QUEUED
    assert refused(queue.offer(wanted("b", grant=limited), 0.0, room)) is Reason.TOKEN_RATE
    queue.cancel(waiting, 0.0)
    queue.offer(wanted("c", grant=BOB), 0.0, room)
    assert refused(queue.offer(wanted("d", grant=limited, priority=1), 0.0, room)) is (
        Reason.QUEUE_FULL
    )
    assert queue.offer(wanted("e", grant=limited, priority=-1), 0.0, room).state is QUEUED


def drained(tokens_per_s: float) -> tuple[AdmissionQueue, Ticket, float]:
    """A queue that was seen to drain so fast, with one running and nobody waiting; and the time."""
    queue, running = filled(queued=100)
    now = 0.0
    for number in range(40):
        queue.offer(wanted(f"{number}"), now, room)
        now += 200 / tokens_per_s
        queue.release(running, running.cost, 0, now)
        (running,) = queue.pump(now, room)
    rate = queue.tokens_per_s
    assert rate == pytest.approx(tokens_per_s, rel=0.1)
    return queue, running, now


def with_image(name: str, num_bytes: int, grant: Grant) -> Ticket:
    ticket = wanted(name, grant)
    data = bytes(num_bytes)
    request = replace(ticket.request, images=(ImageInput(digest_of(data), 0, 1, data),))
    return Ticket(request, ticket.trace)


def test_images_of_one_key_leave_room_for_those_of_others() -> None:
    queue = AdmissionQueue(Bounds(8, 8, max_image_bytes=100))
    first = queue.offer(with_image("a", 30, ALICE), 0.0, room)
    assert refused(queue.offer(with_image("b", 21, ALICE), 0.0, room)) is Reason.IMAGE_BYTES
    assert queue.offer(wanted("text"), 0.0, room).state is ADMITTED  # no image, no limit
    assert queue.offer(with_image("c", 20, ALICE), 0.0, no_room).state is QUEUED
    assert queue.offer(with_image("d", 50, BOB), 0.0, no_room).state is QUEUED
    carol = Grant("carol", "carol")
    assert refused(queue.offer(with_image("e", 1, carol), 0.0, room)) is Reason.IMAGE_BYTES
    assert queue.image_bytes == 100
    queue.release(first, 0.0, 0, 0.0)
    assert queue.offer(with_image("f", 30, carol), 0.0, no_room).state is QUEUED
    queue.stop(0.0)
    assert queue.image_bytes == 0


def test_hopeless_ones_are_refused_at_once() -> None:
    queue, _, now = drained(tokens_per_s=1000)
    for number in range(10):  # 2,000 tokens: two seconds
        assert queue.offer(wanted(f"w{number}"), now, room).state is QUEUED
    hopeless = queue.offer(wanted("x", latest_start=now + 1.0, by_slo=True), now, room)
    assert refused(hopeless) is Reason.SLO
    assert hopeless.refusal is not None
    assert hopeless.refusal.retry_after_s == 1
    assert refused(queue.offer(wanted("y", latest_start=now - 1), now, room)) is Reason.DEADLINE
    patient = queue.offer(wanted("z", latest_start=now + 3.0), now, room)
    assert patient.state is QUEUED
    # Another tenant has its own share, and an urgent one its own line.
    fair = queue.offer(wanted("f", grant=BOB, latest_start=now + 1.0), now, room)
    urgent = queue.offer(wanted("u", priority=-1, latest_start=now + 0.1), now, room)
    assert (fair.state, urgent.state) == (QUEUED, QUEUED)


def test_those_that_wait_are_refused_when_the_queue_gets_too_slow() -> None:
    queue, running, now = drained(tokens_per_s=1000)
    waiting = [queue.offer(wanted(f"w{i}"), now, room) for i in range(5)]
    hopeful = queue.offer(wanted("x", latest_start=now + 2.0, by_slo=True), now, room)
    assert hopeful.state is QUEUED
    left: list[Ticket] = []
    for _ in range(7):  # one request in half a second, not five
        now += 0.25
        left += queue.pump(now, no_room)
    assert left == [hopeful]
    assert refused(hopeful) is Reason.SLO
    assert [it.state for it in waiting] == [QUEUED] * 5
    assert queue.num_queued == 5
    assert running.state is ADMITTED


def test_time_runs_out_while_waiting() -> None:
    queue, _ = filled()
    assert queue.next_expiry() is None
    late = queue.offer(wanted("a", latest_start=2.0), 0.0, room)
    soon = queue.offer(wanted("b", latest_start=1.0, by_slo=True), 0.0, room)
    assert queue.next_expiry() == 1.0
    assert queue.pump(1.0, room) == []
    assert queue.pump(1.1, room) == [soon]
    assert queue.next_expiry() == 2.0
    queue.cancel(late, 1.2)
    assert queue.next_expiry() is None


def test_stopping_refuses_all_that_wait() -> None:
    queue, running = filled()
    waiting = [queue.offer(wanted(name), 0.0, room) for name in "ab"]
    assert queue.stop(0.0) == waiting
    assert [refused(it) for it in waiting] == [Reason.STOPPING] * 2
    queue.release(running, 0, 0, 0.0)
    assert (queue.num_live, queue.num_queued) == (0, 0)
    with pytest.raises(AssertionError, match="released when over"):
        queue.release(running, 0, 0, 0.0)


def test_served_tickets_do_not_pile_up_behind_far_deadlines() -> None:
    queue, running = filled(queued=4)
    for number in range(500):
        queue.offer(wanted(str(number), latest_start=1000.0), 0.0, room)
        queue.release(running, 0, 0, 0.0)
        (running,) = queue.pump(0.0, room)
    assert len(queue._expiries) < 100  # pyright: ignore[reportPrivateUsage]


GRANTS = (
    Grant("a", "a", max_concurrency=3),
    Grant("a2", "a"),
    Grant("b", "b", weight=3.0, tokens_per_minute=5000),
    Grant("c", "c", weight=0.5),
)


@pytest.mark.parametrize(
    ("live", "waiting", "behind", "why"),
    [
        ("", "a", 0, "the head itself does not wait behind itself"),
        ("aa", "aaaaaa", 5, "one tenant alone: all of them"),
        ("aab", "aaaaaa", 0, "one stream of another tenant"),
        ("aabbb", "aaaaaa", 2, "three of another"),
        ("a", "aaaabb", 3, "of a as many as of b, and both of b"),
        ("abcd", "aaabbbccc", 8, "no tenant has more than all others"),
        ("A", "aaaa", 0, "less urgent ones do not make the urgent stand still"),
        ("a", "AAAaaaa", 2, "nor do they wait before urgent ones"),
    ],
)
def test_who_waits_behind_the_head(live: str, waiting: str, behind: int, why: str) -> None:
    """A letter is a tenant; a capital is the same tenant's urgent request."""
    queue, seen = queue_with(live=99, queued=99), list[Ticket]()

    def look(ticket: Ticket) -> bool:
        seen.append(ticket)
        return False

    for number, letter in enumerate(live + waiting):
        tenant = letter.lower()
        priority = -1 if letter.isupper() else 0
        ticket = wanted(str(number), Grant(tenant, tenant), priority=priority)
        queue.offer(ticket, 0.0, room if number < len(live) else no_room)
    queue.pump(0.0, look)
    assert [ticket.behind for ticket in seen] == [behind], why


def test_who_has_left_counts_no_more() -> None:
    queue = queue_with(live=99, queued=99)
    alice = queue.offer(wanted("0", ALICE), 0.0, room)
    bob = queue.offer(wanted("1", BOB), 0.0, room)
    waiting = [queue.offer(wanted(str(number), ALICE), 0.0, no_room) for number in range(2, 8)]
    queue.pump(0.0, no_room)
    assert waiting[0].behind == 0, "bob's stream would stand still"
    queue.release(bob, 0, 0, 0.0)
    queue.pump(0.0, no_room)
    assert waiting[0].behind == 5
    queue.release(alice, 0, 0, 0.0)
    queue.pump(0.0, no_room)
    assert waiting[0].behind == 5


class AdmissionMachine(RuleBasedStateMachine):
    """Any order of everything: bounds hold, counts agree, each ticket ends once and in its turn."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = AdmissionQueue(Bounds(max_live=3, max_queued=5))
        self.now = 0.0
        self.open: list[Ticket] = []  # QUEUED or ADMITTED
        self.lines: dict[tuple[str, int], list[str]] = {}
        self.offered = self.refused = self.over = 0
        self.has_room = True

    def room(self, _: Ticket) -> bool:
        return self.has_room

    def settle(self, left: list[Ticket]) -> None:
        for ticket in left:
            line = self.lines[ticket.tenant, ticket.priority]
            if ticket.state is ADMITTED:
                assert line.pop(0) == ticket.id, "first come, first served"
            else:
                refused(ticket)
                self.refused += 1
                line.remove(ticket.id)
                self.open.remove(ticket)

    @rule(
        grant=st.sampled_from(GRANTS),
        priority=st.integers(-1, 1),
        tokens=st.integers(1, 2000),
        patience=st.none() | st.floats(0, 20),
    )
    def offer(self, grant: Grant, priority: int, tokens: int, patience: float | None) -> None:
        self.offered += 1
        ticket = self.queue.offer(
            wanted(
                str(self.offered), grant, prompt_tokens=tokens, max_tokens=10, priority=priority,
                latest_start=None if patience is None else self.now + patience,
            ),
            self.now, self.room,
        )  # fmt: skip
        if ticket.state is REFUSED:
            refused(ticket)
            self.refused += 1
            return
        self.open.append(ticket)
        if ticket.state is QUEUED:
            self.lines.setdefault((ticket.tenant, priority), []).append(ticket.id)
            self.pump()

    @rule()
    def pump(self) -> None:
        self.settle(self.queue.pump(self.now, self.room))
        if self.has_room:
            assert not self.queue.num_queued or self.queue.num_live == 3, "somebody could go"

    @rule(seconds=st.floats(0, 5), room=st.booleans())
    def wait(self, seconds: float, room: bool) -> None:
        self.now += seconds
        self.has_room = room

    @rule(pick=st.randoms(use_true_random=False))
    def cancel(self, pick: Any) -> None:
        queued = [ticket for ticket in self.open if ticket.state is QUEUED]
        if queued:
            ticket = pick.choice(queued)
            self.queue.cancel(ticket, self.now)
            self.lines[ticket.tenant, ticket.priority].remove(ticket.id)
            self.open.remove(ticket)
            self.over += 1

    @rule(pick=st.randoms(use_true_random=False), used=st.integers(0, 3000))
    def release(self, pick: Any, used: int) -> None:
        live = [ticket for ticket in self.open if ticket.state is ADMITTED]
        if live:
            ticket = pick.choice(live)
            self.queue.release(ticket, used, min(used, 10), self.now)
            self.open.remove(ticket)
            self.over += 1
            self.pump()

    @invariant()
    def counts_agree(self) -> None:
        live = [ticket for ticket in self.open if ticket.state is ADMITTED]
        queued = [ticket for ticket in self.open if ticket.state is QUEUED]
        assert (len(live), len(queued)) == (self.queue.num_live, self.queue.num_queued)
        assert len(live) <= 3
        assert len(queued) <= 5
        assert sum(ticket.grant.name == "a" for ticket in self.open) <= 3
        assert self.queue.queued_tokens == pytest.approx(sum(it.cost for it in queued))
        assert self.offered == self.refused + self.over + len(self.open)
        assert sum(self.queue.queued_by_tenant().values()) == len(queued)
        assert sum(self.queue.stats.refused.values()) == self.refused


TestAdmissionMachine = AdmissionMachine.TestCase
TestAdmissionMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
