"""A draft head on prefill and decode nodes: the decode node verifies drafts in its first step.

No token differs from those of one engine without drafts. Behind a Llama, and behind a Qwen3.5 or
Qwen3-Next, whose recurrent states are handed over too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.llm import LLM
from baton.protocol.sampling import GuidedDecoding, SamplingParams
from tests.cluster import Plan, cluster
from tests.engine.tensor_parallel_ranks import ranks_as_threads
from tests.golden import hybrid_heads
from tests.golden.draft_models import add_mtp, make_bigram, save_eagle3
from tests.golden.hybrid_models import save_hybrid
from tests.system.references import one_engine_tokens, prompts
from tests.system.test_failover import die
from tests.system.test_migration import Stream, move_all
from tests.tiny_models import make_tiny_model

MTP: dict[str, Any] = {"speculative_method": "mtp", "block_size": 32}
TAPS: dict[str, Any] = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
PROMPTS = prompts((3, 17, 40, 65), seed=3)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.8, seed=4)
KINDS = ("llama", "hybrid")


@pytest.fixture(scope="module", params=KINDS)
def perfect(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without context, with a head that is always right."""
    path = tmp_path_factory.mktemp("bigram")
    if request.param == "llama":
        return make_bigram(add_mtp(make_tiny_model("llama", path)))
    return hybrid_heads.make_bigram(
        hybrid_heads.add_head(save_hybrid(path, "qwen3.5", eos_token_id=2))
    )


@pytest.fixture(scope="module", params=KINDS)
def random_head(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("random")
    if request.param == "llama":
        return add_mtp(make_tiny_model("llama", path))
    return hybrid_heads.add_head(save_hybrid(path, "qwen3 next"))


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
async def test_the_decode_node_drafts_from_its_first_step(
    perfect: Path, params: SamplingParams
) -> None:
    expected = one_engine_tokens(perfect, PROMPTS, params)
    async with cluster(Plan(perfect, (MTP,), (MTP,))) as c:
        done = await c.generate(PROMPTS, params)
        decode = c.decode[0].stats
        assert [each.token_ids for each in done] == expected
        # The prompts leave room for four drafts in their last blocks, and all are right.
        assert decode.num_first_step_drafts == 4 * len(PROMPTS)
        assert decode.num_prompt_tokens == 0
        assert decode.acceptance_rate == 1.0
        assert c.prefill[0].stats.num_drafted_tokens == 0  # it verifies none
        await c.settle()


@pytest.mark.parametrize("method", ["mtp", "eagle3"])
async def test_a_random_head_changes_no_token(
    random_head: Path, method: str, tmp_path: Path
) -> None:
    expected = one_engine_tokens(random_head, PROMPTS, SAMPLED)
    head = dict(MTP)
    if method == "eagle3":
        llama = make_tiny_model("llama", tmp_path / "llama")
        path = save_eagle3(tmp_path / "head", llama, 200, **TAPS)
        head |= {"speculative_method": method, "speculative_model": str(path)}
    small = {**head, "block_size": 8, "max_num_batched_tokens": 16, "max_num_seqs": 8}
    small |= {"num_state_checkpoints": 8, "state_checkpoint_spacing": 8}
    async with cluster(Plan(random_head, (small,), (head,))) as c:
        for _ in range(2):  # prefix hits, and their head's KV, the second time
            done = await c.generate(PROMPTS, SAMPLED)
            assert [each.token_ids for each in done] == expected
        assert c.decode[0].stats.num_first_step_drafts > 0
        assert c.prefill[0].stats.num_prefix_hit_tokens > 0
        await c.settle()


async def test_several_answers_and_grammars(perfect: Path) -> None:
    several = replace(SAMPLED, n=3)
    guided = replace(GREEDY, guided=GuidedDecoding("regex", "[0-9a-z]{2,30}"), ignore_eos=False)
    async with cluster(Plan(perfect)) as c:
        plain = [await c.client.generate(PROMPTS[2], each) for each in (several, guided)]
    async with cluster(Plan(perfect, (MTP,), (MTP,))) as c:
        found = [await c.client.generate(PROMPTS[2], each) for each in (several, guided)]
        await c.settle()
    assert [each.token_ids for each in found] == [each.token_ids for each in plain]


async def test_drafts_move_with_a_request(perfect: Path) -> None:
    params = replace(SAMPLED, max_tokens=150)
    async with cluster(Plan(perfect, (MTP,), (MTP, MTP))) as c:
        streams = [Stream(c.client, prompt, params) for prompt in PROMPTS]
        c.pace(streams, lambda: [len(s.tokens) for s in streams if not s.task.done()])
        for stream in streams:
            await stream.at_least(9)
        assert await move_all(c) == [True] * len(PROMPTS)
        assert [await stream.whole() for stream in streams] == one_engine_tokens(
            perfect, PROMPTS, params
        )
        assert sum(member.stats.acceptance_rate for member in c.decode) > 1.9
        await c.settle()


async def test_adopted_pages_hold_the_head_s_kv(perfect: Path, tmp_path: Path) -> None:
    """The decode node reads the prefill node's pages where they lie, those of the head, too."""
    params = replace(SAMPLED, max_tokens=30)
    expected = one_engine_tokens(perfect, PROMPTS, params)
    small = {**MTP, "block_size": 8}
    async with cluster(Plan(perfect, (small,), (small,), shared=tmp_path)) as c:
        done = await c.generate(PROMPTS, params)
        assert [each.token_ids for each in done] == expected
        decode = c.decode[0].stats
        assert decode.num_adopted_blocks == sum(len(prompt) // 8 for prompt in PROMPTS)
        assert decode.num_first_step_drafts > 0
        assert decode.acceptance_rate == 1.0
        await c.settle()


async def test_drafts_after_a_failover(perfect: Path) -> None:
    """A decode node dies: the others compute the KV again, the head's as well."""
    params = replace(SAMPLED, max_tokens=150)
    async with cluster(Plan(perfect, (MTP,), (MTP, MTP))) as c:
        streams = [Stream(c.client, prompt, params) for prompt in PROMPTS]
        c.pace(streams, lambda: [len(s.tokens) for s in streams if not s.task.done()])
        for stream in streams:
            await stream.at_least(9)
        await die(max(c.decode, key=lambda member: member.engine.scheduler.num_running))
        found = [await stream.whole() for stream in streams]
        assert found == one_engine_tokens(perfect, PROMPTS, params)
        assert max(stream.retries for stream in streams) > 0
        assert min(member.stats.acceptance_rate for member in c.decode) > 0.9
        await c.settle()


@pytest.mark.parametrize(("p_size", "d_size"), [(1, 2), (2, 1)])
async def test_nodes_of_unequal_tensor_parallel_sizes(
    perfect: Path, p_size: int, d_size: int
) -> None:
    """The head's KV is cut and joined as that of the layers before it."""
    expected = one_engine_tokens(perfect, PROMPTS, SAMPLED)
    sizes = [{**MTP, "tensor_parallel_size": size} for size in (p_size, d_size)]
    with ranks_as_threads():
        async with cluster(Plan(perfect, sizes[:1], sizes[1:], lanes=("stream",))) as c:
            done = await c.generate(PROMPTS, SAMPLED)
            assert [each.token_ids for each in done] == expected
            decode = c.decode[0].stats
            assert decode.num_first_step_drafts == 4 * len(PROMPTS)
            assert decode.acceptance_rate == 1.0
            assert decode.num_prompt_tokens == 0
            await c.settle()


async def test_deterministic_nodes_change_no_bit(tmp_path: Path) -> None:
    """In bfloat16, also when a decode node dies: tokens and log probabilities are those of each
    prompt alone on one engine without a head."""
    path = add_mtp(make_tiny_model("llama", tmp_path))
    common: dict[str, Any] = {"dtype": "bfloat16", "deterministic": True}
    params = replace(SAMPLED, max_tokens=60, logprobs=2)
    alone = LLM(str(path), **common, num_kv_blocks=16, enable_prefix_caching=False)
    expected = [alone.generate([list(prompt)], params)[0].outputs[0] for prompt in PROMPTS]
    node = {**common, **MTP}
    small = {**node, "block_size": 8, "max_num_batched_tokens": 16, "max_num_seqs": 8}
    async with cluster(Plan(path, (small,), (node, node))) as c:
        streams = [Stream(c.client, prompt, params) for prompt in PROMPTS]
        c.pace(streams, lambda: [len(s.tokens) for s in streams if not s.task.done()])
        for stream in streams:
            await stream.at_least(9)
        await die(max(c.decode, key=lambda member: member.engine.scheduler.num_running))
        assert [await stream.whole() for stream in streams] == [e.token_ids for e in expected]
        assert max(stream.retries for stream in streams) > 0
        done = await c.generate(PROMPTS, params)  # behind prefix hits
        assert [each.token_ids for each in done] == [each.token_ids for each in expected]
        assert [each.logprobs for each in done] == [each.logprobs for each in expected]
        assert sum(member.stats.num_first_step_drafts for member in c.decode) > 0
        assert c.prefill[0].stats.num_prefix_hit_tokens > 0
        await c.settle()
