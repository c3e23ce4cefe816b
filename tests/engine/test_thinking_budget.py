"""A limit of thoughts: behind it their end is written, token by token; nothing else changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.engine.state.interface import Task
from baton.guided.guide import Grammar, Guide
from baton.guided.matcher import FREE
from baton.guided.spec import check_size
from baton.guided.thought import ThoughtEnd, ThoughtLimit
from baton.llm import LLM
from baton.protocol.errors import InvalidRequest
from baton.protocol.request import Request
from baton.protocol.sampling import GuidedDecoding, SamplingParams
from tests.engine.driving import run, tokens_of
from tests.engine.guided_vocabulary import EOS, VOCAB_SIZE, allowed, encode, vocabulary
from tests.tiny_models import EOS_ID, make_tiny_model

END = "Zq"  # of two tokens; no tiny model writes it by chance
LIMITED = GuidedDecoding("free", "", starts_after=END, most_thought=5)
PARAMS = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True, guided=LIMITED)
PROMPT = (7, 8, 9)
EVERY = set(range(VOCAB_SIZE))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=512)


def load(model: Path, **options: Any) -> LLM:
    return LLM(str(model), num_kv_blocks=64, block_size=16, threads=1, **options)


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return load(model)


def outputs(llm: LLM, **params: Any) -> list[tuple[int, ...]]:
    asked = [replace(PARAMS, seed=seed, **params) for seed in range(4)]
    return [output.token_ids for output in llm.generate([PROMPT] * 4, asked)]


def test_the_end_comes_after_so_many_tokens_and_what_follows_is_free(llm: LLM) -> None:
    end = tuple(llm.tokenizer.encode(END, add_special_tokens=False))
    assert len(end) == 2
    free = outputs(llm, guided=None)
    for limited, plain in zip(outputs(llm), free, strict=True):
        assert limited[:5] == plain[:5], "the thought itself is the model's own"
        assert limited[5:7] == end
        assert len(limited) == 24
    at_once = outputs(llm, guided=replace(LIMITED, most_thought=0))
    assert {each[:2] for each in at_once} == {end}
    assert len({each[2:] for each in at_once}) > 1


def test_a_thought_that_has_not_begun_has_no_limit(llm: LLM) -> None:
    waiting = replace(LIMITED, thought_start="never written")
    assert outputs(llm, guided=waiting) == outputs(llm, guided=None)


def test_a_grammar_begins_behind_the_end_that_was_written(llm: LLM) -> None:
    plate = replace(LIMITED, kind="regex", grammar="[A-C]{3}")
    end = tuple(llm.tokenizer.encode(END, add_special_tokens=False))
    for seed in range(3):
        (output,) = llm.generate(
            [PROMPT], replace(PARAMS, guided=plate, ignore_eos=False, seed=seed)
        )
        thought, answer = output.token_ids[:5], output.token_ids[7:]
        assert output.token_ids[5:7] == end
        assert EOS_ID not in thought
        assert set(llm.tokenizer.decode(answer[:-1])) <= set("ABC")
        assert answer[-1] == EOS_ID


def test_it_is_a_pure_function_of_the_tokens_so_far(llm: LLM) -> None:
    """What a failover does: the tokens so far, at any place, in an engine that knows nothing."""
    (whole,) = llm.generate([PROMPT], replace(PARAMS, seed=3))
    for known in (1, 4, 5, 6, 7, 12):
        known_ids = whole.token_ids[:known]
        asked = Request("r", PROMPT, replace(PARAMS, seed=3), output_ids=(known_ids,))
        llm.engine.add(asked)
        (events,) = run(llm.engine).values()
        assert (*known_ids, *tokens_of(events)) == whole.token_ids


def test_token_1_is_forced_where_the_prompt_is_computed(llm: LLM) -> None:
    asked = replace(PARAMS, seed=0, guided=replace(LIMITED, most_thought=0))
    llm.engine.add(Request("p", PROMPT, asked), Task.PREFILL)
    (events,) = run(llm.engine).values()
    assert tokens_of(events) == llm.tokenizer.encode(END, add_special_tokens=False)[:1]


def test_speculation_gives_the_same_tokens(model: Path, llm: LLM) -> None:
    guessing = load(model, speculative_method="draft", speculative_model=str(model))
    assert outputs(guessing) == outputs(llm)
    assert guessing.engine.stats.num_accepted_tokens > 0


def guide(most: int, start: str | None = None) -> Guide:
    words = vocabulary()
    limit = ThoughtLimit(
        None if start is None else ThoughtEnd(start, words), tuple(encode("</think>")), most
    )
    return Guide(Grammar(FREE, ThoughtEnd("</think>", words), frozenset({EOS}), limit))


def after(guide: Guide, text: str) -> set[int]:
    """What may come behind an output."""
    return allowed(_Row(guide, encode(text)))  # pyright: ignore[reportArgumentType]


class _Row:
    """A guide as `allowed` looks at a matcher."""

    def __init__(self, guide: Guide, history: list[int]) -> None:
        self._guide, self._history = guide, history

    def fill(self, row: Any) -> None:
        assert self._guide.fill(self._history, 0, [], row[None]) == 1


def test_the_count_begins_behind_the_start_and_ends_with_the_end() -> None:
    end = encode("</think>")
    assert after(guide(2), "ab") == set(end)
    assert after(guide(2), "a") == EVERY
    assert after(guide(2, "<t>"), "abcdef") == EVERY
    assert after(guide(2, "<t>"), "abc<t>d") == EVERY
    assert after(guide(2, "<t>"), "abc<t>de") == set(end)
    assert after(guide(2), "a</think>bcd") == EVERY, "it ended by itself"


def test_drafts_beyond_the_limit_are_cut() -> None:
    a, b = encode("a"), encode("b")
    assert guide(2).cut(a, 0, [*b, *a, *b]) == b
    assert guide(2).cut(a, 0, [*b, *encode("</think>"), *b]) == [*b, *encode("</think>"), *b]


def test_a_limit_needs_the_end_of_thoughts() -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_size(GuidedDecoding("free", "", most_thought=3))
    assert caught.value.field == "guided"
