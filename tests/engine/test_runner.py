"""The runner against transformers: log probabilities of outputs and prompts, whatever the chunks;
and what it yields for chunks of every kind in one step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.engine.loading.loading import LoadedModel
from baton.engine.memory.kv_cache import KVArena
from baton.engine.memory.layer_groups import one_group
from baton.engine.models.decoder import Decoder
from baton.engine.running import runner as runner_module
from baton.engine.running.runner import ModelRunner
from baton.engine.state.interface import SequenceChunk
from baton.protocol.events import TokenLogprob
from baton.protocol.sampling import SamplingParams
from tests.block_lists import held
from tests.engine import running
from tests.engine.decoding import Sample, decode, load
from tests.tiny_models import EOS_ID, VOCAB_SIZE, make_tiny_model

LENGTHS = (3, 17, 41, 11, 2)
NEW_TOKENS = 9


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("qwen3", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def lean(checkpoint: Path) -> LoadedModel:
    return load(checkpoint)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(5, VOCAB_SIZE, (n,), generator=generator).tolist() for n in LENGTHS]


def transformers_logprobs(path: Path, tokens: list[list[int]]) -> list[torch.Tensor]:
    """Log-softmax [length, vocab] of each sequence, one forward each."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        return [model(torch.tensor([ids])).logits[0].log_softmax(-1) for ids in tokens]


def assert_tells(told: tuple[TokenLogprob, ...], token: int, row: torch.Tensor, count: int) -> None:
    """`told` is `token`, then the rest of the row's `count` best, all within 1e-4."""
    order = row.argsort(descending=True, stable=True).tolist()
    assert told[0].token_id == token
    assert [one.token_id for one in told[1:]] == [t for t in order[:count] if t != token]
    for one in told:
        assert one.logprob == pytest.approx(float(row[one.token_id]), abs=1e-4)
        assert order[one.rank - 1] == one.token_id


@pytest.mark.parametrize("impl", ["lean", "transformers"])
@pytest.mark.parametrize("chunk_size", [4, 100])
def test_logprobs_are_transformers_log_softmax(
    impl: Any, chunk_size: int, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "PROMPT_SLAB_ELEMENTS", 3 * VOCAB_SIZE)
    loaded = load(checkpoint, model_impl=impl)
    samples = [
        # Penalties and temperature must not show: what is told is about the raw logits.
        Sample(prompt, SamplingParams(
            seed=i, temperature=0.7 * (i % 2), max_tokens=NEW_TOKENS, logprobs=(0, 3, 5)[i % 3],
            prompt_logprobs=(2, 0, None, 4, 1)[i], repetition_penalty=1.0 + 0.3 * (i % 2),
        ))
        for i, prompt in enumerate(prompts())
    ]  # fmt: skip
    decode(loaded, samples, chunk_size=chunk_size)
    for one, rows in zip(
        samples, transformers_logprobs(checkpoint, [s.tokens for s in samples]), strict=True
    ):
        first = len(one.prompt)
        assert len(one.logprobs) == NEW_TOKENS
        for i, told in enumerate(one.logprobs):
            assert_tells(told, one.output[i], rows[first + i - 1], one.params.logprobs or 0)
        if one.params.prompt_logprobs is None:
            assert one.prompt_logprobs == []
            continue
        assert len(one.prompt_logprobs) == first - 1
        for i, told in enumerate(one.prompt_logprobs):
            assert_tells(told, one.prompt[i + 1], rows[i], one.params.prompt_logprobs)


def test_the_logits_of_a_whole_step_come_with_its_hidden_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = running.load(make_tiny_model("qwen3", tmp_path, head_dim=32), dtype="bfloat16")
    decoder = loaded.model
    assert isinstance(decoder, Decoder)
    step = decoder.step
    if step is None:
        pytest.skip("no compiled steps here")
    calls: list[int] = []
    logits = Decoder.logits

    def counting(self: Decoder, hidden: torch.Tensor) -> torch.Tensor:
        calls.append(hidden.shape[0])
        return logits(self, hidden)

    def told() -> list[object]:
        samples = [
            Sample(prompt, SamplingParams(
                seed=i, temperature=0.7 * (i % 2), max_tokens=NEW_TOKENS, logprobs=2,
                prompt_logprobs=1, repetition_penalty=1.0 + 0.3 * (i % 2),
            ))
            for i, prompt in enumerate(prompts())
        ]  # fmt: skip
        decode(loaded, samples)
        return [(one.tokens, one.logprobs, one.prompt_logprobs) for one in samples]

    monkeypatch.setattr(Decoder, "logits", counting)
    whole = told()
    beside = len(calls)
    decoder.step = None
    assert told() == whole
    assert step.num_steps > 0
    assert len(calls) - beside == beside + step.num_steps


def test_prompt_logprobs_hold_few_logits_at_once(
    lean: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    heights: list[int] = []
    logits = Decoder.logits

    def counting(self: Decoder, hidden: torch.Tensor) -> torch.Tensor:
        heights.append(hidden.shape[0])
        return logits(self, hidden)

    monkeypatch.setattr(Decoder, "logits", counting)
    monkeypatch.setattr(runner_module, "PROMPT_SLAB_ELEMENTS", 16 * VOCAB_SIZE + 1)
    one = Sample(prompts()[2], SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1))
    decode(lean, [one], chunk_size=100)
    assert heights == [1, 16, 16, 8]  # the last row, then the 40 that predict the prompt
    assert len(one.prompt_logprobs) == 40


def fresh_runner(loaded: LoadedModel, num_blocks: int = 16) -> ModelRunner:
    info = loaded.info
    return ModelRunner(loaded, KVArena(one_group(info.layers), num_blocks, 8, info.kv_dtype, "cpu"))


def test_one_step_serves_every_kind_of_chunk(lean: LoadedModel, checkpoint: Path) -> None:
    prompt = prompts()[3]
    [rows] = transformers_logprobs(checkpoint, [prompt])
    greedy = SamplingParams(temperature=0.0, max_tokens=5)
    best = int(rows[-1].argmax())
    whole: dict[str, Any] = {"history": prompt, "num_prompt": len(prompt)}
    chunks = [
        SequenceChunk("first part", prompt[:5], 0, held([0]), **whole),
        SequenceChunk("greedy", prompt, 0, held([1, 2]), greedy, **whole),
        SequenceChunk("beam", prompt, 0, held([3, 4]), greedy, num_candidates=6, **whole),
        SequenceChunk(
            "drafts with a prompt", [*prompt, best, 7, 7], 0, held([5, 6]), greedy, num_drafts=3,
            prompt_logprobs=1, **whole,
        ),
        SequenceChunk("scored", prompt[:6], 0, held([7]), prompt_logprobs=0, **whole),
    ]  # fmt: skip
    first, plain, beam, drafted, scored = fresh_runner(lean).run(chunks)
    assert first.sampled is None
    assert (plain.sampled and plain.sampled.token_ids) == (best,)
    assert beam.sampled is not None
    order = rows[-1].argsort(descending=True)[:6].tolist()
    assert [one.token_id for one in beam.sampled.candidates] == order
    for one in beam.sampled.candidates:
        assert one.logprob == pytest.approx(float(rows[-1, one.token_id]), abs=1e-4)
    assert drafted.sampled is not None
    assert drafted.sampled.token_ids[0] == best
    assert len(drafted.sampled.token_ids) == 2  # the first draft stands, the second does not
    assert len(drafted.prompt_logprobs) == len(prompt) - 1
    assert len(scored.prompt_logprobs) == 6
    assert [told[0].token_id for told in scored.prompt_logprobs] == prompt[1:7]
    assert fresh_runner(lean).run([]) == []


def test_candidates_obey_what_alters_logits(lean: LoadedModel) -> None:
    prompt = prompts()[1]
    whole: dict[str, Any] = {"history": prompt, "num_prompt": len(prompt), "num_candidates": 400}
    params = SamplingParams(
        temperature=0.0, min_tokens=2, max_tokens=9, stop_token_ids=(40,), bad_words=((41,),)
    )
    [result] = fresh_runner(lean).run(
        [SequenceChunk("r", prompt, 0, held([0, 1, 2]), params, **whole)]
    )
    assert result.sampled is not None
    seen = {one.token_id for one in result.sampled.candidates}
    assert seen == set(range(VOCAB_SIZE)) - {EOS_ID, 40, 41}


def test_min_tokens_holds_back_the_models_own_end(lean: LoadedModel) -> None:
    bias: dict[str, Any] = {"logit_bias": ((EOS_ID, 100.0),), "temperature": 0.0, "max_tokens": 6}
    samples = [Sample(prompts()[0], SamplingParams(min_tokens=n, **bias)) for n in (0, 3)]
    decode(lean, samples)
    assert samples[0].output == [EOS_ID] * 6
    assert [token == EOS_ID for token in samples[1].output] == [False] * 3 + [True] * 3


@pytest.mark.parametrize("size", [3, 4])  # with 4 there are as many draws as rows
@pytest.mark.parametrize("penalty", [0.0, 1.5])
def test_a_fan_out_draws_what_each_sample_would_draw_alone(
    lean: LoadedModel, size: int, penalty: float
) -> None:
    prompt = prompts()[1][:size]
    params = SamplingParams(
        n=4, seed=5, temperature=1.5, logprobs=2, frequency_penalty=penalty, max_tokens=4
    )
    arena = KVArena(one_group(lean.info.layers), 32, 8, lean.info.kv_dtype)
    runner = ModelRunner(lean, arena)

    def chunk(first: int, **more: Any) -> SequenceChunk:
        blocks = held((first,))
        return SequenceChunk(
            "r", prompt, 0, blocks, params, history=prompt, num_prompt=size, **more
        )

    alone = runner.run([chunk(sample, sample_index=sample) for sample in range(4)])
    (together, beside) = runner.run([chunk(5, fan_out=(0, 1, 2, 3)), chunk(6, sample_index=2)])
    assert together.sampled is not None
    wanted = [result.sampled for result in alone if result.sampled is not None]
    assert together.sampled.token_ids == tuple(each.token_ids[0] for each in wanted)
    assert len(set(together.sampled.token_ids)) > 1
    assert beside.sampled is not None
    assert beside.sampled.token_ids == wanted[2].token_ids
    for told, each in zip(together.sampled.logprobs, wanted, strict=True):
        assert [one.token_id for one in told] == [one.token_id for one in each.logprobs[0]]
        assert told[0].logprob == pytest.approx(each.logprobs[0][0].logprob, abs=1e-5)
    (some,) = runner.run([chunk(7, fan_out=(3, 1))])
    assert some.sampled is not None
    tokens = together.sampled.token_ids
    assert some.sampled.token_ids == (tokens[3], tokens[1])
