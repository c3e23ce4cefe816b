"""Running requests change their decode node in mid-stream, with their KV, in one process.

fp32: every stream must equal one engine's, token for token, and counters prove that the KV moved
and that nothing was computed twice.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.client import AsyncClient, GenerateEvent
from baton.engine.thread import StepReport
from baton.protocol.messages import DrainNode
from baton.protocol.sampling import SamplingParams
from router.nodes import migration
from tests.cluster import PATIENT, Cluster, Member, Plan, cluster
from tests.system.references import Tokens, one_engine_tokens, prompts
from tests.tiny_models import make_tiny_model
from tests.waiting import WAIT_S, eventually

NUM_TOKENS = 200
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.9, top_p=0.95, seed=11)
PROMPTS = prompts((3, 17, 40, 65), seed=3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_tiny_model("llama", path, max_position_embeddings=512)
    return path


class Stream:
    """One request, read in the background."""

    def __init__(self, client: AsyncClient, prompt: Tokens, params: SamplingParams) -> None:
        self.tokens: list[int] = []
        self.retries = 0
        self._news = asyncio.Condition()
        self.task = asyncio.create_task(self._read(client.stream(prompt, params)))

    async def _read(self, events: AsyncGenerator[GenerateEvent, None]) -> None:
        async for event in events:
            assert event.position == len(self.tokens), "a gap or a duplicate"
            async with self._news:
                self.tokens.extend(event.token_ids)
                self.retries = event.retries
                self._news.notify_all()

    async def at_least(self, count: int) -> None:
        async with asyncio.timeout(WAIT_S), self._news:
            await self._news.wait_for(lambda: len(self.tokens) >= count)

    async def whole(self) -> Tokens:
        async with asyncio.timeout(WAIT_S):
            await self.task
        return tuple(self.tokens)


def started(c: Cluster, params: SamplingParams) -> list[Stream]:
    streams = [Stream(c.client, prompt, params) for prompt in PROMPTS]
    return c.pace(streams, lambda: [len(s.tokens) for s in streams if not s.task.done()])


def num_prompt_tokens(c: Cluster) -> int:
    return sum(member.stats.num_prompt_tokens for member in c.members)


async def move_all(c: Cluster) -> list[bool]:
    dispatcher = c.router.services.dispatcher
    found = [candidate.request_id for candidate in dispatcher.candidates()]
    return await asyncio.gather(*(dispatcher.migrate(request_id) for request_id in found))


@pytest.mark.parametrize(
    ("params", "sizes", "lane"),
    [
        pytest.param(GREEDY, (16, 16), "grpc", marks=pytest.mark.long),
        (SAMPLED, (16, 16), "stream"),
        (GREEDY, (16, 8), "shm"),
        pytest.param(SAMPLED, (16, 8), "grpc", marks=pytest.mark.long),
    ],
    ids=["greedy", "sampled", "greedy other blocks", "sampled other blocks"],
)
async def test_streams_go_on_where_they_were(
    model: Path, tmp_path: Path, params: SamplingParams, sizes: tuple[int, int], lane: str
) -> None:
    options = [{"num_kv_blocks": 256, "block_size": size} for size in sizes]
    async with cluster(Plan(model, decode=options, shared=tmp_path, lanes=(lane,))) as c:
        streams = started(c, params)
        for count in (5, 40):  # there, and back again
            for stream in streams:
                await stream.at_least(count)
            moved = await move_all(c)
            assert moved == [True] * len(PROMPTS)
        found = [await stream.whole() for stream in streams]
        assert found == one_engine_tokens(model, PROMPTS, params)
        assert {stream.retries for stream in streams} == {0}
        stats = c.router.services.dispatcher.migrations
        assert (stats.done, stats.failed) == (2 * len(PROMPTS), 0)
        assert stats.tokens > 2 * sum(map(len, PROMPTS))
        assert sum(member.stats.num_handed_on for member in c.decode) == stats.done
        # One fetch per hand-over, and no prompt was computed but on the prefill node.
        fetches = sum(member.transfers.fetches for member in c.decode)
        assert fetches == stats.done + len(PROMPTS)
        assert fetches == sum(member.transfers.lanes[lane].fetches for member in c.decode)
        assert sum(member.stats.num_prompt_tokens for member in c.decode) == 0
        assert num_prompt_tokens(c) == sum(map(len, PROMPTS))
        info = await c.client.server_info()
        assert (info.migrations.done, info.migrations.tokens) == (stats.done, stats.tokens)
        await c.settle()


async def begin_drain(member: Member) -> None:
    member.node.shell.begin_drain()


async def test_a_draining_node_hands_its_requests_to_the_other(model: Path) -> None:
    async with cluster(Plan(model, decode=({}, {}))) as c:
        streams = started(c, GREEDY)
        for stream in streams:
            await stream.at_least(5)
        leaving = max(c.decode, key=lambda member: len(member.node.shell.requests))
        staying = next(member for member in c.decode if member is not leaving)
        there = len(leaving.node.shell.requests)
        assert there > 0
        async with asyncio.timeout(WAIT_S):
            await leaving.node.drain()
        assert len(leaving.node.shell.requests) == 0
        assert leaving.node.shell.connector.active_exports == 0
        assert not any(stream.task.done() for stream in streams), "the drain was no waiting"
        assert leaving.stats.num_handed_on == there
        found = [await stream.whole() for stream in streams]
        assert found == one_engine_tokens(model, PROMPTS, GREEDY)
        assert staying.stats.num_prompt_tokens == 0
        # New requests go to the other one only.
        before = leaving.stats.num_requests
        assert len(await c.generate(PROMPTS, GREEDY)) == len(PROMPTS)
        assert leaving.stats.num_requests == before
        await c.settle()


async def test_without_another_node_requests_finish_where_they_are(model: Path) -> None:
    async with cluster(Plan(model)) as c:
        stream = Stream(c.client, PROMPTS[1], GREEDY)
        await stream.at_least(5)
        assert await move_all(c) == [False]
        [node] = c.decode
        async with asyncio.timeout(WAIT_S):
            await node.node.drain()
        assert await stream.whole() == one_engine_tokens(model, [PROMPTS[1]], GREEDY)[0]
        assert node.stats.num_handed_on == 0
        await c.settle()


async def test_a_full_node_is_relieved(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--rebalance`: running requests leave a node that swaps, for one with room, with their KV."""
    small = {"block_size": 8, "num_kv_blocks": 44, "preemption_mode": "swap"}
    params = replace(GREEDY, max_tokens=120)
    here = Plan(
        model, decode=[small, {"num_kv_blocks": 512}], router={"rebalance": True},
        timing=replace(PATIENT, heartbeat_s=0.05),
    )  # fmt: skip
    async with cluster(here) as c:
        full, roomy = c.decode
        asked = threading.Event()
        thread, migrate = full.node.shell.thread, c.router.services.dispatcher.migrate
        tell = thread._on_step

        def tell_and_wait(report: StepReport) -> None:
            """The moment at which it is full lasts until somebody was asked to move."""
            tell(report)
            load = report.load
            if load.swapped and load.free_blocks <= migration.FULL * load.total_blocks:
                asked.wait(WAIT_S)

        def ask(request_id: str) -> Any:
            asked.set()
            return migrate(request_id)

        monkeypatch.setattr(thread, "_on_step", tell_and_wait)
        monkeypatch.setattr(c.router.services.dispatcher, "migrate", ask)
        expected = 4 * one_engine_tokens(model, PROMPTS, params)
        for _ in range(10):  # by chance it never gets full, or who was asked had just ended
            asked.clear()
            found = await c.generate(4 * PROMPTS, params)
            assert [each.token_ids for each in found] == expected
            assert {each.retries for each in found} == {0}
            if "whole" in full.stats.departures:
                break
        assert asked.is_set()
        assert full.stats.departures["whole"] > 0
        assert full.stats.num_swap_outs > 0
        assert c.router.services.dispatcher.migrations.done == full.stats.num_handed_on
        assert (roomy.stats.num_handed_on, roomy.stats.num_prompt_tokens) == (0, 0)
        await c.settle()


async def test_a_client_that_leaves_during_its_migration_leaves_nothing_behind(model: Path) -> None:
    async with cluster(Plan(model, decode=({}, {}))) as c:
        streams = [Stream(c.client, prompt, GREEDY) for prompt in PROMPTS for _ in range(4)]
        for stream in streams:
            await stream.at_least(3)
        moving = asyncio.create_task(move_all(c))

        async def handed_on() -> bool:
            return moving.done() or any(member.stats.num_handed_on for member in c.decode)

        for turns, stream in enumerate(streams):  # at every stage of it
            if turns == len(streams) // 2:
                await eventually(handed_on)
            for _ in range(3 * turns):
                await asyncio.sleep(0)
            stream.task.cancel()
        await asyncio.gather(*(stream.task for stream in streams), return_exceptions=True)
        async with asyncio.timeout(WAIT_S):
            await moving
        await c.settle()
        assert sum(member.stats.num_handed_on for member in c.decode) > 0
        expired = sum(member.transfers.expired_leases for member in c.decode)
        assert expired == 0, "no lease had to end by itself"


async def test_a_second_turn_goes_where_the_first_was_decoded_and_moves_only_what_is_new(
    model: Path,
) -> None:
    """D -> P reuse: the answer's blocks stay in D's prefix map, and the router knows it."""
    options = {"block_size": 8, "num_kv_blocks": 128}
    async with cluster(Plan(model, [options], [options, options])) as c:
        params = replace(GREEDY, max_tokens=48)
        [first] = await c.generate([PROMPTS[3]], params)
        await c.settle()
        [home] = [member for member in c.decode if member.stats.num_requests]
        bytes_before = home.transfers.total_received
        assert bytes_before > 0
        turn = (*PROMPTS[3], *first.token_ids)
        follow_up = (*turn, *PROMPTS[2][:20])

        async def known() -> bool:
            nodes = c.router.registry.snapshots()
            [snapshot] = [n for n in nodes if n.boot_id == home.node.shell.boot_id]
            return len(snapshot.prefix) >= (len(turn) - 1) // 8

        await eventually(known)
        [second] = await c.generate([follow_up], params)
        assert second.token_ids == one_engine_tokens(model, [follow_up], params)[0]
        assert home.stats.num_requests == 2
        token_bytes = c.decode[0].node.shell.load().kv_token_bytes
        cached = (len(turn) - 1) // 8 * 8
        moved = home.transfers.total_received - bytes_before
        assert moved == (len(follow_up) - cached) * token_bytes
        await c.settle()


async def test_automatic_placement_computes_a_second_turn_where_the_first_was_decoded(
    model: Path,
) -> None:
    options = {"block_size": 8, "num_kv_blocks": 128}
    plan = Plan(model, [options], [options], router={"prefill_placement": "auto"})
    async with cluster(plan) as c:
        params = replace(GREEDY, max_tokens=48)
        [first] = await c.generate([PROMPTS[3]], params)
        await c.settle()
        prefill, decode = c.prefill[0].stats, c.decode[0].stats
        assert (prefill.num_requests, decode.num_prompt_tokens) == (1, 0), "nothing measured yet"
        follow_up = (*PROMPTS[3], *first.token_ids, *PROMPTS[0])

        async def known() -> bool:
            nodes = c.router.registry.snapshots()
            return all(node.prefix for node in nodes) and any(
                node.load.prefill_tokens_per_s for node in nodes
            )

        await eventually(known)
        [second] = await c.generate([follow_up], params)
        assert second.token_ids == one_engine_tokens(model, [follow_up], params)[0]
        assert prefill.num_requests == 1, "the decode node needed no help"
        cached = (len(follow_up) - len(PROMPTS[0]) - 1) // 8 * 8
        assert decode.num_prompt_tokens == len(follow_up) - cached
        await c.settle()


async def test_drain_may_be_asked_by_message_too(model: Path) -> None:
    async with cluster(Plan(model, decode=({}, {}))) as c:
        stream = Stream(c.client, PROMPTS[2], GREEDY)
        await stream.at_least(5)
        [candidate] = c.router.services.dispatcher.candidates()
        session = c.router.registry.session(candidate.boot_id)
        assert session is not None
        session.send(DrainNode())
        assert await stream.whole() == one_engine_tokens(model, [PROMPTS[2]], GREEDY)[0]
        assert c.router.services.dispatcher.migrations.done == 1
        await c.settle()
