"""The lean route against the universal one: `python -m bench.routes [--threads 1]`.

A random mixture with latent attention (DeepSeek-V3's structure, 25 million numbers, bfloat16). Both
routes run in one process, in turns: decode steps of 1, 4 and 16 sequences of 256 tokens, and a
prefill of 512. Shown are the CPU time of a step, and how many times as fast the lean route is, by
the median over rounds.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from baton.engine.state.batch import flatten
from baton.engine.state.interface import SequenceChunk
from baton.protocol.kv_spec import HeldBlocks
from bench.engine_kit import TimedPart, arguments_parser, prepare, random_prompt, tell
from bench.quantization import BLOCK_SIZE, ROOT, Measured, load

MIXTURE: Final[dict[str, Any]] = {
    "vocab_size": 8192, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": 128, "kv_lora_rank": 128,
    "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32, "n_routed_experts": 24,
    "n_shared_experts": 1, "num_experts_per_tok": 4, "moe_intermediate_size": 128, "n_group": 4,
    "topk_group": 2, "first_k_dense_replace": 1, "max_position_embeddings": 4096,
}  # fmt: skip
CONTEXT, PROMPT = 256, 512
STEPS: Final = {"decode 1": 1, "decode 4": 4, "decode 16": 16, f"prefill {PROMPT}": 0}


def write_mixture(path: Path) -> Path:
    """Write a checkpoint of MIXTURE's sizes, with the demo model's tokenizer."""
    torch.manual_seed(0)
    config: Any = AutoConfig.for_model("deepseek_v3", **MIXTURE)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(path)
    (path / "tokenizer.json").write_bytes((ROOT / "demo_model" / "tokenizer.json").read_bytes())
    return path


def chunks_of(sequences: int, vocab_size: int) -> list[SequenceChunk]:
    """Return a decode step of `sequences` sequences; for 0 a prefill."""
    if not sequences:
        blocks = HeldBlocks(range(-(-PROMPT // BLOCK_SIZE)))
        return [SequenceChunk("p", random_prompt(PROMPT, 1, vocab_size), 0, (blocks,))]
    each = -(-CONTEXT // BLOCK_SIZE)
    return [
        SequenceChunk(str(i), [9 + i], CONTEXT - 1, (HeldBlocks(range(i * each, (i + 1) * each)),))
        for i in range(sequences)
    ]


@torch.inference_mode()
def cpu_seconds(model: Measured, chunks: Sequence[SequenceChunk], repetitions: int) -> float:
    """Return the CPU time of a step, including the logits of its sampled rows."""
    loaded, attention = model.loaded, model.attention
    start = time.process_time()
    for _ in range(repetitions):
        step = flatten(chunks, attention, BLOCK_SIZE, loaded.device)
        hidden = loaded.forward(step.token_ids, step.positions, step.batch)
        loaded.logits(hidden[-len(chunks) :])
    return (time.process_time() - start) / repetitions


def measure(path: Path, rounds: int, repetitions: int) -> TimedPart:
    """Return one row per kind of step; the routes take turns."""
    lean, universal = (
        load(path, dtype="bfloat16", model_impl=impl) for impl in ("lean", "transformers")
    )
    rows: list[dict[str, Any]] = []
    for name, sequences in STEPS.items():
        chunks = chunks_of(sequences, lean.loaded.info.vocab_size)
        count = repetitions if sequences else max(1, repetitions // 8)
        for model in (lean, universal):
            cpu_seconds(model, chunks, 2)
        pairs = [
            (cpu_seconds(lean, chunks, count), cpu_seconds(universal, chunks, count))
            for _ in range(rounds)
        ]
        ratios = [theirs / ours for ours, theirs in pairs]
        rows.append(
            {
                "step": name,
                "lean ms": statistics.median(ours for ours, _ in pairs) * 1e3,
                "universal ms": statistics.median(theirs for _, theirs in pairs) * 1e3,
                "times as fast": round(statistics.median(ratios), 2),
                "least": round(min(ratios), 2),
                "most": round(max(ratios), 2),
            }
        )
    return TimedPart("mixture with latent attention, bfloat16, CPU time", rows)


def main() -> None:
    """Run the command line."""
    parser = arguments_parser("routes", __doc__)
    given = parser.parse_args()
    prepare(given)
    with tempfile.TemporaryDirectory() as folder:
        part = measure(write_mixture(Path(folder)), 15 if given.full else 7, 40)
    tell([part], given.json)


if __name__ == "__main__":
    main()
