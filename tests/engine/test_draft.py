"""The draft model's own book-keeping: rewinds, budgets, room, ends; and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.config import EngineConfig
from baton.engine.loading.loading import LoadedModel
from baton.engine.running.draft import DraftModelProposer
from baton.engine.running.speculation import load_draft, load_proposer
from baton.engine.sampling.proposer import DraftAsk
from baton.protocol.errors import ConfigError
from baton.protocol.sampling import SamplingParams
from tests.engine.decoding import BLOCK_SIZE, Sample, decode, load
from tests.tiny_models import EOS_ID, make_tiny_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=50)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("draft"))


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return load(folder)


def proposer_of(model: LoadedModel, tokens: int = 512, budget: int = 2048) -> DraftModelProposer:
    return DraftModelProposer(model, model.info, tokens, BLOCK_SIZE, budget)


def plain(model: LoadedModel, history: list[int], params: SamplingParams, count: int) -> list[int]:
    """What the model itself goes on with."""
    one = Sample(history, replace(params, max_tokens=count))
    decode(model, [one])
    return one.output


def ask(
    history: list[int], max_drafts: int = 3, name: str = "r", params: SamplingParams = GREEDY
) -> DraftAsk:
    return DraftAsk(name, history, max_drafts, params, 0)


@settings(deadline=None, max_examples=25)
@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.lists(st.integers(5, 8), min_size=1, max_size=14),
            st.integers(0, 4),
        ),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from([0.0, 1.0]),
)
def test_guesses_are_its_own_tokens_whatever_was_asked_before(
    model: LoadedModel, asked: list[tuple[str, list[int], int]], temperature: float
) -> None:
    """Histories of one id that share any prefix, or none: KV of what differs is never used."""
    proposer = proposer_of(model)
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=50, ignore_eos=True)
    for name, history, count in asked:
        [guess] = proposer.propose([ask(history, count, name, params)])
        assert guess == (plain(model, history, params, count) if count else [])
        proposer.check()
    for name in "abc":
        proposer.forget(name)
    assert proposer.pool.num_used == 0


def test_a_long_history_is_computed_over_several_calls(model: LoadedModel) -> None:
    proposer = proposer_of(model, budget=10)
    long, short = list(range(5, 40)), [7, 8, 9]
    guesses = [proposer.propose([ask(long, name="l"), ask(short, name="s")]) for _ in range(5)]
    assert [len(pair[0]) for pair in guesses] == [0, 0, 0, 0, 3]
    assert all(len(pair[1]) == 3 for pair in guesses)  # nobody waits for the long one
    assert guesses[-1] == [plain(model, long, GREEDY, 3), plain(model, short, GREEDY, 3)]


def test_idle_branches_make_room_and_active_ones_do_not(model: LoadedModel) -> None:
    proposer = proposer_of(model, tokens=6 * BLOCK_SIZE)
    history = list(range(5, 5 + 2 * BLOCK_SIZE))  # 3 blocks with its guesses
    both = [ask(history, name="a"), ask(history, name="b")]
    assert all(proposer.propose(both))
    assert proposer.pool.num_free == 0
    third = ask(history, name="c")
    assert proposer.propose([*both, third])[2] == []  # everybody else is at work
    assert all(proposer.propose([both[1], third]))  # "a" is idle: its blocks go to "c"
    proposer.check()
    assert proposer.propose([both[0]]) == [plain(model, history, GREEDY, 3)]


def test_guessing_ends_where_the_sample_would(model: LoadedModel) -> None:
    proposer = proposer_of(model)
    to_end = replace(GREEDY, logit_bias=((EOS_ID, 100.0),))
    assert proposer.propose([ask([7, 8], params=to_end)]) == [[EOS_ID]]
    ignoring = replace(to_end, ignore_eos=True)
    assert proposer.propose([ask([7, 8], params=ignoring)]) == [[EOS_ID] * 3]
    stopping = replace(GREEDY, logit_bias=((9, 100.0),), stop_token_ids=(9,), logprobs=2)
    assert proposer.propose([ask([7, 8], params=stopping)]) == [[9]]
    at_the_limit = list(range(5, 300)) + [7] * (model.info.max_model_len - 296)
    assert proposer.propose([ask(at_the_limit)]) == [plain(model, at_the_limit, GREEDY, 1)]
    assert proposer.propose([ask([*at_the_limit, 7])]) == [[]]


def test_another_vocabulary_is_refused_by_name(model: LoadedModel, folder: Path) -> None:
    target = replace(model.info, name="target", vocab_size=321)
    with pytest.raises(ConfigError, match=r"320 tokens, target has 321") as caught:
        DraftModelProposer(model, target, 64)
    assert caught.value.field == "speculative_model"


def test_the_configured_draft_model_guesses_from_a_pool_as_large_as_the_target_s(
    model: LoadedModel, folder: Path
) -> None:
    config = EngineConfig(
        model="target", dtype="float32", device="cpu", num_kv_blocks=8, block_size=4,
        speculative_method="draft", speculative_model=str(folder),
    )  # fmt: skip
    draft = load_draft(config)
    assert draft is not None
    proposer = load_proposer(config, model.info, draft)
    assert isinstance(proposer, DraftModelProposer)
    assert (proposer.pool.num_blocks, proposer.pool.block_size) == (8, 4)
    assert proposer.propose([ask([7])]) == [plain(model, [7], GREEDY, 3)]
    none = replace(config, speculative_method="none", speculative_model=None)
    assert load_draft(none) is None
    assert load_proposer(none, model.info) is None
    with pytest.raises(ConfigError, match="not configured"):
        load_proposer(config, model.info)
