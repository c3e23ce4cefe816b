"""Beam search: the pure logic by hand, and whole searches against transformers' own in fp32."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.engine.state.beam import BeamSearch
from baton.llm import LLM
from baton.protocol.events import TokenLogprob
from baton.protocol.sampling import SamplingParams
from tests.engine.driving import assert_all_free
from tests.tiny_models import VOCAB_SIZE, make_tiny_model

STOP = 1


def told(*pairs: tuple[int, float]) -> list[TokenLogprob]:
    return [TokenLogprob(token, value, rank) for rank, (token, value) in enumerate(pairs, 1)]


def search(**params: object) -> BeamSearch:
    values: dict[str, object] = {"beam_width": 2, "max_tokens": 5, **params}
    return BeamSearch(SamplingParams(**values), frozenset((STOP,)), 97)  # type: ignore[arg-type]


def test_survivors_name_their_parents_best_first() -> None:
    beams = search()
    assert beams.num_candidates == 3
    assert beams.advance([told((5, -0.5), (6, -1.0), (7, -3.0))]) == [0, 0]
    assert [beam.token_ids for beam in beams.running] == [(5,), (6,)]
    # The second beam has the two best continuations: the first one ends here.
    parents = beams.advance(
        [told((5, -4.0), (6, -5.0), (7, -6.0)), told((8, -0.1), (9, -0.2), (7, -9.0))]
    )
    assert parents == [1, 1]
    assert [beam.token_ids for beam in beams.running] == [(6, 8), (6, 9)]
    assert [beam.score for beam in beams.running] == pytest.approx([-1.1, -1.2])


def test_a_stop_counts_only_among_the_best_and_never_runs_on() -> None:
    beams = search()
    beams.advance([told((5, -0.5), (6, -1.0), (STOP, -3.0))])
    assert beams.best(2) == [], "third of three: dropped"
    beams.advance([told((STOP, -0.1), (6, -1.0), (7, -2.0)), told((8, -1.0), (9, -2.0), (7, -3.0))])
    (finished,) = beams.best(2)
    assert finished.token_ids == (5, STOP)
    assert finished.score == pytest.approx(-0.6 / 2)
    assert all(beam.token_ids[-1] != STOP for beam in beams.running)
    assert not beams.done


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "done"),
    [("true", 1.0, True), ("false", 1.0, False), ("false", 0.0, True), ("never", 1.0, False)],
)
def test_when_a_search_is_over(early_stopping: str, length_penalty: float, done: bool) -> None:
    beams = search(early_stopping=early_stopping, length_penalty=length_penalty, max_tokens=50)
    beams.advance([told((5, -0.5), (6, -0.6), (7, -3.0))])
    beams.advance(
        [told((STOP, -3.0), (6, -3.1), (7, -9.0)), told((STOP, -3.0), (8, -3.2), (7, -9.0))]
    )
    beams.advance([told((STOP, -0.01), (6, -0.1), (7, -9.0)), told((9, -4.0), (8, -4.0))])
    assert beams.done == done


def test_all_end_at_max_tokens() -> None:
    beams = search(max_tokens=1, n=2)
    assert beams.advance([told((5, -0.5), (6, -1.0), (7, -3.0))]) == []
    assert beams.done
    assert [beam.token_ids for beam in beams.best(2)] == [(5,), (6,)]


# ---- against transformers ----


@functools.lru_cache
def loaded(path: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def theirs(
    path: str, prompt: Sequence[int], params: SamplingParams, eos: list[int]
) -> list[tuple[int, ...]]:
    """The n best beams of transformers' generate, padding cut off."""
    ids = torch.tensor([list(prompt)])
    early: bool | str = {"true": True, "false": False, "never": "never"}[params.early_stopping]
    out = loaded(path).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=params.beam_width,
        num_return_sequences=params.n,
        length_penalty=params.length_penalty,
        early_stopping=early,
        max_new_tokens=params.max_tokens,
        do_sample=False,
        eos_token_id=eos or None,
        pad_token_id=0,
        repetition_penalty=params.repetition_penalty,
        min_new_tokens=params.min_tokens or None,
        bad_words_ids=[list(word) for word in params.bad_words] or None,
        sequence_bias={(token,): bias for token, bias in params.logit_bias} or None,
    )
    rows = [tuple(row[len(prompt) :].tolist()) for row in out]
    return [_cut(row, eos) for row in rows]


def _cut(row: tuple[int, ...], eos: list[int]) -> tuple[int, ...]:
    ends = [index for index, token in enumerate(row) if token in eos]
    return row[: ends[0] + 1] if ends else row


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {
        kind: str(make_tiny_model(kind, tmp_path_factory.mktemp(kind), seed=3))
        for kind in ("llama", "qwen3", "gpt2")
    }


@functools.lru_cache
def llm_of(path: str) -> LLM:
    return LLM(path, dtype="float32", block_size=4, num_kv_blocks=160, check_invariants=True)


# Each penalty and each way to stop, with every model among the long tests; all with all is `soak`.
SEARCHES = [
    pytest.param(
        kind, width, penalty, early,
        marks=pytest.mark.soak if (i + j) % 2 > 0 or width != (4, 2)[j % 2]
        else [pytest.mark.long] * (kind != "llama"),
    )
    for kind in ("llama", "gpt2", "qwen3")
    for width in (2, 4)
    for i, penalty in enumerate((-1.0, 0.0, 0.6, 1.0, 2.0))
    for j, early in enumerate(("false", "true", "never"))
]  # fmt: skip


@pytest.mark.parametrize(("kind", "width", "length_penalty", "early_stopping"), SEARCHES)
def test_beams_equal_transformers(
    models: dict[str, str], kind: str, width: int, length_penalty: float, early_stopping: str
) -> None:
    path = models[kind]
    llm = llm_of(path)
    # Several stop ids, so that searches end at many lengths.
    eos = sorted({2, *range(7, VOCAB_SIZE, 12)})
    params = SamplingParams(
        beam_width=width,
        n=width,
        length_penalty=length_penalty,
        early_stopping=early_stopping,  # type: ignore[arg-type]
        max_tokens=12,
        stop_token_ids=tuple(eos),
        ignore_eos=True,
    )
    prompts = [[9, 33, 71, 200], list(range(20, 31)), [100]]
    outputs = llm.generate(prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        ours = [sample.token_ids for sample in output.outputs]
        assert ours == theirs(path, prompt, params, eos)
    assert_all_free(llm.engine)


def test_beams_without_an_end_equal_transformers(models: dict[str, str]) -> None:
    path = models["llama"]
    params = SamplingParams(beam_width=4, n=2, max_tokens=20, ignore_eos=True)
    (output,) = llm_of(path).generate([[5, 6, 7]], params)
    assert [s.token_ids for s in output.outputs] == theirs(path, [5, 6, 7], params, [])


@pytest.mark.parametrize(
    "changes",
    [
        {"repetition_penalty": 1.3},
        {"min_tokens": 6},
        {"bad_words": tuple((token,) for token in range(200, 310, 2)), "length_penalty": 0.0},
        {"bad_words": tuple((token, token) for token in range(101, VOCAB_SIZE) if token != 200)},
        {"logit_bias": tuple((token, -3.0 if token % 2 else 2.0) for token in range(40, 200))},
        {"min_tokens": 4, "repetition_penalty": 1.1, "bad_words": ((33,), (71,), (200,))},
    ],
)
@pytest.mark.parametrize("kind", ["llama", pytest.param("gpt2", marks=pytest.mark.long)])
def test_beams_under_penalties_equal_transformers(
    models: dict[str, str], kind: str, changes: dict[str, Any]
) -> None:
    """transformers changes log probabilities here, where a sampled token's logits are changed."""
    path, eos = models[kind], sorted({2, *range(7, VOCAB_SIZE, 12)})
    asked: dict[str, Any] = {
        "beam_width": 4, "n": 4, "max_tokens": 14, "stop_token_ids": tuple(eos), "ignore_eos": True
    }  # fmt: skip
    params, plain = SamplingParams(**asked, **changes), SamplingParams(**asked)
    prompts = [[9, 33, 71, 200], list(range(20, 31)), [100]]
    outputs = llm_of(path).generate(prompts, params)
    ours = [[sample.token_ids for sample in output.outputs] for output in outputs]
    assert ours == [theirs(path, prompt, params, eos) for prompt in prompts]
    assert ours != [theirs(path, prompt, plain, eos) for prompt in prompts]
    assert_all_free(llm_of(path).engine)


def test_beams_preempted_by_either_way_equal_transformers(models: dict[str, str]) -> None:
    path = models["llama"]
    params = SamplingParams(beam_width=4, n=4, max_tokens=14, ignore_eos=True)
    prompts = [[5 + i, *range(40, 48 + i)] for i in range(4)]
    wanted = [theirs(path, prompt, params, []) for prompt in prompts]
    for mode in ("swap", "recompute"):
        llm = LLM(
            path, dtype="float32", block_size=4, num_kv_blocks=36, preemption_mode=mode,
            check_invariants=True,
        )  # fmt: skip
        outputs = llm.generate(prompts, params)
        assert [[s.token_ids for s in o.outputs] for o in outputs] == wanted
        assert llm.engine.stats.num_preemptions > 0
        assert (llm.engine.stats.num_swap_ins > 0) == (mode == "swap")
        assert_all_free(llm.engine)
