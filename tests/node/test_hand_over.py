"""Prefill and decode nodes together: a fake model, real engines, sessions and KV transfer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from baton.node.session import RouterSession
from baton.protocol.events import BlockEventKind, FirstToken, NodeStep
from baton.protocol.handles import KVHandle, Role
from baton.protocol.kv_spec import LayerSpec
from baton.protocol.messages import Prefilled
from baton.protocol.request import FinishReason
from kv_transfer import connector
from kv_transfer.lanes.grpc_stream import GrpcLane
from kv_transfer.protocol.base import KVReady
from tests.fakes import expected_output, request
from tests.node.fakes import PATIENCE_S, TIMING, Pair, RawRouter, Setup, connected, running_pair

PROMPT = tuple(range(10, 29))  # 19 tokens: 4 full blocks of 4 and 3 more


def expected(asked) -> list[int]:
    return expected_output(asked.prompt_ids, asked.params)


async def hand_over(pair: Pair, asked) -> list[int]:
    """The journey of one request, as a router would drive it; the tokens from D."""
    await pair.to_p.prefill(asked)
    handle = await pair.to_p.handle_of(asked.id)
    await pair.to_d.decode(asked, handle)
    await pair.to_p.until(lambda: pair.to_p.events(asked.id))
    return await pair.to_d.all_tokens(asked.id)


async def assert_idle(pair: Pair) -> None:
    await pair.p.until_idle()
    await pair.d.until_idle()


async def test_tokens_equal_one_local_engine() -> None:
    asked = request(prompt=PROMPT, max_tokens=12)
    async with running_pair() as pair:
        assert pair.to_p.record.role is Role.PREFILL
        tokens = await hand_over(pair, asked)
        assert tokens == expected(asked)
        assert pair.to_p.tokens("r") == tokens[:1]
        assert pair.to_d.events("r")[0].position == 0, "D's first event repeats token 1"
        assert pair.to_d.subscribed("r")
        stats = pair.d.node.shell.connector.stats
        assert stats.fetches == 1
        assert sum(stats.bytes_received.values()) > 0
        assert pair.d.engine.stats.num_prompt_tokens == 0, "D computed nothing of the prompt"
        num_bytes = sum(stats.bytes_received.values())
        await pair.to_d.until_load(lambda load: load.kv_received_bytes == num_bytes)
        await pair.to_d.until_load(lambda load: (load.kv_fetches, load.kv_fetch_failures) == (1, 0))
        await pair.to_p.until_load(lambda load: load.kv_sent_bytes == num_bytes)
        await pair.to_p.until_load(lambda load: load.prefix_query_tokens > 0)
        await assert_idle(pair)


@pytest.mark.parametrize(("p_block", "d_block"), [(4, 8), (8, 4), (16, 2)])
async def test_block_sizes_may_differ(p_block: int, d_block: int) -> None:
    asked = request(prompt=PROMPT, max_tokens=12)
    async with running_pair(Setup(block_size=p_block), Setup(block_size=d_block)) as pair:
        assert await hand_over(pair, asked) == expected(asked)
        await assert_idle(pair)


async def test_chunked_prefill_over_the_grpc_lane() -> None:
    engine = {"max_num_batched_tokens": 8, "max_num_seqs": 4}
    prefill = Setup(engine_options=engine, lane=GrpcLane(TIMING))
    asked = [request(f"r{i}", tuple(range(i, i + 40)), max_tokens=10) for i in range(6)]
    async with running_pair(prefill, Setup(lane=GrpcLane(TIMING))) as pair:
        for one in asked:
            await pair.to_p.prefill(one)
        for one in asked:
            await pair.to_d.decode(one, await pair.to_p.handle_of(one.id))
        for one in asked:
            assert await pair.to_d.all_tokens(one.id) == expected(one)
        assert pair.p.engine.stats.num_chunked_prompts == len(asked)
        await assert_idle(pair)


async def test_the_handle_leaves_before_the_first_layer_and_the_token_waits_for_no_fetch() -> None:
    asked = request(prompt=PROMPT)
    async with running_pair() as pair:
        pair.p.runner.layer_gate.close()
        await pair.to_p.prefill(asked)
        await pair.p.runner.layer_gate.reached()
        handle = await pair.to_p.handle_of("r")
        assert handle.num_tokens == len(PROMPT)
        assert not pair.to_p.events("r")
        pair.p.runner.layer_gate.open()
        await pair.to_p.until(lambda: pair.to_p.events("r"))  # nobody has fetched anything
        order = [
            "handle" if step.handles else "token"
            for step in pair.to_p.steps
            if step.handles or step.tokens
        ]
        assert order == ["handle", "token"]
        await pair.to_p.release(handle)
        await assert_idle(pair)


async def test_what_is_still_to_be_sent_follows_token_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """The export is complete, and so wakes the data plane, when token 1 has been written."""
    async with running_pair() as pair:
        connector, session, order = pair.p.node.shell.connector, RouterSession, list[str]()
        complete, follow = connector.complete, session.next

        async def next_message(self: RouterSession) -> NodeStep:
            if order == ["writing"]:
                order.append("written")
            step = await follow(self)
            if step.tokens:
                order.append("writing")
            return step

        def completed(handle: KVHandle, first: Sequence[FirstToken]) -> None:
            order.append("complete")
            complete(handle, first)

        monkeypatch.setattr(session, "next", next_message)
        monkeypatch.setattr(connector, "complete", completed)
        await pair.to_p.prefill(request("warm up"))  # the writer waits in the real `next` until now
        await pair.to_p.until(lambda: pair.to_p.events("warm up"))
        await pair.to_p.release(pair.to_p.handles("warm up")[0])
        order.clear()
        asked = request(prompt=PROMPT, max_tokens=12)
        await pair.to_p.prefill(asked)
        await pair.to_d.decode(asked, await pair.to_p.handle_of("r"))
        await pair.to_p.until(lambda: pair.to_p.events("r"))
        assert await pair.to_d.all_tokens("r") == expected(asked)
        assert order[:3] == ["writing", "written", "complete"]
        await assert_idle(pair)


async def test_a_small_export_is_not_asked_for_before_token_1(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """D has its blocks, and P hears nothing of it, until the router says Prefilled."""
    asked = request(prompt=PROMPT, max_tokens=12)
    async with running_pair() as pair:
        side, order, reserved = pair.d.node.shell.connector, list[str](), asyncio.Event()
        follows, fetch = side.follows_prefill, side.fetch

        def follows_prefill(handle: KVHandle) -> bool:
            reserved.set()
            return follows(handle)

        async def fetched(*call: Any, **more: Any) -> KVReady:
            order.append("fetch")
            return await fetch(*call, **more)

        monkeypatch.setattr(side, "follows_prefill", follows_prefill)
        monkeypatch.setattr(side, "fetch", fetched)
        pair.p.runner.layer_gate.close()
        await pair.to_p.prefill(asked)
        await pair.to_d.decode(asked, await pair.to_p.handle_of("r"), prefilling=True)
        await asyncio.wait_for(reserved.wait(), PATIENCE_S)
        await pair.to_d.send(Prefilled("r", 2))  # of another epoch: nobody's
        await pair.to_d.heard()
        assert not pair.to_d.subscribed("r")
        pair.p.runner.layer_gate.open()
        await pair.to_p.until(lambda: pair.to_p.events("r"))
        order.append("prefilled")
        await pair.to_d.send(Prefilled("r", 1))
        assert await pair.to_d.all_tokens("r") == expected(asked)
        assert order == ["prefilled", "fetch"]
        await assert_idle(pair)


async def test_a_long_export_streams_while_the_prompt_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connector, "SMALL_BURSTS", 0)
    asked = request(prompt=PROMPT, max_tokens=12)
    async with running_pair() as pair:
        pair.p.runner.layer_gate.close()
        await pair.to_p.prefill(asked)
        await pair.to_d.decode(asked, await pair.to_p.handle_of("r"), prefilling=True)
        await pair.to_d.until(lambda: pair.to_d.subscribed("r"))  # nobody has said Prefilled
        pair.p.runner.layer_gate.open()
        assert await pair.to_d.all_tokens("r") == expected(asked)
        await assert_idle(pair)


async def test_an_export_ends_complete_though_its_router_has_gone() -> None:
    asked = request(prompt=PROMPT, max_tokens=12)
    async with running_pair() as pair:
        pair.p.runner.step_gate.close()
        async with connected(pair.p, "router-2") as gone:
            await gone.prefill(asked)
            handle = await gone.handle_of("r")
            await pair.to_d.decode(asked, handle)
            await pair.to_d.until(lambda: pair.to_d.subscribed("r"))
            await pair.p.runner.step_gate.reached()
            pair.p.runner.step_gate.open()
            await gone.until(lambda: gone.events("r"))
        assert await pair.to_d.all_tokens("r") == expected(asked)
        await assert_idle(pair)


async def test_a_fetch_streams_while_the_prefill_computes() -> None:
    asked = request(prompt=PROMPT)
    async with running_pair() as pair:
        pair.p.runner.layer_gate.close()
        await pair.to_p.prefill(asked)
        await pair.to_d.decode(asked, await pair.to_p.handle_of("r"))
        await pair.to_d.until(lambda: pair.to_d.subscribed("r"))
        assert not pair.to_p.events("r"), "D subscribed before token 1 existed"
        pair.p.runner.layer_gate.open()
        assert await pair.to_d.all_tokens("r") == expected(asked)
        await assert_idle(pair)


async def test_a_request_may_end_with_token_1() -> None:
    asked = request(prompt=PROMPT, max_tokens=1)
    async with running_pair() as pair:
        tokens = await hand_over(pair, asked)
        assert tokens == expected(asked)
        assert pair.to_p.events("r")[0].finish_reason is FinishReason.LENGTH
        assert pair.to_d.events("r")[-1].finish_reason is FinishReason.LENGTH
        await assert_idle(pair)


async def test_a_retry_goes_on_where_the_output_ended() -> None:
    asked = request(prompt=PROMPT, max_tokens=12)
    whole = expected(asked)
    again = asked.retried((tuple(whole[:5]),))
    async with running_pair() as pair:
        assert await hand_over(pair, again) == whole[5:]
        assert pair.to_p.events("r")[0].position == 5
        await assert_idle(pair)


async def test_another_decode_node_may_use_a_handle_whose_receiver_got_further() -> None:
    """D failover without a second prefill: more tokens are known than the handle holds."""
    asked = request(prompt=PROMPT, max_tokens=12)
    whole = expected(asked)
    async with running_pair() as pair:
        await pair.to_p.prefill(asked)
        handle = await pair.to_p.handle_of("r")
        await pair.to_p.until(lambda: pair.to_p.events("r"))
        again = asked.retried((tuple(whole[:4]),))
        await pair.to_d.decode(again, handle)
        assert await pair.to_d.all_tokens("r") == whole[4:]
        await assert_idle(pair)


async def test_prefix_hits_are_not_fetched_again() -> None:
    first, second = (request(name, PROMPT, max_tokens=6) for name in ("a", "b"))
    async with running_pair() as pair:
        stats = pair.d.node.shell.connector.stats
        assert await hand_over(pair, first) == expected(first)
        whole = sum(stats.bytes_received.values())
        assert await hand_over(pair, second) == expected(second)
        assert sum(stats.bytes_received.values()) - whole < whole / 2
        assert pair.p.engine.stats.num_prefix_hit_tokens > 0
        await assert_idle(pair)


async def test_local_prefill_on_the_decode_node() -> None:
    asked = request(prompt=PROMPT, max_tokens=9)
    async with running_pair() as pair:
        await pair.to_d.decode(asked)
        assert await pair.to_d.all_tokens("r") == expected(asked)
        await assert_idle(pair)


async def test_block_events_reach_sessions_in_sequence_and_begin_with_a_snapshot() -> None:
    async with running_pair() as pair:
        first, second = (request(n, p) for n, p in (("a", PROMPT), ("b", PROMPT[::-1])))
        await hand_over(pair, first)
        await hand_over(pair, second)

        def stored(router: RawRouter) -> set[bytes]:
            return {
                h
                for step in router.steps
                for event in step.block_events
                if event.kind is BlockEventKind.STORED
                for h in event.hashes
            }

        await assert_idle(pair)
        heard = stored(pair.to_p)
        assert len(heard) == 8, "four full blocks of each prompt"
        expected_seq = 1
        for step in pair.to_p.steps:
            if step.block_events:
                assert step.block_events_seq == expected_seq
                expected_seq += len(step.block_events)
        async with connected(pair.p, "router-2") as late:
            await late.until(lambda: any(step.block_events for step in late.steps))
            snapshot = next(step for step in late.steps if step.block_events)
            assert snapshot.block_events[0].kind is BlockEventKind.CLEARED
            assert snapshot.block_events_seq == 1
            assert stored(late) == heard


MIXED = {"layers": (LayerSpec(1, 2, 2), LayerSpec(1, 2, 2, window=6), LayerSpec(1, 2, 2, window=6))}


@pytest.mark.parametrize(("p_block", "d_block"), [(4, 4), (4, 8), (8, 2)])
async def test_layers_with_a_window_have_blocks_of_their_own(p_block: int, d_block: int) -> None:
    """Twice: the second time both find a prefix of which the windowed layers hold the end only."""
    p, d = (Setup(block_size=size, model_options=MIXED) for size in (p_block, d_block))
    async with running_pair(p, d) as pair:
        for name in ("a", "b"):
            asked = request(name, prompt=PROMPT, max_tokens=12)
            assert await hand_over(pair, asked) == expected(asked)
        assert pair.d.engine.stats.num_window_freed_blocks > 0
        assert pair.p.engine.stats.num_prefix_hit_tokens > 0
        await assert_idle(pair)


async def test_a_prefill_waits_for_room_among_the_exports(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_pair() as pair:
        connector = pair.p.node.shell.connector
        monkeypatch.setattr(connector, "room_for", lambda num_bytes: False)
        await pair.to_p.prefill(request("a", prompt=PROMPT))
        first = await pair.to_p.handle_of("a")
        await pair.to_p.prefill(request("b", prompt=PROMPT))
        await pair.to_p.until_load(lambda load: load.waiting == 1)
        assert not pair.to_p.handles("b")
        await pair.to_p.release(first)
        assert (await pair.to_p.handle_of("b")).num_tokens == len(PROMPT)
        assert pair.p.engine.stats.num_export_refusals > 0
        await pair.to_p.release(pair.to_p.handles("b")[0])
        await pair.p.until_idle()
