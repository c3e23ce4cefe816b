"""SIGSTOP of nodes: a process that lives and does nothing. gRPC's ping timeout finds it after some
1.1 s, its requests go on elsewhere, and when it wakes up it has no say any more.

How long that took is measured and bounded generously: this machine may be busy.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.protocol.handles import NodeRecord
from baton.runtime.redis.keys import ONLY
from tests.system import test_kill as kills
from tests.system.processes import ServerProcess
from tests.system.test_kill import (
    Case,
    Model,
    Stream,
    assert_whole,
    case,
    metric,
)
from tests.waiting import eventually

pytestmark = [pytest.mark.redis, pytest.mark.slow, pytest.mark.long]
model = kills.model  # the fixture
log = logging.getLogger(__name__)
FAILOVER_S = 30.0  # 1.1 s to notice, and whatever else runs here; without pings it were stall_s


async def router_metric(c: Case, name: str) -> float:
    async with httpx.AsyncClient(trust_env=False) as http:
        text = (await http.get(f"http://{c.router.address}/metrics")).text
    return float(next(line.split()[1] for line in text.splitlines() if line.startswith(name)))


def stop(server: ServerProcess) -> float:
    """SIGSTOP, and the proof; the time of it."""
    server.signal(signal.SIGSTOP)
    stopped_at = time.monotonic()
    stat = Path(f"/proc/{server.process.pid}/stat")
    while stat.read_text().rpartition(")")[2].split()[0] != "T":
        pass
    return stopped_at


async def died(c: Case) -> float | None:
    """When the router had noticed."""
    return time.monotonic() if await router_metric(c, "baton_node_deaths_total") else None


async def noticed(c: Case) -> float:
    when = await eventually(lambda: died(c))
    assert when is not None
    return when


async def rest_of(stream: Stream, since: float) -> float:
    """Seconds from `since` to the next token that the client sees."""
    await stream.at_least(len(stream.tokens) + 1)
    return time.monotonic() - since


async def token_log(c: Case) -> list[dict[bytes, bytes]]:
    """Of the one request."""
    [key] = [key async for key in c.redis.scan_iter("{pd}:req:*")]
    rows: Any = await c.redis.xrange(ONLY.log_key(key.decode().removeprefix("{pd}:req:")))
    return [row for _, row in rows]


async def wakes_up_without_a_say(
    c: Case, zombie: ServerProcess, before: list[dict[bytes, bytes]]
) -> None:
    """It runs again: back among the nodes, whole and idle, and the log is as it was."""

    async def idle_again() -> NodeRecord | None:
        found = [record for record in await c.records() if record.node_id == zombie.name]
        load = found[0].load if found else None
        free = load is not None and load.free_blocks == load.total_blocks and not load.running
        return found[0] if free else None

    await eventually(idle_again)
    assert await token_log(c) == before
    positions = [int(row[b"p"]) for row in before]
    assert positions == sorted(set(positions)), "appended once, in order"
    epochs = [int(row[b"e"]) for row in before]
    assert epochs == sorted(epochs)
    assert epochs[-1] == 2, "nothing of an older epoch after a newer one"


async def test_a_stopped_decode_node_is_left_and_fenced(
    model: Model, tmp_path: Path, redis_url: str
) -> None:
    async with case(model, tmp_path, redis_url, 1, 2) as c:
        stream = Stream(c.client)
        await stream.at_least(10)
        victim = c.server(await c.recorded("decode_node"))
        stopped_at = stop(victim)
        try:
            lost = asyncio.create_task(noticed(c))
            gap_s = await rest_of(stream, stopped_at)
            while not lost.done():  # tokens that were on their way do not count
                gap_s = await rest_of(stream, stopped_at)
            noticed_s = await lost - stopped_at
            log.warning(
                "stopped D: noticed after %.2f s, next token after %.2f s", noticed_s, gap_s
            )
            assert noticed_s < FAILOVER_S
            last = await stream.finish()
            logged = await token_log(c)
        finally:
            victim.signal(signal.SIGCONT)
        assert_whole(stream, last, model, retries=1)
        await wakes_up_without_a_say(c, victim, logged)
        await c.assert_clean()


async def test_a_prefill_node_stopped_in_mid_prompt_is_left(
    model: Model, tmp_path: Path, redis_url: str
) -> None:
    """The decode node waits for it on a lane without pings: the router does not wait for that."""
    async with case(model, tmp_path, redis_url, 2, 1) as c:
        stream = Stream(c.client)
        await eventually(lambda: metric(c.decode[0], "baton_kv_transfer_fetching"))
        victim = c.server(await c.recorded("prefill_node"))
        stopped_at = stop(victim)
        try:
            assert stream.tokens == [], "the stop came too late to prove anything"
            noticed_s = await noticed(c) - stopped_at
            gap_s = await rest_of(stream, stopped_at)
            log.warning("stopped P: noticed after %.2f s, token 1 after %.2f s", noticed_s, gap_s)
            assert noticed_s < FAILOVER_S
            last = await stream.finish()
            logged = await token_log(c)
        finally:
            victim.signal(signal.SIGCONT)
        assert_whole(stream, last, model, retries=1)
        await wakes_up_without_a_say(c, victim, logged)
        await c.assert_clean()
