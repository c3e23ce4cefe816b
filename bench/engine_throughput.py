"""`LLM.generate` against transformers' `generate`: `python -m bench.engine_throughput`.

The same requests, greedy, each with its own length of prompt and answer:
    baton            all at once: continuous batching over paged KV
    one by one       transformers, one request after the other
    padded           transformers, in batches padded to the longest prompt; a batch runs until its
                     longest answer ends
Tokens per second count only tokens that were asked for, not those that padding adds. vLLM's paper
reports 14-24 times transformers on a GPU; a small model on few cores has no such gap to close.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from baton.llm import LLM
from baton.protocol.sampling import SamplingParams
from bench.engine_kit import (
    Lengths,
    TimedPart,
    arguments_parser,
    mixed_lengths,
    prepare,
    random_prompt,
    tell,
)

DEMO_MODEL = Path(__file__).resolve().parents[1] / "demo_model"
REQUESTS = 64
PROMPT_MEAN, OUTPUT_MEAN = 48, 32
PADDED = (8, 16)


def baton_s(llm: LLM, prompts: Sequence[list[int]], lengths: Sequence[Lengths]) -> float:
    """Return the seconds for all requests at once."""
    params = [
        SamplingParams(temperature=0, max_tokens=each.output, ignore_eos=True) for each in lengths
    ]
    began = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - began
    assert [len(each.token_ids) for each in outputs] == [each.output for each in lengths]
    return seconds


@torch.inference_mode()
def transformers_s(
    model: Any, prompts: Sequence[list[int]], lengths: Sequence[Lengths], batch: int
) -> float:
    """Return the seconds for all requests in batches of `batch`, with prompts padded on the
    left.
    """
    began = time.perf_counter()
    for at in range(0, len(prompts), batch):
        part = prompts[at : at + batch]
        longest = max(len(prompt) for prompt in part)
        count = max(each.output for each in lengths[at : at + batch])
        ids = torch.zeros(len(part), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(part):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return time.perf_counter() - began


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return the exit status."""
    parser = arguments_parser("engine_throughput", __doc__)
    parser.add_argument("--model", default=str(DEMO_MODEL), help="checkpoint (default: the demo)")
    parser.add_argument("--dtype", default="float32", help="of both sides (default: float32)")
    parser.add_argument("--requests", type=int, default=REQUESTS)
    given = parser.parse_args(arguments)
    prepare(given)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    rounds = 3 if given.full else 1
    lengths = mixed_lengths(given.requests, PROMPT_MEAN, OUTPUT_MEAN, seed=0)
    llm = LLM(given.model, given.dtype, enable_prefix_caching=False)
    vocab_size = llm.engine.info.vocab_size
    prompts = [random_prompt(each.prompt, i, vocab_size) for i, each in enumerate(lengths)]
    theirs: Any = AutoModelForCausalLM.from_pretrained(
        given.model, dtype=getattr(torch, given.dtype)
    ).eval()
    baton_s(llm, prompts[:4], lengths[:4])
    transformers_s(theirs, prompts[:2], lengths[:2], 1)
    runs: dict[str, list[float]] = {}
    for _ in range(rounds):  # alternating, so that changes of the machine's speed hit both
        runs.setdefault("baton", []).append(baton_s(llm, prompts, lengths))
        runs.setdefault("transformers, one by one", []).append(
            transformers_s(theirs, prompts, lengths, 1)
        )
        for batch in PADDED:
            runs.setdefault(f"transformers, padded {batch}", []).append(
                transformers_s(theirs, prompts, lengths, batch)
            )
    tokens = sum(each.output for each in lengths)
    best = {name: min(seconds) for name, seconds in runs.items()}
    rows = [
        {
            "system": name,
            "seconds": seconds,
            "tokens/s": tokens / seconds,
            "baton is": f"{seconds / best['baton']:.2f}x",
        }
        for name, seconds in best.items()
    ]
    title = (
        f"{given.requests} requests, {sum(e.prompt for e in lengths)} prompt tokens, {tokens} new"
    )
    tell([TimedPart(title, rows)], given.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
