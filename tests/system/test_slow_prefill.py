"""A prefill that takes longer than the progress deadline of a fetch: nothing is lost or repeated.

One way that copies while the prompt is computed, one that reads pages in place. All ways, longer
prefills and busy machines: python -m tests.slow_prefills.
"""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest

from baton.client import GenerateOptions
from baton.runtime.failpoints import VARIABLE
from tests.slow_prefills import FLAGS, PARAMS, Ground, asking, make_ground, slow_prefill
from tests.system.processes import Processes

pytestmark = [pytest.mark.slow, pytest.mark.long]
SECONDS = 7.0  # above Timing.kv_progress_s


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    return make_ground(tmp_path_factory.mktemp("ground"))


@pytest.mark.parametrize("way", ["stream", "shm adopted"])
async def test_a_slow_prefill_hands_over_once(ground: Ground, tmp_path: Path, way: str) -> None:
    proof = await slow_prefill(ground, tmp_path, way, SECONDS)
    assert "delays of" in proof


async def test_an_engine_that_hangs_is_noticed(ground: Ground, tmp_path: Path) -> None:
    """In the midst of a prompt, while the node's other threads still say that they live."""
    hang_s = 600
    hangs = {VARIABLE: f"p.mid_chunk:3:delay={hang_s * 1000}"}
    flags = (*FLAGS, "--stall-s", "2")
    async with Processes(ground.model, tmp_path, forked=True) as processes:
        p, q, d = await asyncio.gather(
            processes.start("prefill_node", "p", flags, hangs),
            processes.start("prefill_node", "q", flags),
            processes.start("decode_node", "d", flags),
        )
        router = await processes.router([p, q], [d], ["--prefill-placement", "remote"])
        async with asking(router, num_nodes=3) as client, asyncio.timeout(hang_s / 2):
            found = await client.generate(ground.prompt, PARAMS)
            salts = map(str, itertools.count())
            while found.retries == 0:  # until one came to the node that hangs
                options = GenerateOptions(cache_salt=next(salts))
                found = await client.generate(ground.prompt, PARAMS, options)
        await p.kill()
    assert (found.retries, found.token_ids) == (1, ground.expected)
