"""Several samples, and searches, from a prefill node to a decode node: one export, one transfer.

The fake model's KV is real, so a fork, a copy on write or a hand-over that went wrong is a wrong
token; the oracle is one engine.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from baton.protocol.errors import InvalidRequest
from baton.protocol.messages import StopSample
from baton.protocol.request import FinishReason, Request
from kv_transfer.lanes.grpc_stream import GrpcLane
from tests.fakes import expected_beams, expected_output, request
from tests.node.fakes import TIMING, Pair, Setup, running_pair

PROMPT = tuple(range(10, 29))  # 19 tokens: 4 full blocks of 4 and 3 more
ROOM = Setup(num_blocks=200, engine_options={"max_num_seqs": 32})


def ask(name: str = "r", prompt: tuple[int, ...] = PROMPT, **sampling: int) -> Request:
    return request(name, prompt, max_tokens=sampling.pop("max_tokens", 12), sampling=sampling)


def wanted(asked: Request, sample: int) -> list[int]:
    return expected_output(asked.prompt_ids, asked.params, sample=sample)


async def hand_over(pair: Pair, asked: Request) -> None:
    await pair.to_p.prefill(asked)
    await pair.to_d.decode(asked, await pair.to_p.handle_of(asked.id))


async def idle(pair: Pair) -> None:
    await pair.p.until_idle()
    await pair.d.until_idle()


@pytest.mark.parametrize(("p_block", "d_block"), [(4, 4), (4, 8), (8, 4), (16, 2)])
async def test_eight_samples_are_one_prefill_and_one_transfer(p_block: int, d_block: int) -> None:
    asked = ask(n=8)
    prefill = Setup(block_size=p_block, engine_options={"max_num_seqs": 1})
    async with running_pair(prefill, replace(ROOM, block_size=d_block)) as pair:
        single = ask("single", tuple(range(40, 59)))
        await hand_over(pair, single)
        await pair.to_d.all_ended("single", 1)
        one = sum(pair.d.node.shell.connector.stats.bytes_received.values())
        await hand_over(pair, asked)
        await pair.to_p.until(lambda: len(pair.to_p.events("r")) == 8)
        await pair.to_d.all_ended("r", 8)
        for sample in range(8):
            assert pair.to_p.sample("r", sample) == wanted(asked, sample)[:1]
            assert pair.to_d.sample("r", sample) == wanted(asked, sample)
        stats = pair.d.node.shell.connector.stats
        assert stats.fetches == 2
        assert sum(stats.bytes_received.values()) == 2 * one, "as many bytes as for one sample"
        assert pair.p.node.shell.connector.stats.exports == 2
        assert pair.p.engine.stats.num_prompt_tokens <= 2 * len(PROMPT)
        assert pair.d.engine.stats.num_prompt_tokens == 0
        assert pair.d.engine.stats.num_forks == 7
        await idle(pair)


async def test_prefix_hits_on_both_sides() -> None:
    async with running_pair(None, ROOM) as pair:
        for name in ("first", "again"):
            asked = ask(name, n=4)
            await hand_over(pair, asked)
            await pair.to_d.all_ended(name, 4)
            for sample in range(4):
                assert pair.to_d.sample(name, sample) == wanted(asked, sample)
        assert pair.p.engine.stats.num_prefix_hit_tokens == 16
        assert pair.d.engine.stats.num_prefix_hit_tokens == 16
        await idle(pair)


async def test_over_the_grpc_lane_many_at_once() -> None:
    prefill = Setup(
        lane=GrpcLane(TIMING), engine_options={"max_num_batched_tokens": 32, "max_num_seqs": 8}
    )
    asked = [ask(f"r{i}", tuple(range(i, i + 40)), n=3, best_of=4) for i in range(5)]
    async with running_pair(prefill, replace(ROOM, lane=GrpcLane(TIMING))) as pair:
        for one in asked:
            await pair.to_p.prefill(one)
        for one in asked:
            await pair.to_d.decode(one, await pair.to_p.handle_of(one.id))
        for one in asked:
            await pair.to_d.all_ended(one.id, 4)
            for sample in range(4):
                assert pair.to_d.sample(one.id, sample) == wanted(one, sample)
        assert pair.d.node.shell.connector.stats.fetches == 5
        await idle(pair)


async def test_a_search_goes_on_where_its_prompt_was_not_computed() -> None:
    asked = ask(n=4, beam_width=4)
    async with running_pair(None, ROOM) as pair:
        await hand_over(pair, asked)
        await pair.to_p.until(lambda: pair.to_p.events("r"))
        (computed,) = pair.to_p.events("r")
        assert (computed.token_ids, computed.finish_reason) == ((), None)
        await pair.to_d.all_ended("r", 4)
        found = [tuple(pair.to_d.sample("r", sample)) for sample in range(4)]
        assert found == expected_beams(PROMPT, asked.params)
        assert pair.d.engine.stats.num_prompt_tokens == 0
        assert pair.d.engine.stats.num_prefill_chunks == 0
        assert pair.d.node.shell.connector.stats.fetches == 1
        await idle(pair)


async def test_samples_that_end_at_token_1_are_not_run_by_the_decode_node() -> None:
    single = ask(n=4)
    first = wanted(single, 1)[0]
    asked = replace(single, params=replace(single.params, stop_token_ids=(first,)))
    async with running_pair(None, ROOM) as pair:
        await hand_over(pair, asked)
        await pair.to_p.until(lambda: len(pair.to_p.events("r")) == 4)
        ends = [event.finish_reason for event in pair.to_p.events("r")]
        assert ends[1] is FinishReason.STOP
        await pair.to_d.all_ended("r", 4)
        for sample in range(4):
            assert pair.to_d.sample("r", sample) == wanted(asked, sample)
        assert pair.d.engine.stats.num_forks == ends.count(None) - 1
        await idle(pair)


async def test_another_decode_node_goes_on_with_the_samples_that_live() -> None:
    """The export is fetched a second time, by a retry that knows some tokens of each."""
    asked = ask(n=4)
    async with running_pair(None, ROOM) as pair:
        await pair.to_p.prefill(asked)
        handle = await pair.to_p.handle_of("r")
        known = tuple(
            tuple(wanted(asked, sample)[:count]) for sample, count in enumerate((3, 5, 1, 1))
        )
        retried = replace(asked.retried(known), ended=(1,))
        await pair.to_d.decode(retried, handle)
        await pair.to_d.all_ended("r", 3)
        assert {event.sample for event in pair.to_d.events("r")} == {0, 2, 3}
        for sample in (0, 2, 3):
            assert [*known[sample], *pair.to_d.sample("r", sample)] == wanted(asked, sample)
        await idle(pair)


# ---- samples that nobody wants any more ----


async def test_a_stopped_sample_ends_alone() -> None:
    asked = ask(n=3, max_tokens=40)
    async with running_pair(None, ROOM) as pair:
        pair.d.runner.hold_after(4)
        await hand_over(pair, asked)
        await pair.to_d.until(lambda: len(pair.to_d.sample("r", 1)) > 2)
        await pair.d.runner.step_gate.reached()
        await pair.to_d.send(StopSample("r", 1, 1))
        await pair.to_d.heard()
        pair.d.runner.step_gate.open()
        await pair.to_d.all_ended("r", 2)
        assert len(pair.to_d.sample("r", 1)) < 40
        for sample in (0, 2):
            assert pair.to_d.sample("r", sample) == wanted(asked, sample)
        await idle(pair)


async def test_a_sample_stopped_while_its_kv_travels_is_never_forked() -> None:
    asked = replace(ask(n=3), epoch=2)
    async with running_pair(None, ROOM) as pair:
        pair.p.runner.layer_gate.close()
        await hand_over(pair, asked)
        await pair.to_d.until(lambda: pair.to_d.subscribed("r"))
        await pair.to_d.send(StopSample("r", 2, 0))
        await pair.to_d.send(StopSample("r", 1, 2))  # of an older epoch: nobody's
        await pair.to_d.decode(ask("later", n=1))  # its answer shows that the stops were heard
        await pair.to_d.all_ended("later", 1)
        pair.p.runner.layer_gate.open()
        await pair.to_d.all_ended("r", 2)
        assert {event.sample for event in pair.to_d.events("r")} == {1, 2}
        assert pair.d.engine.stats.num_forks == 1
        await idle(pair)


async def test_the_last_stop_ends_the_request() -> None:
    asked = ask(n=2, max_tokens=60)
    async with running_pair(None, ROOM) as pair:
        pair.d.runner.hold_after(4)
        await hand_over(pair, asked)
        await pair.to_d.until(lambda: len(pair.to_d.sample("r", 1)) > 2)
        await pair.d.runner.step_gate.reached()
        for sample in (1, 0):
            await pair.to_d.send(StopSample("r", 1, sample))
        await pair.to_d.heard()
        pair.d.runner.step_gate.open()
        await idle(pair)
        assert not pair.to_d.finished("r")
        assert not pair.to_d.failures("r")
        assert len(pair.d.node.shell.requests) == 0


@pytest.mark.parametrize("seed", range(6))
async def test_aborts_at_any_moment_leave_the_pools_whole(seed: int) -> None:
    draw = random.Random(seed)
    # What P exported before it heard the abort ends with its lease.
    short = Setup(timing=replace(TIMING, kv_lease_s=0.5))
    async with running_pair(short, ROOM) as pair:
        for index in range(12):
            name = f"r{index}"
            shape = draw.choice([{"n": 4}, {"n": 1, "best_of": 3}, {"n": 2, "beam_width": 3}])
            asked = ask(name, PROMPT[: draw.randrange(1, 19)], max_tokens=30, **shape)
            await pair.to_p.prefill(asked)
            if draw.random() < 0.3:
                await pair.to_p.abort(name)
                continue
            handle = await pair.to_p.handle_of(name)
            await pair.to_d.decode(asked, handle)
            for _ in range(draw.randrange(3)):
                await pair.to_d.next_step()
            if draw.random() < 0.5:
                await pair.to_d.send(StopSample(name, 1, draw.randrange(3)))
            await pair.to_d.abort(name)
            await pair.to_p.release(handle)
        await idle(pair)


async def test_a_decode_node_that_is_too_small_refuses_by_name() -> None:
    async with running_pair(None, Setup(engine_options={"max_num_seqs": 4})) as pair:
        await hand_over(pair, ask(n=5))
        failed = await pair.to_d.failure_of("r")
        assert (failed.code, failed.field) == (InvalidRequest.code, "n")
        await pair.to_p.release(pair.to_p.handles("r")[0])
        await idle(pair)
