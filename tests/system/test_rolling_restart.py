"""A rolling restart of every node under load, with real processes: no request fails, and every
stream is the undisturbed one, token for token. Decode nodes hand their requests on with their KV.
"""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from baton.client import AsyncClient, GenerateOptions, ServerInfo
from baton.protocol.sampling import SamplingParams
from tests.system.asking import Asking
from tests.system.processes import STOP_S, Processes, ServerProcess
from tests.system.references import Tokens, one_engine_tokens, prompts
from tests.tiny_models import make_wide_model
from tests.waiting import eventually

pytestmark = [pytest.mark.redis, pytest.mark.slow, pytest.mark.long]

PROMPTS = prompts((200, 30, 90, 150), seed=9)
PARAMS = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
REQUEST_S = 240.0  # of a request, on a crowded machine
FLAGS = ("--num-kv-blocks", "128", "--max-num-seqs", "16", "--drain-s", "15")


@dataclass
class Load:
    """One client per prompt, asking again and again; `in_flight` streams have shown something."""

    client: AsyncClient
    expected: list[Tokens]
    finished: int = 0
    in_flight: int = 0
    asking: Asking = field(default_factory=Asking)

    def start(self) -> None:
        self.asking.start(self._ask(index) for index in range(len(PROMPTS)))

    async def _ask(self, index: int) -> None:
        while not self.asking.stopping:
            tokens: list[int] = []
            options = GenerateOptions(timeout_s=REQUEST_S)
            async for event in self.client.stream(PROMPTS[index], PARAMS, options):
                assert event.position == len(tokens), "a gap or a duplicate"
                self.in_flight += not tokens
                tokens.extend(event.token_ids)
            assert tuple(tokens) == self.expected[index]
            self.in_flight -= 1
            self.finished += 1

    async def busy(self, node_id: str) -> None:
        """Until most clients are in the middle of a stream, some of them on that node."""

        async def look() -> bool:
            self.asking.raise_failures()
            nodes = (await self.client.server_info()).nodes
            [node] = [node for node in nodes if node.node_id == node_id]
            return node.running >= 1 and self.in_flight >= len(PROMPTS) - 1

        await eventually(look)


async def test_no_request_fails_while_every_node_is_restarted(
    tmp_path: Path, redis_url: str
) -> None:
    # Slow enough that a router on a busy machine is not half a stream behind the nodes.
    model = make_wide_model(tmp_path / "model")
    expected = one_engine_tokens(model, PROMPTS, PARAMS)
    async with Processes(model, tmp_path, redis_url) as processes:
        prefill, decode = await processes.nodes(2, 2, FLAGS)
        router = await processes.router(prefill, decode)
        async with AsyncClient(str(router.ready["grpc_address"])) as client:

            async def serves() -> ServerInfo | None:
                info = await client.server_info()
                ready = [node for node in info.nodes if not node.draining]
                return info if len(ready) == 4 else None

            await eventually(serves)
            load = Load(client, expected)
            load.start()
            for one_of_each in zip(decode, prefill, strict=True):
                await load.busy(one_of_each[0].name)
                await asyncio.gather(*(restart(processes, old) for old in one_of_each))
                await eventually(serves)
                load.asking.raise_failures()
            await load.asking.stop()
            assert load.finished > len(PROMPTS)
            info = await serves()
            assert info is not None
            assert info.migrations.done >= 2, "both decode nodes handed something on"
            assert info.migrations.failed == 0
            await eventually(lambda: all_free(client))


async def restart(processes: Processes, old: ServerProcess) -> None:
    old.signal(signal.SIGTERM)
    assert await asyncio.wait_for(old.process.wait(), STOP_S) == 0
    assert "drain ended with" not in old.log.read_text(), "it had to give up something"
    await processes.start(f"{'decode' if old.name[0] == 'd' else 'prefill'}_node", old.name, FLAGS)


async def all_free(client: AsyncClient) -> bool:
    """free + used == total, and nothing is used."""
    nodes = (await client.server_info()).nodes
    return all(node.running == 0 and node.free_blocks == node.total_blocks for node in nodes)
