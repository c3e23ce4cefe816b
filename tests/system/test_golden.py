"""The great test, in fp32: router + P + D over gRPC == one engine in one process == transformers.

Each case proves from counters that what it is about has happened, and that no block is left behind.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from baton.llm import LLM
from baton.protocol.sampling import SamplingParams
from tests.cluster import Cluster, Plan, cluster
from tests.system.references import Tokens, one_engine_tokens, prompts, transformers_tokens
from tests.tiny_models import make_tiny_model

NUM_TOKENS = 20
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
PROMPTS = prompts((3, 17, 40, 65, 1, 33))
SAMPLED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.8, "top_p": 0.9, "seed": 7},
    {"temperature": 1.3, "top_k": 12, "seed": 2**63 + 5},
    {"temperature": 1.0, "min_p": 0.02, "seed": 0},
    {"temperature": 1.0, "seed": 3},
    {
        "temperature": 0.7, "seed": 4, "presence_penalty": 0.5, "frequency_penalty": 0.3,
        "repetition_penalty": 1.3, "logit_bias": ((40, 3.0), (41, -100.0)), "min_tokens": 5,
    },
)  # fmt: skip
ROUTES = [
    *itertools.product(("llama", "qwen2", "qwen3", "mistral"), ("lean", "transformers")),
    ("gpt2", "transformers"),
]
# What differs between families once each is equal to transformers: whether layers have windows, and
# whose code runs. The rest of them comes with the long tests.
UNLIKE = {("llama", "lean"), ("mistral", "lean"), ("gpt2", "transformers")}
FEW = [pytest.param(*route, marks=[pytest.mark.long] * (route not in UNLIKE)) for route in ROUTES]
SIZES = [(8, 32), (32, 8), (16, 128)]


@dataclass(frozen=True)
class Golden:
    """A model and what transformers makes of PROMPTS."""

    model: Path
    tokens: list[Tokens]


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Golden]:
    known: dict[str, Golden] = {}

    def of(kind: str) -> Golden:
        if kind not in known:
            model = tmp_path_factory.mktemp(kind)
            make_tiny_model(kind, model)
            known[kind] = Golden(model, transformers_tokens(model, PROMPTS, NUM_TOKENS))
        return known[kind]

    return of


async def run(c: Cluster, rounds: int = 1) -> list[list[Tokens]]:
    """PROMPTS, all at once, `rounds` times; then nothing may be left on any node."""
    found: list[list[Tokens]] = []
    for _ in range(rounds):
        done = await c.generate(PROMPTS, GREEDY)
        assert {generation.finish_reason for generation in done} == {"length"}
        assert {generation.retries for generation in done} == {0}
        found.append([generation.token_ids for generation in done])
    await c.settle()
    return found


def assert_handed_over(c: Cluster) -> None:
    """Every request was prefilled on P and decoded on D, and its KV moved between them."""
    prefilled = sum(member.stats.num_generated_tokens for member in c.prefill)
    decoded = sum(member.stats.num_generated_tokens for member in c.decode)
    assert prefilled > 0
    assert decoded == prefilled * (NUM_TOKENS - 1)
    assert sum(member.stats.num_prompt_tokens for member in c.decode) == 0
    assert sum(member.transfers.bytes_received["grpc"] for member in c.decode) > 0


@pytest.mark.parametrize(("kind", "impl"), ROUTES)
async def test_disaggregated_equals_one_engine_equals_transformers(
    golden: Callable[[str], Golden], kind: str, impl: str
) -> None:
    expected = golden(kind)
    assert (
        len({token for tokens in expected.tokens for token in tokens}) > 10
    )  # decisive, not stuck
    options = {"model_impl": impl}
    async with cluster(Plan(expected.model, [options], [options])) as c:
        assert {member.engine.info.model_impl for member in c.members} == {impl}
        assert await run(c) == [expected.tokens]
        assert_handed_over(c)
    assert one_engine_tokens(expected.model, PROMPTS, GREEDY, impl) == expected.tokens


@pytest.mark.parametrize(("kind", "impl"), FEW)
async def test_chunked_prefill_changes_no_token(
    golden: Callable[[str], Golden], kind: str, impl: str
) -> None:
    expected = golden(kind)
    chunked = {"model_impl": impl, "max_num_batched_tokens": 16, "max_num_seqs": 8}
    async with cluster(Plan(expected.model, [chunked], [{"model_impl": impl}])) as c:
        assert await run(c) == [expected.tokens]
        assert c.prefill[0].stats.num_chunked_prompts >= 3
        assert c.prefill[0].stats.num_prefill_chunks > len(PROMPTS)
        assert_handed_over(c)


@pytest.mark.parametrize(("kind", "impl"), FEW)
async def test_prefix_hits_on_both_sides_change_no_token(
    golden: Callable[[str], Golden], kind: str, impl: str
) -> None:
    expected = golden(kind)
    options = {"model_impl": impl, "block_size": 8}
    async with cluster(Plan(expected.model, [options], [options])) as c:
        assert await run(c) == [expected.tokens]
        moved = c.decode[0].transfers.bytes_received["grpc"]
        assert await run(c) == [expected.tokens]
        assert c.prefill[0].stats.num_prefix_hit_tokens >= 16 + 32 + 64 + 32
        # Mistral's window of 9 tokens begins within a block of the prompt of 40: that block came in
        # part only, so it answers nobody.
        known = 16 + 64 + 32 + (0 if kind == "mistral" else 32)
        assert c.decode[0].stats.num_prefix_hit_tokens >= known
        # The second time only what D lacked was sent.
        assert c.decode[0].transfers.bytes_received["grpc"] - moved < moved / 2
        assert_handed_over(c)


@pytest.mark.parametrize(("kind", "impl"), FEW)
async def test_preemption_by_recompute_changes_no_token(
    golden: Callable[[str], Golden], kind: str, impl: str
) -> None:
    expected = golden(kind)
    # The longest sequence takes 11 blocks of 8; all six together need 40. How many of them meet on
    # D is a matter of timing, so they come again until they have met.
    small = {
        "model_impl": impl,
        "block_size": 8,
        "num_kv_blocks": 14,
        "enable_prefix_caching": False,
        "preemption_mode": "recompute",
    }
    async with cluster(Plan(expected.model, [{"model_impl": impl}], [small])) as c:

        def met() -> int:
            stats = c.decode[0].stats
            # All of this Mistral's layers see 9 tokens: it gives blocks back instead.
            windowed = kind == "mistral"
            return stats.num_window_freed_blocks if windowed else stats.num_preemptions

        for _ in range(20):
            assert await run(c) == [expected.tokens]
            if met():
                break
        assert met() > 0
        assert c.decode[0].transfers.bytes_received["grpc"] > 0


@pytest.mark.parametrize(("kind", "impl"), FEW)
async def test_three_prefill_and_two_decode_nodes(
    golden: Callable[[str], Golden], kind: str, impl: str
) -> None:
    """Who gets which prompt is drawn among equals: they come again until each node had some."""
    expected = golden(kind)
    options = {"model_impl": impl, "enable_prefix_caching": False}
    async with cluster(Plan(expected.model, [options] * 3, [options] * 2)) as c:
        for _ in range(20):
            assert await run(c) == [expected.tokens]
            if all(member.stats.num_generated_tokens > 0 for member in c.members):
                break
        assert all(member.stats.num_generated_tokens > 0 for member in c.members)
        assert_handed_over(c)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("kind", "impl"), FEW)
async def test_different_block_sizes_on_prefill_and_decode(
    golden: Callable[[str], Golden], kind: str, impl: str, sizes: tuple[int, int]
) -> None:
    expected = golden(kind)
    prefill, decode = ({"model_impl": impl, "block_size": size} for size in sizes)
    async with cluster(Plan(expected.model, [prefill], [decode])) as c:
        assert tuple(member.engine.pool.block_size for member in c.members) == sizes
        assert await run(c) == [expected.tokens]
        assert_handed_over(c)


async def test_steps_planned_while_one_runs_change_no_token(
    golden: Callable[[str], Golden],
) -> None:
    """On D; P, which exports, plans none so."""
    expected = golden("llama")
    options = {"async_scheduling": True}
    async with cluster(Plan(expected.model, [options], [options])) as c:
        assert await run(c, rounds=2) == [expected.tokens] * 2
        assert c.decode[0].stats.num_steps_ahead > 0
        assert c.prefill[0].stats.num_steps_ahead == 0
        assert_handed_over(c)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
async def test_sampled_tokens_depend_on_the_seed_alone(
    golden: Callable[[str], Golden], kind: str
) -> None:
    model = golden(kind).model
    llm = LLM(model=str(model), num_kv_blocks=64, threads=1)
    async with cluster(Plan(model)) as c:
        for chosen in SAMPLED:
            params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **chosen)
            alone = llm.generate([list(prompt) for prompt in PROMPTS], params)
            together = await c.generate(PROMPTS, params)
            assert [each.token_ids for each in together] == [tuple(one.token_ids) for one in alone]
        await c.settle()


async def test_a_stop_token_ends_the_stream_on_either_node(golden: Callable[[str], Golden]) -> None:
    expected = golden("llama")
    first, later = expected.tokens[1][0], expected.tokens[1][6]
    async with cluster(Plan(expected.model)) as c:
        for stop, count in ((first, 1), (later, expected.tokens[1].index(later) + 1)):
            params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, stop_token_ids=(stop,))
            done = await c.client.generate(PROMPTS[1], params)
            assert done.finish_reason == "stop"
            assert done.token_ids == expected.tokens[1][:count]
        one = await c.client.generate(PROMPTS[1], SamplingParams(temperature=0.0, max_tokens=1))
        assert (one.token_ids, one.finish_reason) == (expected.tokens[1][:1], "length")
        await c.settle()
