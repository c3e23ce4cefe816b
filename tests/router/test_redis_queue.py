"""Scripts of many requests in few pipelines: order, restarts, failures, cancelled callers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import redis as blocking
from redis.exceptions import RedisError, ResponseError

from baton.protocol.clock import SystemClock
from baton.runtime.redis.connections import connect
from deploy.redis_server import RedisServer, find_redis_binary
from router.store.patience import Patience
from router.store.redis_queue import ScriptQueue

pytestmark = pytest.mark.redis
PUSH = "return redis.call('RPUSH', KEYS[1], ARGV[1])"
FAIL = "return redis.error_reply('ERR as told')"


def patience(least_s: float, most_s: float = 0.0) -> Patience:
    return Patience(SystemClock(), least_s, most_s)


async def test_calls_that_come_together_go_together_and_in_order(empty_redis: str) -> None:
    client = connect(empty_redis, 2.0)
    queue, push = ScriptQueue(client, patience(2.0)), client.register_script(PUSH)
    answers = await asyncio.gather(*(queue.run(push, ["list"], [i]) for i in range(600)))
    assert answers == list(range(1, 601))
    assert await client.lrange("list", 0, -1) == [b"%d" % i for i in range(600)]  # pyright: ignore
    assert 3 <= queue.pipelines <= 6  # 600 in pipelines of at most 256, some sent twice: NOSCRIPT
    await queue.stop()
    await client.aclose()


async def test_a_script_that_fails_fails_alone(empty_redis: str) -> None:
    client = connect(empty_redis, 2.0)
    queue = ScriptQueue(client, patience(2.0))
    push, fail = client.register_script(PUSH), client.register_script(FAIL)
    one, two, three = await asyncio.gather(
        queue.run(push, ["list"], ["a"]), queue.run(fail, [], []), queue.run(push, ["list"], ["b"]),
        return_exceptions=True,
    )  # fmt: skip
    assert (one, three) == (1, 2)
    assert isinstance(two, ResponseError)
    await queue.stop()
    await client.aclose()


async def test_a_caller_that_leaves_before_its_pipeline_takes_its_call_along(
    empty_redis: str,
) -> None:
    client = connect(empty_redis, 2.0)
    queue, push = ScriptQueue(client, patience(2.0)), client.register_script(PUSH)
    calls = [queue.run(push, ["list"], [i]) for i in range(3)]
    # All are queued, nothing has been sent.
    calls[1].cancel()
    await asyncio.wait(calls)
    assert await client.lrange("list", 0, -1) == [b"0", b"2"]  # pyright: ignore
    await queue.stop()
    await client.aclose()


async def test_it_goes_on_after_a_restart_of_the_server(tmp_path: Path) -> None:
    binary = find_redis_binary()
    assert binary is not None, "the mark says so"
    with RedisServer(binary, tmp_path) as server:
        client = connect(server.url, 2.0)
        queue, push = ScriptQueue(client, patience(2.0)), client.register_script(PUSH)
        assert await queue.run(push, ["list"], ["a"]) == 1
        server.kill()
        with pytest.raises((RedisError, OSError)):
            await queue.run(push, ["list"], ["b"])
        server.start()
        assert await queue.run(push, ["other"], ["c"]) == 1  # loaded again: scripts are gone
        await queue.stop()
        await client.aclose()


async def test_a_server_that_hangs_fails_all_that_wait_once(empty_redis: str) -> None:
    client = connect(empty_redis, 5.0)
    queue, push = ScriptQueue(client, patience(0.3)), client.register_script(PUSH)
    await queue.run(push, ["list"], ["warm"])
    with blocking.Redis.from_url(empty_redis) as other:
        other.execute_command("CLIENT", "PAUSE", "1500", "ALL")
        began = asyncio.get_running_loop().time()
        failed = await asyncio.gather(
            *(queue.run(push, ["list"], [i]) for i in range(300)), return_exceptions=True
        )
        assert all(isinstance(one, (RedisError, OSError, TimeoutError)) for one in failed)
        assert asyncio.get_running_loop().time() - began < 1.2
        other.execute_command("CLIENT", "UNPAUSE")
    async with asyncio.timeout(10.0):
        assert await queue.run(push, ["after"], ["x"]) == 1
    await queue.stop()
    await client.aclose()


async def test_a_call_that_nobody_waits_for_has_its_place_and_is_told(empty_redis: str) -> None:
    client = connect(empty_redis, 2.0)
    queue = ScriptQueue(client, patience(2.0))
    push, fail = client.register_script(PUSH), client.register_script(FAIL)
    told: list[object] = []
    queue.post(push, ["list"], ["a"], told.append)
    queue.post(fail, [], [], told.append)
    assert await queue.run(push, ["list"], ["b"]) == 2
    assert told[0] == 1, "told before what was asked later"
    assert isinstance(told[1], ResponseError)
    queue.post(push, ["list"], ["c"], told.append)
    await queue.stop()
    assert told[2:] == [3], "stopping waits for it"
    await client.aclose()


async def test_scripts_that_the_server_has_lost_are_told_again_in_order(empty_redis: str) -> None:
    client = connect(empty_redis, 2.0)
    queue = ScriptQueue(client, patience(2.0))
    push, twice = client.register_script(PUSH), client.register_script(PUSH + " * 2")
    for script in (push, twice):
        await queue.run(script, ["list"], ["before"])
    with blocking.Redis.from_url(empty_redis) as other:
        other.script_flush()
    calls = [queue.run(push if i % 2 else twice, ["list"], [i]) for i in range(300)]
    assert await asyncio.gather(*calls) == [i + 3 if i % 2 else 2 * (i + 3) for i in range(300)]
    assert await client.lrange("list", 2, -1) == [b"%d" % i for i in range(300)]  # pyright: ignore
    await queue.stop()
    await client.aclose()


async def test_a_connection_that_breaks_is_made_anew_at_once(empty_redis: str) -> None:
    client = connect(empty_redis, 2.0)
    queue, push = ScriptQueue(client, patience(2.0)), client.register_script(PUSH)
    await queue.run(push, ["list"], ["first"])
    with blocking.Redis.from_url(empty_redis) as other:
        other.execute_command("CLIENT", "PAUSE", "60000", "WRITE")
        calls = [queue.run(push, ["list"], [i]) for i in range(3)]
        await asyncio.sleep(0)  # sent
        for peer in other.client_list():
            if peer["cmd"] == "evalsha":
                other.client_kill(peer["addr"])
        other.execute_command("CLIENT", "UNPAUSE")
    assert await asyncio.gather(*calls) == [2, 3, 4]
    await queue.stop()
    await client.aclose()
