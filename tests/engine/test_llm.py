"""LLM: prompts in any form, seeds, order, and the real engine underneath (a tiny checkpoint)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from baton.engine.state.interface import SequenceChunk
from baton.llm import LLM
from baton.protocol.errors import (
    ConfigError,
    ContextLengthExceeded,
    InvalidRequest,
    UnsupportedFeature,
)
from baton.protocol.request import FinishReason
from baton.protocol.sampling import GuidedDecoding, SamplingParams
from baton.text.tokenizer import Tokenizer
from tests.block_lists import held
from tests.engine.driving import PROMPT, assert_all_free
from tests.fakes import expected_output, fake_engine, token_logprob
from tests.tiny_models import make_tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def test_answers_come_in_the_order_of_the_prompts() -> None:
    engine, _ = fake_engine(max_num_seqs=2)
    llm = LLM("fake", engine=engine)
    prompts = [PROMPT[i:] for i in range(5)]
    params = [SamplingParams(seed=i, max_tokens=9 - i) for i in range(5)]
    outputs = llm.generate(prompts, params)
    for prompt, each, output in zip(prompts, params, outputs, strict=True):
        assert output.prompt_ids == prompt
        assert list(output.token_ids) == expected_output(prompt, each)
        assert output.text is None
    assert_all_free(engine)
    assert engine.take_block_events() == []


def test_a_seed_is_drawn_where_none_is_given() -> None:
    engine, _ = fake_engine()
    seeds = iter((41, 42))
    llm = LLM("fake", engine=engine, draw_seed=lambda: next(seeds))
    outputs = llm.generate([PROMPT, PROMPT], SamplingParams(max_tokens=5))
    for seed, output in zip((41, 42), outputs, strict=True):
        expected = expected_output(PROMPT, SamplingParams(max_tokens=5, seed=seed))
        assert list(output.token_ids) == expected


def test_max_tokens_is_cut_to_the_context() -> None:
    engine, _ = fake_engine(max_model_len=24)
    (output,) = LLM("fake", engine=engine).generate(
        [PROMPT], SamplingParams(max_tokens=500, seed=1, ignore_eos=True)
    )
    assert len(output.token_ids) == 24 - len(PROMPT)
    assert output.finish_reason is FinishReason.LENGTH


def test_a_bad_prompt_stops_all_before_anything_runs() -> None:
    engine, runner = fake_engine()
    llm = LLM("fake", engine=engine)
    with pytest.raises(ContextLengthExceeded):
        llm.generate([PROMPT, (5,) * 300])
    with pytest.raises(UnsupportedFeature):
        llm.generate([PROMPT], SamplingParams(guided=GuidedDecoding("regex", "a")))
    with pytest.raises(InvalidRequest, match="2 params for 1 prompts"):
        llm.generate([PROMPT], [GREEDY, GREEDY])
    assert runner.batches == []
    assert_all_free(engine)


def test_a_failing_step_leaves_nothing_behind() -> None:
    engine, runner = fake_engine()
    runner.fail_for.add("llm-1")
    llm = LLM("fake", engine=engine)
    with pytest.raises(RuntimeError):
        llm.generate([PROMPT, PROMPT])
    assert_all_free(engine)
    assert len(llm.generate([PROMPT])) == 1


def test_best_of_returns_the_likeliest_samples_best_first() -> None:
    engine, _ = fake_engine()
    params = SamplingParams(n=2, best_of=5, max_tokens=5, seed=3, ignore_eos=True)
    (output,) = LLM("fake", engine=engine).generate([PROMPT], params)
    sums: dict[int, float] = {}
    for sample in range(5):
        tokens = list(PROMPT)
        sums[sample] = 0.0
        for token in expected_output(PROMPT, params, sample=sample):
            sums[sample] += token_logprob(tokens, token).logprob
            tokens.append(token)
    best = sorted(sums, key=lambda sample: -sums[sample])[:2]
    assert [sample.index for sample in output.outputs] == best
    assert [sample.cumulative_logprob for sample in output.outputs] == [
        pytest.approx(sums[sample]) for sample in best
    ]
    assert output.token_ids == tuple(expected_output(PROMPT, params, sample=best[0]))


def test_prompt_logprobs_and_logprobs_are_handed_out() -> None:
    engine, _ = fake_engine()
    params = SamplingParams(logprobs=0, prompt_logprobs=0, max_tokens=3, seed=3, ignore_eos=True)
    (output,) = LLM("fake", engine=engine).generate([PROMPT], params)
    assert [told[0].token_id for told in output.prompt_logprobs] == list(PROMPT[1:])
    assert [told[0].token_id for told in output.outputs[0].logprobs] == list(output.token_ids)


# ---- with a model ----


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model("llama", tmp_path_factory.mktemp("llama")))


def test_without_params_the_models_own_recommendation_holds(tmp_path: Path) -> None:
    model = make_tiny_model("llama", tmp_path)
    file = model / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"do_sample": False}))
    llm = LLM(str(model), dtype="float32", block_size=4, num_kv_blocks=32)
    (silent,) = llm.generate([PROMPT])
    (greedy,) = llm.generate([PROMPT], SamplingParams(temperature=0.0))
    assert silent == greedy


def test_text_in_text_out_equals_token_ids_in(model: str) -> None:
    llm = LLM(model, dtype="float32", block_size=4, num_kv_blocks=32)
    text = llm.generate("hello there", GREEDY)[0]
    ids = Tokenizer.load(model).encode("hello there")
    assert text.prompt_ids == tuple(ids)
    assert text.text == Tokenizer.load(model).decode(text.token_ids)
    (other,) = llm.generate([ids], GREEDY)
    assert (other.token_ids, other.text) == (text.token_ids, None)
    assert llm.engine.stats.num_prefix_hit_tokens > 0
    assert_all_free(llm.engine)


def test_chunks_preemption_and_hits_change_no_token_of_a_real_model(model: str) -> None:
    prompts = [[7 + i, *range(20, 20 + 5 * i), 99] for i in range(1, 5)]
    params = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
    plain = LLM(model, dtype="float32", num_kv_blocks=64)
    wanted = [plain.generate([prompt], params)[0].token_ids for prompt in prompts]
    small = LLM(
        model, dtype="float32", block_size=4, num_kv_blocks=18, check_invariants=True,
        max_num_seqs=4, max_num_batched_tokens=6,
    )  # fmt: skip
    for _ in range(2):
        assert [output.token_ids for output in small.generate(prompts, params)] == wanted
    stats = small.engine.stats
    assert stats.num_preemptions > 0
    assert stats.num_chunked_prompts > 0
    assert stats.num_prefix_hit_tokens > 0
    assert_all_free(small.engine)


def test_sampling_depends_on_seed_and_position_alone(model: str) -> None:
    llm = LLM(model, dtype="float32", block_size=4, num_kv_blocks=64, max_num_seqs=3)
    params = [SamplingParams(seed=seed, max_tokens=8, ignore_eos=True) for seed in (1, 2, 1)]
    first, second, again = llm.generate([list(PROMPT)] * 3, params)
    assert first.token_ids == again.token_ids
    assert first.token_ids != second.token_ids
    (alone,) = llm.generate([list(PROMPT)], params[0])
    assert alone.token_ids == first.token_ids


def test_four_samples_are_four_draws_keyed_by_their_index(model: str) -> None:
    llm = LLM(model, dtype="float32", block_size=4, num_kv_blocks=64, check_invariants=True)
    params = SamplingParams(seed=7, max_tokens=9, ignore_eos=True, n=4)
    prompt = list(PROMPT)
    (output,) = llm.generate([prompt], params)
    assert [sample.index for sample in output.outputs] == [0, 1, 2, 3]
    assert len({sample.token_ids for sample in output.outputs}) == 4
    for width in (1, 2, 3):
        (fewer,) = llm.generate([prompt], replace(params, n=width))
        assert fewer.outputs == output.outputs[:width], "a sample depends on no other"
    # Each by plain decoding of its own: the draw is keyed by (seed, sample, position) alone.
    for sample in output.outputs:
        assert sample.token_ids == alone(llm, prompt, params, sample.index)
    assert llm.engine.stats.num_copied_blocks > 0
    assert_all_free(llm.engine)


def alone(llm: LLM, prompt: list[int], params: SamplingParams, index: int) -> tuple[int, ...]:
    """Tokens of one sample, each computed by a forward of the whole text through the runner."""
    pool, runner = llm.engine.pool, llm.engine.steps.runner
    tokens = list(prompt)
    blocks = pool.allocate(pool.blocks_for(len(prompt) + params.max_tokens))
    assert blocks is not None
    for position in range(params.max_tokens):
        chunk = SequenceChunk(
            "alone", list(tokens), 0, held(blocks), params, position, index,
            history=list(tokens), num_prompt=len(prompt),
        )  # fmt: skip
        (result,) = runner.run([chunk])
        assert result.sampled is not None
        tokens.extend(result.sampled.token_ids)
    pool.unref(blocks)
    return tuple(tokens[len(prompt) :])


@pytest.mark.parametrize("mode", ["swap", "recompute", "auto"])
def test_preemption_changes_no_token_of_a_real_model(model: str, mode: str) -> None:
    prompts = [[7 + i, *range(20, 24 + 3 * i), 99] for i in range(5)]
    params = [SamplingParams(seed=i, max_tokens=16, ignore_eos=True, n=1 + i % 3) for i in range(5)]
    plain = LLM(model, dtype="float32", block_size=4, num_kv_blocks=256)
    wanted = plain.generate(prompts, params)
    assert plain.engine.stats.num_preemptions == 0
    small = LLM(
        model, dtype="float32", block_size=4, num_kv_blocks=31, check_invariants=True,
        preemption_mode=mode,
    )  # fmt: skip
    assert small.generate(prompts, params) == wanted
    stats = small.engine.stats
    assert stats.num_preemptions > 0
    assert stats.num_swap_ins == stats.num_swap_outs
    assert (stats.num_swap_ins > 0) == (mode != "recompute"), "auto swaps first, to measure it"
    assert (stats.copy_bytes_per_s > 0) == (mode != "recompute")
    assert_all_free(small.engine)


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0])
def test_speculation_changes_no_token_of_a_real_model(model: str, temperature: float) -> None:
    prompts = [[7, 8, 9, 10] * (2 + i) + [40 + i] for i in range(4)]
    params = [
        SamplingParams(
            seed=i, temperature=temperature, max_tokens=24, ignore_eos=i % 2 == 0, n=1 + i % 2,
            top_k=8 * (i % 2),
        )
        for i in range(4)
    ]  # fmt: skip
    wanted = LLM(model, dtype="float32", block_size=4, num_kv_blocks=128).generate(prompts, params)
    fast = LLM(
        model, dtype="float32", block_size=4, num_kv_blocks=60, check_invariants=True,
        speculative_method="ngram", num_speculative_tokens=3,
    )  # fmt: skip
    assert fast.generate(prompts, params) == wanted
    if temperature == 0.0:  # it falls into loops, which prompt lookup sees
        assert fast.engine.stats.num_accepted_tokens > 0
    assert_all_free(fast.engine)


def test_the_model_drafts_for_itself_with_the_same_noise(model: str) -> None:
    params = SamplingParams(seed=5, max_tokens=20, ignore_eos=True, n=2)
    wanted = LLM(model, dtype="float32", num_kv_blocks=64).generate([PROMPT], params)
    fast = LLM(
        model, dtype="float32", num_kv_blocks=64, check_invariants=True,
        speculative_method="draft", speculative_model=model,
    )  # fmt: skip
    assert fast.generate([PROMPT], params) == wanted
    assert fast.engine.stats.acceptance_rate == 1.0, "same model, same noise"
    assert fast.engine.stats.num_steps < 12


def test_a_window_of_all_layers_frees_blocks_and_changes_no_token(tmp_path: Path) -> None:
    path = str(make_tiny_model("mistral", tmp_path / "mistral"))  # all layers see 9 tokens
    params = SamplingParams(seed=5, max_tokens=40, ignore_eos=True, n=2)
    prompts = [list(range(30, 67)), list(range(30, 60))]
    whole = LLM(path, dtype="float32", block_size=128, num_kv_blocks=16)
    wanted = whole.generate(prompts, params)
    assert whole.engine.stats.num_window_freed_blocks == 0
    llm = LLM(
        path, dtype="float32", block_size=4, num_kv_blocks=100, check_invariants=True,
        max_num_seqs=8, max_num_batched_tokens=16,
    )  # fmt: skip
    assert llm.generate(prompts, params) == wanted
    assert llm.engine.stats.num_window_freed_blocks > 40
    assert llm.generate(prompts, params) == wanted, "prefix hits too"
    assert_all_free(llm.engine)


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        LLM(str(tmp_path / "nothing"))
