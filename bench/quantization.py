"""What rounding costs and gains: `python -m bench.quantization [--model DIR]`.

Every weight scheme, heads of each, and KV precision on one model, against float32 on the same
tokens. Measured are:
    the relative error of the logits (|a - b| / |b| over all entries)
    how often the greedy token differs
    the perplexity of the answers of the demo glossary (the questions as chat; only the answers
        count; the demo model knows them by heart)
    the perplexity of a text that the model never saw (this repository's LICENSE)
    the bytes of weights and of one token's KV
    the time of a decode step and of a prefill chunk
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from baton.engine.config import EngineConfig
from baton.engine.loading.loading import LoadedModel, load_model
from baton.engine.memory.kv_cache import KVArena, bytes_per_block
from baton.engine.memory.layer_groups import one_group
from baton.engine.running.attention_choice import choose_attention
from baton.engine.state.batch import flatten
from baton.engine.state.interface import SequenceChunk
from baton.protocol.kv_spec import HeldBlocks
from baton.text.tokenizer import Tokenizer
from bench.engine_kit import TimedPart, arguments_parser, prepare, random_prompt, tell
from bench.engine_swap import median_s

ROOT = Path(__file__).resolve().parents[1]
UNSEEN, UNSEEN_TOKENS = ROOT / "LICENSE", 1000
GLOSSARY = ROOT / "tools" / "demo_corpus" / "en.md"
BLOCK_SIZE = 32
# The (weights, head, KV) that are measured in each dtype.
VARIANTS = (
    ("none", "none", "auto"), ("none", "int8", "auto"), ("none", "w8a8", "auto"),
    ("none", "int4", "auto"), ("int8", "none", "auto"), ("int8", "int8", "auto"),
    ("int8", "int4", "auto"), ("w8a8", "none", "auto"), ("w8a8", "w8a8", "auto"),
    ("int4", "none", "auto"), ("int4", "int8", "auto"), ("int4", "int4", "auto"),
    ("w4a8", "none", "auto"), ("w4a8", "w8a8", "auto"),
    ("none", "none", "int8"), ("none", "none", "fp8"), ("w8a8", "w8a8", "int8"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """Token ids of one question and its answer; the answer starts at index `first`."""

    ids: list[int]
    first: int


class Measured:
    """A loaded model over its own pool."""

    def __init__(self, loaded: LoadedModel, num_blocks: int = 256) -> None:
        self.loaded = loaded
        self.arena = KVArena(
            one_group(loaded.info.layers), num_blocks, BLOCK_SIZE, loaded.info.kv_dtype
        )
        self.attention = choose_attention(loaded, self.arena)

    @torch.inference_mode()
    def run(self, chunks: Sequence[SequenceChunk]) -> Tensor:
        """Return the logits of all rows of one step."""
        step = flatten(chunks, self.attention, BLOCK_SIZE, self.loaded.device)
        return self.loaded.logits(self.loaded.forward(step.token_ids, step.positions, step.batch))

    def step_s(self, sequences: int, context: int, repetitions: int) -> float:
        """Return the median seconds of a decode step of `sequences` of `context` tokens each."""
        per_sequence = -(-context // BLOCK_SIZE)
        chunks = [
            SequenceChunk(
                str(i), [9 + i], context - 1,
                (HeldBlocks(range(i * per_sequence, (i + 1) * per_sequence)),),
            )
            for i in range(sequences)
        ]  # fmt: skip
        return median_s(lambda: self.run(chunks), repetitions)

    def prefill_s(self, tokens: int, repetitions: int) -> float:
        """Return the median seconds of one chunk of `tokens` tokens."""
        prompt = random_prompt(tokens, 1, self.loaded.info.vocab_size)
        chunk = SequenceChunk("p", prompt, 0, (HeldBlocks(range(-(-tokens // BLOCK_SIZE))),))
        return median_s(lambda: self.run([chunk]), repetitions)


def glossary(tokenizer: Tokenizer, every: int) -> Iterator[TimedAnswer]:
    """Yield every `every`-th topic of the glossary that has a written question, as chat."""
    topics = GLOSSARY.read_text(encoding="utf-8").split("\n## ")[1:]
    for topic in topics[::every]:
        lines = [line for line in topic.splitlines()[1:] if line and not line.startswith("#")]
        asked = [line.removeprefix("? ") for line in lines if line.startswith("? ")]
        answer = " ".join(line for line in lines if not line.startswith("?"))
        if asked and answer:
            head = f"<|im_start|>user\n{asked[0]}<|im_end|>\n<|im_start|>assistant\n"
            ids = tokenizer.encode(head, add_special_tokens=False)
            rest = tokenizer.encode(f"{answer}<|im_end|>", add_special_tokens=False)
            yield TimedAnswer([*ids, *rest], len(ids))


def all_logits(model: Measured, answers: Sequence[TimedAnswer]) -> list[Tensor]:
    """Return, per answer, the logits of the rows that predict the answer's tokens."""
    found: list[Tensor] = []
    for answer in answers:
        blocks = range(-(-len(answer.ids) // BLOCK_SIZE))
        logits = model.run([SequenceChunk("a", answer.ids, 0, (HeldBlocks(blocks),))])
        found.append(logits[answer.first - 1 : -1])
    return found


def perplexity(logits: Sequence[Tensor], answers: Sequence[TimedAnswer]) -> float:
    """Return exp of the mean negative log likelihood of the answers' tokens."""
    losses = [
        -rows.log_softmax(-1).gather(1, torch.tensor(answer.ids[answer.first :])[:, None])
        for rows, answer in zip(logits, answers, strict=True)
    ]
    return math.exp(float(torch.cat(losses).mean()))


def load(path: Path, **options: Any) -> Measured:
    """Load a model on the GPU if the machine has one, else on the CPU."""
    return Measured(load_model(EngineConfig(model=str(path), **options)))


def measure(path: Path, dtypes: Sequence[str], every: int, repetitions: int) -> TimedPart:
    """Return one row per dtype and variant."""
    tokenizer = Tokenizer.load(path)
    answers = list(glossary(tokenizer, every))
    text = UNSEEN.read_text(encoding="utf-8")
    unseen = [TimedAnswer(tokenizer.encode(text, add_special_tokens=False)[:UNSEEN_TOKENS], 1)]
    exact = all_logits(load(path, dtype="float32"), answers)
    reference, best = torch.cat(exact), torch.cat(exact).argmax(-1)
    rows: list[dict[str, Any]] = []
    for dtype in dtypes:
        for weights, head, kv in VARIANTS:
            model = load(
                path, dtype=dtype, quantization=weights, lm_head_quantization=head,
                kv_cache_dtype=kv,
            )  # fmt: skip
            logits = all_logits(model, answers)
            flat = torch.cat(logits)
            info = model.loaded.info
            rows.append(
                {
                    "dtype": dtype,
                    "weights": weights,
                    "head": head,
                    "KV": kv,
                    "logit error": float((flat - reference).norm() / reference.norm()),
                    "other greedy token": float((flat.argmax(-1) != best).float().mean()),
                    "perplexity": round(perplexity(logits, answers), 4),
                    "of unseen text": perplexity(all_logits(model, unseen), unseen),
                    "weights MB": model.loaded.weight_bytes / 1e6,
                    "KV bytes/token": bytes_per_block(info.layers, 1, info.kv_dtype),
                    "decode 1 ms": model.step_s(1, 256, repetitions) * 1e3,
                    "decode 16 ms": model.step_s(16, 256, repetitions) * 1e3,
                    "prefill 256 ms": model.prefill_s(256, repetitions) * 1e3,
                }
            )
    return TimedPart(f"{len(answers)} answers, {len(best)} tokens of {path.name}", rows)


def main() -> None:
    """Run the command line."""
    parser = arguments_parser("quantization", __doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "demo_model")
    given = parser.parse_args()
    prepare(given)
    every, repetitions = (1, 20) if given.full else (8, 7)
    tell([measure(given.model, ("float32", "bfloat16"), every, repetitions)], given.json)


if __name__ == "__main__":
    main()
