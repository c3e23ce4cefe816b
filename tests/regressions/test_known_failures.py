"""Known failures of other serving systems, each by name; here they are tests.

A failure that another test already reproduces is listed in PROVEN_ELSEWHERE with that test's place,
and it is checked that the place exists; the others are below.
"""

from __future__ import annotations

import asyncio
import importlib
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.protocol.errors import InvalidRequest
from baton.protocol.messages import ReleaseExport, SubmitDecode, SubmitPrefill
from baton.protocol.sampling import SamplingParams
from kv_transfer.lanes.memory import MemoryFabric, MemoryLane
from tests.fakes import expected_output, request
from tests.front.fakes import TOKENIZER, Front
from tests.node.fakes import PATIENCE_S, TIMING, Pair, Setup, running_pair
from tests.router.clients import Client, cluster
from tests.router.fakes import make_request
from tests.transfer.cluster import transfer
from tests.transfer.pools import BOOT_D, Node, fill_random, fill_untouched

PROMPT = tuple(range(10, 29))

# What happened elsewhere -> the tests that reproduce it here.
PROVEN_ELSEWHERE = {
    "abort on D while waiting for KV leaks blocks": (
        "tests.node.test_aborts:test_abort_while_the_fetch_waits_for_the_prefill",
        "tests.node.test_aborts:test_abort_in_line_leaves_the_line_moving",
        "tests.node.test_fan_out:test_aborts_at_any_moment_leave_the_pools_whole",
    ),
    "JSON-schema request migrated restarts its grammar": (
        "tests.system.test_guided:test_a_request_moves_to_another_node_within_its_grammar",
        "tests.system.test_guided:test_a_killed_decode_node_leaves_no_trace_in_the_output",
    ),
    "seeded sampling changes with a batch mate's top-k": (
        "tests.engine.test_sampler:test_batch_mates_change_nothing",
        "tests.engine.test_sampler_rows:test_batch_mates_change_nothing",
    ),
    "one request's KV is answered for another's": (
        "tests.node.test_aborts:test_a_handle_of_something_else_is_refused",
        "tests.transfer.test_contract_failures:test_a_lapsed_lease_is_not_served_before_the_sweep",
    ),
}


@pytest.mark.parametrize("failure", PROVEN_ELSEWHERE)
def test_proven_elsewhere(failure: str) -> None:
    for place in PROVEN_ELSEWHERE[failure]:
        module, name = place.split(":")
        assert callable(vars(importlib.import_module(module))[name])


# ---- read after blocks were freed: another prompt's answer with status 200 ----


async def test_read_after_blocks_were_freed_gives_no_token() -> None:
    """vllm #21570: P's lease ends, its blocks are another prompt's by the time that D reads."""
    timing = replace(TIMING, kv_lease_s=0.2)
    async with running_pair(Setup(num_blocks=8, timing=timing), Setup(timing=timing)) as pair:
        asked = request("r", PROMPT)
        await pair.to_p.prefill(asked)
        handle = await pair.to_p.handle_of("r")
        await pair.to_p.until(lambda: pair.to_p.events("r"))
        await pair.p.until_idle()  # nobody renewed it: the lease is over, the blocks are free
        assert pair.p.node.shell.connector.stats.expired_leases == 1
        other = request("other", tuple(range(40, 68)))
        await pair.to_p.prefill(other)
        await pair.to_p.handle_of("other")
        await pair.to_p.until(lambda: pair.to_p.events("other"))
        await pair.to_d.decode(asked, handle)
        failed = await pair.to_d.failure_of("r")
        assert (failed.code, failed.retryable) == ("kv_stale", True)
        assert pair.to_d.events("r") == []
        await pair.d.until_idle()


async def test_blocks_freed_in_the_middle_of_the_read_give_no_token() -> None:
    """The same while D reads: the export is released before its first layer is written."""
    async with running_pair(Setup(num_blocks=8), Setup()) as pair:
        pair.p.runner.layer_gate.close()
        asked = request("r", PROMPT)
        await pair.to_p.prefill(asked)
        handle = await pair.to_p.handle_of("r")
        await pair.p.runner.layer_gate.reached()
        await pair.to_d.decode(asked, handle)
        await pair.to_d.until(lambda: pair.to_d.subscribed("r"))
        await pair.to_p.release(handle)  # as its router does when it gives the request up
        await pair.to_p.heard()  # else the prefill may end before the release is read
        pair.p.runner.layer_gate.open()
        failed = await pair.to_d.failure_of("r")
        assert (failed.code, failed.retryable) == ("kv_stale", True)
        assert pair.to_d.events("r") == []
        await pair.d.until_idle()
        await pair.p.until_idle()


# ---- D rejects before admission and strands P ----


async def test_a_decode_node_that_rejects_strands_no_export() -> None:
    """vllm PR #41269: P kept the blocks of a request that D had refused for 480 s."""
    async with cluster("p", "d") as (router, (p, d)):
        client = Client(router, make_request())
        asked = (await p.hear(SubmitPrefill)).request
        handle = p.export(asked)
        d.fail((await d.hear(SubmitDecode)).request, "context_length_exceeded", retryable=False)
        assert isinstance(await client.fails(), InvalidRequest)
        assert (await p.hear(ReleaseExport)).handle == handle


async def test_what_no_node_could_serve_is_rejected_before_the_prefill() -> None:
    front = Front()
    async with front.client() as http:
        reply = await http.post("/v1/completions", json={"prompt": "a", "max_tokens": 10_000})
    assert reply.status_code == 400
    assert front.dispatcher.requests == []


# ---- a dead P makes D unhealthy ----


async def serves(pair: Pair) -> bool:
    """What a probe of the decode node sees."""
    async with grpc.aio.insecure_channel(pair.d.node.address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
        return reply.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_dead_prefill_node_leaves_the_decode_node_healthy_and_serving() -> None:
    """sglang #12779: the decode node's probe failed with its peer, and it was killed as well."""
    async with running_pair() as pair:
        pair.p.runner.layer_gate.close()
        asked = request("r", PROMPT)
        await pair.to_p.prefill(asked)
        handle = await pair.to_p.handle_of("r")
        await pair.p.runner.layer_gate.reached()
        await pair.to_d.decode(asked, handle)
        await pair.to_d.until(lambda: pair.to_d.subscribed("r"))
        (lane,) = pair.p.node.shell.connector.lanes
        await asyncio.to_thread(lane.stop)  # as if the process were gone
        assert (await pair.to_d.failure_of("r")).code == "kv_lost"
        await pair.d.node._beat()  # what publishes its health
        assert await serves(pair)
        own = request("own", PROMPT)
        await pair.to_d.decode(own)
        assert await pair.to_d.all_tokens("own") == expected_output(own.prompt_ids, own.params)
        await pair.d.until_idle()
        pair.p.runner.layer_gate.open()


# ---- an out-of-vocabulary logit_bias kills the engine ----


@pytest.mark.parametrize("token", [TOKENIZER.vocab_size, 10**6, 999_999_999])
async def test_logit_bias_beyond_the_vocabulary_is_refused_at_the_door(token: int) -> None:
    """vllm PR #16529: one such request ended the engine, and all others with it."""
    front = Front()
    body = {"prompt": "a", "logit_bias": {str(token): 5.0}}
    chat = {"messages": [{"role": "user", "content": "a"}], "logit_bias": body["logit_bias"]}
    async with front.client() as http:
        for path, asked in (("/v1/completions", body), ("/v1/chat/completions", chat)):
            reply = await http.post(path, json=asked)
            assert reply.status_code == 400
            assert reply.json()["error"]["param"] == "logit_bias"
        for odd in ({"x": 1}, {"1.5": 1}, {"-1": 1}, {"1": "a"}, {"1": None}, {"1": 1e9}):
            reply = await http.post("/v1/completions", json={**body, "logit_bias": odd})
            assert reply.status_code == 400
    assert front.dispatcher.requests == []


async def test_logit_bias_that_reaches_a_node_harms_nobody() -> None:
    """By a door that forgot to look: the request itself may fail, the node serves on."""
    async with running_pair() as pair:
        bad = SamplingParams(max_tokens=4, seed=1, logit_bias=((2**31 - 1, 5.0),))
        await pair.to_d.decode(replace(request("bad", PROMPT), params=bad))
        good = request("good", PROMPT)
        await pair.to_d.decode(good)
        assert await pair.to_d.all_tokens("good") == expected_output(good.prompt_ids, good.params)
        await pair.to_d.until(lambda: pair.to_d.finished("bad") or pair.to_d.failures("bad"))
        await pair.d.until_idle()


# ---- idle for an hour, then a hang ----


@pytest.mark.parametrize("idle_s", [61.0, 3600.0, 7 * 86_400.0])
async def test_after_an_idle_hour_a_transfer_is_like_any_other(idle_s: float) -> None:
    """sglang #9926: the first request after a pause waited for a connection that was long gone.

    The hour is virtual: both ends' clocks are moved, so that leases, kept connections and promises
    of before are all over.
    """
    fabric = MemoryFabric()
    p, d = Node(MemoryLane(fabric)), Node(MemoryLane(fabric), boot_id=BOOT_D)
    fill_random(p.arena, 1)
    fill_untouched(d.arena)
    for node in (p, d):
        await node.connector.start()
    await transfer(p, d, 40)
    before = d.connector.stats.lanes["memory"].connections
    for node in (p, d):
        node.clock.advance(idle_s)
    async with asyncio.timeout(PATIENCE_S):
        await transfer(p, d, 40)
    assert d.connector.stats.lanes["memory"].connections > before, "an old one was not trusted"
    for node in (p, d):
        await node.connector.stop()
    assert p.connector.stats.expired_leases == 0
