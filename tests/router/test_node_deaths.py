"""Whose fault a node's death is: a poisonous request ends after three, the others go on."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import replace

import pytest

from baton.protocol.errors import NodeLost
from baton.protocol.messages import SubmitDecode
from baton.protocol.request import MAX_NODE_DEATHS, Request, RequestState
from router.nodes.attachments import FEW, Attempt, suspects
from tests.router.clients import Client, cluster, first_of, state_of
from tests.router.fakes import FAST, PATIENCE_S, FakeNode, make_request

HASTY = replace(FAST, connect_s=0.3)  # for so long a node that was lost may come back
POISON = "poison"


def at(name: str, *, begun: bool) -> Attempt:
    return Attempt(name, 1, lambda _: None, begun=begun)


# ---- the rule ----


def test_all_of_a_few_are_suspects() -> None:
    few = [at(str(index), begun=index % 2 == 0) for index in range(FEW)]
    assert suspects(few, 0) == {"0", "1", "2", "3"}


def test_of_many_only_those_that_have_just_begun() -> None:
    many = [at(str(index), begun=True) for index in range(FEW)]
    assert suspects([*many, at("new", begun=False)], 0) == {"new"}
    assert suspects([*many, at("old", begun=True)], 0) == set()


def test_of_many_that_have_just_begun_nobody_is_one() -> None:
    burst = [at(str(index), begun=False) for index in range(FEW + 1)]
    assert suspects(burst, 0) == set()


def test_other_routers_requests_count_as_well() -> None:
    alone = [at("a", begun=True)]
    assert suspects(alone, FEW) == {"a"}
    assert suspects(alone, FEW + 1) == set()


class Storm:
    """Nodes that die at random under requests that decode, by the rule and nothing else. Each step
    every request brings a token; whoever lost its node begins on a random other one."""

    def __init__(self, num_nodes: int, num_requests: int, seed: int) -> None:
        self.draw = random.Random(seed)
        self.nodes: dict[int, dict[str, Attempt]] = {node: {} for node in range(num_nodes)}
        self.deaths: Counter[str] = Counter()
        self.blamed: Counter[str] = Counter()
        for index in range(num_requests):
            self.begin(str(index))

    def begin(self, name: str) -> int:
        node = self.draw.choice(list(self.nodes))
        self.nodes[node][name] = at(name, begun=False)
        return node

    def step(self) -> None:
        for running in self.nodes.values():
            for each in running.values():
                each.begun = True

    def kill(self, node: int) -> None:
        running = self.nodes.pop(node)
        blamed = suspects(running.values(), 0)
        self.blamed.update(blamed)
        self.deaths.update(running.keys())
        for name in running:
            if name != POISON and self.blamed[name] < MAX_NODE_DEATHS:
                self.begin(name)


def test_a_storm_kills_no_request() -> None:
    """8 of 20 nodes are killed under 500 requests, two at a time; some of these meet three deaths
    and more."""
    unlucky = 0
    for seed in range(200):
        storm = Storm(20, 500, seed)
        for kill in range(8):
            if kill % 2 == 0:
                storm.step()
            storm.kill(storm.draw.choice(list(storm.nodes)))
        assert max(storm.blamed.values(), default=0) < MAX_NODE_DEATHS
        unlucky += max(storm.deaths.values()) >= MAX_NODE_DEATHS
    assert unlucky > 0, "else the storm was none"


def test_a_poisonous_request_among_many_is_found() -> None:
    for seed in range(50):
        storm = Storm(20, 500, seed)
        storm.step()
        for _ in range(MAX_NODE_DEATHS):
            storm.kill(storm.begin(POISON))
            storm.step()
        assert storm.blamed[POISON] == MAX_NODE_DEATHS
        assert set(storm.blamed) == {POISON}


# ---- requests ----


async def decoding(nodes: list[FakeNode], client: Client) -> FakeNode:
    """The node that decodes it, after its first token."""
    node = await first_of(nodes, SubmitDecode)
    node.tokens((await node.hear(SubmitDecode)).request, 0, 41)
    await client.next()
    return node


async def test_a_death_among_many_is_not_held_against_who_was_decoding() -> None:
    async with cluster("d1", timing=HASTY, node_wait_s=PATIENCE_S) as (router, (d1,)):
        clients = [Client(router, make_request(f"r{index}")) for index in range(FEW + 1)]
        for client in clients:
            await decoding([d1], client)
        d1.cut()
        for _ in clients:
            again = await d1.hear(SubmitDecode)
            d1.finish(again.request, 1, 42)
        for client in clients:
            assert await client.done() == [41, 42]
            assert (client.trace.retries, client.trace.node_deaths) == (1, 0)


async def test_among_many_it_is_held_against_who_has_just_begun() -> None:
    async with cluster("d1", timing=HASTY, node_wait_s=PATIENCE_S) as (router, (d1,)):
        clients = [Client(router, make_request(f"r{index}")) for index in range(FEW + 1)]
        for client in clients:
            await decoding([d1], client)
        late = Client(router, make_request("late"))
        assert (await d1.hear(SubmitDecode)).request.id == "late"
        d1.cut()
        for _ in range(len(clients) + 1):
            again = (await d1.hear(SubmitDecode)).request
            d1.finish(again, len(again.output_ids[0]), 42)
        for client in (*clients, late):
            await client.done()
            assert client.trace.node_deaths == (client is late)


async def asked_in_epoch(nodes: list[FakeNode], epoch: int) -> tuple[FakeNode, Request]:
    """The node that is given the request in that epoch."""

    async def hears(node: FakeNode) -> tuple[FakeNode, Request]:
        while True:
            request = (await node.hear(SubmitDecode)).request
            if request.epoch == epoch:
                return node, request

    hearing = [asyncio.create_task(hears(node)) for node in nodes]
    done, others = await asyncio.wait(hearing, return_when=asyncio.FIRST_COMPLETED)
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    return done.pop().result()


@pytest.mark.parametrize("dialled", [True, False])
async def test_nodes_that_come_back_as_they_were_have_not_died(dialled: bool) -> None:
    """The network was away, or this router stood still. `dialled`: each is there again before the
    next one is lost; else the request is left by one right after the other."""
    async with cluster("d1", "d2", "d3", node_wait_s=PATIENCE_S) as (router, nodes):
        client = Client(router, make_request())
        lost: set[str] = set()
        for epoch in range(1, MAX_NODE_DEATHS + 1):
            node, _ = await asked_in_epoch(nodes, epoch)
            lost.add(node.record.node_id)
            node.cut()
            await router.until(lambda: len(router.registry.records()) < len(nodes))
            if dialled:
                await router.until(lambda: len(router.registry.records()) == len(nodes))
        assert len(lost) == MAX_NODE_DEATHS, "who failed it is avoided"
        node, request = await asked_in_epoch(nodes, MAX_NODE_DEATHS + 1)
        node.finish(request, 0, 41)
        assert await client.done() == [41]
        assert client.trace.node_deaths == MAX_NODE_DEATHS, "so it seemed at first"


async def test_a_request_that_hangs_three_nodes_fails_though_they_live() -> None:
    timing = replace(HASTY, stall_s=0.1)
    async with cluster("d1", "d2", "d3", timing=timing) as (router, nodes):
        client = Client(router, make_request())
        assert isinstance(await client.fails(), NodeLost)
        assert await state_of(router) == (RequestState.FAILED, MAX_NODE_DEATHS)
        assert all(len(node.heard_of(SubmitDecode)) == 1 for node in nodes)
