"""Tiny random Hugging Face checkpoints for tests, written without transformers, in milliseconds.

Weights are seeded and sharpened (wide normal entries), so that greedy tokens are decisive and
differ from position to position. The tokenizer is a byte-level BPE: 5 specials, 256 bytes, 59
bigrams.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel

VOCAB_SIZE: Final = 320
SPECIALS: Final = ("<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
PAD_ID, BOS_ID, EOS_ID, IM_START_ID, IM_END_ID = range(5)
KINDS: Final = ("llama", "qwen2", "qwen3", "mistral", "gpt2")
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_SPECIAL_IDS = {"pad_token_id": PAD_ID, "bos_token_id": BOS_ID, "eos_token_id": EOS_ID}
_DECODER: dict[str, Any] = {
    **_SPECIAL_IDS,
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "torch_dtype": "float32",
}
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "attention_bias": False, "mlp_bias": False},
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "use_sliding_window": False,
        "tie_word_embeddings": True,
    },
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "head_dim": 24},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 9},
}
_GPT2: dict[str, Any] = {
    **_SPECIAL_IDS,
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": VOCAB_SIZE,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 512,
    "torch_dtype": "float32",
}


def make_tiny_model(kind: str, path: Path, seed: int = 0, **overrides: Any) -> Path:
    """Write a complete checkpoint of family `kind` into the folder `path` and return it.

    `overrides` replace keys of config.json; a value of None removes the key. Weights depend on
    (kind, seed, shapes) only.
    """
    path.mkdir(parents=True, exist_ok=True)
    base = _GPT2 if kind == "gpt2" else {**_DECODER, **_FAMILIES[kind]}
    merged = {"model_type": kind, **base, **overrides}
    config = {key: value for key, value in merged.items() if value is not None}
    shapes = _gpt2_shapes(config) if kind == "gpt2" else _decoder_shapes(kind, config)
    save_file(_random_weights(shapes, seed, config), path / "model.safetensors", {"format": "pt"})
    _write_json(path / "config.json", config)
    _write_json(path / "generation_config.json", {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID})
    write_tiny_tokenizer(path)
    return path


def make_wide_model(path: Path, **overrides: Any) -> Path:
    """A Llama with 16 KiB of KV per token, whose hand-over fits into no socket's buffer, and whose
    steps take milliseconds: what happens in mid-stream has time to happen."""
    wide = {
        "hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 2048,
    }  # fmt: skip
    return make_tiny_model("llama", path, **(wide | overrides))


def make_reranker(path: Path) -> Path:
    """A Qwen3 in whose vocabulary yes and no are single tokens."""
    wide = {"vocab_size": VOCAB_SIZE + 1, "max_position_embeddings": 1024}
    make_tiny_model("qwen3", path, **wide)
    file = path / "tokenizer.json"
    content = json.loads(file.read_text())
    content["added_tokens"].append(
        {
            "id": VOCAB_SIZE, "content": "yes", "single_word": False, "lstrip": False,
            "rstrip": False, "normalized": False, "special": False,
        }
    )  # fmt: skip
    file.write_text(json.dumps(content))
    return path


def make_other_vocabulary(path: Path, vocab_size: int = 300) -> Path:
    """A Qwen3 with other token ids for every text, fewer of them, and another chat template."""
    make_tiny_model("qwen3", path, seed=1, vocab_size=vocab_size)
    write_tiny_tokenizer(path, vocab_size)
    file = path / "tokenizer_config.json"
    config = json.loads(file.read_text())
    config["chat_template"] = CHAT_TEMPLATE.replace("assistant", "other model")
    file.write_text(json.dumps(config))
    return path


def write_tiny_tokenizer(path: Path, vocab_size: int = VOCAB_SIZE) -> None:
    """Write tokenizer.json and tokenizer_config.json (ChatML template); all ids below `vocab_size`
    decode. Vocabularies of different sizes have no byte at the same id."""
    alphabet = sorted(ByteLevel.alphabet())
    bigrams = _bigrams(vocab_size - len(SPECIALS) - len(alphabet))
    turn = VOCAB_SIZE - vocab_size
    alphabet = alphabet[turn:] + alphabet[:turn]
    pieces = [*SPECIALS, *alphabet, *("".join(pair) for pair in bigrams)]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, bigrams))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.save(str(path / "tokenizer.json"))
    _write_json(
        path / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "pad_token": "<pad>",
            "add_bos_token": False,
            "chat_template": CHAT_TEMPLATE,
            "model_max_length": 512,
        },
    )


def _bigrams(count: int) -> list[tuple[str, str]]:
    """The first `count` pairs of frequent English letters, as merges."""
    letters = "etaoinshr"
    return [(a, b) for a in letters for b in letters][:count]


def _decoder_shapes(kind: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim", hidden // config["num_attention_heads"])
    query = config["num_attention_heads"] * head_dim
    kv = config["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden)
    }
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        shapes[name + "input_layernorm.weight"] = (hidden,)
        shapes[name + "post_attention_layernorm.weight"] = (hidden,)
        for part, rows in (("q", query), ("k", kv), ("v", kv)):
            shapes[f"{name}self_attn.{part}_proj.weight"] = (rows, hidden)
            if kind == "qwen2" or config.get("attention_bias"):
                shapes[f"{name}self_attn.{part}_proj.bias"] = (rows,)
        shapes[name + "self_attn.o_proj.weight"] = (hidden, query)
        if config.get("attention_bias"):
            shapes[name + "self_attn.o_proj.bias"] = (hidden,)
        if kind == "qwen3":
            shapes[name + "self_attn.q_norm.weight"] = (head_dim,)
            shapes[name + "self_attn.k_norm.weight"] = (head_dim,)
        shapes[name + "mlp.gate_proj.weight"] = (inner, hidden)
        shapes[name + "mlp.up_proj.weight"] = (inner, hidden)
        shapes[name + "mlp.down_proj.weight"] = (hidden, inner)
        if config.get("mlp_bias"):
            for part, rows in (("gate", inner), ("up", inner), ("down", hidden)):
                shapes[f"{name}mlp.{part}_proj.bias"] = (rows,)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def _gpt2_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """GPT-2 stores its projections as [in, out] (Conv1D)."""
    hidden = config["n_embd"]
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (config["vocab_size"], hidden),
        "transformer.wpe.weight": (config["n_positions"], hidden),
    }
    for layer in range(config["n_layer"]):
        name = f"transformer.h.{layer}."
        for part, rows, columns in (
            ("attn.c_attn", hidden, 3 * hidden),
            ("attn.c_proj", hidden, hidden),
            ("mlp.c_fc", hidden, 4 * hidden),
            ("mlp.c_proj", 4 * hidden, hidden),
        ):
            shapes[f"{name}{part}.weight"] = (rows, columns)
            shapes[f"{name}{part}.bias"] = (columns,)
        for part in ("ln_1", "ln_2"):
            shapes[f"{name}{part}.weight"] = (hidden,)
            shapes[f"{name}{part}.bias"] = (hidden,)
    shapes["transformer.ln_f.weight"] = (hidden,)
    shapes["transformer.ln_f.bias"] = (hidden,)
    return shapes


def _random_weights(
    shapes: dict[str, tuple[int, ...]], seed: int, config: dict[str, Any]
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(
        config["torch_dtype"], torch.float32
    )
    weights: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        if len(shape) > 1:
            value = noise * (1.2 / shape[-1] ** 0.5)
        elif name.endswith("bias"):
            value = noise * 0.05
        else:
            value = 1.0 + noise * 0.05
        weights[name] = value.to(dtype)
    return weights


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1))
