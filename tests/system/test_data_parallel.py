"""Data-parallel nodes, their ranks as processes of their own: served end to end, and killed."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from baton.client import AsyncClient, GenerateOptions
from baton.node.data_ranks import LOST_RANK, PREFIX
from baton.protocol.sampling import SamplingParams
from tests.golden.random_models import save_random
from tests.system.processes import Processes, ServerProcess
from tests.system.references import one_engine_tokens, prompts
from tests.system.samples import Samples
from tests.waiting import eventually

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=160, ignore_eos=True)
PROMPTS = prompts((61, 40, 75, 5, 33, 12, 90))  # unequal: ranks do not end together
PATIENCE_S = 120.0
FLAGS = ("--num-kv-blocks", "160", "--block-size", "8", "--metrics-port", "0")

ROOMY = ("--num-kv-blocks", "640", "--block-size", "8", "--metrics-port", "0")

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two of eight experts for each token: rows travel, and some ranks are not asked."""
    return save_random(
        tmp_path_factory.mktemp("model") / "m", "qwen3_moe",
        num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48,
        max_position_embeddings=1024,
    )  # fmt: skip


def size_flags(size: int) -> tuple[str, ...]:
    return (*FLAGS, "--data-parallel-size", str(size))


def children(pid: int) -> list[int]:
    """Of a process, by the kernel's account."""
    return [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]


def alive(pids: Sequence[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


async def ends(pids: Sequence[int]) -> None:
    """Until none of these processes is there."""

    async def all_ended() -> bool:
        return not alive(pids)

    await eventually(all_ended, PATIENCE_S)


def folders() -> set[Path]:
    """Where groups meet."""
    return set(Path("/tmp").glob(f"{PREFIX}*"))


async def knows(client: AsyncClient, count: int) -> None:
    async def serves() -> bool:
        return len((await client.server_info()).nodes) == count

    await eventually(serves, PATIENCE_S)


async def generated(server: ServerProcess) -> list[float]:
    """Tokens by rank."""
    counts: list[float] = []
    for rank in server.ready["ranks"]:
        async with httpx.AsyncClient() as http:
            text = (await http.get(f"http://127.0.0.1:{rank['metrics_port']}/metrics")).text
        name = "baton_node_generation_tokens_total"
        lines = [line for line in text.splitlines() if line.startswith(name)]
        counts.append(sum(float(line.rpartition(" ")[2]) for line in lines))
    return counts


@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 4)])
async def test_groups_serve_the_tokens_of_one_engine(
    model: Path, tmp_path: Path, prefill: int, decode: int
) -> None:
    """An uneven load, and idle ranks; then they drain and end together."""
    before = folders()
    async with Processes(model, tmp_path, forked=True) as run:
        p, d = await asyncio.gather(
            run.start("prefill_node", "p", size_flags(prefill)),
            run.start("decode_node", "d", size_flags(decode)),
        )
        router = await run.router([p], [d])
        pids = [child for server in (p, d) for child in children(server.process.pid)]
        assert len(pids) == prefill + decode - 2
        assert len({rank["address"] for rank in d.ready["ranks"]}) == decode
        async with AsyncClient(str(router.ready["grpc_address"])) as client:
            await knows(client, prefill + decode)
            options = GenerateOptions(timeout_s=PATIENCE_S)
            [alone] = [await client.generate(PROMPTS[0], GREEDY, options)]
            together = await asyncio.gather(
                *(client.generate(prompt, GREEDY, options) for prompt in PROMPTS)
            )
        expected = one_engine_tokens(model, PROMPTS, GREEDY)
        assert [tuple(each.token_ids) for each in together] == expected
        assert tuple(alone.token_ids) == expected[0]
        assert {each.retries for each in (alone, *together)} == {0}
        busy = [count > 0 for count in await generated(d)]
        assert sum(busy) >= 2, "the router balances over ranks"
        assert await d.stop() == 0
        assert await p.stop() == 0
        await ends(pids)
        for server in (p, d):
            assert "lost" not in server.log.read_text()
    assert folders() <= before


@pytest.mark.parametrize(("size", "victim"), [(2, 1), (2, 0), (4, 2)])
async def test_a_rank_killed_in_mid_stream_ends_its_group_alone(
    model: Path, tmp_path: Path, size: int, victim: int
) -> None:
    """All streams of the group go on elsewhere, right; nothing of the group is left."""
    before, pools = folders(), tmp_path / "pools"
    pools.mkdir()
    lanes = ("--kv-lanes", "shm,stream", "--kv-shm-dir", str(pools))
    expected = one_engine_tokens(model, PROMPTS, LONG)
    async with Processes(model, tmp_path) as run:
        p, d, spare = await asyncio.gather(
            run.start("prefill_node", "p", (*FLAGS, *lanes)),
            run.start("decode_node", "d", (*size_flags(size), *lanes)),
            run.start("decode_node", "spare", (*FLAGS, *lanes)),
        )
        router = await run.router([p], [d, spare])
        pids = [d.process.pid, *children(d.process.pid)]
        async with AsyncClient(str(router.ready["grpc_address"])) as client:
            await knows(client, 2 + size)
            options = GenerateOptions(timeout_s=PATIENCE_S)
            streams = [Samples(client, prompt, LONG, options) for prompt in PROMPTS]
            await asyncio.gather(*(each.at_least(5) for each in streams))
            began = time.monotonic()
            os.kill(pids[victim], signal.SIGKILL)
            status = await asyncio.wait_for(d.process.wait(), PATIENCE_S)
            await ends(pids)
            took_s = time.monotonic() - began
            assert status == (-signal.SIGKILL if victim == 0 else LOST_RANK)
            assert took_s < 5, "on a busy machine; a fraction of a second on a quiet one"
            found = await asyncio.gather(*(each.whole() for each in streams))
            assert [tokens for [tokens] in found] == expected
            assert any(each.retries for each in streams), "some were on the group"
        if victim:
            assert f"rank {victim} has ended with status -9" in d.log.read_text()
        left = {path.name for path in pools.iterdir()}
        assert len(left) == 2, "the pools of the prefill node and of the spare one"
        assert await spare.stop() == 0
        assert await p.stop() == 0
    assert not list(pools.iterdir())
    assert folders() <= before


@pytest.mark.parametrize("victim", [1, 0])
async def test_a_killed_prefill_group_leaves_its_prompts_to_others(
    model: Path, tmp_path: Path, victim: int
) -> None:
    """Prompts are under way on both of its ranks, in steps of few tokens."""
    before = folders()
    few = ("--max-num-batched-tokens", "64")
    many = prompts((400, 390, 380, 370, 360, 350, 340, 330), seed=3)
    expected = one_engine_tokens(model, many, GREEDY)
    async with Processes(model, tmp_path) as run:
        p, spare, d = await asyncio.gather(
            run.start("prefill_node", "p", (*ROOMY, *few, "--data-parallel-size", "2")),
            run.start("prefill_node", "spare", (*ROOMY, *few)),
            run.start("decode_node", "d", ROOMY),
        )
        router = await run.router([p, spare], [d])
        pids = [p.process.pid, *children(p.process.pid)]
        async with AsyncClient(str(router.ready["grpc_address"])) as client:
            await knows(client, 4)
            options = GenerateOptions(timeout_s=PATIENCE_S)
            streams = [Samples(client, prompt, GREEDY, options) for prompt in many]
            await streams[0].at_least(1)
            os.kill(pids[victim], signal.SIGKILL)
            status = await asyncio.wait_for(p.process.wait(), PATIENCE_S)
            await ends(pids)
            assert status == (-signal.SIGKILL if victim == 0 else LOST_RANK)
            found = await asyncio.gather(*(each.whole() for each in streams))
            assert [tokens for [tokens] in found] == expected
            await knows(client, 2)
            [last] = await asyncio.gather(client.generate(many[0], GREEDY, options))
            assert tuple(last.token_ids) == expected[0], "the spare one serves"
        assert await d.stop() == 0
        assert await spare.stop() == 0
    assert folders() <= before
