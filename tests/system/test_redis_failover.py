"""Redis fails over under a router and real nodes: with Sentinels, and as a Cluster.

A router, two prefill and two decode nodes, twelve clients, half of them with resumable requests.
Each client asks one request after another, so that requests are under way whenever something
happens, however busy the machine is. No request fails, every text is one engine's, and no token of
a resumable request that was shown is missing at the new primary. tests/front/test_redis_failover.py
has more streams, of scripted tokens.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton.client import AsyncClient
from baton.protocol.clock import SystemClock
from baton.protocol.errors import StoreUnavailable
from baton.protocol.request import RequestState
from baton.runtime.redis.keys import SPREAD, slot_of
from baton.runtime.timing import Timing
from router.store.base import LogEntry
from router.store.redis_links import RedisServers
from router.store.redis_store import RedisStore
from tests.chaos.oracle import STRICT, check_stream
from tests.chaos.streams import Spec, Stream, chaos_model, make_specs
from tests.redis_kinds import Server, Servers, migrate, until
from tests.system.asking import Asking
from tests.system.processes import Processes, ServerProcess
from tests.system.test_rolling_restart import all_free
from tests.waiting import eventually

pytestmark = [pytest.mark.redis, pytest.mark.slow, pytest.mark.soak, pytest.mark.timeout(900)]

log = logging.getLogger(__name__)
CLIENTS = 12
RESUMABLE = CLIENTS // 2
SHOWN = 4  # tokens of some resumable requests under way when the primary dies
REQUEST_S = 240.0  # of a request, on a crowded machine
FLAGS = ("--num-kv-blocks", "256", "--max-num-seqs", "16", "--drain-s", "0")
STORE_S = 5.0
Shown = dict[str, dict[int, int]]  # stored id of a request -> sample -> tokens that were shown


@dataclass
class Load:
    """Clients that ask again and again; each answer is checked when it ends."""

    address: str
    specs: Sequence[Spec]
    asking: Asking = field(default_factory=Asking)
    running: dict[int, Stream] = field(default_factory=dict[int, Stream])
    ended: list[Stream] = field(default_factory=list[Stream])

    def start(self) -> None:
        self.asking.start(self._ask(index) for index in range(CLIENTS))

    async def _ask(self, index: int) -> None:
        spec, number = self.specs[index % len(self.specs)], 0
        while not self.asking.stopping:
            number += 1
            stream = Stream(spec, f"c{index}-{number}", deadline_s=REQUEST_S)
            stream.resumable = index < RESUMABLE
            self.running[index] = stream.start_at([self.address])
            await stream.finish()
            check_stream(stream, STRICT)
            self.ended.append(stream)

    def shown(self) -> Shown:
        """What clients of resumable requests have seen of those under way."""
        return {
            stream.stored_id: {sample: len(stream.tokens(sample)) for sample in samples_of(stream)}
            for index, stream in self.running.items()
            if index < RESUMABLE and not stream.over and stream.num_tokens
        }

    async def under_way(self) -> None:
        """Until clients have seen something of half of the resumable requests under way."""

        async def look() -> bool:
            self.asking.raise_failures()
            told = [sum(samples.values()) >= SHOWN for samples in self.shown().values()]
            return sum(told) >= RESUMABLE // 2

        await eventually(look, REQUEST_S)

    async def goes_on(self) -> None:
        """Until each client has got an answer to a question that it had not asked yet."""
        before = {stream.request_id for stream in self.running.values()}
        self.ended.clear()

        async def look() -> bool:
            self.asking.raise_failures()
            ended = {stream.request_id for stream in self.ended} - before
            return len({name.partition("-")[0] for name in ended}) == CLIENTS

        await eventually(look, REQUEST_S)


def samples_of(stream: Stream) -> range:
    return range(len(stream.spec.expected))


@dataclass
class Deployment:
    servers: Servers
    router: ServerProcess
    load: Load

    async def outages(self) -> float:
        """How often the router's store has been away."""
        async with httpx.AsyncClient(trust_env=False, timeout=REQUEST_S) as http:
            page = (await http.get(f"http://{self.router.address}/metrics")).text
        return next(
            sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if sample.name == "baton_store_outages_total"
        )

    @asynccontextmanager
    async def store(self) -> AsyncIterator[RedisStore]:
        clients = RedisServers.of(self.servers.url, STORE_S, replicas=0)
        store = RedisStore(clients, "reader", Timing(), SystemClock(), STORE_S)
        try:
            yield store
        finally:
            await store.stop()

    async def still_logged(self, shown: Shown) -> None:
        """What was shown of resumable requests is in the log of those that are primaries now."""
        async with self.store() as store:
            for id_, counts in shown.items():
                entries = await eventually(lambda id_=id_: log_of(store, id_))
                for sample, count in counts.items():
                    assert num_logged(entries, sample) >= count, (id_, sample)

    async def whole(self, stream: Stream) -> None:
        """A resumable request is recorded as finished, with every token."""
        async with self.store() as store:
            record = await store.read(stream.stored_id)
            assert record is not None, stream.request_id
            assert record.state is RequestState.FINISHED, stream.request_id
            entries = await store.read_log(stream.stored_id)
            for sample in samples_of(stream):
                assert num_logged(entries, sample) == len(stream.tokens(sample))


async def log_of(store: RedisStore, id_: str) -> list[LogEntry]:
    """The log; nothing while the new primary is not known yet."""
    try:
        return await store.read_log(id_)
    except StoreUnavailable:
        return []


def num_logged(entries: Sequence[LogEntry], sample: int) -> int:
    return sum(len(entry.token_ids) for entry in entries if entry.sample == sample)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chaos_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def specs(model: Path) -> dict[str, Spec]:
    return make_specs(model)


@asynccontextmanager
async def deployment(
    model: Path, specs: dict[str, Spec], folder: Path, servers: Servers
) -> AsyncIterator[Deployment]:
    async with Processes(model, folder, servers.url) as processes:
        prefill, decode = await processes.nodes(2, 2, FLAGS)
        router = await processes.router(prefill, decode, ("--prefill-placement", "remote"))
        address = str(router.ready["grpc_address"])
        async with AsyncClient(address) as client:

            async def complete() -> bool:
                return len((await client.server_info()).nodes) == 4

            await eventually(complete)
            it = Deployment(servers, router, Load(address, list(specs.values())))
            it.load.start()
            try:
                yield it
            finally:
                await it.load.asking.stop()
            await eventually(lambda: all_free(client))


async def during(it: Deployment, trouble: Callable[[], None]) -> None:
    """Let `trouble` happen while requests are under way, and prove what is promised."""
    load = it.load
    await load.under_way()
    shown = load.shown()
    began = time.monotonic()
    await asyncio.to_thread(trouble)
    log.info(
        "%d requests under way; over after %.1f s", len(load.running), time.monotonic() - began
    )
    await it.still_logged(shown)
    await load.goes_on()
    assert await it.outages() >= 1, "the router noticed"
    await load.asking.stop()
    resumable = [stream for stream in load.ended if stream.resumable]
    assert len(resumable) >= RESUMABLE
    for stream in resumable:
        await it.whole(stream)
    log.info("%d requests ended since, %d resumable", len(load.ended), len(resumable))


async def test_a_primary_killed_under_sentinels(
    model: Path, specs: dict[str, Spec], tmp_path: Path, sentinels: Servers
) -> None:
    primary, replica = sentinels.data

    def kill() -> None:
        primary.kill()
        until(lambda: replica.info("role") == "master", "a promotion")

    async with deployment(model, specs, tmp_path, sentinels) as it:
        await during(it, kill)


async def test_slots_moved_and_a_primary_killed_in_a_cluster(
    model: Path, specs: dict[str, Spec], tmp_path: Path, cluster_nodes: Servers
) -> None:
    first, second, third, *_, heir = cluster_nodes.data

    def move_and_kill() -> None:
        slots = [slot_of(group.tag) for group in SPREAD]
        of_first = [slot for slot in slots if slot < 16384 // 3]
        until(lambda: any(num_keys(first, slot) for slot in of_first), "keys of requests")
        moved = [slot for slot in of_first if num_keys(first, slot)]
        for slot in moved:
            migrate(slot, first, second, cluster_nodes)
        log.info("%d slots moved", len(moved))
        third.kill()
        until(lambda: heir.info("role") == "master", "a promotion")

    async with deployment(model, specs, tmp_path, cluster_nodes) as it:
        await during(it, move_and_kill)


def num_keys(server: Server, slot: int) -> int:
    return int(server.ask("CLUSTER", "COUNTKEYSINSLOT", slot))
