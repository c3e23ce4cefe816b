"""Gemma 3 through router, P and D: its sliding layers free what they have passed, on every side.

Each layer group has block lists of its own, and with prefix hits those begin with holes: what P
never held is not asked for, what D will never see is not kept. Counters prove it; the tokens are
transformers' own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton.protocol.sampling import SamplingParams
from tests.cluster import Cluster, Plan, cluster
from tests.golden.random_models import save_random
from tests.system.references import Tokens, prompts, transformers_tokens

NUM_TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
PROMPTS = prompts((61, 40, 75, 5))
SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Tokens]]:
    path = save_random(
        tmp_path_factory.mktemp("gemma3"), "gemma3_text", sliding_window=12,
        query_pre_attn_scalar=16, num_hidden_layers=6, tie_word_embeddings=False,
        layer_types=[SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL],
    )  # fmt: skip
    tokens = transformers_tokens(path, PROMPTS, NUM_TOKENS)
    assert len({token for output in tokens for token in output}) > 10
    return path, tokens


async def run(c: Cluster, asked: list[Tokens]) -> list[Tokens]:
    done = await c.generate(asked, GREEDY)
    await c.settle()
    assert {generation.retries for generation in done} == {0}
    return [generation.token_ids for generation in done]


@pytest.mark.parametrize("sizes", [(4, 4), (4, 16), (8, 4)])
async def test_handed_over_with_holes(
    gemma: tuple[Path, list[Tokens]], sizes: tuple[int, int]
) -> None:
    path, tokens = gemma
    common: dict[str, Any] = {"num_kv_blocks": 300, "max_num_batched_tokens": 24}
    p, d = ({**common, "block_size": size, "max_num_seqs": 8} for size in sizes)
    async with cluster(Plan(path, [p], [d])) as c:
        (prefill,), (decode,) = c.prefill, c.decode
        assert decode.engine.arena.groups.windows == (0, 12, 12)
        assert await run(c, PROMPTS) == tokens
        assert prefill.stats.num_chunked_prompts > 0
        assert prefill.stats.num_prefix_hit_tokens == decode.stats.num_prefix_hit_tokens == 0
        freed = decode.stats.num_window_freed_blocks
        assert freed > 0
        moved = decode.transfers.bytes_received["grpc"]
        arena = decode.engine.arena
        whole = sum(spec.token_bytes(arena.dtype) for spec in arena.layers)
        assert moved < 0.8 * whole * sum(map(len, PROMPTS)), (
            "what slid out of a window stays behind"
        )
        # Both sides know the prompts now, as far as anybody will look at them again.
        assert await run(c, PROMPTS) == tokens
        assert prefill.stats.num_prefix_hit_tokens > 100
        assert decode.stats.num_prefix_hit_tokens > 90
        assert decode.transfers.bytes_received["grpc"] - moved < 0.7 * moved
        assert decode.stats.num_window_freed_blocks > freed
        # P has holes (its hits need no sliding layer's past) and D knows nothing of the answers.
        longer = [prompt + out[:12] for prompt, out in zip(PROMPTS, tokens, strict=True)]
        done = await run(c, longer)
        assert [out[: NUM_TOKENS - 12] for out in done] == [out[12:] for out in tokens]
        assert decode.stats.num_prompt_tokens == 0


async def test_a_fresh_decode_node_is_served_by_a_prefill_node_with_holes(
    gemma: tuple[Path, list[Tokens]],
) -> None:
    path, tokens = gemma
    common: dict[str, Any] = {"num_kv_blocks": 300, "block_size": 4, "max_num_seqs": 8}
    plan = Plan(path, [common], [common | {"enable_prefix_caching": False}])
    async with cluster(plan) as c:
        for _ in range(2):
            assert await run(c, PROMPTS) == tokens
        assert c.prefill[0].stats.num_prefix_hit_tokens > 100
        assert c.decode[0].stats.num_prefix_hit_tokens == 0


@pytest.mark.parametrize("mode", ["swap", "recompute"])
async def test_preempted_after_a_hand_over(gemma: tuple[Path, list[Tokens]], mode: str) -> None:
    """What was fetched is swapped without the blocks that a window's head left incomplete."""
    path, tokens = gemma
    roomy: dict[str, Any] = {"num_kv_blocks": 300, "block_size": 4, "max_num_seqs": 8}
    # Four requests take up to 20 blocks of the full layers; one alone 25 of each of three groups.
    small = roomy | {"num_kv_blocks": 76, "preemption_mode": mode}
    async with cluster(Plan(path, [roomy], [small])) as c:
        stats = c.decode[0].stats
        for _ in range(20):
            assert await run(c, PROMPTS * 2) == tokens * 2
            if stats.num_preemptions:
                break
        assert stats.num_preemptions > 0
        assert (stats.num_swap_ins > 0) == (mode == "swap")
        assert stats.num_window_freed_blocks > 0
