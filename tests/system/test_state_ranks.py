"""Prefill and decode nodes of unequal tensor parallel sizes, of models with recurrent state: the
tokens of transformers, by counters handed over once. Ranks are threads."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.protocol.sampling import SamplingParams
from tests.cluster import Cluster, Plan, cluster
from tests.engine.tensor_parallel_ranks import ranks_as_threads
from tests.golden.hybrid_models import RANKED, save_hybrid
from tests.golden.random_models import save_random
from tests.golden.stateful_models import STATEFUL
from tests.system.references import prompts, transformers_tokens
from tests.system.test_state_handover import (
    GREEDY,
    NUM_TOKENS,
    D,
    P,
    Stream,
    alone,
    assert_handed_over,
    settled,
    state_bytes,
)
from tests.waiting import WAIT_S

KINDS = ("qwen3 next", "qwen3.5", "qwen3.5 moe")
UNIVERSAL = tuple(name for name in STATEFUL if not name.startswith("qwen3"))
PROMPTS = prompts((3, 17, 40, 65, 1), seed=2)
SIZES = (1, 2, 4)
# What the default run tries: sizes that only one side's ranks cut, and two that both cut.
QUICK = {
    ("qwen3 next", 2, 1), ("qwen3 next", 1, 2), ("qwen3.5", 2, 1), ("qwen3.5", 2, 4),
    ("qwen3.5 moe", 1, 2), ("zamba2", 1, 2), ("falcon_h1", 2, 1),
}  # fmt: skip
PAIRS = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.soak)
    for case in (
        *itertools.product(KINDS, SIZES, SIZES),
        *((name, *sizes) for name in UNIVERSAL for sizes in ((1, 2), (2, 1), (2, 2))),
    )
    if case[1:] != (1, 1)
]
UNEQUAL = [
    pytest.param(*case, marks=() if case[:2] == (2, 1) else pytest.mark.soak)
    for case in ((2, 1), (1, 4), (4, 2))
]


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    with ranks_as_threads():
        yield


def ranked(path: Path, name: str) -> Path:
    if name in STATEFUL:
        return save_random(path, name, **STATEFUL[name])
    return save_hybrid(path, name, **RANKED)


def of_ranks(size: int, options: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**options, "tensor_parallel_size": size, **more}


def assert_ranks(c: Cluster, *sizes: int) -> None:
    """As many ranks run as were asked for."""
    for member, size in zip(c.members, sizes, strict=True):
        ranks = member.engine.ranks
        assert (0 if ranks is None else len(ranks.processes)) == size - 1


@pytest.mark.parametrize(("name", "p_size", "d_size"), PAIRS)
async def test_any_two_sizes(name: str, p_size: int, d_size: int, tmp_path: Path) -> None:
    """Prompts in chunks; blocks of 16 tokens on P and of 8 on D."""
    model = ranked(tmp_path / "m", name)
    expected = transformers_tokens(model, PROMPTS, NUM_TOKENS)
    plan = Plan(model, (of_ranks(p_size, P),), (of_ranks(d_size, D),), lanes=("stream",))
    async with cluster(plan) as c:
        done = await c.generate(PROMPTS, GREEDY)
        assert [each.token_ids for each in done] == expected
        await settled(c)
        assert_handed_over(c, len(PROMPTS))
        assert c.prefill[0].stats.num_chunked_prompts > 0
        assert_ranks(c, p_size, d_size)


@pytest.mark.parametrize("lane", ["grpc", "dist"])
async def test_each_lane_that_ranks_open(lane: str, tmp_path: Path) -> None:
    model = save_hybrid(tmp_path / "m", "qwen3.5", **RANKED)
    expected = transformers_tokens(model, PROMPTS, NUM_TOKENS)
    plan = Plan(model, (of_ranks(2, P),), (of_ranks(4, D),), lanes=(lane,))
    async with cluster(plan) as c:
        done = await c.generate(PROMPTS, GREEDY)
        assert [each.token_ids for each in done] == expected
        await settled(c)
        assert_handed_over(c, len(PROMPTS))
        assert list(c.decode[0].transfers.bytes_received) == [lane]


@pytest.mark.parametrize(("p_size", "d_size"), UNEQUAL)
async def test_a_prompt_from_a_checkpoint(p_size: int, d_size: int, tmp_path: Path) -> None:
    """All ranks of the prefill node go on from their part of an earlier prompt's state."""
    model = save_hybrid(tmp_path / "m", "qwen3 next", **RANKED)
    longer = [(*prompt, *PROMPTS[0]) for prompt in PROMPTS[2:4]]
    expected = transformers_tokens(model, longer, NUM_TOKENS)
    kept = {"state_checkpoint_spacing": 1, "num_state_checkpoints": 8}
    nodes = (of_ranks(p_size, P, **kept),), (of_ranks(d_size, D, **kept),)
    async with cluster(Plan(model, *nodes, lanes=("stream",))) as c:
        await c.generate(PROMPTS[2:4], GREEDY)
        done = await c.generate(longer, GREEDY)
        assert [each.token_ids for each in done] == expected
        await settled(c)
        assert_handed_over(c, 2 * len(longer))
        assert c.prefill[0].stats.num_checkpoint_hits > 0


@pytest.mark.parametrize(("p_size", "d_size"), UNEQUAL)
async def test_four_samples_fork_from_a_state_that_has_moved(
    p_size: int, d_size: int, tmp_path: Path
) -> None:
    model = save_hybrid(tmp_path / "m", "qwen3.5", **RANKED)
    params = replace(GREEDY, temperature=0.8, n=4, seed=5)
    expected = alone(model, params)[: len(PROMPTS)]
    plan = Plan(model, (of_ranks(p_size, P),), (of_ranks(d_size, D),), lanes=("stream",))
    async with cluster(plan) as c:
        done = await c.generate(PROMPTS, params)
        found = [[each.token_ids, *(other.token_ids for other in each.others)] for each in done]
        assert found == expected
        await settled(c)
        assert_handed_over(c, len(PROMPTS))
        assert c.decode[0].stats.num_forks == 3 * len(PROMPTS)


@pytest.mark.parametrize(("p_size", "d_size"), UNEQUAL)
@pytest.mark.parametrize("mode", ["swap", "recompute"])
async def test_preempted_after_the_hand_over(
    mode: str, p_size: int, d_size: int, tmp_path: Path
) -> None:
    model = save_hybrid(tmp_path / "m", "qwen3 next", **RANKED)
    expected = transformers_tokens(model, PROMPTS, 60)
    decode = of_ranks(d_size, D, num_kv_blocks=20, preemption_mode=mode)
    plan = Plan(model, (of_ranks(p_size, P),), (decode,), lanes=("stream",))
    async with cluster(plan) as c:
        done = await c.generate(PROMPTS, replace(GREEDY, max_tokens=60))
        assert [each.token_ids for each in done] == expected
        await settled(c)
        stats, layers = c.decode[0].stats, c.decode[0].engine.info.layers
        assert stats.num_preemptions > 0
        assert (stats.num_swap_ins > 0) == (mode == "swap")
        assert state_bytes(c) == len(PROMPTS) * sum(spec.state_bytes for spec in layers)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("qwen3.5", (1, 2, 1)),
        pytest.param("qwen3 next", (2, 1, 4), marks=pytest.mark.soak),
        pytest.param("qwen3.5 moe", (4, 2, 1), marks=pytest.mark.soak),
        pytest.param("nemotron_h", (2, 1, 2), marks=pytest.mark.soak),
        pytest.param("olmo_hybrid", (1, 2, 1), marks=pytest.mark.soak),
    ],
)
async def test_running_requests_move_between_sizes(
    name: str, sizes: tuple[int, int, int], tmp_path: Path
) -> None:
    """To the other decode node and back again, in the middle of their streams."""
    model = ranked(tmp_path / "m", name)
    count = 80
    expected = transformers_tokens(model, PROMPTS, count)
    prefill, *decode = sizes
    nodes = (of_ranks(prefill, P),), tuple(of_ranks(size, D) for size in decode)
    async with cluster(Plan(model, *nodes, lanes=("stream",))) as c:
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        streams = [Stream(c.client, prompt, params) for prompt in PROMPTS]
        c.pace(streams, lambda: [len(s.tokens) for s in streams if not s.task.done()])
        dispatcher = c.router.services.dispatcher
        for position in (5, 30):
            for stream in streams:
                await stream.at_least(position)
            found = [candidate.request_id for candidate in dispatcher.candidates()]
            moved = await asyncio.gather(*(dispatcher.migrate(each) for each in found))
            assert moved == [True] * len(PROMPTS)
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*(stream.task for stream in streams))
        assert [tuple(stream.tokens) for stream in streams] == expected
        await settled(c)
        assert_handed_over(c, 3 * len(PROMPTS))
        assert_ranks(c, *sizes)
