"""Everything at once, against an oracle that knows none of it.

Random requests (samples, penalties, bias, bad words, stops, filters, prompt logprobs, adapters) in
random engines (small pools of any block size, chunks, prefix hits, swaps, speculation, layer
groups, deterministic mode). The oracle is transformers over the whole text, without a cache, and
plain Python in float64 for what follows the logits; it shares with the engine only the key of a
token's noise. Counters prove that what is combined has happened.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.engine.config import EngineConfig
from baton.engine.core.assembly import build_engine
from baton.engine.core.engine import Engine
from baton.engine.sampling.sampler import Draw
from baton.protocol.adapters import adapter_name
from baton.protocol.errors import ContextLengthExceeded
from baton.protocol.events import TokenEvent
from baton.protocol.request import Request
from baton.protocol.sampling import SamplingParams
from tests.engine.driving import assert_all_free, run_samples, tokens_of
from tests.engine.test_mixed_windows import MODELS
from tests.engine.test_models_families import FAMILIES
from tests.engine.test_models_lora import linear_layers, make_adapter, merged_model
from tests.golden.random_models import save_random
from tests.tiny_models import VOCAB_SIZE, make_tiny_model

NUM_RUNS = 5
NUM_REQUESTS = 8
LONGEST = 86  # prompt and output
HAPPENED = (
    "num_forks", "num_copied_blocks", "num_drafted_tokens", "num_accepted_tokens",
    "num_chunked_prompts",
)  # fmt: skip


class Oracle:
    """transformers, and what the documents say of sampling."""

    def __init__(self, models: dict[str, Any], eos_token_ids: tuple[int, ...]) -> None:
        self._models = models
        self._eos = eos_token_ids

    @torch.inference_mode()
    def answer(
        self, request: Request, sample: int, theirs: list[int]
    ) -> tuple[list[int], list[float], list[float]]:
        """Output tokens, their log probabilities, and those of the prompt's tokens.

        One pass: each token follows the prompt and what stands before it in `theirs`, the engine's.
        The output is theirs only if each of theirs is right and they end where they should.
        """
        params, prompt = request.params, list(request.prompt_ids)
        stops = {*params.stop_token_ids, *(() if params.ignore_eos else self._eos)}
        ids = torch.tensor([[*prompt, *theirs]])
        logits = self._models[adapter_name(request.adapter)](ids, use_cache=False).logits[0]
        logprobs = logits.log_softmax(-1)
        known = [float(row[token]) for row, token in zip(logprobs, prompt[1:], strict=False)]
        output: list[int] = []
        told: list[float] = []
        for position, row in enumerate(logits[len(prompt) - 1 :]):
            scores = self._processed(row.double(), params, prompt, theirs[:position])
            token = _choose(scores, params, sample, position)
            told.append(float(logprobs[len(prompt) - 1 + position, token]))
            output.append(token)
            if len(output) == params.max_tokens or token in stops:
                break
        return output, told, known

    def _processed(
        self, logits: Tensor, params: SamplingParams, prompt: list[int], output: list[int]
    ) -> Tensor:
        scores = logits.clone()
        if params.allowed_token_ids:
            allowed = list(params.allowed_token_ids)
            scores = torch.full_like(logits, -math.inf)
            scores[allowed] = logits[allowed]
        for *before, last in params.bad_words:
            if len(before) <= len(output) and output[len(output) - len(before) :] == before:
                scores[last] = -math.inf
        if len(output) < params.min_tokens:
            scores[[t for t in (*self._eos, *params.stop_token_ids) if t < VOCAB_SIZE]] = -math.inf
        for token, bias in dict(params.logit_bias).items():
            scores[token] += bias
        for token in {*prompt, *output}:
            factor = params.repetition_penalty
            scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
        for token, count in Counter(output).items():
            scores[token] -= params.frequency_penalty * count + params.presence_penalty
        return scores


def _choose(scores: Tensor, params: SamplingParams, sample: int, position: int) -> int:
    """The token that wins, by the definitions of the filters, one after the other."""
    if params.greedy:
        return int(scores.argmax())
    scaled = scores / params.temperature
    probabilities = scaled.softmax(-1)
    kept = probabilities >= params.min_p * probabilities.max()
    order = sorted(range(VOCAB_SIZE), key=lambda token: (-float(scaled[token]), token))
    if params.top_k > 0:
        kept[order[params.top_k :]] = False
    if params.top_p < 1.0:
        mass, before = float(probabilities[kept].sum()), 0.0
        for token in (token for token in order if kept[token]):
            kept[token] = before < params.top_p * mass
            before += float(probabilities[token])
    key = Draw(params, sample, position).key
    noise = torch.tensor([_gumbel(key, token) for token in range(VOCAB_SIZE)], dtype=torch.float64)
    return int((scaled + noise).masked_fill(~kept, -math.inf).argmax())


def _gumbel(key: int, token: int) -> float:
    """SplitMix64's output number `token` after `key`, its upper 52 bits as a uniform number."""
    mask = (1 << 64) - 1
    z = (key + (token + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return -math.log(-math.log((((z ^ (z >> 31)) >> 12) + 0.5) / 2**52))


def some_params(draw: Random) -> SamplingParams:
    def maybe(share: float, default: Any, *values: Any) -> Any:
        return draw.choice(values) if draw.random() < share else default

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(draw.sample(range(VOCAB_SIZE), count))

    max_tokens = draw.choice((26, draw.randint(1, 26)))
    return SamplingParams(
        n=maybe(0.4, 1, 2, 3),
        temperature=maybe(0.5, 0.0, 0.3, 0.7, 1.0, 1.5),
        seed=draw.getrandbits(64),
        max_tokens=max_tokens,
        min_tokens=maybe(0.3, 0, draw.randint(0, max_tokens)),
        top_k=maybe(0.3, 0, 1, 5, 40, VOCAB_SIZE + 1),
        top_p=maybe(0.3, 1.0, 0.1, 0.5, 0.9),
        min_p=maybe(0.2, 0.0, 0.01, 0.2),
        repetition_penalty=maybe(0.3, 1.0, 0.8, 1.2, 1.5),
        frequency_penalty=maybe(0.3, 0.0, -1.0, 0.3, 1.0),
        presence_penalty=maybe(0.3, 0.0, -0.5, 0.7),
        logit_bias=maybe(0.2, (), tuple((token, 3.0) for token in tokens(3))),
        bad_words=maybe(0.3, (), tuple((token,) for token in tokens(9)), (tokens(2), tokens(1))),
        stop_token_ids=maybe(0.3, (), tokens(40)),
        allowed_token_ids=maybe(0.2, (), tokens(120)),
        ignore_eos=draw.random() < 0.5,
        logprobs=maybe(0.5, None, 0, 1, 5),
        prompt_logprobs=maybe(0.3, None, 0, 2),
    )


def some_prompts(draw: Random) -> list[tuple[int, ...]]:
    """Some with a common beginning, some that go round in circles, some like none."""
    stem, loop = draw.choices(range(5, VOCAB_SIZE), k=50), draw.choices(range(5, VOCAB_SIZE), k=3)
    kinds = (
        lambda: stem[: draw.randint(1, 50)] + draw.choices(range(VOCAB_SIZE), k=9),
        lambda: (loop * 12)[: draw.randint(4, 36)],
        lambda: draw.choices(range(VOCAB_SIZE), k=draw.choice((1, 2, 16, 33, 60))),
    )
    return [tuple(draw.choice(kinds)()) for _ in range(NUM_REQUESTS)]


def some_engine(draw: Random, path: Path, groups: int, adapters: tuple[str, ...]) -> Engine:
    block_size = draw.choice((8, 8, 8, 16, 32, 128))
    whole = -(-LONGEST // block_size)
    method = draw.choice(("none", "ngram", "draft"))
    config = EngineConfig(
        str(path), dtype="float32", device="cpu", block_size=block_size, check_invariants=True,
        num_kv_blocks=groups * draw.choice((whole + 1, whole + 2, whole + whole // 2 + 1)),
        max_num_seqs=draw.choice((4, 8)), max_num_batched_tokens=draw.choice((8, 8, 24, 2048)),
        enable_prefix_caching=draw.random() < 0.8, lora_modules=adapters,
        preemption_mode=draw.choice(("swap", "recompute")), speculative_method=method,
        speculative_model=str(path) if method == "draft" else None,
        num_speculative_tokens=draw.choice((1, 3, 5)), deterministic=draw.random() < 0.25,
    )  # fmt: skip
    return build_engine(config)


def add(engine: Engine, draw: Random, prompts: Sequence[tuple[int, ...]]) -> list[Request]:
    adapters = ("", *engine.info.adapters)
    asked: list[Request] = []
    for prompt in prompts:
        request = Request(
            f"r{engine.stats.num_requests}", prompt, some_params(draw),
            adapter=draw.choice(adapters), priority=draw.choice((0, 0, 1)),
            resume=draw.choice(("fast", "fast", "exact")),
        )  # fmt: skip
        try:
            engine.validate(request)
        except ContextLengthExceeded:  # so many samples may not fit so small a pool
            request = dataclasses.replace(request, params=dataclasses.replace(request.params, n=1))
        engine.add(request)
        asked.append(request)
    return asked


def compare(
    oracle: Oracle, request: Request, events: dict[tuple[str, int], list[TokenEvent]]
) -> None:
    prompts = [e.prompt_logprobs for (name, _), es in events.items() if name == request.id
               for e in es if e.prompt_logprobs]  # fmt: skip
    prompt_logprobs: list[float] = []
    for sample in range(request.params.n):
        mine = events[request.id, sample]
        theirs = tokens_of(mine)
        tokens, logprobs, prompt_logprobs = oracle.answer(request, sample, theirs)
        assert theirs == tokens, (request, sample)
        told = [each[0].logprob for event in mine for each in event.logprobs]
        assert told == (
            [] if request.params.logprobs is None else pytest.approx(logprobs, abs=2e-3)
        )
    if request.params.prompt_logprobs is None or len(request.prompt_ids) == 1:
        assert not prompts
        return
    assert len(prompts) == 1
    assert [each[0].logprob for each in prompts[0]] == pytest.approx(prompt_logprobs, abs=2e-3)


@pytest.mark.parametrize(
    "kind",
    [
        "llama",
        *(
            pytest.param(kind, marks=pytest.mark.long)
            for kind in ("mistral", "gemma3_text", "deepseek_v3")
        ),
    ],
)
def test_any_combination_gives_the_oracles_tokens(kind: str, tmp_path: Path) -> None:
    groups, adapters = 1, dict[str, Path]()
    if kind in ("llama", "mistral"):
        path = make_tiny_model(kind, tmp_path / "model")
    else:
        config = MODELS[kind][0] if kind in MODELS else FAMILIES[kind]
        path = save_random(tmp_path / "model", kind, **config)
        groups = len(MODELS[kind][1]) if kind in MODELS else 1
    if kind != "deepseek_v3":
        layers = linear_layers(path, ("q_proj", "v_proj", "o_proj"))
        adapters = {f"a{i}": make_adapter(tmp_path / f"a{i}", layers, i) for i in (1, 2)}
    models = {name: merged_model(path, adapter) for name, adapter in adapters.items()}
    models[""] = merged_model(path, None)
    draw, happened = Random(kind), Counter[str]()
    for _ in range(NUM_RUNS):
        served = tuple(f"{name}={adapter}" for name, adapter in adapters.items())
        engine = some_engine(draw, path, groups, served)
        prompts, asked, events = some_prompts(draw), [], {}
        for wave in (prompts[:3], prompts[3:]):  # the second may find what the first computed
            asked += add(engine, draw, wave)
            events |= run_samples(engine)
            assert_all_free(engine)
        oracle = Oracle(models, engine.info.eos_token_ids)
        for request in asked:
            compare(oracle, request, events)
        counted = dataclasses.asdict(engine.stats)
        happened.update({name: n for name, n in counted.items() if isinstance(n, int | float)})
    # What windows give back averts most preemptions here, and is soon needed by others:
    # test_mixed_windows.py preempts and hits.
    own = ["num_preemptions", "num_prefix_hit_tokens"]
    if kind in ("gemma3_text", "mistral"):
        own = ["num_window_freed_blocks"]
    for name in (*HAPPENED, *own):
        assert happened[name] > 0, name
