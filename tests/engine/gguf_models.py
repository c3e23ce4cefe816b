"""Tiny GGUF files, written by llama.cpp's own package from tiny checkpoints, each with the plain
twin of the numbers that it stands for (by that package's dequantizers)."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

gguf: Any = importlib.import_module("gguf")  # in the group `test`

NORMAL, CONTROL = 1, 3
MODEL_ARCHES: Final = {
    "llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma": gguf.MODEL_ARCH.GEMMA, "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
}  # fmt: skip
# What llama.cpp's quantizer gives to most matrices, and to the others (values, down, embeddings).
MIXES: Final = {
    "Q4_0": ("Q4_0", "Q4_0"), "Q8_0": ("Q8_0", "Q8_0"), "F16": ("F16", "F16"),
    "BF16": ("BF16", "BF16"), "F32": ("F32", "F32"), "Q4_K_M": ("Q4_K", "Q6_K"),
    "Q5_K_M": ("Q5_K", "Q6_K"), "Q6_K": ("Q6_K", "Q8_0"), "old": ("Q4_1", "Q5_0"),
    "older": ("Q5_1", "Q4_1"),
}  # fmt: skip
HALVES: Final = {  # bytes at which a block has its float16 factors
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}


def kind_of(name: str) -> Any:
    return gguf.GGMLQuantizationType[name]


def random_blocks(kind: str, rows: int, columns: int, generator: Any) -> Any:
    """Random bytes with small, finite factors: [rows, bytes]. The package does not pack K types."""
    numbers, size = gguf.GGML_QUANT_SIZES[kind_of(kind)]
    blocks = generator.integers(0, 256, (rows * columns // numbers, size), dtype=np.uint8)
    for at in HALVES[kind]:
        factors = generator.uniform(1e-4, 3e-4, len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = factors.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


def write_gguf(model: Path, file: Path, mix: str = "Q8_0", **said: Any) -> Path:
    """Write the checkpoint in `model` to `file`, and its plain twin beside it (returned).

    `said`: keys behind the architecture's name that differ, None = left out.
    """
    config = json.loads((model / "config.json").read_text())
    arch = MODEL_ARCHES[config["model_type"]]
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[arch])
    for key, value in (shape_of(config) | said).items():
        kinds = {str: "STRING", float: "FLOAT32", int: "UINT32"}
        if value is not None:
            kind = gguf.GGUFValueType[kinds[type(value)]]
            writer.add_key_value(f"{gguf.MODEL_ARCH_NAMES[arch]}.{key}", value, kind)
    add_tokenizer(writer, model, config)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    generator = np.random.default_rng(0)
    twin = file.with_name(f"{file.stem}-twin")
    shutil.copytree(model, twin)
    plain = load_file(model / "model.safetensors")
    for name, tensor in plain.items():
        told = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert told is not None, name
        kind = tensor_kind(name, tensor, mix)
        if kind in HALVES:
            raw = random_blocks(kind, len(tensor), tensor.shape[1], generator)
        else:
            raw = gguf.quants.quantize(turned(name, tensor, config).float().numpy(), kind_of(kind))
        raw = np.ascontiguousarray(raw)
        writer.add_tensor(told, raw, raw_dtype=kind_of(kind))
        numbers = torch.from_numpy(np.array(gguf.quants.dequantize(raw, kind_of(kind))))
        plain[name] = turned(name, numbers.view(tensor.shape), config, back=True)
    save_file({name: t.contiguous() for name, t in plain.items()}, twin / "model.safetensors")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return twin


def tensor_kind(name: str, tensor: Tensor, mix: str) -> str:
    """Vectors are float32; rows that make no blocks float16."""
    if tensor.dim() < 2:
        return "F32"
    most, others = MIXES[mix]
    kind = others if any(part in name for part in ("v_proj", "down_proj", "embed")) else most
    return kind if tensor.shape[1] % gguf.GGML_QUANT_SIZES[kind_of(kind)][0] == 0 else "F16"


def turned(name: str, tensor: Tensor, config: Mapping[str, Any], *, back: bool = False) -> Tensor:
    """As llama.cpp has it: a Llama's queries and keys in pairs, a Gemma's norms plus one."""
    if config["model_type"].startswith("gemma") and name.endswith("norm.weight"):
        return tensor - 1 if back else tensor + 1
    parts = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    part = next((part for part in parts if f".{part}." in name), None)
    if config["model_type"] != "llama" or part is None:
        return tensor
    inner = (-1, 2) if back else (2, -1)
    pairs = tensor.reshape(config[parts[part]], *inner, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


def shape_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of its architecture, as llama.cpp's converter writes them."""
    rope = config.get("rope_parameters") or config
    rope = rope.get("full_attention", rope)
    found: dict[str, Any] = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "block_count": config["num_hidden_layers"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if config["model_type"] in ("gemma2", "gemma3_text"):
        found["attention.sliding_window"] = config["sliding_window"]
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            if config.get(key) is not None:
                found[key] = float(config[key])
    return found


def add_tokenizer(writer: Any, model: Path, config: Mapping[str, Any]) -> None:
    content = json.loads((model / "tokenizer.json").read_text())
    ids: dict[str, int] = content["model"]["vocab"]
    special = {each["content"] for each in content["added_tokens"]}
    words = sorted(ids, key=lambda word: ids[word])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    writer.add_token_types([CONTROL if word in special else NORMAL for word in words])
    writer.add_token_merges([" ".join(pair) for pair in content["model"]["merges"]])
    said = json.loads((model / "generation_config.json").read_text())
    ends = said.get("eos_token_id", config.get("eos_token_id")) or 2
    writer.add_eos_token_id(ends[0] if isinstance(ends, list) else ends)
    writer.add_bos_token_id(1)
    writer.add_add_bos_token(False)
    template = json.loads((model / "tokenizer_config.json").read_text())["chat_template"]
    writer.add_chat_template(template)
