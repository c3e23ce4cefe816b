"""Router + P + D on one host, D reading P's pages where they lie: == one engine in one process.

What must be seen besides equal tokens: no byte of a full page was copied, P's pages are its own
again afterwards, and P's death or a lapsed lease in mid-decode costs no token.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from baton.engine.memory import adopted_pages
from baton.llm import LLM
from baton.protocol.errors import KVTimeout
from baton.protocol.events import SpanName
from baton.protocol.handles import KVHandle
from baton.protocol.sampling import SamplingParams
from tests.cluster import PATIENT, Member, Plan, cluster
from tests.system.processes import Processes
from tests.system.references import Tokens, one_engine_tokens, prompts
from tests.tiny_models import make_tiny_model

SIZE = 8
LENGTHS = (3, 16, 40, 65, 1, 33)
PARAMS = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
OPTIONS = {"block_size": SIZE}


@dataclass(frozen=True)
class Reference:
    model: Path
    prompts: list[Tokens]
    tokens: list[Tokens]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    model = make_tiny_model("llama", tmp_path_factory.mktemp("model"))
    asked = prompts(LENGTHS, seed=7)
    return Reference(model, asked, one_engine_tokens(model, asked, PARAMS))


@pytest.fixture(autouse=True)
def _no_page_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow this machine is: pages become own ones where a test says so."""
    monkeypatch.setattr(adopted_pages, "TAKE_OVER_AFTER_S", 1e6)


def plan(reference: Reference, shared: Path, **changes: Any) -> Plan:
    shared.mkdir()
    return Plan(reference.model, (OPTIONS,), (OPTIONS,), shared=shared, **changes)


def promises(member: Member) -> list[Any]:
    """What a decode node counts on, of each export that it holds."""
    return [held._promise for held in member.node.shell.connector._fetches._held]


def in_step(member: Member, number: int, action: Callable[[], None]) -> None:
    """Do `action` on the engine thread in the middle of the `number`th step from now."""
    runner, count = member.engine.steps.runner, 0
    inner = runner.run

    def run(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count == number:
            action()
        return inner(*arguments)

    runner.run = run  # pyright: ignore[reportAttributeAccessIssue]


async def test_full_pages_are_read_in_place(reference: Reference, tmp_path: Path) -> None:
    async with cluster(plan(reference, tmp_path / "shm")) as c:
        (prefill,), (decode,) = c.prefill, c.decode
        for _ in range(2):  # the second time P's own prefix hits are lent
            done = await c.generate(reference.prompts, PARAMS)
            assert [each.token_ids for each in done] == reference.tokens
            assert {each.retries for each in done} == {0}
        await c.settle()
        whole = 2 * sum(length // SIZE for length in LENGTHS)
        assert decode.stats.num_adopted_blocks == whole
        assert decode.stats.num_taken_over_blocks == 0
        assert decode.stats.num_prompt_tokens == 0
        # Of each prompt the last page was copied, if decoding goes on in it; no byte was fetched.
        assert decode.stats.num_copied_blocks == 2 * sum(length % SIZE > 0 for length in LENGTHS)
        assert decode.transfers.bytes_received == {}
        assert decode.transfers.lanes["shm"].fetches == 2 * len(LENGTHS)
        token_bytes = decode.node.shell.connector.bytes_of(1)
        assert decode.transfers.lanes["shm"].bytes_adopted == 2 * sum(LENGTHS) * token_bytes
        assert c.router.services.timelines is not None
        work = [part for each in c.router.services.timelines.newest() for part in each.trace.work]
        told = sum(part.span.kv_bytes for part in work if part.span.name == SpanName.FETCH)
        assert told == 2 * sum(LENGTHS) * token_bytes, "timelines count adopted pages"
        assert prefill.engine.stats.num_prefix_hit_tokens > 0
        assert not promises(decode)


async def test_pools_that_differ_are_copied(reference: Reference, tmp_path: Path) -> None:
    (tmp_path / "shm").mkdir()
    larger = OPTIONS | {"block_size": 2 * SIZE}
    here = Plan(reference.model, (OPTIONS,), (larger,), shared=tmp_path / "shm")
    async with cluster(here) as c:
        done = await c.generate(reference.prompts, PARAMS)
        assert {each.retries for each in done} == {0}
        assert [each.token_ids for each in done] == reference.tokens
        await c.settle()
        (decode,) = c.decode
        assert decode.stats.num_adopted_blocks == 0
        assert decode.transfers.bytes_received["shm"] > 0


@pytest.mark.parametrize("takes_over", [False, True])
async def test_int8_pages_are_read_with_their_scales(
    reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, takes_over: bool
) -> None:
    """== one engine with int8 KV; also when they become own pages in mid-stream."""
    if takes_over:
        monkeypatch.setattr(adopted_pages, "TAKE_OVER_AFTER_S", 0.0)
    options: dict[str, Any] = OPTIONS | {"kv_cache_dtype": "int8"}
    llm = LLM(model=str(reference.model), num_kv_blocks=64, threads=1, **options)
    alone = llm.generate([list(prompt) for prompt in reference.prompts], PARAMS)
    (tmp_path / "shm").mkdir()
    async with cluster(Plan(reference.model, (options,), (options,), shared=tmp_path / "shm")) as c:
        done = await c.generate(reference.prompts, PARAMS)
        assert [each.token_ids for each in done] == [tuple(each.token_ids) for each in alone]
        await c.settle()
        (decode,) = c.decode
        assert decode.stats.num_adopted_blocks == sum(length // SIZE for length in LENGTHS)
        assert (decode.stats.num_taken_over_blocks > 0) == takes_over
        assert decode.transfers.bytes_received == {}


async def test_deterministic_attention_reads_in_place_too(
    reference: Reference, tmp_path: Path
) -> None:
    (tmp_path / "shm").mkdir()
    options = OPTIONS | {"deterministic": True}
    async with cluster(Plan(reference.model, (options,), (options,), shared=tmp_path / "shm")) as c:
        done = await c.generate(reference.prompts, PARAMS)
        assert [each.token_ids for each in done] == reference.tokens
        await c.settle()
        assert c.decode[0].stats.num_adopted_blocks == sum(length // SIZE for length in LENGTHS)


async def test_old_ones_are_copied_and_given_back(
    reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adopted_pages, "TAKE_OVER_AFTER_S", 0.0)
    async with cluster(plan(reference, tmp_path / "shm")) as c:
        done = await c.generate(reference.prompts, PARAMS)
        assert [each.token_ids for each in done] == reference.tokens
        await c.settle()
        (decode,) = c.decode
        assert decode.stats.num_taken_over_blocks == decode.stats.num_adopted_blocks > 0


async def test_a_full_exporter_gets_its_pages_back_at_once(
    reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P has room for one of the prompts. D decodes the first in P's pages; the second is prefilled
    while the first still runs, long before any age or lease would have made room."""
    (tmp_path / "shm").mkdir()
    small = OPTIONS | {"num_kv_blocks": 12}
    here = Plan(reference.model, (small,), (OPTIONS,), shared=tmp_path / "shm")
    async with cluster(here) as c:
        (prefill,), (decode,) = c.prefill, c.decode
        wanted, computed = threading.Event(), threading.Event()
        runner = prefill.engine.steps.runner
        inner, seen = runner.run, list[int]()

        def run(chunks: Any, on_layer: Any) -> Any:
            results = inner(chunks, on_layer)
            seen.append(len(chunks))
            if len(seen) == 2:
                computed.set()
            return results

        runner.run = run  # pyright: ignore[reportAttributeAccessIssue]
        want_back = prefill.node.shell.connector.want_back

        def spy(short: bool) -> None:
            want_back(short)
            if short:
                wanted.set()

        monkeypatch.setattr(prefill.node.shell.connector, "want_back", spy)
        decoding = threading.Event()

        def decode_on() -> None:
            decoding.set()
            require(wanted)

        in_step(decode, 3, decode_on)
        in_step(decode, 10, lambda: require(computed))
        first = asyncio.create_task(c.client.generate(reference.prompts[3], PARAMS))
        assert await asyncio.to_thread(decoding.wait, 20)
        second = await c.client.generate(reference.prompts[2], PARAMS)
        assert second.token_ids == reference.tokens[2]
        assert (await first).token_ids == reference.tokens[3]
        assert decode.stats.num_taken_over_blocks >= LENGTHS[3] // SIZE
        assert (decode.stats.num_preemptions, decode.stats.num_failed) == (0, 0)
        assert decode.transfers.total_received == 0
        await c.settle()


async def test_a_promise_that_nobody_renews_is_not_waited_out(
    reference: Reference, tmp_path: Path
) -> None:
    """P is stopped, or out of reach: what it has promised is copied before that is over."""
    async with cluster(plan(reference, tmp_path / "shm")) as c:
        (prefill,), (decode,) = c.prefill, c.decode
        fetches = decode.node.shell.connector._fetches

        async def unheard(handle: KVHandle, epoch: int) -> None:
            raise KVTimeout("no answer")

        fetches.renew = unheard

        def pass_time() -> None:
            (promise,) = promises(decode)
            promise._until -= 0.6 * PATIENT.kv_lease_s
            assert promise.holds()
            assert decode.stats.num_taken_over_blocks == 0

        in_step(decode, 4, pass_time)
        generation = await c.client.generate(reference.prompts[3], PARAMS)
        assert generation.token_ids == reference.tokens[3]
        assert generation.retries == 0
        assert decode.stats.num_taken_over_blocks == LENGTHS[3] // SIZE
        assert prefill.transfers.expired_leases == 0
        await c.settle()


def require(event: threading.Event) -> None:
    assert event.wait(20)


async def test_a_lease_that_lapsed_during_a_step(reference: Reference, tmp_path: Path) -> None:
    """D slept in mid-step, until P may have taken its pages back: prefilled again, same tokens."""
    async with cluster(plan(reference, tmp_path / "shm")) as c:
        (prefill,), (decode,) = c.prefill, c.decode

        def sleep() -> None:
            (promise,) = promises(decode)
            assert promise.holds()
            promise._until = 0.0
            assert not promise.holds(), "P lives"

        in_step(decode, 4, sleep)
        generation = await c.client.generate(reference.prompts[3], PARAMS)
        assert generation.token_ids == reference.tokens[3]
        assert generation.retries == 1
        assert decode.stats.num_failed == 1
        assert prefill.transfers.exports == 2
        await c.settle()


async def test_a_node_that_renews_no_more_stops_in_time(
    reference: Reference, tmp_path: Path
) -> None:
    """Nothing is pretended: the lease passes in mid-step, P frees its pages, D stops by itself."""
    timing = replace(PATIENT, kv_lease_s=0.6)
    async with cluster(plan(reference, tmp_path / "shm", timing=timing)) as c:
        (prefill,), (decode,) = c.prefill, c.decode
        fetches = decode.node.shell.connector._fetches
        renew, silent = fetches.renew, threading.Event()

        async def unheard(handle: KVHandle, epoch: int) -> None:
            if silent.is_set():
                raise KVTimeout("no answer")
            await renew(handle, epoch)

        fetches.renew = unheard

        def sleep() -> None:
            silent.set()
            threading.Event().wait(2 * timing.kv_lease_s)
            assert not any(promise.holds() for promise in promises(decode))
            silent.clear()

        in_step(decode, 4, sleep)
        generation = await c.client.generate(reference.prompts[2], PARAMS)
        assert generation.token_ids == reference.tokens[2]
        assert generation.retries == 1
        assert prefill.transfers.expired_leases == 1
        assert decode.stats.num_failed == 1
        await c.settle()


@pytest.mark.slow
async def test_pages_of_a_killed_node_serve_on(reference: Reference, tmp_path: Path) -> None:
    """kill -9 of P in mid-decode; its lease ends and nobody can renew it: nothing is lost."""
    shared = tmp_path / "shm"
    shared.mkdir()
    flags = ("--kv-lanes", "shm,grpc", "--kv-shm-dir", str(shared), "--block-size", str(SIZE))
    async with Processes(reference.model, tmp_path) as processes:
        prefill = await processes.start(
            "prefill_node", "p", (*flags, "--num-kv-blocks", "64", "--threads", "1")
        )
        here = Plan(reference.model, (), (OPTIONS,), elsewhere=(prefill.address,), shared=shared)
        async with cluster(here) as c:
            (decode,) = c.decode
            stopped, dead = threading.Event(), threading.Event()

            def wait() -> None:
                stopped.set()
                assert dead.wait(20)
                for promise in promises(decode):
                    promise._until = 0.0
                    assert promise.holds(), "P is dead"

            in_step(decode, 4, wait)
            running = asyncio.create_task(c.client.generate(reference.prompts[3], PARAMS))
            assert await asyncio.to_thread(stopped.wait, 20)
            await prefill.kill()
            dead.set()
            generation = await running
            assert generation.token_ids == reference.tokens[3]
            assert generation.retries == 0
            assert decode.stats.num_adopted_blocks == LENGTHS[3] // SIZE
            assert decode.stats.num_prompt_tokens == 0
            await c.settle()
