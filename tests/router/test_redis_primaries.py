"""Who is the primary, by the word of Sentinels or of a Cluster's nodes; and what stops a start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import pytest
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError

from baton.node.heartbeat import RedisRegistry
from baton.protocol.clock import SystemClock
from baton.protocol.errors import ConfigError, StoreUnavailable
from baton.protocol.handles import Role
from baton.protocol.request import RequestState
from baton.runtime.redis.connections import NODE_CALL, check_redis, check_router_redis, connect
from baton.runtime.redis.keys import node_key
from baton.runtime.redis.primaries import (
    ClusterMap,
    Dial,
    Place,
    SentinelPrimary,
    SlotPrimary,
    WrongRedis,
)
from baton.runtime.timing import Timing
from router.nodes.directory import RedisDirectory
from router.store.redis_links import RedisServers
from router.store.redis_store import RedisStore
from tests.redis_kinds import Servers, cluster, redis_binary, service, single, until
from tests.router.fakes import make_record
from tests.router.test_aborts import Requests, routers
from tests.waiting import eventually

ONE, TWO, THREE = ("one", 1), ("two", 2), ("three", 3)
PATIENCE_S = 5.0
AWAY = RedisConnectionError("away")


class Answering:
    """Servers that answer with what the test wrote down; `asked`: whom, in order."""

    def __init__(self, answers: Mapping[Place, Any]) -> None:
        self.answers = dict(answers)
        self.asked: list[Place] = []

    def dial(self, place: Place) -> Redis:
        return cast(Redis, _Client(self, place))

    @property
    def as_dial(self) -> Dial:
        return self.dial


class _Client:
    def __init__(self, servers: Answering, place: Place) -> None:
        self._servers = servers
        self._place = place

    async def execute_command(self, *command: str) -> Any:
        self._servers.asked.append(self._place)
        answer = self._servers.answers[self._place]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def aclose(self) -> None:
        pass


async def test_the_next_sentinel_is_asked_if_one_is_away_or_does_not_know() -> None:
    servers = Answering({ONE: AWAY, TWO: None, THREE: [b"10.0.0.1", b"6379"]})
    primary = SentinelPrimary([ONE, TWO, THREE], "s", servers.as_dial)
    assert await primary.place() == ("10.0.0.1", 6379)
    assert servers.asked == [ONE, TWO, THREE]
    servers.asked.clear()
    assert await primary.place() == ("10.0.0.1", 6379)
    assert servers.asked == [TWO, THREE], "the one that was away is the last one now"


async def test_a_doubt_asks_another_sentinel_first() -> None:
    servers = Answering({ONE: [b"old", b"1"], TWO: [b"new", b"2"]})
    primary = SentinelPrimary([ONE, TWO], "s", servers.as_dial)
    assert await primary.place() == ("old", 1)
    primary.doubt()
    assert await primary.place() == ("new", 2)


async def test_a_service_that_nobody_knows() -> None:
    servers = Answering({ONE: None, TWO: None})
    with pytest.raises(WrongRedis, match="no Sentinel knows the service 's'"):
        await SentinelPrimary([ONE, TWO], "s", servers.as_dial).place()
    servers.answers[TWO] = AWAY
    with pytest.raises(RedisConnectionError, match="no Sentinel answers"):
        await SentinelPrimary([ONE, TWO], "s", servers.as_dial).place()


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (ResponseError("unknown command 'SENTINEL'"), WrongRedis),
        (NoPermissionError("no permissions"), NoPermissionError),
        (AuthenticationError("wrong password"), AuthenticationError),
    ],
)
async def test_why_no_sentinel_answers_is_told(error: Exception, cause: type[Exception]) -> None:
    servers = Answering({ONE: error})
    with pytest.raises(RedisConnectionError) as caught:
        await SentinelPrimary([ONE], "s", servers.as_dial).place()
    assert isinstance(caught.value.__cause__, cause)


def rows(*ranges: tuple[int, int, Place]) -> list[Any]:
    return [[first, last, [host.encode(), port, b"id"]] for first, last, (host, port) in ranges]


async def test_all_slots_share_one_map_until_somebody_doubts_it() -> None:
    servers = Answering({ONE: rows((0, 99, ONE), (100, 16383, TWO)), TWO: rows((0, 16383, TWO))})
    known = ClusterMap([ONE], servers.as_dial)
    low, high = SlotPrimary(known, 7), SlotPrimary(known, 100)
    assert (await low.place(), await high.place()) == (ONE, TWO)
    assert servers.asked == [ONE]
    low.doubt()
    assert await low.place() == TWO
    assert servers.asked == [ONE, TWO], "the next node that it had heard of"


async def test_a_node_without_a_name_is_the_one_that_was_asked() -> None:
    for unnamed in (None, b"", b"?"):
        servers = Answering({ONE: [[0, 16383, [unnamed, 7000, b"id"]]]})
        known = ClusterMap([ONE], servers.as_dial)
        assert await known.primary_of(5) == ("one", 7000)


async def test_a_cluster_that_is_away_or_serves_not_all() -> None:
    servers = Answering({ONE: AWAY, TWO: rows((0, 99, TWO))})
    known = ClusterMap([ONE, TWO], servers.as_dial)
    assert await known.primary_of(99) == TWO
    with pytest.raises(RedisConnectionError, match="no node of the cluster serves slot 100"):
        await known.primary_of(100)
    servers.answers[TWO] = AWAY
    with pytest.raises(RedisConnectionError, match="no node of the cluster answers"):
        await known.primary_of(99)


# ---- real servers ----


@pytest.mark.redis
async def test_what_is_no_sentinel_and_no_cluster_stops_the_start(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with single(redis_binary(), tmp_path_factory.mktemp("single")) as servers:
        place = f"127.0.0.1:{servers.data[0].port}"
        for url, why in (
            (f"redis+sentinel://u:hidden@{place}/s", "SENTINEL"),
            (f"redis+cluster://{place}", "cluster support disabled"),
        ):
            with pytest.raises(ConfigError, match=why) as caught:
                await check_redis(url, PATIENCE_S, NODE_CALL)
            assert caught.value.field == "redis_url"
            assert "hidden" not in caught.value.message


@pytest.mark.redis
async def test_nobody_there_stops_no_start() -> None:
    for kind in ("redis+sentinel://127.0.0.1:1/s", "redis+cluster://127.0.0.1:1"):
        await check_redis(kind, PATIENCE_S, NODE_CALL)
        await check_router_redis(kind, PATIENCE_S)


@pytest.mark.redis
@pytest.mark.long
async def test_a_connection_follows_the_primary_of_a_service(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with service(redis_binary(), tmp_path_factory.mktemp("service")) as servers:
        await check_router_redis(servers.url, PATIENCE_S)
        with pytest.raises(ConfigError, match="no Sentinel knows the service 'other'"):
            await check_redis(servers.url.replace("/baton/", "/other/"), PATIENCE_S, NODE_CALL)
        plain = f"redis://127.0.0.1:{servers.sentinels[0].port}"
        with pytest.raises(ConfigError, match="unknown command"):
            await check_redis(plain, PATIENCE_S, NODE_CALL)
        await _follows(servers, lambda: servers.sentinels[0].ask("SENTINEL", "FAILOVER", "baton"))


@pytest.mark.redis
@pytest.mark.long
async def test_a_connection_follows_the_primary_of_a_slot(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with cluster(redis_binary(), tmp_path_factory.mktemp("cluster")) as servers:
        await check_router_redis(servers.url, PATIENCE_S)
        others = [f"redis://127.0.0.1:{it.port}" for it in servers.data[:3]]
        refused = 0
        for url in others:
            try:
                await check_redis(url, PATIENCE_S, NODE_CALL)
            except ConfigError as error:
                refused += "redis+cluster://" in error.message
        assert refused == 2, "one of the three has the keys of nodes"
        client = connect(servers.url, PATIENCE_S)
        await client.set(node_key("n"), "1")
        has = [it for it in servers.data[3:] if it.ask("KEYS", "*")]
        await client.aclose()
        await _follows(servers, lambda: has[0].ask("CLUSTER", "FAILOVER"))


async def _follows(servers: Servers, fail_over: Any) -> None:
    """The server that connections speak to becomes a replica, and lives on."""
    client = connect(servers.url, PATIENCE_S)
    registry, record = RedisRegistry(servers.url, Timing()), make_record("d1", Role.DECODE)
    store = RedisStore(
        RedisServers.of(servers.url, PATIENCE_S, 1), "r1", Timing(), SystemClock(), PATIENCE_S
    )
    await store.start()
    await registry.claim(record)
    for number in range(32):  # some in every key group
        assert await store.claim(f"before-{number}") is not None
    before = [it.port for it in servers.primaries()]
    fail_over()
    until(lambda: [it.port for it in servers.primaries()] != before, "another primary")
    until(lambda: len(servers.primaries()) == len(before), "the old one follows the new one")

    async def write() -> bool:
        try:
            claims = [await store.claim(f"after-{number}") for number in range(32)]
            return all(claims) and bool(await client.set(node_key("n"), "2", px=1))
        except (RedisError, StoreUnavailable):
            return False  # Sentinels and nodes may tell the old one for a moment

    await eventually(write)
    assert (await store.counts())[RequestState.QUEUED] == 64, "nothing twice, nothing lost"
    await registry.announce(record)
    assert [it.node_id for it in await RedisDirectory(client, PATIENCE_S).records()] == ["d1"]
    async with routers(servers.url, Requests(), Requests("there")) as (asked, _):
        assert await asked.everywhere(["there"]) == ["there"]
    await registry.close()
    await store.stop()
    await client.aclose()
