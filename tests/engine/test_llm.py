"""LLM: prompts in any form, seeds, order, and the real engine underneath (a tiny checkpoint)."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.errors import ConfigError, ContextLengthExceeded, InvalidRequest, UnsupportedFeature
from baton.llm import LLM
from baton.request import FinishReason
from baton.sampling import SamplingParams
from baton.tokenizer import Tokenizer
from tests.engine.driving import PROMPT, assert_all_free
from tests.fakes import expected_output, fake_engine
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
        llm.generate([PROMPT], SamplingParams(n=2))
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


# ---- with a model ----


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model("llama", tmp_path_factory.mktemp("llama")))


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


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        LLM(str(tmp_path / "nothing"))
