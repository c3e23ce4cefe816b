"""kill -9 of nodes under a running stream, with real processes and a real Redis.

fp32, greedy: the stream must equal the undisturbed one token for token. Each case proves that the
kill hit the stage it is about, and that afterwards every surviving pool is whole, no lease is left
and Redis holds no orphan.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import redis.asyncio as aredis

from baton.client import AsyncClient, GenerateEvent, GenerateOptions
from baton.llm import LLM
from baton.protocol import wire
from baton.protocol.handles import NodeRecord
from baton.protocol.request import RequestState
from baton.protocol.sampling import SamplingParams
from baton.runtime.failpoints import VARIABLE
from baton.runtime.redis.keys import ONLY, node_key
from tests.system.processes import Processes, ServerProcess, fields_of, is_idle
from tests.system.references import Tokens, one_engine_tokens, prompts
from tests.system.samples import Samples
from tests.tiny_models import make_wide_model
from tests.waiting import WAIT_S, eventually

pytestmark = [pytest.mark.redis, pytest.mark.slow]

PROMPT = prompts([900], seed=5)[0]
PARAMS = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
# Small chunks: a prefill of many steps, so that there is time to kill in its middle.
FLAGS = (
    "--num-kv-blocks",
    "96",
    "--max-num-batched-tokens",
    "32",
    "--max-num-seqs",
    "8",
    "--metrics-port",
    "0",
)


@dataclass(frozen=True)
class Model:
    path: Path
    expected: Tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = make_wide_model(tmp_path_factory.mktemp("model"))
    [expected] = one_engine_tokens(path, [PROMPT], PARAMS)
    assert len(set(expected)) > 20
    return Model(path, expected)


@dataclass
class Case:
    """A running cluster and the eyes on it."""

    prefill: list[ServerProcess]
    decode: list[ServerProcess]
    router: ServerProcess
    client: AsyncClient
    redis: aredis.Redis

    async def records(self) -> list[NodeRecord]:
        servers = [*self.prefill, *self.decode]
        alive = [server.name for server in servers if server.process.returncode is None]
        values = await self.redis.mget([node_key(name) for name in alive])
        return [wire.record_from_bytes(value) for value in values if isinstance(value, bytes)]

    def server(self, name: str) -> ServerProcess:
        return next(server for server in [*self.prefill, *self.decode] if server.name == name)

    async def serves(self, num_nodes: int) -> bool:
        return len((await self.client.server_info()).nodes) == num_nodes

    async def request_fields(self) -> dict[str, str]:
        return await fields_of(self.redis, "{pd}:req:*")

    async def recorded(self, role: str) -> str:
        """The node of that role ("prefill_node", "decode_node") in the record, once it is there:
        a router tells where a request has got to within a moment, not at once."""

        async def look() -> str:
            return (await self.request_fields()).get(role, "")

        return await eventually(look)

    async def prefilling(self) -> str | None:
        """The node that computes the request's prompt; None while there is no request."""
        if not await self.redis.exists(ONLY.leases):
            return None
        return (await self.request_fields()).get("prefill_node")

    async def assert_clean(self) -> None:
        """free + used == total on every surviving pool, no lease, no orphan in Redis."""
        await eventually(self._all_idle)
        assert await self.redis.zcard(ONLY.leases) == 0
        keys = [key async for key in self.redis.scan_iter("{pd}:req:*")]
        keys += [key async for key in self.redis.scan_iter("{pd}:log:*")]
        assert keys
        assert all([await self.redis.ttl(key) > 0 for key in keys]), "an orphan stays for ever"
        fields = await self.request_fields()
        assert fields["state"] == RequestState.FINISHED
        assert int(fields["epoch"]) >= 2
        await eventually(self._only_survivors_registered)

    async def _all_idle(self) -> bool:
        return all(is_idle(record) for record in await self.records())

    async def _only_survivors_registered(self) -> bool:
        keys = {key async for key in self.redis.scan_iter("{pd}:node:*")}
        return keys == {node_key(record.node_id).encode() for record in await self.records()}


@asynccontextmanager
async def case(
    model: Model, directory: Path, redis_url: str, num_prefill: int, num_decode: int
) -> AsyncIterator[Case]:
    client = aredis.Redis.from_url(redis_url)
    await client.flushall()
    try:
        async with Processes(model.path, directory, redis_url) as processes:
            prefill, decode = await processes.nodes(num_prefill, num_decode, FLAGS)
            router = await processes.router(prefill, decode)
            async with AsyncClient(str(router.ready["grpc_address"])) as baton:
                c = Case(prefill, decode, router, baton, client)
                await eventually(lambda: c.serves(num_prefill + num_decode))
                yield c
    finally:
        await client.aclose()


async def metric(server: ServerProcess, name: str) -> float:
    """One value of a node's /metrics; 0 for a sample that is not there yet."""
    url = f"http://127.0.0.1:{server.ready['metrics_port']}/metrics"
    async with httpx.AsyncClient(trust_env=False) as http:
        text = (await http.get(url, timeout=WAIT_S)).text
    bare, _, labels = name.partition("{")
    for line in text.splitlines():
        sample, _, value = line.rpartition(" ")
        if sample.partition("{")[0] == bare and labels.rstrip("}") in sample:
            return float(value)
    return 0.0


class Stream:
    """One request, read in the background; `tokens` is what the client has seen so far."""

    def __init__(self, client: AsyncClient, params: SamplingParams = PARAMS) -> None:
        self.tokens: list[int] = []
        self.last: GenerateEvent | None = None
        self.seen = asyncio.Condition()
        events = client.stream(PROMPT, params, GenerateOptions(timeout_s=90))
        self.task = asyncio.create_task(self._read(events))

    async def _read(self, events: AsyncGenerator[GenerateEvent, None]) -> None:
        async for event in events:
            assert event.position == len(self.tokens), "a gap or a duplicate"
            async with self.seen:
                self.tokens.extend(event.token_ids)
                self.last = event
                self.seen.notify_all()

    async def at_least(self, count: int) -> None:
        async with asyncio.timeout(WAIT_S), self.seen:
            await self.seen.wait_for(lambda: len(self.tokens) >= count)

    async def finish(self) -> GenerateEvent:
        await asyncio.wait_for(self.task, 90)
        assert self.last is not None
        return self.last


def assert_whole(stream: Stream, last: GenerateEvent, model: Model, retries: int) -> None:
    assert tuple(stream.tokens) == model.expected
    assert last.finish_reason == "length"
    assert last.retries == retries
    assert last.usage is not None
    assert last.usage.completion_tokens == len(model.expected)


@pytest.mark.long  # in one process: test_failover.py; real processes: tests/deploy/test_up.py
async def test_decode_node_killed_in_mid_stream(
    model: Model, tmp_path: Path, redis_url: str
) -> None:
    async with case(model, tmp_path, redis_url, 1, 2) as c:
        stream = Stream(c.client)
        await stream.at_least(10)
        victim = await c.recorded("decode_node")
        await c.server(victim).kill()
        assert len(stream.tokens) < len(model.expected), "the kill came too late to prove anything"
        last = await stream.finish()
        assert_whole(stream, last, model, retries=1)
        await c.assert_clean()


@pytest.mark.long
async def test_decode_node_killed_with_four_samples(
    model: Model, tmp_path: Path, redis_url: str
) -> None:
    params = SamplingParams(n=4, temperature=0.9, seed=3, max_tokens=120, ignore_eos=True)
    llm = LLM(model=str(model.path), num_kv_blocks=256, threads=1)
    [output] = llm.generate([list(PROMPT)], params)
    async with case(model, tmp_path, redis_url, 1, 2) as c:
        samples = Samples(c.client, PROMPT, params)
        await samples.at_least(10)
        victim = await c.recorded("decode_node")
        await c.server(victim).kill()
        assert not any(samples.ended), "the kill came too late to prove anything"
        assert await samples.whole() == [sample.token_ids for sample in output.outputs]
        assert samples.retries == 1
        await c.assert_clean()


@pytest.mark.long
async def test_prefill_node_killed_before_token_1(
    model: Model, tmp_path: Path, redis_url: str
) -> None:
    async with case(model, tmp_path, redis_url, 2, 1) as c:
        stream = Stream(c.client)
        victim = await eventually(c.prefilling)
        assert victim is not None
        await c.server(victim).kill()
        assert stream.tokens == [], "the kill came too late to prove anything"
        last = await stream.finish()
        assert_whole(stream, last, model, retries=1)
        await c.assert_clean()


@pytest.mark.long
async def test_prefill_node_killed_while_kv_moves(
    model: Model, tmp_path: Path, redis_url: str
) -> None:
    async with case(model, tmp_path, redis_url, 2, 1) as c:
        stream = Stream(c.client)
        await eventually(lambda: metric(c.decode[0], "baton_kv_transfer_fetching"))
        victim = await c.recorded("prefill_node")
        await c.server(victim).kill()
        assert stream.tokens == [], "the kill came too late to prove anything"
        last = await stream.finish()
        assert_whole(stream, last, model, retries=1)
        # The decode node had subscribed, so it was the one to report the exporter's death.
        assert await metric(c.decode[0], 'baton_kv_transfer_fetches_total{outcome="kv_lost"}') == 1
        assert await metric(c.decode[0], 'baton_kv_transfer_fetches_total{outcome="ok"}') == 1
        await c.assert_clean()


@pytest.mark.long
async def test_prefill_node_killed_between_token_1_and_the_end_of_its_kv(
    model: Model, tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token 1 comes from P, with no KV on its way: the client has it while D still fetches.

    P holds the end of its KV back until it dies, so D cannot have acknowledged the export.
    """
    plan = tmp_path / "plan"
    plan.write_text("kv.last:1:delay=60000")
    monkeypatch.setenv(VARIABLE, f"@{plan}")
    async with case(model, tmp_path, redis_url, 2, 1) as c:
        stream, decode = Stream(c.client), c.decode[0]
        await stream.at_least(1)
        victim = c.server(await c.recorded("prefill_node"))
        assert await metric(victim, "baton_kv_transfer_active_exports") == 1
        plan.unlink()
        await victim.kill()
        assert len(stream.tokens) == 1, "D had no whole KV: nobody could decode"
        last = await stream.finish()
        assert_whole(stream, last, model, retries=1)
        assert await metric(decode, 'baton_kv_transfer_fetches_total{outcome="ok"}') == 1
        assert await metric(decode, 'baton_kv_transfer_fetches_total{outcome="kv_lost"}') == 1
        await c.assert_clean()
