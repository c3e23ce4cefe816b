"""Random checkpoints of the shapes with which the engine is measured.

`python -m bench.models FOLDER` writes the two dense ones, for servers and programs that need a
folder; further words name others.

Only the shapes matter: Qwen3-0.6B (28 layers, hidden 1024, vocabulary 151,936 tied) and a Llama of
25 million numbers (8 layers, hidden 512, vocabulary 8,192), bfloat16; MIXTURES of 25 and about 600
million, with Qwen3-MoE's layers and with DeepSeek-V2-Lite's (latent attention, a dense first layer,
two shared experts; without YaRN), and of 25 million with Qwen2-MoE's (a shared expert with a gate);
and HYBRIDS with the layers of Qwen3.5-0.8B: all 24, or four of
them (three of linear attention, one of full), for machines with little time. The same seed gives
the same files. The tokenizer is the demo model's, with further words that no text contains, so that
each id that a random model chooses has a text to stream.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bench.transfer_engine import DEMO_MODEL, TOKENIZER_FILES, write_model

LARGE, SMALL = "Qwen3-0.6B", "Llama-25M"
LARGE_VOCABULARY: Final = 151_936
SMALL_VOCABULARY: Final = 8192
MIXTURE_VOCABULARY: Final = 32_768
POSITIONS: Final = 16_384  # that every model has, for the contexts of `bench.engine --full`
_SHARED: Final[dict[str, Any]] = {"max_position_embeddings": POSITIONS, "eos_token_id": 2}
_LLAMA: Final[dict[str, Any]] = {
    **_SHARED, "model_type": "llama", "vocab_size": SMALL_VOCABULARY, "hidden_size": 512,
    "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64,
}  # fmt: skip
_QWEN: Final[dict[str, Any]] = {**_SHARED, "model_type": "qwen3_moe", "norm_topk_prob": True}
_DEEPSEEK: Final[dict[str, Any]] = {
    **_SHARED, "model_type": "deepseek_v2", "q_lora_rank": None, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "topk_method": "greedy", "n_group": 1, "topk_group": 1,
    "norm_topk_prob": False, "routed_scaling_factor": 1.0,
}  # fmt: skip
MIXTURES: Final[dict[str, dict[str, Any]]] = {
    "Qwen3-MoE-25M": {
        **_QWEN, "vocab_size": SMALL_VOCABULARY, "hidden_size": 256, "intermediate_size": 1024,
        "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
        "num_experts": 24, "num_experts_per_tok": 4, "moe_intermediate_size": 128,
    },
    "DeepSeek-V2-25M": {
        **_DEEPSEEK, "vocab_size": SMALL_VOCABULARY, "hidden_size": 256, "intermediate_size": 1024,
        "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8,
        "kv_lora_rank": 128, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32,
        "n_routed_experts": 24, "num_experts_per_tok": 4, "moe_intermediate_size": 128,
    },
    "Qwen2-MoE-25M": {
        **_SHARED, "model_type": "qwen2_moe", "vocab_size": SMALL_VOCABULARY, "hidden_size": 256,
        "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8,
        "num_key_value_heads": 8, "num_experts": 24, "num_experts_per_tok": 4,
        "moe_intermediate_size": 128, "shared_expert_intermediate_size": 512,
    },
    "Qwen3-MoE-0.6B": {
        **_QWEN, "vocab_size": MIXTURE_VOCABULARY, "hidden_size": 768, "intermediate_size": 2048,
        "num_hidden_layers": 14, "num_attention_heads": 16, "num_key_value_heads": 2,
        "head_dim": 64, "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 256,
    },
    "DeepSeek-V2-0.6B": {
        **_DEEPSEEK, "vocab_size": MIXTURE_VOCABULARY, "hidden_size": 1024,
        "intermediate_size": 5472, "num_hidden_layers": 10, "num_attention_heads": 8,
        "num_key_value_heads": 8, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64,
        "num_experts_per_tok": 6, "moe_intermediate_size": 256,
    },
}  # fmt: skip
_QWEN35: Final[dict[str, Any]] = {
    **_SHARED, "model_type": "qwen3_5_text", "hidden_size": 1024, "intermediate_size": 3584,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
    "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "tie_word_embeddings": True,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10], "mrope_interleaved": True,
    },
}  # fmt: skip
HYBRIDS: Final[dict[str, dict[str, Any]]] = {
    "Qwen3.5-0.6B": {**_QWEN35, "vocab_size": LARGE_VOCABULARY, "num_hidden_layers": 24},
    "Qwen3.5-90M": {**_QWEN35, "vocab_size": SMALL_VOCABULARY, "num_hidden_layers": 4},
}
SPACE: Final = "\u0120"  # as byte-level tokenizers write it


def write_checkpoint(name: str, folder: Path) -> Path:
    """Write the checkpoint `name` into its own folder in `folder`, unless it is there already."""
    path = folder / name
    if not path.exists():
        unfinished = folder / f".{name}"
        shutil.rmtree(unfinished, ignore_errors=True)
        WRITERS[name](unfinished)
        unfinished.rename(path)
    return path


def _write_large(path: Path) -> None:
    write_model(path, vocab_size=LARGE_VOCABULARY, max_position_embeddings=POSITIONS)
    widen_tokenizer(path / "tokenizer.json", LARGE_VOCABULARY)


def _write_random(sizes: Mapping[str, Any], path: Path) -> None:
    """Write a model of these sizes, as its class of transformers draws it."""
    config: Any = AutoConfig.for_model(**sizes)
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(path)
    for name in TOKENIZER_FILES:
        shutil.copy(DEMO_MODEL / name, path / name)
    widen_tokenizer(path / "tokenizer.json", sizes["vocab_size"])


WRITERS: Final[Mapping[str, Callable[[Path], None]]] = {
    LARGE: _write_large,
    SMALL: partial(_write_random, _LLAMA),
    **{name: partial(_write_random, sizes) for name, sizes in (MIXTURES | HYBRIDS).items()},
}


def widen_tokenizer(path: Path, size: int) -> None:
    """Give every id below `size` a text in the tokenizer at `path`, which is written anew.

    No merge leads to the new words, so the ids of a text do not change.
    """
    content = json.loads(path.read_text())
    words: dict[str, int] = content["model"]["vocab"]
    words |= {f"{SPACE}w{index}": index for index in range(len(words), size)}
    path.write_text(json.dumps(content, ensure_ascii=False))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.models", description="Write the benchmarks' random checkpoints."
    )
    parser.add_argument("folder", type=Path, help="made if missing")
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(WRITERS))
    given = parser.parse_args(arguments)
    if unknown := [name for name in given.models if name not in WRITERS]:
        parser.error(f"no model is called {unknown[0]}: the models are {', '.join(WRITERS)}")
    for name in given.models or (LARGE, SMALL):
        sys.stdout.write(f"{write_checkpoint(name, given.folder)}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
