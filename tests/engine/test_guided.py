"""Guided requests in one engine: whatever else is asked and whatever happens to them, the output
matches; and nothing that must not change a token does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.engine.core.engine import Engine
from baton.engine.state.interface import Task
from baton.llm import LLM, GenerationOutput
from baton.protocol.errors import InvalidRequest, UnsupportedFeature
from baton.protocol.request import FinishReason, Request
from baton.protocol.sampling import GuidedDecoding, SamplingParams
from tests.engine.driving import assert_all_free, run, tokens_of
from tests.guided_cases import (
    CHOICES,
    GBNF,
    GBNF_REGEX,
    MAX_TOKENS,
    REGEXES,
    SCHEMAS,
    check_json,
    check_regex,
)
from tests.guided_sweep import sweep_engine
from tests.tiny_models import EOS_ID, make_tiny_model

PERSON = GuidedDecoding("json_schema", json.dumps(SCHEMAS["person"]))
PLATE = GuidedDecoding("regex", REGEXES[0])
SAMPLED = SamplingParams(temperature=1.0, max_tokens=MAX_TOKENS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    return make_tiny_model("llama", folder, max_position_embeddings=2048)


def load(model: Path, **options: Any) -> LLM:
    chosen = {"num_kv_blocks": 512, "block_size": 16, "threads": 1, "check_invariants": True}
    return LLM(str(model), **(chosen | options))


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return load(model)


@pytest.fixture(scope="module")
def undrafted(llm: LLM) -> list[list[GenerationOutput]]:
    """What it answers to everything that is asked with drafts too."""
    return ask_everything(llm)


def persons(llm: LLM, count: int = 8, **params: Any) -> list[GenerationOutput]:
    """Sampled persons with seeds from 0 on, all at once; every one valid."""
    asked = [replace(SAMPLED, guided=PERSON, seed=seed, **params) for seed in range(count)]
    outputs = llm.generate([f"prompt {seed}" for seed in range(count)], asked)
    for output in outputs:
        for sample in output.outputs:
            assert sample.finish_reason is FinishReason.STOP
            check_json(sample.text or "", SCHEMAS["person"])
    assert_all_free(llm.engine)
    return outputs


def test_outputs_of_a_random_model_are_valid(llm: LLM) -> None:
    found = dict(sweep_engine(llm, range(3)))
    assert {count for count, _ in found.values()} == {3}


def test_a_choice_and_a_grammar(llm: LLM) -> None:
    choice = GuidedDecoding("choice", json.dumps(CHOICES))
    params = [replace(SAMPLED, guided=choice, seed=seed) for seed in range(12)]
    texts = {output.text for output in llm.generate(["x"] * 12, params)}
    assert texts <= set(CHOICES)
    assert len(texts) > 1
    params = [replace(SAMPLED, guided=GuidedDecoding("ebnf", GBNF), seed=s) for s in range(6)]
    for output in llm.generate(["x"] * 6, params):
        check_regex(output.text or "", GBNF_REGEX)


def test_what_does_not_fit_ends_for_its_length(llm: LLM) -> None:
    params = replace(SAMPLED, guided=GuidedDecoding("json_object", ""), seed=0, max_tokens=9)
    (output,) = llm.generate(["x"], params)
    assert output.finish_reason is FinishReason.LENGTH
    assert len(output.token_ids) == 9
    assert (output.text or "").startswith("{")


def test_samples_best_of_and_beams(llm: LLM) -> None:
    outputs = persons(llm, 2, n=3)
    assert len({sample.text for output in outputs for sample in output.outputs}) == 6
    persons(llm, 2, n=2, best_of=4)
    persons(llm, 2, n=3, beam_width=3)
    beams = llm.generate(["x"], replace(SAMPLED, guided=PLATE, n=4, beam_width=4))[0].outputs
    for beam in beams:
        check_regex(beam.text or "", REGEXES[0])


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"top_k": 3, "top_p": 0.8, "min_p": 0.05},
        {"min_tokens": 900},
        {"ignore_eos": True},
        {"logit_bias": tuple((token, -100.0) for token in range(5, 200))},
        {"logit_bias": ((EOS_ID, 100.0),)},
        {"bad_words": tuple((token,) for token in range(5, 320))},
        {"repetition_penalty": 2.0, "frequency_penalty": 2.0, "presence_penalty": -2.0},
        {"logprobs": 3},
    ],
)
def test_other_parameters_choose_among_what_is_allowed(llm: LLM, params: dict[str, Any]) -> None:
    outputs = persons(llm, 2, **params)
    for output in outputs:
        assert output.token_ids[-1] == EOS_ID


def test_logprobs_are_the_models_own(llm: LLM) -> None:
    """Told of the logits before the mask: the same as without it."""
    guided = replace(SAMPLED, guided=PLATE, seed=1, logprobs=0, max_tokens=1)
    (output,) = llm.generate([[9, 10, 11]], guided)
    (told,) = output.outputs[0].logprobs
    free = replace(SAMPLED, seed=1, logprobs=0, max_tokens=1, temperature=0.0,
                   logit_bias=((told[0].token_id, 100.0),))  # fmt: skip
    (same,) = llm.generate([[9, 10, 11]], free)
    assert same.outputs[0].logprobs[0] == told


def test_unguided_batch_mates_are_not_masked(llm: LLM) -> None:
    free = replace(SAMPLED, seed=5, max_tokens=20)
    (alone,) = llm.generate(["y"], free)
    _, together, _ = llm.generate(
        ["x", "y", "z"], [replace(SAMPLED, guided=PLATE, seed=1), free,
                          replace(SAMPLED, guided=PERSON, seed=2)],
    )  # fmt: skip
    assert together.token_ids == alone.token_ids


# ---- what must not change a token ----


def ask_everything(llm: LLM) -> list[list[GenerationOutput]]:
    """Sampled, greedy, several samples, thoughts before the grammar begins."""
    thinking = [
        replace(SAMPLED, guided=replace(PLATE, starts_after="e"), seed=seed, max_tokens=60)
        for seed in range(3)
    ]
    return [
        persons(llm, 2),
        persons(llm, 1, temperature=0.0),
        persons(llm, 1, n=2),
        llm.generate(["x"] * 3, thinking),
    ]


@pytest.mark.parametrize(
    "method", ["ngram", "draft", pytest.param("another draft", marks=pytest.mark.long)]
)
def test_speculation_gives_the_same_tokens(
    model: Path, undrafted: list[list[GenerationOutput]], method: str, tmp_path: Path
) -> None:
    """No draft model knows of grammars: what it guesses is cut, and verified under the masks."""
    guess: dict[str, Any] = {"speculative_method": method}
    if method != "ngram":
        other = method == "another draft"
        wrong = make_tiny_model("llama", tmp_path, seed=7, max_position_embeddings=2048)
        folder = wrong if other else model
        guess = {"speculative_method": "draft", "speculative_model": str(folder)}
    guessing = load(model, **guess)
    assert ask_everything(guessing) == undrafted
    stats = guessing.engine.stats
    assert stats.num_drafted_tokens > 0
    # Another model guesses right now and then, where a grammar leaves little choice.
    assert 0 < stats.num_accepted_tokens <= stats.num_drafted_tokens


def test_drafts_that_the_grammar_forbids_are_not_even_tried(model: Path) -> None:
    """A loop in the prompt is guessed on and on; none of it is a plate."""
    guessing = load(model, speculative_method="ngram")
    guided = replace(SAMPLED, guided=GuidedDecoding("regex", "(AB){6}"), temperature=0.0)
    prompt = guessing.tokenizer.encode("ABxyABxyABxy" * 4)
    (output,) = guessing.generate([prompt], guided)
    assert guessing.tokenizer.decode(output.token_ids) == "AB" * 6
    stats = guessing.engine.stats
    assert stats.num_drafted_tokens == stats.num_accepted_tokens


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preemption_changes_no_token(model: Path, llm: LLM, mode: str) -> None:
    tight = load(model, num_kv_blocks=14, block_size=8, preemption_mode=mode, max_model_len=112)
    mine = persons(tight, 6, max_tokens=90)
    assert mine == persons(llm, 6, max_tokens=90)
    assert tight.engine.stats.num_preemptions > 0


def test_deterministic_mode_changes_no_token_of_a_batch(model: Path) -> None:
    fixed = load(model, deterministic=True)
    together = persons(fixed, 2)
    for seed, output in enumerate(together):
        alone = fixed.generate(
            [f"prompt {seed}"], replace(SAMPLED, guided=PERSON, seed=seed)
        )  # fmt: skip
        assert alone == [output]


def test_a_replay_of_known_tokens_goes_on_the_same(llm: LLM) -> None:
    """What a failover does: the tokens so far, at any place, in an engine that knows nothing."""
    (whole,) = llm.generate([[7, 8, 9]], replace(SAMPLED, guided=PERSON, seed=3))
    for known in (1, 2, len(whole.token_ids) // 2, len(whole.token_ids) - 1):
        request = ask(PERSON, seed=3, output_ids=(whole.token_ids[:known],))
        llm.engine.add(request)
        (events,) = run(llm.engine).values()
        assert (*whole.token_ids[:known], *tokens_of(events)) == whole.token_ids


def test_token_1_is_masked_where_it_is_sampled(llm: LLM) -> None:
    """A PREFILL task; the engine that goes on replays it."""
    engine = llm.engine
    engine.add(ask(PERSON, seed=4, prompt=(7, 8, 9)), Task.PREFILL)
    (events,) = run(engine).values()
    assert llm.tokenizer.decode(tokens_of(events)) == "{"


def ask(
    guided: GuidedDecoding,
    seed: int = 0,
    prompt: Sequence[int] = (7, 8, 9),
    output_ids: tuple[tuple[int, ...], ...] = ((),),
    **params: Any,
) -> Request:
    chosen = replace(SAMPLED, guided=guided, seed=seed, **params)
    return Request(f"r{seed}", tuple(prompt), chosen, output_ids=output_ids)


# ---- thoughts ----


def test_a_grammar_waits_for_the_end_of_a_thought(llm: LLM) -> None:
    """A thought that ends with a character that comes sooner or later."""
    end = "5"
    guided = replace(PERSON, starts_after=end)
    ended = 0
    asked = [replace(SAMPLED, guided=guided, seed=seed, max_tokens=400) for seed in range(6)]
    for output in llm.generate(["x"] * len(asked), asked):
        thought, found, answer = (output.text or "").partition(end)
        assert end not in thought
        if found:
            ended += 1
            if output.finish_reason is FinishReason.STOP:
                check_json(answer, SCHEMAS["person"])
    assert ended > 0


# ---- refusals and failures ----


def test_an_engine_without_a_vocabulary_refuses(llm: LLM) -> None:
    engine, grammars = llm.engine, llm.engine.grammars
    engine.grammars = None
    try:
        with pytest.raises(UnsupportedFeature, match="tokenizer") as caught:
            engine.add(ask(PLATE))
    finally:
        engine.grammars = grammars
    assert caught.value.field == "guided"


@pytest.mark.parametrize(
    "guided",
    [
        GuidedDecoding("regex", "("),
        GuidedDecoding("regex", ""),
        GuidedDecoding("regex", "a" * 300_000),
        GuidedDecoding("json_schema", "{"),
        GuidedDecoding("json_schema", "3"),
        GuidedDecoding("json_schema", "false"),
        GuidedDecoding("regex", "a", backend="own"),
        GuidedDecoding("structural_tag", '{"type": "structural_tag"}'),
    ],
)
def test_what_is_no_grammar_is_refused_by_field(llm: LLM, guided: GuidedDecoding) -> None:
    with pytest.raises(InvalidRequest) as caught:
        llm.generate(["x"], replace(SAMPLED, guided=guided))
    assert caught.value.field == "guided"
    assert_all_free(llm.engine)


def test_an_output_that_left_its_grammar_fails_alone(llm: LLM) -> None:
    engine: Engine = llm.engine
    engine.add(ask(PLATE, seed=1, output_ids=((50, 60),)))
    engine.add(ask(PLATE, seed=2))
    events = run(engine)
    (failed,) = engine.take_failed()
    assert (failed.request_id, failed.code, failed.field) == ("r1", "invalid_request", "guided")
    assert "r1" not in events
    check_regex(llm.tokenizer.decode(tokens_of(events["r2"])), REGEXES[0])
    assert_all_free(engine)


def test_a_backend_may_be_named_and_all_tags_are_followed(llm: LLM) -> None:
    form = {"type": "dispatch", "rules": [["<a", {"type": "const_string", "value": "!"}]]}
    tag = GuidedDecoding("structural_tag", json.dumps({"type": "structural_tag", "format": form}))
    llm.generate(["x"], replace(SAMPLED, guided=tag, seed=0, max_tokens=3))
    named = replace(PLATE, backend="xgrammar")
    (output,) = llm.generate(["x"], replace(SAMPLED, guided=named, seed=0))
    check_regex(output.text or "", REGEXES[0])
