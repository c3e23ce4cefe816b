"""An abort at every stage, on both nodes: everything that the request held is free afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from baton.protocol.handles import KVHandle
from baton.protocol.request import Request
from tests.fakes import expected_output, request
from tests.node.fakes import Gate, Pair, Setup, running_pair

PROMPT = tuple(range(10, 29))  # 19 tokens: 5 blocks of 4


async def both_idle(pair: Pair) -> None:
    await pair.p.until_idle()
    await pair.d.until_idle()


async def prefilled(pair: Pair, asked: Request) -> KVHandle:
    await pair.to_p.prefill(asked)
    await pair.to_p.until(lambda: pair.to_p.events(asked.id))
    return await pair.to_p.handle_of(asked.id)


async def gated_prefills(pair: Pair, asked: Sequence[Request]) -> list[KVHandle]:
    """Handles of prompts whose prefill stands still, all in one step, before its first layer."""
    hold = Gate()
    hold.close()
    pair.p.node.shell.thread.post(lambda _: hold.pass_through())
    await hold.reached()  # else the thread may take some of the prompts along, and step with them
    for one in asked:
        await pair.to_p.prefill(one)
    await pair.to_p.heard()
    pair.p.runner.layer_gate.close()
    hold.open()
    return [await pair.to_p.handle_of(one.id) for one in asked]


# ---- on the prefill node ----


async def test_abort_before_the_prefill_is_admitted() -> None:
    async with running_pair(Setup(num_blocks=6)) as pair:
        first = await prefilled(pair, request("first", PROMPT))  # its export fills the pool
        await pair.to_p.prefill(request("r", PROMPT[::-1]))
        await pair.to_p.until_load(lambda load: load.waiting == 1)
        await pair.to_p.abort("r")
        await pair.to_p.until_load(lambda load: load.waiting == 0)
        await pair.to_p.release(first)
        await both_idle(pair)
        assert not pair.to_p.handles("r")


async def test_a_waiting_prefill_enters_when_an_export_is_released() -> None:
    async with running_pair(Setup(num_blocks=6)) as pair:
        first = await prefilled(pair, request("first", PROMPT))
        await pair.to_p.prefill(request("r", PROMPT[::-1]))
        await pair.to_p.until_load(lambda load: load.waiting == 1)
        await pair.to_p.release(first)
        await pair.to_p.release(await pair.to_p.handle_of("r"))
        await both_idle(pair)


async def test_nobody_is_asked_for_pages_when_who_waited_for_room_has_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No step follows the abort: the flag is not left up until some other request comes."""
    async with running_pair(Setup(num_blocks=6)) as pair:
        wanted: list[bool] = []
        monkeypatch.setattr(pair.p.node.shell.connector, "want_back", wanted.append)
        first = await prefilled(pair, request("first", PROMPT))
        await pair.to_p.prefill(request("r", PROMPT[::-1]))
        await pair.to_p.until_load(lambda load: load.waiting == 1)
        await pair.p.node.shell.thread.call(lambda _: None)
        assert wanted[-1]
        steps = pair.p.engine.stats.num_steps
        await pair.to_p.abort("r")
        await pair.to_p.until_load(lambda load: load.waiting == 0)
        await pair.p.node.shell.thread.call(lambda _: None)
        assert not wanted[-1]
        assert pair.p.engine.stats.num_steps == steps, "nothing else has said so"
        await pair.to_p.release(first)
        await both_idle(pair)


async def test_abort_while_the_prefill_computes() -> None:
    async with running_pair() as pair:
        await gated_prefills(pair, [request("r", PROMPT)])
        await pair.to_p.abort("r")
        await pair.to_p.heard()
        pair.p.runner.layer_gate.open()
        await both_idle(pair)
        assert not pair.to_p.failures("r"), "an abort has no answer"


async def test_a_release_while_the_prefill_computes_stops_it_and_is_told() -> None:
    async with running_pair() as pair:
        (handle,) = await gated_prefills(pair, [request("r", PROMPT)])
        await pair.to_p.release(handle)
        await pair.to_p.heard()
        pair.p.runner.layer_gate.open()
        failed = await pair.to_p.failure_of("r")
        assert (failed.code, failed.retryable) == ("kv_stale", True)
        assert not pair.to_p.events("r")
        await both_idle(pair)


async def test_an_old_abort_does_not_end_a_newer_epoch() -> None:
    async with running_pair() as pair:
        asked = request("r", PROMPT, epoch=5)
        pair.p.runner.layer_gate.close()
        await pair.to_p.prefill(asked)
        await pair.to_p.abort("r", epoch=4)
        pair.p.runner.layer_gate.open()
        await pair.to_p.until(lambda: pair.to_p.events("r"))
        await pair.to_p.release(await pair.to_p.handle_of("r"))
        await both_idle(pair)


# ---- on the decode node ----


async def test_abort_while_the_fetch_waits_for_the_prefill() -> None:
    async with running_pair() as pair:
        asked = request("r", PROMPT)
        (handle,) = await gated_prefills(pair, [asked])
        await pair.to_d.decode(asked, handle)
        await pair.to_d.until(lambda: pair.to_d.subscribed("r"))
        await pair.to_d.abort("r")
        await pair.d.until_idle()
        pair.p.runner.layer_gate.open()
        await pair.to_p.until(lambda: pair.to_p.events("r"))
        await pair.to_p.release(handle)
        await both_idle(pair)
        assert not pair.to_d.events("r")


async def test_abort_while_decoding() -> None:
    async with running_pair() as pair:
        asked = request("r", PROMPT, max_tokens=200)
        pair.d.runner.hold_after(4)
        await pair.to_d.decode(asked, await prefilled(pair, asked))
        await pair.to_d.until(lambda: len(pair.to_d.tokens("r")) >= 3)
        await pair.d.runner.step_gate.reached()
        await pair.to_d.abort("r")
        await pair.to_d.heard()
        pair.d.runner.step_gate.open()
        await both_idle(pair)
        assert not pair.to_d.finished("r")
        assert pair.d.engine.stats.num_aborted == 1


async def test_abort_of_a_local_prefill() -> None:
    async with running_pair() as pair:
        pair.d.runner.step_gate.close()
        await pair.to_d.decode(request("r", PROMPT))
        await pair.d.runner.step_gate.reached()
        await pair.to_d.abort("r")
        pair.d.runner.step_gate.open()
        await both_idle(pair)


async def test_abort_in_line_leaves_the_line_moving() -> None:
    """D holds two prompts; the third and fourth wait for blocks, and the third is aborted there."""
    asked = [request(name, tuple(range(i, i + 19)), max_tokens=2) for i, name in enumerate("abcd")]
    async with running_pair(decode=Setup(num_blocks=12)) as pair:
        handles = await gated_prefills(pair, asked)
        for one, handle in zip(asked, handles, strict=True):
            await pair.to_d.decode(one, handle)
        await pair.to_d.until_load(lambda load: load.fetching == 4)
        await pair.to_d.until(lambda: pair.to_d.subscribed("b"))
        assert not pair.to_d.subscribed("c")
        await pair.to_d.abort("c")
        await pair.to_d.until_load(lambda load: load.fetching == 3)
        pair.p.runner.layer_gate.open()
        for one in (asked[0], asked[1], asked[3]):
            expected = expected_output(one.prompt_ids, one.params)
            assert await pair.to_d.all_tokens(one.id) == expected
        assert not pair.to_d.subscribed("c")
        await pair.to_p.release(handles[2])
        await both_idle(pair)


async def test_the_line_is_bounded() -> None:
    asked = [request(name, tuple(range(i, i + 19)), max_tokens=2) for i, name in enumerate("abc")]
    decode = Setup(num_blocks=6, options={"max_queued_fetches": 1})
    async with running_pair(decode=decode) as pair:
        handles = await gated_prefills(pair, asked)
        await pair.to_d.decode(asked[0], handles[0])
        await pair.to_d.until(lambda: pair.to_d.subscribed("a"))
        await pair.to_d.decode(asked[1], handles[1])
        await pair.to_d.decode(asked[2], handles[2])
        failed = await pair.to_d.failure_of("c")
        assert (failed.code, failed.retryable) == ("overloaded", True)
        pair.p.runner.layer_gate.open()
        for one in asked[:2]:
            expected = expected_output(one.prompt_ids, one.params)
            assert await pair.to_d.all_tokens(one.id) == expected
        await pair.to_p.release(handles[2])
        await both_idle(pair)


# ---- lost KV ----


async def test_a_dead_exporter_is_reported_as_kv_lost() -> None:
    async with running_pair() as pair:
        asked = request("r", PROMPT)
        (handle,) = await gated_prefills(pair, [asked])
        await pair.to_d.decode(asked, handle)
        await pair.to_d.until(lambda: pair.to_d.subscribed("r"))
        (lane,) = pair.p.node.shell.connector.lanes
        await asyncio.to_thread(lane.stop)  # as if the process were gone
        failed = await pair.to_d.failure_of("r")
        assert (failed.code, failed.retryable) == ("kv_lost", True)
        await pair.d.until_idle()
        pair.p.runner.layer_gate.open()


async def test_a_released_export_is_reported_as_stale() -> None:
    async with running_pair() as pair:
        asked = request("r", PROMPT)
        handle = await prefilled(pair, asked)
        await pair.to_p.release(handle)
        await pair.p.until_idle()
        await pair.to_d.decode(asked, handle)
        failed = await pair.to_d.failure_of("r")
        assert (failed.code, failed.retryable) == ("kv_stale", True)
        await both_idle(pair)


@pytest.mark.parametrize("change", [{"request_id": "other"}, {"num_tokens": 99}, {"epoch": 7}])
async def test_a_handle_of_something_else_is_refused(change: dict) -> None:
    async with running_pair() as pair:
        asked = request("r", PROMPT)
        handle = await prefilled(pair, asked)
        await pair.to_d.decode(asked, replace(handle, **change))
        failed = await pair.to_d.failure_of("r")
        assert (failed.code, failed.field) == ("invalid_request", "handle")
        await pair.to_p.release(handle)
        await both_idle(pair)
