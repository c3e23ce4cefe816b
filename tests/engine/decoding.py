"""A tiny engine for tests of the real runner: chunked prefill, decode, and speculation.

Each sequence owns its blocks, shuffled; nothing is shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from baton.engine.config import EngineConfig
from baton.engine.loading.loading import LoadedModel, load_model
from baton.engine.memory.kv_cache import KVArena
from baton.engine.memory.layer_groups import one_group
from baton.engine.running.runner import ModelRunner
from baton.engine.sampling.proposer import DraftAsk, Proposer
from baton.engine.state.interface import SequenceChunk
from baton.protocol.events import TokenLogprob
from baton.protocol.sampling import SamplingParams
from tests.block_lists import held

BLOCK_SIZE = 4


@dataclass
class Sample:
    """One sequence under way, and what was told of it."""

    prompt: Sequence[int]
    params: SamplingParams
    index: int = 0
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    logprobs: list[tuple[TokenLogprob, ...]] = field(default_factory=list)
    prompt_logprobs: list[tuple[TokenLogprob, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def missing(self) -> int:
        return self.params.max_tokens - len(self.output)


@dataclass
class Tally:
    """What speculation did."""

    steps: int = 0
    proposed: int = 0
    accepted: int = 0


def load(path: Any, **config: Any) -> LoadedModel:
    """A checkpoint in float32 on the CPU."""
    return load_model(EngineConfig(model=str(path), dtype="float32", device="cpu", **config))


def decode(
    loaded: LoadedModel,
    samples: Sequence[Sample],
    proposer: Proposer | None = None,
    max_drafts: int = 4,
    chunk_size: int = 7,
) -> Tally:
    """Run all samples together to max_tokens (no stop ids); with a proposer, speculating."""
    longest = max(len(s.prompt) + s.params.max_tokens for s in samples)
    each = -(-longest // BLOCK_SIZE)
    order = torch.randperm(each * len(samples), generator=torch.Generator().manual_seed(3))
    tables = order.view(len(samples), each).tolist()
    info = loaded.info
    arena = KVArena(one_group(info.layers), order.numel(), BLOCK_SIZE, info.kv_dtype, loaded.device)
    runner = ModelRunner(loaded, arena)
    tally = Tally()
    while active := [i for i, sample in enumerate(samples) if sample.missing > 0]:
        drafts = _drafts([samples[i] for i in active], active, proposer, max_drafts)
        chunks = [
            _chunk(str(i), samples[i], tables[i], draft, chunk_size)
            for i, draft in zip(active, drafts, strict=True)
        ]
        tally.steps += 1
        for i, chunk, result in zip(active, chunks, runner.run(chunks), strict=True):
            sample = samples[i]
            sample.prompt_logprobs.extend(result.prompt_logprobs)
            sample.computed = chunk.start + len(chunk.token_ids) - chunk.num_drafts
            if result.sampled is None:
                continue
            accepted = result.sampled.token_ids
            tally.proposed += chunk.num_drafts
            tally.accepted += len(accepted) - 1
            sample.computed += len(accepted) - 1
            sample.tokens.extend(accepted)
            sample.logprobs.extend(result.sampled.logprobs)
            assert sample.missing >= 0
    return tally


def _drafts(
    samples: Sequence[Sample], ids: Sequence[int], proposer: Proposer | None, max_drafts: int
) -> list[list[int]]:
    """Guesses for the sequences that decode."""
    drafts: list[list[int]] = [[] for _ in samples]
    if proposer is None:
        return drafts
    decoding = [at for at, s in enumerate(samples) if len(s.tokens) - s.computed == 1]
    asks = [
        DraftAsk(
            str(ids[at]), samples[at].tokens, min(max_drafts, samples[at].missing - 1),
            samples[at].params, len(samples[at].output), samples[at].index,
        )
        for at in decoding
    ]  # fmt: skip
    for at, ask, guesses in zip(decoding, asks, proposer.propose(asks), strict=True):
        assert len(guesses) <= max(0, ask.max_drafts)
        drafts[at] = guesses
    return drafts


def _chunk(
    name: str, sample: Sample, table: Sequence[int], drafts: Sequence[int], chunk_size: int
) -> SequenceChunk:
    stop = min(sample.computed + chunk_size, len(sample.tokens))
    last = stop == len(sample.tokens)
    tokens = sample.tokens[sample.computed : stop] + list(drafts)
    covered = -(-(sample.computed + len(tokens)) // BLOCK_SIZE)
    return SequenceChunk(
        name, tokens, sample.computed, held(table[:covered]),
        sample=sample.params if last else None,
        position=len(sample.output) if last else 0,
        sample_index=sample.index,
        history=sample.tokens,
        num_prompt=len(sample.prompt),
        num_drafts=len(drafts),
        prompt_logprobs=sample.params.prompt_logprobs,
    )  # fmt: skip
