"""resume=exact and resume=fast, where they differ: bfloat16, whose kernels choose by shape.

Router, prefill and decode nodes in one process; nodes die as in test_failover.py. What a resumption
costs is shown by counters of the nodes.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from baton.client import AsyncClient, GenerateOptions
from baton.protocol.sampling import SamplingParams
from baton.runtime.failpoints import VARIABLE
from router.request import choice
from tests.cluster import Cluster, Plan, cluster
from tests.engine.test_replay import skip_unless_rows_stand_alone
from tests.system.processes import Processes, ServerProcess
from tests.system.references import Tokens, prompts
from tests.system.samples import Samples
from tests.system.test_failover import die
from tests.system.test_migration import move_all
from tests.tiny_models import make_wide_model
from tests.waiting import eventually

PARAMS: Final = SamplingParams(temperature=0.8, max_tokens=90, ignore_eos=True)
PROMPTS: Final = prompts([37, 130, 300, 90, 64, 33, 1, 200], seed=5)
BF16: Final[dict[str, Any]] = {"dtype": "bfloat16", "num_kv_blocks": 150, "max_num_seqs": 16}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough that bfloat16 streams part when shapes change."""
    return make_wide_model(tmp_path_factory.mktemp("model"), num_hidden_layers=6)


@pytest.fixture(scope="module")
def own_rows(model: Path) -> None:
    """Exact fixes the shape of each row's own work, not how many rows a product has."""
    skip_unless_rows_stand_alone(model)


def start(c: Cluster) -> list[Samples]:
    streams = [
        Samples(c.client, prompt, replace(PARAMS, seed=seed)) for seed, prompt in enumerate(PROMPTS)
    ]
    return c.pace(streams, lambda: [len(s.tokens[0]) for s in streams if not s.task.done()])


async def whole(streams: list[Samples]) -> list[Tokens]:
    return [(await stream.whole())[0] for stream in streams]


@pytest.mark.usefixtures("own_rows")
async def test_8_of_8_exact_streams_are_those_without_a_fault(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both decode nodes die, and the prefill node in between, at random positions.

    A stream that ends before the slowest has come to the first position needs no resumption. One
    that is prefilled again when the prefill node dies meets all three deaths."""
    monkeypatch.setattr(choice, "MAX_NODE_DEATHS", 4)
    draw = random.Random(11)
    at = sorted(draw.sample(range(3, 30), 3))
    plan = Plan(model, [BF16, BF16], [BF16, BF16], {"resume": "exact"})
    async with cluster(plan) as c:
        expected = await whole(start(c))
        streams = start(c)
        for count, victim in zip(at, (c.decode[0], c.prefill[0], c.decode[1]), strict=True):
            for stream in streams:
                await stream.at_least(count)
            await die(victim)
        assert await whole(streams) == expected, f"deaths at {at}"
        resumed = sum(stream.retries > 0 for stream in streams)
        assert resumed >= 1, "the slowest stream has lived through both deaths"
        replayed = sum(member.stats.num_replayed_tokens for member in c.decode)
        assert replayed >= resumed * (at[0] - 1)
        assert [member.stats.num_prefix_hit_tokens for member in c.members] == [0] * 4
        await c.settle()


@pytest.mark.usefixtures("own_rows")
async def test_exact_streams_move_with_their_kv(model: Path) -> None:
    """A migration replays nothing, and changes no bit either."""
    async with cluster(Plan(model, [BF16], [BF16, BF16], {"resume": "exact"})) as c:
        expected = await whole(start(c))
        streams = start(c)
        for count in (7, 30):
            for stream in streams:
                await stream.at_least(count)
            assert all(await move_all(c))
        assert await whole(streams) == expected
        assert c.router.services.dispatcher.migrations.done == 16
        assert sum(member.stats.num_replayed_tokens for member in c.decode) == 0
        await c.settle()


async def test_fast_streams_are_never_contradicted(model: Path) -> None:
    """They may go on otherwise than they would have: `Samples` checks that no position comes twice,
    the router that no token is said again with another value."""
    async with cluster(Plan(model, [BF16], [BF16, BF16])) as c:
        streams, before = start(c), list[Tokens]()
        for count, victim in zip((9, 40), c.decode, strict=True):
            for stream in streams:
                await stream.at_least(count)
            before = [tuple(stream.tokens[0]) for stream in streams]
            await die(victim)
        told = await whole(streams)
        assert [ids[: len(b)] for ids, b in zip(told, before, strict=True)] == before
        assert [len(ids) for ids in told] == [90] * 8
        assert sum(member.stats.num_replayed_tokens for member in c.decode) == 0
        await c.settle()


@pytest.mark.parametrize("resume", ["fast", "exact"])
async def test_what_a_resumption_costs_the_prefill_node(model: Path, resume: str) -> None:
    """Its prefix cache still has the prompt: a fast one computes what is behind the last whole
    block, an exact one all of the prompt and nothing of the output."""
    plan = Plan(model, [BF16], [BF16, BF16], {"resume": resume})
    prompt = PROMPTS[2]
    async with cluster(plan) as c:
        stats, go_on = c.prefill[0].stats, c.hold_after(60)
        stream = Samples(c.client, prompt, replace(PARAMS, seed=3))
        await stream.at_least(40)
        assert stats.num_prompt_tokens == len(prompt)
        victim = max(c.decode, key=lambda member: member.stats.num_generated_tokens)
        await die(victim)
        go_on.set()
        await stream.whole()
        assert stream.retries == 1
        again = stats.num_prompt_tokens - len(prompt)
        cached = len(prompt) // 32 * 32
        if resume == "exact":
            assert (again, stats.num_prefix_hit_tokens) == (len(prompt), 0)
        else:
            assert stats.num_prefix_hit_tokens == cached
            assert 40 <= again - (len(prompt) - cached) < 90, "the emitted ones"
        assert c.prefill[0].transfers.exports == 2
        await c.settle()


@pytest.mark.slow
@pytest.mark.long
async def test_kill_9_of_the_decode_nodes_changes_no_bit(model: Path, tmp_path: Path) -> None:
    """Real processes: one decode node after the other, and the prefill node is asked each time."""
    flags = ["--dtype", "bfloat16", "--num-kv-blocks", "100", "--max-num-seqs", "8"]
    params = replace(PARAMS, seed=11, max_tokens=600)
    slow = {VARIABLE: "d.step_n:*:delay=10"}  # else a stream may end before its node is killed
    async with Processes(model, tmp_path) as processes:
        p, *decode = await asyncio.gather(
            processes.start("prefill_node", "p", flags),
            *(processes.start("decode_node", f"d{i}", flags, slow) for i in range(3)),
        )
        router = await processes.router([p], decode)
        async with AsyncClient(router.ready["grpc_address"]) as client:
            await eventually(lambda: _connected(client, 4))
            exact = GenerateOptions(resume="exact", timeout_s=90)
            expected = await client.generate(PROMPTS[2], params, exact)
            assert expected.retries == 0
            stream = Samples(client, PROMPTS[2], params, exact)
            for count in (20, 60):
                await stream.at_least(count)
                address = await eventually(lambda: _busy(client, decode))
                victim = next(one for one in decode if one.address == address)
                decode.remove(victim)
                await victim.kill()
            assert await stream.whole() == [expected.token_ids]
            assert stream.retries == 2


async def _busy(client: AsyncClient, living: Sequence[ServerProcess]) -> str | None:
    """Which of these decode nodes runs something, once it has told so."""
    addresses = {one.address for one in living}
    nodes = (await client.server_info()).nodes
    return next((n.address for n in nodes if n.address in addresses and n.running > 0), None)


async def _connected(client: AsyncClient, count: int) -> bool:
    return len((await client.server_info()).nodes) == count
