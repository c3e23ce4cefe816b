"""Chunks, and keys that a query chooses, from P to D with unequal blocks: transformers' tokens in
fp32, whether D fetches everything or a prefix lies there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton.protocol.sampling import SamplingParams
from tests.cluster import Plan, cluster
from tests.golden.sparse_models import save_sparse
from tests.system.references import prompts, transformers_tokens

NUM_TOKENS = 16
PROMPTS = prompts((3, 17, 40, 65, 10))
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("llama4", (4, 16)),
        ("glm 5", (8, 32)),
        pytest.param("deepseek v3.2", (16, 4), marks=pytest.mark.long),
    ],
)
async def test_handed_over(name: str, blocks: tuple[int, int], tmp_path: Path) -> None:
    path = save_sparse(tmp_path, name)
    expected = transformers_tokens(path, PROMPTS, NUM_TOKENS)
    common: dict[str, Any] = {"num_kv_blocks": 300, "max_num_batched_tokens": 24}
    p, d = ({**common, "block_size": size, "max_num_seqs": 8} for size in blocks)
    async with cluster(Plan(path, (p,), (d,))) as c:
        (prefill,), (decode,) = c.prefill, c.decode
        for _ in range(2):
            done = await c.generate(PROMPTS, GREEDY)
            await c.settle()
            assert [each.token_ids for each in done] == expected
            assert {each.retries for each in done} == {0}
        assert prefill.stats.num_chunked_prompts > 0
        assert prefill.stats.num_prefix_hit_tokens > 0  # of the second round
        assert decode.stats.num_prompt_tokens == 0
        assert decode.transfers.failures == {}
        arena = decode.engine.arena
        whole = sum(layer.token_bytes(arena.dtype) for layer in arena.layers)
        moved = decode.transfers.bytes_received["grpc"]
        if name == "llama4":  # chunks that were passed stay behind
            assert decode.stats.num_window_freed_blocks > 0
            assert moved < 1.6 * whole * sum(map(len, PROMPTS))
        else:  # index keys travel with the latents
            assert any(layer.v_dim for layer in arena.layers)
            assert moved >= whole * sum(len(prompt) - 1 for prompt in PROMPTS)
