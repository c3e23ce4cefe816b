"""kill -9 of encode nodes at every stage, and of a prefill node that has their rows: the tokens are
those of transformers' generate, and no request fails.

The nodes that die are processes of their own; router and the other nodes live in this one.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import signal
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from baton.protocol.images import ImageInput, digest_of
from baton.protocol.request import Request
from baton.protocol.sampling import SamplingParams
from baton.runtime.failpoints import VARIABLE
from router.request.encoding import named
from tests.cluster import Cluster, Plan, cluster
from tests.system.processes import STOP_S, Processes, ServerProcess
from tests.tiny_vision import generated, make_vision_model, picture, prompt_of

pytestmark = [pytest.mark.slow, pytest.mark.long]

KIND = "qwen3_vl"
NEW_TOKENS = 16
GREEDY = SamplingParams(temperature=0.0, seed=1, max_tokens=NEW_TOKENS, ignore_eos=True)
ROOM: dict[str, Any] = {
    "num_kv_blocks": 256, "max_num_seqs": 8, "block_size": 4, "max_num_batched_tokens": 48,
}  # fmt: skip
FLAGS = ("--threads", "1", "--num-kv-blocks", "256", "--block-size", "4")
# Where an encode node dies: before the tower runs, behind it, while its rows are fetched.
STAGES = ("e.encoding", "e.encoded", "kv.first")
Prompt = tuple[tuple[int, ...], tuple[ImageInput, ...]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return make_vision_model(KIND, tmp_path_factory.mktemp("model"))


async def told(c: Cluster, name: str, prompt: Prompt) -> list[int]:
    found: list[int] = []
    ids, images = prompt
    request = Request(name, ids, GREEDY, images=images)
    async with aclosing(c.router.services.dispatcher.run(request)) as events:
        async for event in events:
            found += event.token_ids
    return found


def picture_for(c: Cluster, name: str) -> bytes:
    """A file that goes to the encode node `name`."""
    nodes = c.router.registry.snapshots(encoding=True)
    files = (picture(seed) for seed in itertools.count())
    return next(file for file in files if named(nodes, digest_of(file)).node_id == name)


async def is_dead(server: ServerProcess) -> bool:
    return await asyncio.wait_for(server.process.wait(), STOP_S) == -signal.SIGKILL


async def dying(processes: Processes, module: str, stage: str) -> ServerProcess:
    """A node, named after the stage at which it kills itself."""
    return await processes.start(module, stage, FLAGS, {VARIABLE: f"{stage}:1:kill9"})


@pytest.mark.parametrize("stage", STAGES)
async def test_an_encode_node_dies(path: Path, tmp_path: Path, stage: str) -> None:
    async with Processes(path, tmp_path) as processes:
        server = await dying(processes, "encode_node", stage)
        blind = {**ROOM, "vision_tower": False}  # only encode nodes and the decode node can help
        plan = Plan(path, (blind,), (ROOM,), encode=({},), encode_elsewhere=(server.address,))
        async with cluster(plan) as c:
            file = picture_for(c, stage)
            prompt = prompt_of(KIND, [[5], file, [9, 10]])
            expected = generated(path, KIND, *prompt, NEW_TOKENS)
            assert await told(c, "one", prompt) == expected
            assert await is_dead(server)
            # The other encode node has done it. What dies before it is asked is not asked.
            assert c.encode[0].stats.num_encoded_images == 1
            again = prompt_of(KIND, [[6], file, [9, 10]])
            assert await told(c, "two", again) == generated(path, KIND, *again, NEW_TOKENS)
            assert c.encode[0].stats.num_encoded_images == 1
            assert c.decode[0].stats.num_encoded_images == 0
            await c.settle()


async def test_a_prefill_node_dies_with_the_rows(path: Path, tmp_path: Path) -> None:
    async with Processes(path, tmp_path) as processes:
        server = await dying(processes, "prefill_node", "p.mid_chunk")
        plan = Plan(path, (), (ROOM,), encode=({},), elsewhere=(server.address,))
        async with cluster(plan) as c:
            prompt = prompt_of(KIND, [[5], picture(1), [9, 10]])
            assert await told(c, "one", prompt) == generated(path, KIND, *prompt, NEW_TOKENS)
            assert await is_dead(server)
            # The decode node computed the prompt, with the same rows: nobody encoded them again.
            assert c.encode[0].stats.num_encoded_images == 1
            assert c.encode[0].stats.num_reused_images == 1
            assert c.decode[0].stats.num_fetched_images == 1
            assert c.decode[0].stats.num_encoded_images == 0
            await c.settle()
