"""Every model with recurrent state or sparse attention on two prefill and two decode nodes with
blocks of other sizes: transformers' tokens, with counters that prove what happened on the way.

One cluster per model, in one process: prompts in chunks, prefixes that are cached (with a
checkpoint of the state), four samples of one prompt, requests that move in mid-stream. Then one per
decode node: preemption (one swaps, the other computes again). tests/system/test_state_models.py
kills nodes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.llm import LLM
from baton.protocol.sampling import SamplingParams
from tests.cluster import Cluster, Member, Plan, cluster
from tests.golden.random_models import save_random
from tests.golden.sparse_models import SPARSE_MODELS, save_sparse
from tests.golden.stateful_models import STATEFUL
from tests.system.references import Tokens, prompts, transformers_tokens
from tests.system.test_state_handover import Stream, assert_handed_over, settled
from tests.waiting import WAIT_S

EVERY = (*STATEFUL, *SPARSE_MODELS)
PROMPTS = prompts((3, 17, 40, 65, 1, 90), seed=2)
LONGER = [(*prompt, *PROMPTS[0]) for prompt in PROMPTS[3:]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
LONG = replace(GREEDY, max_tokens=70)  # so that requests leave no room for each other
SAMPLED = replace(GREEDY, temperature=0.8, n=4, seed=5, max_tokens=14)
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_num_batched_tokens": 32, "max_num_seqs": 8,
    "state_checkpoint_spacing": 1, "num_state_checkpoints": 8,
}  # fmt: skip
ROOM = 256  # tokens of KV of a decode node


def saved(name: str, path: Path) -> Path:
    if name in SPARSE_MODELS:
        return save_sparse(path, name)
    return save_random(path, name, **STATEFUL[name])


def plan_of(name: str, model: Path) -> Plan:
    groups = 2 if name.startswith("llama4") else 1  # layers with and without a window
    decode = [
        {
            **OPTIONS,
            "block_size": size,
            "num_kv_blocks": groups * ROOM // size,
            "preemption_mode": mode,
        }
        for size, mode in ((8, "swap"), (32, "recompute"))
    ]
    # Room for the exports of twelve prompts.
    prefill = {**OPTIONS, "max_num_seqs": 16, "block_size": 16, "num_kv_blocks": groups * 64}
    return Plan(model, (prefill, prefill), decode, lanes=("stream",))


def total(members: Sequence[Member], counter: Callable[[Any], int]) -> int:
    return sum(counter(member.stats) for member in members)


async def greedy(c: Cluster, asked: Sequence[Tokens], params: SamplingParams) -> list[Tokens]:
    return [each.token_ids for each in await c.generate(asked, params)]


@pytest.mark.soak
@pytest.mark.parametrize("name", EVERY)
async def test_on_two_prefill_and_two_decode_nodes(name: str, tmp_path: Path) -> None:
    model = saved(name, tmp_path / "m")
    expected = transformers_tokens(model, PROMPTS, 70)
    longer = transformers_tokens(model, LONGER, 24)
    sampled = four_samples(model)
    plan = plan_of(name, model)
    async with cluster(plan) as c:
        # In chunks, then handed over: once each.
        assert await greedy(c, PROMPTS, GREEDY) == [tokens[:24] for tokens in expected]
        await settled(c)
        if name in STATEFUL:
            assert_handed_over(c, len(PROMPTS))
        assert total(c.prefill, lambda stats: stats.num_prompt_tokens) == sum(map(len, PROMPTS))
        assert total(c.prefill, lambda stats: stats.num_chunked_prompts) >= 3
        assert total(c.decode, lambda stats: stats.num_prompt_tokens) == 0

        # Prompts that begin as earlier ones.
        assert await greedy(c, LONGER, GREEDY) == longer
        if name in STATEFUL:
            assert total(c.prefill, lambda stats: stats.num_checkpoint_hits) > 0
        assert total(c.prefill, lambda stats: stats.num_prefix_hit_tokens) > 0

        # Four samples of what was handed over once.
        found = await c.generate(PROMPTS[:2], SAMPLED)
        assert [[e.token_ids, *(o.token_ids for o in e.others)] for e in found] == sampled
        assert total(c.decode, lambda stats: stats.num_forks) >= 6

        await moved(c, expected)
        await settled(c)
    for decode in plan.decode:
        async with cluster(replace(plan, decode=(decode,))) as c:
            await preempted(c, expected, decode["preemption_mode"])


def four_samples(model: Path) -> list[list[Tokens]]:
    """Of each of two prompts, from one engine."""
    llm = LLM(model=str(model), num_kv_blocks=128, threads=1, **OPTIONS)
    done = llm.generate([list(prompt) for prompt in PROMPTS[:2]], SAMPLED)
    return [[tuple(sample.token_ids) for sample in each.outputs] for each in done]


async def preempted(c: Cluster, expected: Sequence[Tokens], mode: str) -> None:
    """Twelve requests that do not fit."""
    go_on = c.hold_after(0)  # until all are there
    streams = [Stream(c.client, prompt, LONG) for prompt in (*PROMPTS, *PROMPTS)]
    for stream in streams:
        await stream.at_least(1)
    go_on.set()
    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(*(stream.task for stream in streams))
    assert [tuple(stream.tokens) for stream in streams] == [*expected, *expected]
    (decode,) = c.decode
    assert decode.stats.num_preemptions > 0
    assert (decode.stats.num_swap_ins > 0) == (mode == "swap")


async def moved(c: Cluster, expected: Sequence[Tokens]) -> None:
    """To the other decode node and back again, in the middle of their streams."""
    streams = [Stream(c.client, prompt, LONG) for prompt in PROMPTS[:2]]
    c.pace(streams, lambda: [len(s.tokens) for s in streams if not s.task.done()])
    dispatcher = c.router.services.dispatcher
    for position in (5, 30):
        for stream in streams:
            await stream.at_least(position)
        under_way = [candidate.request_id for candidate in dispatcher.candidates()]
        done = await asyncio.gather(*(dispatcher.migrate(each) for each in under_way))
        assert done == [True] * len(streams)
    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(*(stream.task for stream in streams))
    assert [tuple(stream.tokens) for stream in streams] == expected[:2]
    assert total(c.decode, lambda stats: stats.num_handed_on) == 2 * len(streams)
