"""Running requests change their decode node: the journey against scripted nodes, and who moves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest

from baton.protocol.errors import Cancelled
from baton.protocol.events import TokenEvent
from baton.protocol.handles import KVHandle, NodeLoad, Role
from baton.protocol.messages import (
    AbortRequest,
    Migrate,
    ReleaseExport,
    RenewExport,
    SubmitDecode,
    SubmitPrefill,
)
from baton.protocol.request import Request, RequestState
from router.nodes import migration
from router.nodes.migration import Candidate, MigrationStats, Migrator, MigratorParts, relief
from router.nodes.policy import NodeSnapshot
from router.request import dispatch, dispatcher
from tests.router.clients import Client, cluster, first_of, state_of
from tests.router.fakes import (
    FAST,
    PATIENCE_S,
    FakeClock,
    FakeNode,
    FakeRouter,
    make_request,
)


@dataclass
class Running:
    """Request `r` decodes on `d` and has told 41, 42; the `others` are idle decode nodes."""

    router: FakeRouter
    client: Client
    p: FakeNode
    d: FakeNode
    others: list[FakeNode]
    request: Request

    def migrate(self) -> asyncio.Task[bool]:
        return asyncio.create_task(self.router.dispatcher.migrate("r"))

    @property
    def stats(self) -> MigrationStats:
        return self.router.dispatcher.migrations


@contextlib.asynccontextmanager
async def running(*decoders: str) -> AsyncIterator[Running]:
    async with cluster("p", *decoders) as (router, (p, *nodes)):
        client = Client(router, make_request())
        prefill = await p.hear(SubmitPrefill)
        p.export(prefill.request)
        d = await first_of(nodes, SubmitDecode)
        decode = await d.hear(SubmitDecode)
        p.tokens(prefill.request, 0, 41)
        d.subscribe(decode.request)
        d.tokens(decode.request, 0, 41)
        d.tokens(decode.request, 1, 42)
        await client.hears(2)
        others = [node for node in nodes if node is not d]
        yield Running(router, client, p, d, others, decode.request)


async def ended(move: asyncio.Task[bool]) -> bool:
    async with asyncio.timeout(PATIENCE_S):
        return await move


def leave(node: FakeNode, request: Request, *told: int) -> KVHandle:
    """What a node answers that lets go of a request."""
    known = replace(request, output_ids=(told,))
    return node.export(known, seq=7)


async def test_the_way_of_a_migration() -> None:
    async with running("d1", "d2") as r:
        move = r.migrate()
        asked = await r.d.hear(Migrate)
        assert asked == Migrate("r", 1)
        r.d.tokens(r.request, 2, 43)  # it was in the middle of a step
        handle = leave(r.d, r.request, 41, 42, 43)
        [other] = r.others
        decode = await other.hear(SubmitDecode)
        assert decode.handle == handle
        assert decode.request.epoch == 2
        assert decode.request.output_ids == ((41, 42, 43),)
        assert await state_of(r.router) == (RequestState.TRANSFER, 2)
        assert (await r.d.hear(RenewExport)).handle == handle, "the router keeps the lease"
        # The old owner may say what it likes: it is fenced.
        r.d.tokens(r.request, 3, 99)
        other.subscribe(decode.request)
        other.tokens(decode.request, 3, 44)
        assert await ended(move)
        assert await state_of(r.router) == (RequestState.DECODE, 2)
        other.finish(decode.request, 4, 45)
        assert await r.client.done() == [41, 42, 43, 44, 45]
        assert await r.router.logged("r") == [41, 42, 43, 44, 45]
        trace = r.client.trace
        assert (trace.migrations, trace.retries, trace.node_deaths) == (1, 0, 0)
        assert trace.decode_node == other.record.node_id
        assert (r.stats.done, r.stats.failed, r.stats.tokens) == (1, 0, handle.num_tokens)
        assert r.stats.seconds > 0
        assert not r.d.heard_of(AbortRequest)
        assert not r.d.heard_of(ReleaseExport)
        assert len(r.p.heard_of(SubmitPrefill)) == 1, "nothing was prefilled again"


async def test_a_request_that_was_prefilled_locally_moves_as_well() -> None:
    async with cluster("d1", "d2") as (router, nodes):
        client = Client(router, make_request())
        d = await first_of(nodes, SubmitDecode)
        [other] = [node for node in nodes if node is not d]
        first = await d.hear(SubmitDecode)
        d.tokens(first.request, 0, 41)
        await client.next()
        move = asyncio.create_task(router.dispatcher.migrate("r"))
        await d.hear(Migrate)
        handle = leave(d, first.request, 41)
        decode = await other.hear(SubmitDecode)
        assert decode.handle == handle
        other.finish(decode.request, 1, 42)
        assert await client.done() == [41, 42]
        assert await ended(move)


async def test_asked_twice_it_moves_once() -> None:
    async with running("d1", "d2") as r:
        move = r.migrate()
        await r.d.hear(Migrate)
        assert not await ended(r.migrate())
        assert not await ended(asyncio.create_task(r.router.dispatcher.migrate("nobody")))
        leave(r.d, r.request, 41, 42)
        decode = await r.others[0].hear(SubmitDecode)
        r.others[0].finish(decode.request, 2, 43)
        assert await r.client.done() == [41, 42, 43]
        assert await ended(move)
        assert len(r.d.heard_of(Migrate)) == 1


async def test_with_nowhere_to_go_nothing_is_asked() -> None:
    async with running("d1") as r:
        assert not await ended(r.migrate())
        assert not r.d.heard_of(Migrate)
        r.d.finish(r.request, 2, 43)
        assert await r.client.done() == [41, 42, 43]


async def test_what_is_given_back_in_mid_stream_is_prefilled_again_and_is_no_failure() -> None:
    async with running("d1", "d2") as r:
        move = r.migrate()
        await r.d.hear(Migrate)
        r.d.fail(r.request, "given_back", retryable=True)
        again = await r.p.hear(SubmitPrefill)
        assert (again.request.epoch, again.request.output_ids) == (2, ((41, 42),))
        r.p.export(again.request, seq=2)
        [other] = r.others
        decode = await other.hear(SubmitDecode)
        other.finish(decode.request, 2, 43)
        assert await r.client.done() == [41, 42, 43]
        assert not await ended(move)
        assert (r.client.trace.retries, r.client.trace.migrations) == (0, 0)
        assert (r.stats.done, r.stats.given_back, r.stats.failed) == (0, 1, 0)


async def test_what_is_given_back_before_its_kv_came_takes_the_prefill_nodes_export_along() -> None:
    async with cluster("p", "d1", "d2") as (router, (p, *nodes)):
        client = Client(router, make_request())
        prefill = await p.hear(SubmitPrefill)
        handle = p.export(prefill.request)
        d = await first_of(nodes, SubmitDecode)
        [other] = [node for node in nodes if node is not d]
        first = await d.hear(SubmitDecode)
        move = asyncio.create_task(router.dispatcher.migrate("r"))
        await d.hear(Migrate)
        d.fail(first.request, "given_back", retryable=True)
        decode = await other.hear(SubmitDecode)
        assert (decode.handle, decode.request.epoch) == (handle, 2)
        other.finish(decode.request, 0, 41)
        assert await client.done() == [41]
        assert not await ended(move)
        assert len(p.heard_of(SubmitPrefill)) == 1


async def test_the_target_dies_and_another_one_fetches_the_same_export() -> None:
    async with running("d1", "d2", "d3") as r:
        move = r.migrate()
        await r.d.hear(Migrate)
        handle = leave(r.d, r.request, 41, 42)
        victim = await first_of(r.others, SubmitDecode)
        await victim.hear(SubmitDecode)
        await victim.stop()
        [third] = [node for node in r.others if node is not victim]
        decode = await third.hear(SubmitDecode)
        assert (decode.handle, decode.request.epoch) == (handle, 3)
        third.finish(decode.request, 2, 43)
        assert await r.client.done() == [41, 42, 43]
        assert await ended(move)
        assert (r.client.trace.migrations, r.client.trace.node_deaths) == (1, 1)
        assert len(r.p.heard_of(SubmitPrefill)) == 1


@pytest.mark.parametrize("code", ["kv_lost", "kv_stale"])
async def test_an_export_that_cannot_be_fetched_is_prefilled_again(code: str) -> None:
    async with running("d1", "d2") as r:
        move = r.migrate()
        await r.d.hear(Migrate)
        handle = leave(r.d, r.request, 41, 42)
        [other] = r.others
        decode = await other.hear(SubmitDecode)
        other.fail(decode.request, code, retryable=True)
        again = await r.p.hear(SubmitPrefill)
        assert again.request.epoch == decode.request.epoch + 1
        assert again.request.output_ids == ((41, 42),)
        assert (await r.d.hear(ReleaseExport)).handle == handle
        r.p.export(again.request, seq=2)
        last = await other.hear(SubmitDecode)
        other.finish(last.request, 2, 43)
        assert await r.client.done() == [41, 42, 43]
        assert not await ended(move)
        assert (r.stats.done, r.stats.failed) == (0, 1)


async def test_an_export_whose_fetch_timed_out_is_fetched_elsewhere() -> None:
    """By the third decode node, never by the one that exports; then it is prefilled again."""
    async with running("d1", "d2", "d3") as r:
        move = r.migrate()
        await r.d.hear(Migrate)
        handle = leave(r.d, r.request, 41, 42)
        waiting = list(r.others)
        for epoch in (2, 3):
            node = await first_of(waiting, SubmitDecode)
            waiting.remove(node)
            decode = await node.hear(SubmitDecode)
            assert (decode.handle, decode.request.epoch) == (handle, epoch)
            node.fail(decode.request, "kv_timeout", retryable=True)
        again = await r.p.hear(SubmitPrefill)
        assert (again.request.epoch, again.request.output_ids) == (4, ((41, 42),))
        r.p.export(again.request, seq=2)
        last = await node.hear(SubmitDecode)
        node.finish(last.request, 2, 43)
        assert await r.client.done() == [41, 42, 43]
        assert not await ended(move)


async def test_the_source_dies_before_it_has_let_go() -> None:
    async with running("d1", "d2") as r:
        move = r.migrate()
        await r.d.hear(Migrate)
        await r.d.stop()
        again = await r.p.hear(SubmitPrefill)
        assert not await ended(move)
        r.p.export(again.request, seq=2)
        decode = await r.others[0].hear(SubmitDecode)
        r.others[0].finish(decode.request, 2, 43)
        assert await r.client.done() == [41, 42, 43]
        assert r.client.trace.node_deaths == 1


async def test_a_client_that_leaves_while_its_request_moves() -> None:
    async with running("d1", "d2") as r:  # the node has been asked
        move = r.migrate()
        await r.d.hear(Migrate)
        assert r.router.dispatcher.abort("r")
        assert (await r.d.hear(AbortRequest)) == AbortRequest("r", 1)
        assert not await ended(move)
        assert isinstance(await r.client.fails(), Cancelled)
        assert await state_of(r.router) == (RequestState.CANCELLED, 1)
        assert r.stats.failed == 0
    async with running("d1", "d2") as r:  # it has let go
        move = r.migrate()
        await r.d.hear(Migrate)
        handle = leave(r.d, r.request, 41, 42)
        [other] = r.others
        await other.hear(SubmitDecode)
        assert r.router.dispatcher.abort("r")
        assert (await other.hear(AbortRequest)) == AbortRequest("r", 2)
        assert (await r.d.hear(ReleaseExport)).handle == handle
        assert not await ended(move)
        assert isinstance(await r.client.fails(), Cancelled)
        assert await state_of(r.router) == (RequestState.CANCELLED, 2)


async def test_a_request_that_ends_before_its_node_hears_the_question() -> None:
    async with running("d1", "d2") as r:
        move = r.migrate()
        await r.d.hear(Migrate)
        r.d.finish(r.request, 2, 43)
        assert await r.client.done() == [41, 42, 43]
        assert not await ended(move)
        assert (r.stats.done, r.stats.failed) == (0, 0)


async def test_a_node_that_never_answers_may_be_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (dispatch, dispatcher):
        monkeypatch.setattr(module, "MOVE_S", 0.05)
    async with running("d1", "d2") as r:
        for _ in range(2):
            move = r.migrate()
            await r.d.hear(Migrate)
            assert not await ended(move)
        leave(r.d, r.request, 41, 42)  # late, but the request is nowhere else
        decode = await r.others[0].hear(SubmitDecode)
        r.others[0].finish(decode.request, 2, 43)
        assert await r.client.done() == [41, 42, 43]


async def test_ten_migrations_are_no_reason_to_give_up() -> None:
    async with running("d1", "d2") as r:
        here, there, request = r.d, r.others[0], r.request
        for index in range(10):
            move = r.migrate()
            await here.hear(Migrate)
            leave(here, request, *range(41, 43 + index))
            decode = await there.hear(SubmitDecode)
            there.tokens(decode.request, 2 + index, 43 + index)
            assert await ended(move)
            here, there, request = there, here, decode.request
        here.finish(request, 12, 99)
        assert await r.client.done() == [*range(41, 53), 99]
        assert r.client.trace.migrations == 10


# ---- who moves ----


def node(name: str, **load: int | bool) -> NodeSnapshot:
    return NodeSnapshot(
        node_id=name,
        boot_id=name,
        role=Role.DECODE if name[0] == "d" else Role.PREFILL,
        model_digest="m",
        fingerprint="layout",
        block_size=10,
        kv_dtype="float32",
        load=NodeLoad(**{"free_blocks": 100, "total_blocks": 100, **load}),  # type: ignore[arg-type]
    )


FULL = node("d1", free_blocks=2, swapped=1)


def on(boot_id: str, num_tokens: int = 50, **more: float | bool) -> Candidate:
    name = f"{boot_id}-{num_tokens}-{more}"
    return Candidate(name, boot_id, num_tokens, **{"decoding": True, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("nodes", "candidates", "expected"),
    [
        ([FULL, node("d2")], [on("d1", 50), on("d1", 700), on("d2", 60)], [700]),
        ([FULL, node("d2")], [on("d1", 50), on("d1", 800)], [50]),  # 75 blocks can be given
        ([FULL, node("d2", free_blocks=30)], [on("d1", 49), on("d1", 50)], [49]),
        ([FULL, node("d2", free_blocks=20)], [on("d1", 5)], []),  # it would be full itself
        ([FULL, node("d2", swapped=1)], [on("d1")], []),
        ([FULL, node("d2", draining=True)], [on("d1")], []),
        ([FULL, replace(node("d2"), fingerprint="other")], [on("d1")], []),
        ([FULL, node("p")], [on("d1")], []),
        ([node("d1", free_blocks=2), node("d2")], [on("d1")], []),  # nobody waits for its blocks
        ([node("d1", free_blocks=9, swapped=1), node("d2")], [on("d1")], []),  # it has some left
        ([FULL, node("d2")], [on("d1", decoding=False)], []),
        ([FULL, node("d2")], [on("d1", moved_at=95.0)], []),
        ([FULL, node("d2")], [on("d1", moved_at=90.0)], [50]),
        ([FULL, replace(FULL, boot_id="d3"), node("d2")], [on("d1"), on("d3", 40)], [50, 40]),
    ],
)
def test_relief_of_full_nodes(
    nodes: list[NodeSnapshot], candidates: list[Candidate], expected: list[int]
) -> None:
    assert [each.num_tokens for each in relief(nodes, candidates, now=100.0)] == expected


@dataclass
class FakeRequests:
    """Notes what is asked to move; each move ends when the test says so."""

    waiting: list[Candidate]
    moves: dict[str, asyncio.Future[bool]] = field(default_factory=dict)

    def candidates(self) -> Sequence[Candidate]:
        return [each for each in self.waiting if each.request_id not in self.moves]

    async def migrate(self, request_id: str) -> bool:
        future = self.moves[request_id] = asyncio.get_running_loop().create_future()
        return await future


@contextlib.asynccontextmanager
async def migrator(
    requests: FakeRequests, nodes: list[NodeSnapshot], *, rebalance: bool = False
) -> AsyncIterator[Callable[[], None]]:
    """Yields a way to say that something has changed."""
    events = [asyncio.Event()]

    def say() -> None:
        events.append(asyncio.Event())
        events[-2].set()

    clock = FakeClock()
    timing = replace(FAST, heartbeat_s=PATIENCE_S)
    parts = MigratorParts(
        requests, lambda: nodes, lambda: events[-1], timing, clock.monotonic, rebalance
    )
    task = asyncio.create_task(Migrator(parts).run())
    try:
        yield say
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_draining_node_is_emptied_a_few_requests_at_a_time() -> None:
    requests = FakeRequests([on("d1", 10 + i) for i in range(12)] + [on("d2", i) for i in (1, 2)])
    nodes = [node("d1", draining=True), node("d2")]
    async with migrator(requests, nodes):
        await turns()
        first = list(requests.moves)
        assert len(first) == migration.MAX_MOVING
        requests.moves[first[0]].set_result(True)
        await turns()
        assert len(requests.moves) == migration.MAX_MOVING + 1, "the next took its place at once"
        for _ in range(3):
            for future in requests.moves.values():
                if not future.done():
                    future.set_result(True)
            await turns()
        assert set(requests.moves) == {c.request_id for c in requests.waiting[:12]}


async def test_a_change_is_looked_at_at_once_and_no_partner_means_no_move() -> None:
    requests = FakeRequests([on("d1")])
    nodes = [node("d1", draining=True), node("d2", draining=True), node("p")]
    async with migrator(requests, nodes) as changed:
        await turns()
        assert not requests.moves
        nodes[1] = node("d2")
        changed()
        await turns()
        assert len(requests.moves) == 1


@pytest.mark.parametrize("rebalance", [False, True])
async def test_relief_is_an_option_and_goes_one_by_one(rebalance: bool) -> None:
    requests = FakeRequests([on("d1", 10), on("d1", 20)])
    async with migrator(requests, [FULL, node("d2")], rebalance=rebalance) as changed:
        await turns()
        assert list(requests.moves) == [requests.waiting[1].request_id] * rebalance
        changed()
        await turns()
        assert len(requests.moves) == int(rebalance)


async def test_the_router_moves_what_runs_on_a_node_that_says_it_drains() -> None:
    async with running("d1", "d2") as r:
        parts = MigratorParts(
            r.router.dispatcher,
            r.router.registry.snapshots,
            lambda: r.router.registry.changed,
            replace(FAST, heartbeat_s=PATIENCE_S),
            FakeClock().monotonic,
        )
        task = asyncio.create_task(Migrator(parts).run())
        await turns()
        assert not r.d.heard_of(Migrate)
        r.d.say(load=NodeLoad(draining=True))
        await r.d.hear(Migrate)
        leave(r.d, r.request, 41, 42)
        decode = await r.others[0].hear(SubmitDecode)
        r.others[0].finish(decode.request, 2, 43)
        assert await r.client.done() == [41, 42, 43]
        task.cancel()
        assert isinstance(r.client.events[-1], TokenEvent)
