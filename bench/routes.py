"""The lean route against the universal one: `python -m bench.routes [--families NAME ...]`.

Random models of about 25 million numbers, bfloat16 (default: a mixture with latent attention, of
DeepSeek-V3's structure), both routes in one process, in turns: decode steps of 1, 4 and 16
sequences of 256 tokens, and a prefill of 512. CPU time of a step, and how many times as fast the
lean route is, by the median over rounds. `mxfp4`: GPT-OSS's structure with 300 million numbers,
experts in 4 bits against bfloat16, both lean.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
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
GPT_OSS: Final[dict[str, Any]] = {
    "vocab_size": 8192, "hidden_size": 256, "intermediate_size": 128, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "num_local_experts": 24,
    "num_experts_per_tok": 4, "sliding_window": 128, "max_position_embeddings": 4096,
    "pad_token_id": 0,
}  # fmt: skip
WIDE: Final[dict[str, Any]] = {
    **GPT_OSS, "hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 4,
}  # fmt: skip
_DENSE: Final[dict[str, Any]] = {
    "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "pad_token_id": 0,
    "max_position_embeddings": 4096,
}  # fmt: skip
_WINDOWS: Final = {"sliding_window": 128, "query_pre_attn_scalar": 64}
FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "deepseek_v3": MIXTURE,
    "gpt_oss": GPT_OSS,
    "mxfp4": WIDE,
    "gemma2": {**_DENSE, **_WINDOWS},
    "gemma3_text": {**_DENSE, **_WINDOWS},
    "phi3": {**_DENSE, "partial_rotary_factor": 0.5, "eos_token_id": 2},
    "glm4": {**_DENSE, "attention_bias": False},
}
CONTEXT, PROMPT = 256, 512
STEPS: Final = {"decode 1": 1, "decode 4": 4, "decode 16": 16, f"prefill {PROMPT}": 0}


def write_family(path: Path, family: str) -> Path:
    """A checkpoint of FAMILIES' sizes, with the demo model's tokenizer."""
    torch.manual_seed(0)
    name = "gpt_oss" if family == "mxfp4" else family
    config: Any = AutoConfig.for_model(name, **FAMILIES[family])
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(path)
    (path / "tokenizer.json").write_bytes((ROOT / "demo_model" / "tokenizer.json").read_bytes())
    return path


def write_packed(plain: Path, path: Path) -> Path:
    """Such a GPT-OSS with random experts in MXFP4."""
    path.mkdir()
    for file in ("config.json", "tokenizer.json"):
        (path / file).write_bytes((plain / file).read_bytes())
    tensors = load_file(plain / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(256, (*shape, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(118, 123, shape, dtype=torch.uint8)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (path / "config.json").write_text(json.dumps(config))
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


def measure(path: Path, family: str, rounds: int, repetitions: int) -> TimedPart:
    """One row per kind of step; the two models take turns."""
    first, second = ("mxfp4", "bfloat16") if family == "mxfp4" else ("lean", "universal")
    ours = write_packed(path, path / "packed") if family == "mxfp4" else path
    lean = load(ours, dtype="bfloat16", model_impl="lean")
    other = "lean" if family == "mxfp4" else "transformers"
    universal = load(path, dtype="bfloat16", model_impl=other)
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
                f"{first} ms": statistics.median(ours for ours, _ in pairs) * 1e3,
                f"{second} ms": statistics.median(theirs for _, theirs in pairs) * 1e3,
                "times as fast": round(statistics.median(ratios), 2),
                "least": round(min(ratios), 2),
                "most": round(max(ratios), 2),
            }
        )
    return TimedPart(f"{family}, bfloat16, CPU time", rows)


def main() -> None:
    """Run the command line."""
    parser = arguments_parser("routes", __doc__)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=["deepseek_v3"])
    given = parser.parse_args()
    prepare(given)
    parts: list[TimedPart] = []
    for family in given.families:
        with tempfile.TemporaryDirectory() as folder:
            path = write_family(Path(folder), family)
            parts.append(measure(path, family, 15 if given.full else 7, 40))
    tell(parts, given.json)


if __name__ == "__main__":
    main()
