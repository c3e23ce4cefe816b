"""Models of which some layers see a window and some see all, long enough that windows pass.

`transformers.generate` (or the same engine with one block for everything, where nothing can be
freed) says the tokens; counters prove that blocks were freed, found, moved, shared and drafted.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from baton.engine.core.pooling import PoolingJob
from baton.llm import LLM, GenerationOutput
from baton.protocol.sampling import SamplingParams
from tests.engine.driving import assert_all_free
from tests.golden.random_models import save_random
from tests.system.references import prompts, transformers_tokens

NUM_TOKENS = 30
PROMPTS = [list(prompt) for prompt in prompts((61, 40, 75))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
SPACIOUS: dict[str, Any] = {"block_size": 128, "num_kv_blocks": 64}
SLIDING, FULL = "sliding_attention", "full_attention"
# name -> (config, windows of its layer groups)
MODELS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "gemma2": (
        {
            "sliding_window": 9, "query_pre_attn_scalar": 16, "num_hidden_layers": 4,
            "tie_word_embeddings": False,
        },
        (0, 9),
    ),
    "gemma3_text": (
        {
            "sliding_window": 12, "query_pre_attn_scalar": 16, "num_hidden_layers": 6,
            "tie_word_embeddings": False,
            "layer_types": [SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL],
        },
        (0, 12, 12),
    ),
    "gpt_oss": (
        {
            "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 7,
            "num_hidden_layers": 4,
        },
        (0, 7),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Golden:
    """A checkpoint and what transformers makes of PROMPTS."""

    path: str
    windows: tuple[int, ...]
    tokens: list[tuple[int, ...]]


@pytest.fixture(
    scope="module",
    params=[
        "gemma3_text",  # two groups slide
        *(pytest.param(name, marks=pytest.mark.long) for name in ("gemma2", "gpt_oss")),
    ],
)
def golden(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Golden:
    config, windows = MODELS[request.param]
    path = save_random(tmp_path_factory.mktemp(request.param), request.param, **config)
    tokens = transformers_tokens(path, [tuple(prompt) for prompt in PROMPTS], NUM_TOKENS)
    assert len({token for output in tokens for token in output}) > 10  # decisive, not degenerate
    return Golden(str(path), windows, tokens)


def load(golden: Golden, **options: Any) -> LLM:
    chosen: dict[str, Any] = {
        "block_size": 4, "num_kv_blocks": 240, "check_invariants": True, "max_num_seqs": 8,
        "max_num_batched_tokens": 24, **options,
    }  # fmt: skip
    llm = LLM(golden.path, dtype="float32", **chosen)
    assert llm.engine.arena.groups.windows == golden.windows
    return llm


def spacious(golden: Golden, **options: Any) -> LLM:
    """One block holds any sequence whole: no hole, no hit, no copy of less than everything."""
    return LLM(golden.path, dtype="float32", **SPACIOUS, **options)


@functools.cache
def _of_spacious(
    path: str, prompts: tuple[tuple[int, ...], ...], asked: SamplingParams
) -> list[GenerationOutput]:
    llm = LLM(path, dtype="float32", **SPACIOUS)
    return llm.generate([list(prompt) for prompt in prompts], asked)


def outputs_of_spacious(
    golden: Golden, prompts: Sequence[Sequence[int]], asked: SamplingParams
) -> list[GenerationOutput]:
    """What such an engine says to several tests, computed once."""
    return _of_spacious(golden.path, tuple(map(tuple, prompts)), asked)


def tokens_of(llm: LLM, asked: SamplingParams = GREEDY) -> list[tuple[int, ...]]:
    return [tuple(out.token_ids) for out in llm.generate(PROMPTS, asked)]


def test_windows_pass_and_prefix_hits_need_only_what_is_seen(golden: Golden) -> None:
    llm = load(golden)
    stats = llm.engine.stats
    assert tokens_of(llm) == golden.tokens
    assert stats.num_chunked_prompts > 0
    assert stats.num_window_freed_blocks > 3 * 15
    assert stats.num_prefix_hit_tokens == 0
    assert tokens_of(llm) == golden.tokens
    assert stats.num_prefix_hit_tokens >= sum(len(prompt) // 4 * 4 - 4 for prompt in PROMPTS)
    assert_all_free(llm.engine)
    # Conversations go on: hits reach into what was generated.
    longer = [[*prompt, *out[:20]] for prompt, out in zip(PROMPTS, golden.tokens, strict=True)]
    before = stats.num_prefix_hit_tokens
    done = [tuple(out.token_ids) for out in llm.generate(longer, GREEDY)]
    rest = [tokens[20:] for tokens in golden.tokens]
    assert [tokens[: NUM_TOKENS - 20] for tokens in done] == rest
    assert stats.num_prefix_hit_tokens - before > sum(map(len, longer)) - 3 * 12
    assert_all_free(llm.engine)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preempted_requests_come_back(golden: Golden, mode: Any) -> None:
    # Each needs 22 blocks of the full layers at its end: four do not fit, any one computed anew
    # does.
    short = [prompt[:8] for prompt in [*PROMPTS, PROMPTS[0][9:]]]
    asked = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
    llm = load(golden, num_kv_blocks=22 * len(golden.windows) + 4, preemption_mode=mode)
    stats = llm.engine.stats
    assert llm.generate(short, asked) == outputs_of_spacious(golden, short, asked)
    assert stats.num_preemptions > 0
    assert (stats.num_swap_ins > 0) == (mode == "swap")
    assert stats.num_window_freed_blocks > 0
    assert_all_free(llm.engine)


def test_samples_and_beams_share_what_they_see(golden: Golden) -> None:
    roomy = spacious(golden)
    for asked in (
        SamplingParams(seed=5, n=3, max_tokens=NUM_TOKENS, ignore_eos=True),
        SamplingParams(temperature=0.0, beam_width=3, n=2, max_tokens=NUM_TOKENS),
    ):
        llm = load(golden)
        assert llm.generate(PROMPTS, asked) == roomy.generate(PROMPTS, asked)
        stats = llm.engine.stats
        assert stats.num_forks >= 6
        assert stats.num_copied_blocks > 0
        assert stats.num_window_freed_blocks > 0
        assert_all_free(llm.engine)
    assert roomy.engine.stats.num_window_freed_blocks == 0


@pytest.mark.parametrize("method", ["ngram", "draft"])
def test_drafts_change_nothing(golden: Golden, method: Any) -> None:
    model = golden.path if method == "draft" else None
    llm = load(
        golden, speculative_method=method, speculative_model=model, max_num_batched_tokens=200
    )
    stats = llm.engine.stats
    asked = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS * 2, ignore_eos=True)
    done = tokens_of(llm, asked)
    assert [tokens[:NUM_TOKENS] for tokens in done] == golden.tokens
    expected = outputs_of_spacious(golden, PROMPTS, asked)
    assert done == [tuple(out.token_ids) for out in expected]
    assert stats.num_drafted_tokens > 0
    assert stats.num_accepted_tokens > 0 or method == "ngram"
    assert stats.num_window_freed_blocks > 0
    assert_all_free(llm.engine)


def test_rounded_kv_keeps_its_scales_by_group(golden: Golden) -> None:
    llm = load(golden, kv_cache_dtype="int8")
    expected = tokens_of(spacious(golden, kv_cache_dtype="int8"))
    assert tokens_of(llm) == expected
    assert llm.engine.stats.num_window_freed_blocks > 0
    assert tokens_of(llm) == expected
    assert llm.engine.stats.num_prefix_hit_tokens > 0
    assert_all_free(llm.engine)


def test_pooling_gives_back_what_it_has_passed(golden: Golden) -> None:
    llm, roomy = load(golden), spacious(golden)
    vectors = [
        PoolingJob(each.engine, each.engine.pooler, PROMPTS, "mean")
        for each in (llm, roomy)
        if each.engine.pooler is not None
    ]
    job = vectors[0]
    used: list[int] = []
    while not job.done:
        assert job.step()
        llm.engine.check()
        used.append(llm.engine.pool.num_used)
    whole = sum(-(-len(prompt) // 4) for prompt in PROMPTS) * len(golden.windows)
    assert max(used) < whole
    assert (job.vectors() - vectors[1].run()).abs().max() < 1e-5
    assert_all_free(llm.engine)


def test_deterministic_attention_reads_tables_with_holes(golden: Golden) -> None:
    options: dict[str, Any] = {"deterministic": True}
    llm, roomy = load(golden, **options), spacious(golden, **options)
    assert tokens_of(llm) == tokens_of(roomy)
    assert llm.engine.stats.num_window_freed_blocks > 0
