"""What --deterministic costs: `python -m bench.deterministic [--model DIR]`.

Both modes in one process on the same model, measured in turns: decode steps of 1, 4 and 16
sequences of 256 tokens, and a prefill chunk of 256. Ratios are deterministic over normal. Without
--model also a random model of 110M parameters, where products weigh more than Python's overhead,
and a mixture of 8 experts, of which a token meets 2; this one by both routes.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench.engine_kit import TimedPart, arguments_parser, prepare, tell
from bench.quantization import ROOT, Measured, load

RANDOM_MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 8192,
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "hidden_act": "silu",
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    "rope_theta": 10000.0, "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


EXPERTS: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 8,
    "num_experts_per_tok": 2, "intermediate_size": 704, "num_hidden_layers": 4,
}  # fmt: skip


def write_random_model(path: Path, **changes: Any) -> Path:
    """Write a Llama or Mixtral checkpoint of random bfloat16 weights, with the demo model's
    tokenizer.
    """
    c = RANDOM_MODEL | changes
    hidden, inner, kv = c["hidden_size"], c["intermediate_size"], c["num_key_value_heads"] * 64
    shapes = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden), "self_attn.o_proj": (hidden, hidden),
    }  # fmt: skip
    if experts := c.get("num_local_experts"):
        moe = "block_sparse_moe."
        shapes[moe + "gate"] = (experts, hidden)
        for each in range(experts):
            shapes |= dict.fromkeys((f"{moe}experts.{each}.w{i}" for i in (1, 3)), (inner, hidden))
            shapes[f"{moe}experts.{each}.w2"] = (hidden, inner)
    else:
        shapes |= dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (inner, hidden))
        shapes["mlp.down_proj"] = (hidden, inner)
    generator = torch.Generator().manual_seed(0)
    tensors = {"model.norm.weight": torch.ones(hidden).bfloat16()}

    def add(name: str, shape: tuple[int, int]) -> None:
        noise = torch.randn(shape, generator=generator) / shape[1] ** 0.5
        tensors[f"model.{name}.weight"] = noise.bfloat16()

    add("embed_tokens", (c["vocab_size"], hidden))
    for layer in range(c["num_hidden_layers"]):
        for name, shape in shapes.items():
            add(f"layers.{layer}.{name}", shape)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = torch.ones(hidden).bfloat16()
    path.mkdir(parents=True)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(c))
    (path / "tokenizer.json").write_bytes((ROOT / "demo_model" / "tokenizer.json").read_bytes())
    return path


def measure(path: Path, dtype: str, counts: tuple[int, int], impl: str = "auto") -> TimedPart:
    """Measure one row per kind of step; the two modes take turns.

    `counts` are the rounds, and the repetitions in each.
    """
    rounds, repetitions = counts
    options = {"dtype": dtype, "model_impl": impl}
    modes = {mode: load(path, deterministic=mode, **options) for mode in (False, True)}
    shapes = {"decode 1": 1, "decode 4": 4, "decode 16": 16, "prefill 256": 0}

    def once(model: Measured, sequences: int) -> float:
        if sequences:
            return model.step_s(sequences, 256, repetitions)
        return model.prefill_s(256, repetitions)

    rows: list[dict[str, Any]] = []
    for name, sequences in shapes.items():
        ratios: list[float] = []
        seconds: list[float] = []
        for _ in range(rounds):
            plain, fixed = (once(modes[mode], sequences) for mode in (False, True))
            ratios.append(fixed / plain)
            seconds.append(plain)
        rows.append(
            {
                "step": name,
                "normal ms": statistics.median(seconds) * 1e3,
                "deterministic / normal": round(statistics.median(ratios), 2),
                "least": round(min(ratios), 2),
                "most": round(max(ratios), 2),
            }
        )
    return TimedPart(f"{path.name}, {dtype}, {modes[True].loaded.info.model_impl}", rows)


def main() -> None:
    """Run the command line."""
    parser = arguments_parser("deterministic", __doc__)
    parser.add_argument("--model", type=Path)
    given = parser.parse_args()
    prepare(given)
    counts = (7, 15) if given.full else (3, 7)
    with tempfile.TemporaryDirectory() as folder:
        models = [(given.model or ROOT / "demo_model", "auto")]
        if given.model is None:
            mixture = write_random_model(Path(folder) / "random-mixture", **EXPERTS)
            models += [
                (write_random_model(Path(folder) / "random-110M"), "auto"),
                (mixture, "auto"),
                (mixture, "transformers"),
            ]
        parts = [
            measure(path, dtype, counts, impl)
            for path, impl in models
            for dtype in ("bfloat16", "float32")
        ]
    tell(parts, given.json)


if __name__ == "__main__":
    main()
