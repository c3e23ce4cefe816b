"""Mixtures with latent attention from P to D, in fp32: transformers' tokens, whichever route each
node took, however large its blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton.protocol.sampling import SamplingParams
from tests.cluster import Plan, cluster
from tests.golden.latent_models import save_latent
from tests.system.references import prompts, transformers_tokens

NUM_TOKENS = 16
PROMPTS = prompts((3, 17, 40, 65, 1, 33))
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.mark.parametrize(
    ("name", "prefill", "decode"),
    [
        ("v3", {"block_size": 8}, {"block_size": 32, "model_impl": "transformers"}),
        pytest.param(
            "v2, groups", {"model_impl": "transformers"}, {"block_size": 8}, marks=pytest.mark.long
        ),
        pytest.param("v2, groups", {}, {}, marks=pytest.mark.long),
        pytest.param(
            "glm4 lite", {"quantization": "int8"}, {"quantization": "int8"}, marks=pytest.mark.long
        ),
    ],
)
async def test_latents_are_handed_over(
    name: str, prefill: dict[str, Any], decode: dict[str, Any], tmp_path: Path
) -> None:
    model = save_latent(tmp_path, name)
    async with cluster(Plan(model, (prefill,), (decode,))) as c:
        impls = [member.engine.info.model_impl for member in c.members]
        assert impls == [o.get("model_impl", "lean") for o in (prefill, decode)]
        rounds = [await c.generate(PROMPTS, GREEDY) for _ in range(2)]
        await c.settle()
        assert {each.retries for done in rounds for each in done} == {0}
        assert c.decode[0].transfers.failures == {}
        assert c.decode[0].stats.num_prompt_tokens == 0
        assert c.prefill[0].stats.num_prefix_hit_tokens > 0  # of the second round
        found = [[each.token_ids for each in done] for done in rounds]
    assert found[0] == found[1]
    if "quantization" not in prefill:
        assert found[0] == transformers_tokens(model, PROMPTS, NUM_TOKENS)
