"""Speculation changes nothing but speed: token equality over seeds and temperatures, whoever
guesses; and how often guesses drawn with the target's noise stand."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.engine.attention.torch_cpu import TorchAttention
from baton.engine.loading.loading import LoadedModel
from baton.engine.memory.kv_cache import KVArena
from baton.engine.memory.layer_groups import one_group
from baton.engine.running.draft import DraftModelProposer
from baton.engine.sampling.proposer import DraftAsk, NgramProposer, Proposer
from baton.engine.sampling.sampler import Draw, sample
from baton.engine.state.batch import flatten
from baton.engine.state.interface import SequenceChunk
from baton.protocol.sampling import SamplingParams
from tests.block_lists import held
from tests.engine.decoding import Sample, decode, load
from tests.tiny_models import make_tiny_model

NUM_SEEDS = 40
Plainly: TypeAlias = Callable[[float, bool], list[Sample]]  # temperature, whether MIXED
TEMPERATURES = (0.0, 0.5, 1.0, 1.5)
PROMPT = [9, 30, 31, 32, 9, 30, 31, 40, 41, 9, 30]
MIXED = {
    "top_p": 0.9, "top_k": 50, "repetition_penalty": 1.3, "presence_penalty": 0.4,
    "frequency_penalty": 0.2, "logit_bias": ((9, 2.0),), "bad_words": ((30, 31), (7,)),
    "min_tokens": 6, "stop_token_ids": (50,), "logprobs": 2,
}  # fmt: skip


class OracleProposer:
    """Knows what plain decoding gave, and lies now and then: both branches of acceptance."""

    def __init__(self, outputs: dict[str, list[int]], vocab_size: int) -> None:
        self._outputs = outputs
        self._vocab_size = vocab_size
        self._random = random.Random(5)

    def propose(self, asks: Sequence[DraftAsk]) -> list[list[int]]:
        return [self._guess(ask) for ask in asks]

    def forget(self, request_id: str) -> None:
        self._outputs.pop(request_id)

    def _guess(self, ask: DraftAsk) -> list[int]:
        truth = self._outputs[ask.request_id][ask.position : ask.position + ask.max_drafts]
        return [
            token if self._random.random() < 0.7 else self._random.randrange(self._vocab_size)
            for token in truth
        ]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(make_tiny_model("llama", tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def near(tmp_path_factory: pytest.TempPathFactory, target: LoadedModel) -> LoadedModel:
    """A draft model near the target: its weights with some noise."""
    path = make_tiny_model("llama", tmp_path_factory.mktemp("near"))
    return blurred(path, 0.08)


def blurred(path: Path, share: float) -> LoadedModel:
    """The checkpoint with every weight disturbed by `share` of its own size."""
    weights = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(11)
    for name, weight in weights.items():
        weights[name] = weight + share * weight.std() * torch.randn(
            weight.shape, generator=generator
        )
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return load(path)


def samples_of(seeds: range, temperature: float, length: int, **params: Any) -> list[Sample]:
    """One sequence per seed; prompts differ in length and end."""
    return [
        Sample(
            [*PROMPT, *range(20, 20 + seed % 9)],
            SamplingParams(seed=seed, temperature=temperature, max_tokens=length, **params),
            index=seed % 3,
        )
        for seed in seeds
    ]


@pytest.fixture(scope="module")
def plainly(target: LoadedModel) -> Plainly:
    """What the target gives without anybody's guesses, computed once."""

    @cache
    def of(temperature: float, mixed: bool) -> list[Sample]:
        plain = samples_of(range(NUM_SEEDS), temperature, 12, **(MIXED if mixed else {}))
        decode(target, plain)
        return plain

    return of


def assert_same(
    target: LoadedModel, plainly: Plainly, proposer: Proposer | None, params: dict[str, Any]
) -> tuple[int, int]:
    """Plain and speculating runs of all seeds and temperatures agree; (proposed, accepted)."""
    proposed = accepted = 0
    for temperature in TEMPERATURES:
        plain = plainly(temperature, params is MIXED)
        guesser = proposer or OracleProposer(
            {str(i): one.output for i, one in enumerate(plain)}, target.info.vocab_size
        )
        speculating = samples_of(range(NUM_SEEDS), temperature, 12, **params)
        tally = decode(target, speculating, guesser)
        for i in range(NUM_SEEDS):
            guesser.forget(str(i))
        assert [s.output for s in speculating] == [s.output for s in plain]
        for one, other in zip(speculating, plain, strict=True):
            assert_told_the_same(one, other)
        proposed, accepted = proposed + tally.proposed, accepted + tally.accepted
    return proposed, accepted


def assert_told_the_same(one: Sample, other: Sample) -> None:
    """Log probabilities belong to the same tokens; their last bits may depend on the batch."""
    assert len(one.logprobs) == len(other.logprobs)
    for told, expected in zip(one.logprobs, other.logprobs, strict=True):
        assert [t.token_id for t in told] == [t.token_id for t in expected]
        assert [t.rank for t in told] == [t.rank for t in expected]
        assert [t.logprob for t in told] == pytest.approx([t.logprob for t in expected], abs=1e-4)


@pytest.mark.parametrize("params", [{}, MIXED], ids=["plain", "mixed"])
def test_an_oracle_that_lies_changes_nothing(
    target: LoadedModel, plainly: Plainly, params: dict[str, Any]
) -> None:
    proposed, accepted = assert_same(target, plainly, None, params)
    # Of 4 guesses, each true with 0.7, the first lie ends the run: 0.7 + ... + 0.7^4 = 0.44 x 4.
    assert 0.4 < accepted / proposed < 0.52


def test_prompt_lookup_changes_nothing(target: LoadedModel, plainly: Plainly) -> None:
    proposed, accepted = assert_same(target, plainly, NgramProposer(min_n=1), {})
    assert 0 < accepted < proposed


@pytest.mark.parametrize("params", [{}, MIXED], ids=["plain", "mixed"])
def test_a_draft_model_changes_nothing(
    target: LoadedModel, near: LoadedModel, plainly: Plainly, params: dict[str, Any]
) -> None:
    proposer = DraftModelProposer(near, target.info, pool_tokens=NUM_SEEDS * 48)
    proposed, accepted = assert_same(target, plainly, proposer, params)
    assert accepted / proposed > 0.3, (proposed, accepted)
    proposer.check()
    assert proposer.pool.num_used == 0


@pytest.mark.parametrize(
    ("kind", "impl"),
    [("mistral", "lean"), ("mistral", "transformers"), ("gpt2", "auto"), ("qwen3", "lean")],
)
def test_windows_and_both_routes(kind: str, impl: str, tmp_path: Path) -> None:
    """Rejected drafts leave KV behind that a window of 9 tokens would still see: overwritten."""
    loaded = load(make_tiny_model(kind, tmp_path), model_impl=impl)
    for temperature in (0.0, 1.0):
        plain, speculating = (samples_of(range(12), temperature, 24) for _ in range(2))
        decode(loaded, plain)
        oracle = OracleProposer({str(i): s.output for i, s in enumerate(plain)}, 320)
        tally = decode(loaded, speculating, oracle)
        assert [s.output for s in speculating] == [s.output for s in plain]
        assert 0 < tally.accepted < tally.proposed


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_acceptance_is_near_the_optimum(
    target: LoadedModel, near: LoadedModel, temperature: float
) -> None:
    """Per position of plain outputs: how often the draft's keyed sample is the target's, beside
    the mean of sum(min(p, q))."""
    samples = samples_of(range(60), temperature, 12)
    decode(target, samples)
    agreed, optimum = [], []
    for one in samples:
        p, q = (logits_along(model, one) / temperature for model in (target, near))
        draws = [Draw(one.params, one.index, i) for i in range(len(one.output))]
        assert sample(p * temperature, draws) == one.output
        guesses = sample(q * temperature, draws)
        agreed += [a == b for a, b in zip(guesses, one.output, strict=True)]
        optimum += torch.minimum(p.softmax(-1), q.softmax(-1)).sum(-1).tolist()
    rate, best = sum(agreed) / len(agreed), sum(optimum) / len(optimum)
    noise = 3 * 0.5 / len(agreed) ** 0.5
    assert best / (2 - best) - noise < rate < best + noise, (rate, best)


def logits_along(loaded: LoadedModel, one: Sample) -> torch.Tensor:
    """Logits [outputs, vocab] that a model gives at each position of a sample's output."""
    info = loaded.info
    arena = KVArena(one_group(info.layers), 1, 64, info.kv_dtype, "cpu")
    attention = TorchAttention(arena, loaded.attention_layers)
    with torch.inference_mode():
        step = flatten([SequenceChunk("r", one.tokens, 0, held([0]))], attention, 64, loaded.device)
        hidden = loaded.forward(step.token_ids, step.positions, step.batch)
        return loaded.logits(hidden[len(one.prompt) - 1 : -1])


def test_a_perfect_draft_model_is_always_right(target: LoadedModel) -> None:
    """The same model with the same noise draws the same tokens: every guess stands."""
    proposer = DraftModelProposer(target, target.info, pool_tokens=4096)
    for temperature in TEMPERATURES:
        samples = samples_of(range(16), temperature, 16)
        tally = decode(target, samples, proposer)
        assert tally.accepted == tally.proposed > 0
        for i in range(16):
            proposer.forget(str(i))


@pytest.mark.parametrize("spread", [0.2, 0.5, 1.0, 2.0])
def test_shared_noise_accepts_nearly_what_is_possible(spread: float) -> None:
    """No coupling of two distributions agrees more often than sum(min(p, q)) = 1 - TV; Gumbel noise
    by vocabulary id, ignorant of the other distribution, agrees at least (1 - TV) / (1 + TV) often.

    Source: Daliri, Musco, Suresh, "Coupling without Communication and Drafter-Invariant
    Speculative Decoding", 2024 (bounds).
    """
    num_draws, vocab = 4000, 64
    generator = torch.Generator().manual_seed(2)
    target = torch.randn(vocab, generator=generator) * 2
    draft = target + spread * torch.randn(vocab, generator=generator)
    p, q = target.softmax(-1), draft.softmax(-1)
    optimum = float(torch.minimum(p, q).sum())
    draws = [Draw(SamplingParams(seed=seed), 0, 3) for seed in range(num_draws)]
    rows = [sample(x.expand(num_draws, -1).contiguous(), draws) for x in (target, draft)]
    rate = sum(a == b for a, b in zip(rows[0], rows[1], strict=True)) / num_draws
    independent = float((p * q).sum())
    noise = 3 * 0.5 / num_draws**0.5
    assert optimum / (2 - optimum) - noise < rate < optimum + noise
    assert rate > independent + 0.2, f"{rate} of {optimum}, independent {independent}"
