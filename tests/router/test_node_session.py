"""One session with one scripted node over real gRPC: hello, routing, back-off, refusals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from baton.protocol import wire
from baton.protocol.errors import NodeLost
from baton.protocol.events import (
    BlockEvent,
    BlockEventKind,
    NodeStep,
    RequestFailed,
    Subscribed,
    TokenEvent,
)
from baton.protocol.handles import NodeLoad, NodeRecord, Role
from baton.protocol.messages import AbortRequest, SubmitDecode
from router.nodes import attachments
from router.nodes import session as node_session
from router.nodes.attachments import (
    PART_EVENTS,
    Attachments,
    Attempt,
    NodeEvent,
    SessionLost,
    in_order,
)
from router.nodes.health import HealthStats
from tests.router.fakes import (
    PATIENCE_S,
    FakeDirectory,
    FakeNode,
    fake_nodes,
    make_record,
    make_request,
    running_router,
)


def inbox_of(epoch: int = 1, request_id: str = "r") -> tuple[Attempt, asyncio.Queue[NodeEvent]]:
    inbox: asyncio.Queue[NodeEvent] = asyncio.Queue()
    return Attempt(request_id, epoch, inbox.put_nowait), inbox


async def take(inbox: asyncio.Queue[NodeEvent]) -> NodeEvent:
    async with asyncio.timeout(PATIENCE_S):
        return await inbox.get()


async def test_events_go_to_the_request_and_epoch_they_name() -> None:
    async with fake_nodes("d") as (d,), running_router([d]) as router:
        session = router.registry.session("boot-d")
        assert session is not None
        one, first = inbox_of(2, "a")
        two, second = inbox_of(1, "b")
        session.attach(one)
        session.attach(two)
        d.say(
            tokens=(
                TokenEvent("a", 1, 0, (1,)),  # an older epoch
                TokenEvent("b", 1, 0, (2,)),
                TokenEvent("c", 1, 0, (3,)),  # nobody's
                TokenEvent("a", 2, 0, (4,)),
            ),
            subscribed=(Subscribed("c", 1),),
            failed=(RequestFailed("b", 1, "internal", "x", False),),
        )
        assert await take(first) == TokenEvent("a", 2, 0, (4,))
        assert await take(second) == TokenEvent("b", 1, 0, (2,))
        assert isinstance(await take(second), RequestFailed)  # after the tokens of its step
        session.detach("b")
        d.say(tokens=(TokenEvent("b", 1, 1, (5,)), TokenEvent("a", 2, 1, (6,))))
        assert await take(first) == TokenEvent("a", 2, 1, (6,))
        assert first.empty()
        assert second.empty()
        session.send(AbortRequest("a", 2))
        assert await d.hear(AbortRequest) == AbortRequest("a", 2)


async def test_load_and_assigned_tokens() -> None:
    async with fake_nodes("p") as (p,), running_router([p]) as router:
        session = router.registry.session("boot-p")
        assert session is not None
        attempt, inbox = inbox_of()
        attempt.tokens = 70
        session.attach(attempt)
        assert (session.assigned, session.assigned_tokens) == (1, 70)
        assert session.unreported_tokens == 70
        load = NodeLoad(running=1, free_blocks=9, total_blocks=64)
        p.say(load=load, tokens=(TokenEvent("r", 1, 0, (1,)),))
        await take(inbox)
        assert session.load == load
        assert session.unreported_tokens == 0
        assert (session.assigned, session.assigned_tokens) == (1, 0)
        session.detach("r")
        session.detach("r")
        assert (session.assigned, session.assigned_tokens) == (0, 0)


async def test_inputs_that_are_pooled_are_counted_apart() -> None:
    async with fake_nodes("p") as (p,), running_router([p]) as router:
        session = router.registry.session("boot-p")
        assert session is not None
        assert session.record is not None
        for name in ("a", "b"):
            session.attach(Attempt(name, 1, lambda _: None, pooled=True))
        snapshot = session.snapshot(session.record)
        assert (snapshot.pooling, snapshot.assigned, snapshot.assigned_tokens) == (2, 2, 0)
        session.detach("a")
        session.detach("a")
        assert session.snapshot(session.record).pooling == 1
        await p.stop()
        await router.until(lambda: not session.connected)
        assert session.snapshot(session.record).pooling == 0


async def test_what_a_node_refused_is_not_counted_with_it() -> None:
    """An idle node tells no load that would take it back: nothing more would be let in."""
    async with fake_nodes("p") as (p,), running_router([p]) as router:
        session = router.registry.session("boot-p")
        assert session is not None
        attempt, inbox = inbox_of()
        attempt.tokens = 70
        session.attach(attempt)
        p.say(failed=(RequestFailed("r", 1, "invalid_request", "no", False),))
        assert isinstance(await take(inbox), RequestFailed)
        session.detach("r")
        assert (session.assigned_tokens, session.unreported_tokens) == (0, 0)


async def test_block_events_make_the_prefix_index_and_a_gap_forgets() -> None:
    async with fake_nodes("p") as (p,), running_router([p]) as router:
        session = router.registry.session("boot-p")
        assert session is not None
        attempt, inbox = inbox_of()
        session.attach(attempt)

        async def tell(seq: int, *events: BlockEvent) -> set[bytes]:
            p.say(block_events_seq=seq, block_events=events, tokens=(TokenEvent("r", 1, 0, (1,)),))
            await take(inbox)
            return set(session.prefix.hashes)

        stored = BlockEvent(BlockEventKind.STORED, (b"1", b"2", b"3"))
        assert await tell(1, stored) == {b"1", b"2", b"3"}
        assert await tell(2, BlockEvent(BlockEventKind.EVICTED, (b"3",))) == {b"1", b"2"}
        assert await tell(4, BlockEvent(BlockEventKind.STORED, (b"9",))) == {b"9"}
        assert session.prefix.gaps == 1
        assert await tell(5, BlockEvent(BlockEventKind.CLEARED)) == set()


async def test_a_session_whose_write_failed_is_over_for_the_node_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """gRPC takes such a call for done, and would leave it open in its core for ever."""
    failed = asyncio.Event()

    async def failing(call: Any, message: Any) -> None:
        monkeypatch.undo()
        failed.set()
        call._cython_call.set_internal_error("scripted")
        await call._raise_for_status()

    async with fake_nodes("d") as (d,), running_router([d]) as router:
        session = router.registry.session("boot-d")
        assert session is not None
        attempt, inbox = inbox_of()
        session.attach(attempt)
        monkeypatch.setattr("grpc.aio._call._StreamRequestMixin._write", failing)
        session.send(AbortRequest("r", 1))
        async with asyncio.timeout(PATIENCE_S):
            await failed.wait()
            d.say(tokens=(TokenEvent("r", 1, 0, (1,)),))
            assert await inbox.get() == TokenEvent("r", 1, 0, (1,))
            assert isinstance(await inbox.get(), SessionLost)
            await d.left.wait()


async def test_a_broken_session_tells_its_requests_and_comes_back() -> None:
    async with fake_nodes("d") as (d,), running_router([d]) as router:
        session = router.registry.session("boot-d")
        assert session is not None
        attempt, inbox = inbox_of()
        session.attach(attempt)
        d.cut()
        lost = await take(inbox)
        assert isinstance(lost, SessionLost)
        assert lost.node_id == "d"
        assert session.assigned == 0
        await router.until(lambda: d.sessions == 2 and session.connected)
        session.attach(attempt)
        session.send(SubmitDecode(make_request()))
        assert (await d.hear(SubmitDecode)).request.id == "r"


async def test_a_node_that_is_down_takes_nothing() -> None:
    async with fake_nodes("d") as (d,), running_router([d]) as router:
        session = router.registry.session("boot-d")
        assert session is not None
        await d.stop()
        await router.until(lambda: not session.connected)
        with pytest.raises(NodeLost):
            session.attach(inbox_of()[0])
        session.send(AbortRequest("r", 1))  # dropped
        assert router.registry.session("boot-d") is None


class Resumable:
    """A StepLog of resumable requests only."""

    def note(self, event: TokenEvent) -> bool:
        return False

    def shows_logged(self, request_id: str) -> bool:
        return True

    async def append(self, events: Sequence[TokenEvent]) -> None: ...


async def test_tokens_of_resumable_requests_are_logged_before_they_are_delivered() -> None:
    order: list[str] = []

    class Log(Resumable):
        async def append(self, events: Sequence[TokenEvent]) -> None:
            order.append(f"log {len(events)}")

    async with fake_nodes("d") as (d,), running_router([d], log=Log()) as router:
        session = router.registry.session("boot-d")
        assert session is not None
        done = asyncio.Event()

        def deliver(event: NodeEvent) -> None:
            assert isinstance(event, TokenEvent)
            order.append(f"show {event.token_ids[0]}")
            if event.finish_reason or event.token_ids[0] == 3:
                done.set()

        session.attach(Attempt("a", 1, deliver))
        session.attach(Attempt("b", 1, deliver))
        d.say(
            tokens=(
                TokenEvent("a", 1, 0, (1,)),
                TokenEvent("b", 1, 0, (2,)),
                TokenEvent("x", 1, 0, (9,)),
            )
        )
        d.say(tokens=(TokenEvent("a", 1, 1, (3,)),))
        async with asyncio.timeout(PATIENCE_S):
            await done.wait()
        assert order == ["log 2", "show 1", "show 2", "log 1", "show 3"]


async def test_the_secret_is_proven(caplog: pytest.LogCaptureFixture) -> None:
    node = FakeNode(make_record("d", Role.DECODE), secret="right")
    await node.start()
    try:
        async with running_router([node], secret="right") as router:
            assert router.registry.can_serve()
        async with running_router([node], secret="wrong", wait=False) as router:
            async with asyncio.timeout(PATIENCE_S):
                await node.refusals.get()
                await node.refusals.get()  # so the first has been seen
            assert not router.registry.can_serve()
        assert f"node {node.address} refuses this router: wrong secret" in caplog.text
    finally:
        await node.stop()


class BriefNode(FakeNode):
    """Says what its script holds, then ends the session in good order once it may `go`."""

    def __init__(self) -> None:
        super().__init__(make_record("d", Role.DECODE))
        self.script: Sequence[NodeRecord | NodeStep] = ()
        self.go = asyncio.Event()
        self.calls: asyncio.Queue[None] = asyncio.Queue()

    async def Session(self, request_iterator: Any, context: Any) -> None:
        self.calls.put_nowait(None)
        await context.read()
        for message in self.script:
            await context.write(wire.node_message_to_wire(message))
        await self.go.wait()

    async def called(self, times: int = 1) -> None:
        async with asyncio.timeout(PATIENCE_S):
            for _ in range(times):
                await self.calls.get()


@pytest.fixture
async def brief() -> AsyncIterator[BriefNode]:
    node = BriefNode()
    await node.start()
    yield node
    await node.stop()


@pytest.mark.parametrize(
    ("script", "complaint"),
    [((), None), ((NodeStep(),), "breaks the protocol: the first message is no hello")],
)
async def test_a_node_without_a_hello_is_not_used_but_tried_again(
    brief: BriefNode,
    script: Sequence[NodeStep],
    complaint: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    brief.script = script
    brief.go.set()
    async with running_router([brief], wait=False) as router:
        await brief.called(2)
        assert not router.registry.can_serve()
        brief.script = (brief.record,)
        brief.go.clear()
        await router.until(router.registry.can_serve)
    assert "session with node" not in caplog.text, "a peer's fault, none of ours"
    if complaint is not None:
        assert complaint in caplog.text


async def test_a_node_may_end_the_session_in_good_order(brief: BriefNode) -> None:
    brief.script = (brief.record,)
    async with running_router([brief]) as router:
        session = router.registry.session("boot-d")
        assert session is not None
        attempt, inbox = inbox_of()
        session.attach(attempt)
        brief.go.set()
        assert await take(inbox) == SessionLost("d", "the node ended the session", suspect=True)


async def test_a_drained_node_is_left_when_its_last_step_was_read() -> None:
    async with fake_nodes("d") as (d,), running_router([d]) as router:
        session = router.registry.session("boot-d")
        assert session is not None
        attempt, inbox = inbox_of()
        session.attach(attempt)
        d.say(tokens=(TokenEvent("r", 1, 0, (1,)),))
        d.say(last=True)
        assert isinstance(await take(inbox), TokenEvent)
        lost = await take(inbox)
        assert isinstance(lost, SessionLost)
        assert lost.drained
        async with asyncio.timeout(PATIENCE_S):
            await d.left.wait()  # it was the router that ended the session


async def test_a_wake_up_ends_the_back_off(
    brief: BriefNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_session, "FIRST_BACKOFF_S", 100 * PATIENCE_S)
    directory = FakeDirectory([brief.record])
    brief.script = (brief.record,)
    async with running_router([], wait=False, directory=directory) as router:
        await router.until(router.registry.can_serve)
        brief.go.set()
        await router.until(lambda: not router.registry.can_serve())
        brief.go.clear()
        again = replace(brief.record, boot_id="boot-again")
        brief.script = directory.known = [again]
        await router.registry.refresh()
        await router.until(lambda: router.registry.session("boot-again") is not None)


async def test_a_large_step_is_logged_and_shown_in_parts_in_order() -> None:
    told: list[str] = []
    gate = asyncio.Event()

    class Log(Resumable):
        """Takes the first part, and the others once the first has been shown."""

        def __init__(self) -> None:
            self.parts: list[int] = []

        async def append(self, events: Sequence[TokenEvent]) -> None:
            self.parts.append(len(events))
            if len(self.parts) > 1:
                await gate.wait()
            told.append(f"logged {events[0].token_ids[0]}")

    log = Log()
    count = 2 * PART_EVENTS + 10
    async with fake_nodes("d") as (d,), running_router([d], log=log) as router:
        session = router.registry.session("boot-d")
        assert session is not None
        done = asyncio.Event()

        def deliver(event: NodeEvent) -> None:
            assert isinstance(event, TokenEvent)
            told.append(f"shown {event.token_ids[0]}")
            if event.token_ids[0] == PART_EVENTS - 1:
                gate.set()
            if event.token_ids[0] == count - 1:
                done.set()

        session.attach(Attempt("r", 1, deliver))
        d.say(tokens=tuple(TokenEvent("r", 1, i, (i,)) for i in range(count)))
        async with asyncio.timeout(10.0):
            await done.wait()
    assert log.parts == [PART_EVENTS, PART_EVENTS, 10]
    assert [line for line in told if line.startswith("shown")] == [
        f"shown {i}" for i in range(count)
    ]
    for part in range(3):
        first = part * PART_EVENTS
        assert told.index(f"logged {first}") < told.index(f"shown {first}")


async def test_nothing_overtakes_the_tokens_of_a_resumable_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its failure waits, too, also in a later part of the step; other requests do not."""
    monkeypatch.setattr(attachments, "PART_EVENTS", 1)
    told: list[str] = []

    class Log(Resumable):
        def note(self, event: TokenEvent) -> bool:
            return not self.shows_logged(event.request_id)

        def shows_logged(self, request_id: str) -> bool:
            return request_id == "r"

        async def append(self, events: Sequence[TokenEvent]) -> None:
            told.append("logged")

    attached = Attachments(Log(), HealthStats())

    def deliver(event: NodeEvent) -> None:
        assert isinstance(event, TokenEvent | RequestFailed)
        told.append(f"{event.request_id} {type(event).__name__}")

    for request_id in ("r", "plain"):
        attached.add(Attempt(request_id, 1, deliver))
    step = NodeStep(
        tokens=(TokenEvent("r", 1, 0, (1,)), TokenEvent("plain", 1, 0, (2,))),
        failed=tuple(
            RequestFailed(it, 1, "internal", "lost", retryable=True) for it in ("r", "plain")
        ),
    )
    await attached.show(in_order(step))
    assert told == [
        "plain TokenEvent", "plain RequestFailed", "logged", "r TokenEvent", "r RequestFailed",
    ]  # fmt: skip


async def test_a_bug_of_ours_strands_no_request(caplog: pytest.LogCaptureFixture) -> None:
    class BrokenLog(Resumable):
        async def append(self, events: Sequence[TokenEvent]) -> None:
            raise RuntimeError("a bug")

    async with fake_nodes("d") as (d,), running_router([d], log=BrokenLog()) as router:
        session = router.registry.session("boot-d")
        assert session is not None
        attempt, inbox = inbox_of()
        session.attach(attempt)
        d.say(tokens=(TokenEvent("r", 1, 0, (1,)),))
        assert await take(inbox) == SessionLost("d", "RuntimeError: a bug", suspect=True)
    assert f"session with node {d.address} failed" in caplog.text


async def test_a_node_that_breaks_the_protocol_is_dropped() -> None:
    async with fake_nodes("d") as (d,), running_router([d]) as router:
        session = router.registry.session("boot-d")
        assert session is not None
        attempt, inbox = inbox_of()
        session.attach(attempt)
        d.say_raw(replace(d.record))  # a second hello
        assert isinstance(await take(inbox), SessionLost)
        await router.until(lambda: d.sessions == 2 and session.connected)
        session.attach(attempt)
        d.say_raw(NodeStep(tokens=(TokenEvent("r", 1, 0, (7,)),)))
        assert await take(inbox) == TokenEvent("r", 1, 0, (7,))
