"""What of Redis stops a start: a wrong password, database, shard or CA; an outage never does."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from baton.node.main import main as node_main
from baton.protocol.errors import ConfigError
from baton.runtime.redis.connections import NODE_CALL, check_redis, router_call
from baton.runtime.redis.keys import ONLY
from baton.runtime.redis.urls import check_redis_url
from decode_node.__main__ import PROGRAM
from router.main import main as router_main
from tests.transfer.certificates import make_files

PATIENCE_S = 60.0  # none of these waits for it
ROUTER_CALL = router_call(ONLY)
PERMANENT = [
    b"-WRONGPASS invalid username-password pair or user is disabled.",
    b"-NOAUTH Authentication required.",
    b"-ERR invalid password",
    b"-ERR DB index is out of range",
    b"-ERR SELECT is not allowed in cluster mode",
    b"-MOVED 3999 10.0.0.9:6379",
    b"-NOPERM this user has no permissions to run the 'set' command",
    b"HTTP/1.1 400 Bad Request",
]
TEMPORARY = [
    b"-LOADING Redis is loading the dataset in memory",
    b"-MISCONF Redis is configured to save RDB snapshots",
    b"-READONLY You can't write against a read only replica.",
    b"-CLUSTERDOWN The cluster is down",
    b"-TRYAGAIN Multiple keys request during rehashing of slot",
    b"-MASTERDOWN Link with MASTER is down",
    b"-OOM command not allowed when used memory > 'maxmemory'.",
    b"-BUSY Redis is busy running a script.",
    b"-ERR max number of clients reached",
    b"-NOSCRIPT No matching script. Please use EVAL.",
    b"",  # it closes the connection
]


@asynccontextmanager
async def answering(reply: bytes | None, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """A server that says the same to every command (None: nothing); yields its port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (line := await reader.readline()) and reply != b"":
                if line.startswith(b"*") and reply is not None:  # the head of a command
                    writer.write(reply + b"\r\n")
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    async with server:
        yield server.sockets[0].getsockname()[1]


@pytest.mark.parametrize("reply", PERMANENT, ids=lambda reply: reply[:12].decode())
@pytest.mark.parametrize("command", [NODE_CALL, ROUTER_CALL], ids=["node", "router"])
async def test_what_no_waiting_mends_stops_the_start(reply: bytes, command: Any) -> None:
    async with answering(reply) as port:
        with pytest.raises(ConfigError) as caught:
            await check_redis(f"redis://baton:hidden@127.0.0.1:{port}/5", PATIENCE_S, command)
    assert caught.value.field == "redis_url"
    assert "hidden" not in caught.value.message
    assert f"127.0.0.1:{port}" in caught.value.message
    assert "\n" not in caught.value.message


async def test_a_wrong_shard_is_told_the_right_one() -> None:
    async with answering(PERMANENT[5]) as port:
        with pytest.raises(ConfigError, match=r"10\.0\.0\.9:6379"):
            await check_redis(f"redis://127.0.0.1:{port}", PATIENCE_S, NODE_CALL)


@pytest.mark.parametrize("reply", TEMPORARY, ids=lambda reply: reply[:12].decode())
async def test_an_outage_does_not(reply: bytes) -> None:
    async with answering(reply) as port:
        await check_redis(f"redis://u:p@127.0.0.1:{port}/5", PATIENCE_S, ROUTER_CALL)


async def test_nor_does_silence_or_nobody(tmp_path: Path) -> None:
    async with asyncio.timeout(PATIENCE_S):
        async with answering(b"") as port:
            pass
        await check_redis(f"redis://127.0.0.1:{port}/0", PATIENCE_S, NODE_CALL)
        await check_redis(f"unix://{tmp_path / 'redis.sock'}", PATIENCE_S, NODE_CALL)
        await check_redis("redis://nobody.invalid:6379/0", PATIENCE_S, NODE_CALL)
        async with answering(None) as port:
            await check_redis(f"redis://127.0.0.1:{port}/0", 0.05, NODE_CALL)


async def test_a_certificate_that_is_not_believed_stops_it(tmp_path: Path) -> None:
    ours, others = make_files(tmp_path / "ours"), make_files(tmp_path / "others")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(ours.cert, ours.key)
    async with answering(b"+OK", context) as port:
        url = f"rediss://127.0.0.1:{port}/0?ssl_ca_certs="
        await check_redis(f"{url}{ours.ca}", PATIENCE_S, NODE_CALL)
        for ca in (others.ca, tmp_path / "missing.pem"):
            with pytest.raises(ConfigError, match="TLS") as caught:
                await check_redis(f"{url}{ca}", PATIENCE_S, NODE_CALL)
            assert caught.value.field == "redis_url"


@pytest.mark.parametrize("path", ["/one", "/0x1", "/-1"])
def test_a_database_is_a_number(path: str) -> None:
    """redis-py would take each of these for 0."""
    with pytest.raises(ConfigError) as caught:
        check_redis_url(f"redis://baton:hidden@h:6379{path}")
    assert caught.value.field == "redis_url"
    assert "hidden" not in caught.value.message
    check_redis_url("redis://h:6379/5")


@pytest.mark.parametrize("option", ["db=two", "colour=red", "socket_timeout=soon"])
async def test_an_option_that_there_is_none_of_stops_it(option: str) -> None:
    url = f"redis://baton:hidden@127.0.0.1:9/0?{option}"
    with pytest.raises(ConfigError) as caught:
        await check_redis(url, PATIENCE_S, NODE_CALL)
    assert caught.value.field == "redis_url"
    assert "hidden" not in caught.value.message


@pytest.mark.redis
async def test_a_server_that_answers_lets_it_start(redis_url: str) -> None:
    for command in (NODE_CALL, ROUTER_CALL):
        await check_redis(redis_url, PATIENCE_S, command)
        with pytest.raises(ConfigError, match="DB index"):
            await check_redis(f"{redis_url}?db=99", PATIENCE_S, command)


@pytest.mark.redis
@pytest.mark.parametrize(
    "main",
    [router_main, lambda argv, environ: node_main(PROGRAM, argv, environ)],
    ids=["router", "node"],
)
def test_the_process_ends_with_its_reason(
    main: Callable[..., int], redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before it loads a model: there is none."""
    flags = ["--model", "/nonexistent", "--redis-url", f"{redis_url}?db=99"]
    assert main(flags, {}) == 2
    said = capsys.readouterr()
    assert said.out == "", "it is not ready"
    (line,) = [each for each in said.err.splitlines() if each.startswith("python -m")]
    assert "--redis-url" in line
    assert "DB index is out of range" in line
