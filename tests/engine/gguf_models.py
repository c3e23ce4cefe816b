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

from baton.text.chat_template import ChatTemplate
from bench.peers.gguf_file import add_tokenizer

gguf: Any = importlib.import_module("gguf")  # in the group `test`

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
# What llama.cpp takes for rows that make no blocks of 256.
FALLBACKS: Final = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}


def kind_of(name: str) -> Any:
    return gguf.GGMLQuantizationType[name]


def pack_k(weight: Tensor, kind: str) -> Any:
    """weight [rows, columns] rounded to nearest, as bytes [rows, ...]: the package packs no K
    types, and llama.cpp itself searches for better scales."""
    blocks = weight.reshape(-1, 256)
    packed = _pack_q6_k(blocks) if kind == "Q6_K" else _pack_minima(blocks, 4 if "4" in kind else 5)
    return packed.view(len(weight), -1).numpy()


def _halfs(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """float16 of [n]: (its bytes [n, 2], what they stand for [n, 1])."""
    halfs = numbers.clamp(min=1e-7).half()
    return halfs.view(torch.uint8).view(-1, 2), halfs.float()[:, None]


def _pack_minima(blocks: Tensor, bits: int) -> Tensor:
    """Q4_K and Q5_K: 8 runs of 32, each w = d * scale * q - dmin * minimum."""
    runs, top = blocks.view(-1, 8, 32), 2**bits - 1
    lowest = runs.amin(2).clamp(max=0)
    wanted = (runs.amax(2).clamp(min=0) - lowest) / top
    (d, factor), (dmin, least) = _halfs(wanted.amax(1) / 63), _halfs(-lowest.amin(1) / 63)
    scale, minimum = (wanted / factor).round().clamp(0, 63), (-lowest / least).round().clamp(0, 63)
    step = (factor * scale).clamp(min=1e-9)[..., None]
    q = ((runs + (least * minimum)[..., None]) / step).round().clamp(0, top).to(torch.uint8)
    s, m = scale.to(torch.uint8), minimum.to(torch.uint8)
    first = s[:, :4] | s[:, 4:] >> 4 << 6
    second = m[:, :4] | m[:, 4:] >> 4 << 6
    third = s[:, 4:] & 15 | (m[:, 4:] & 15) << 4
    low = (q & 15).view(-1, 4, 2, 32)
    parts = [d, dmin, first, second, third]
    if bits == 5:
        parts.append((q >> 4 << torch.arange(8, dtype=torch.uint8)[:, None]).sum(1).to(torch.uint8))
    return torch.cat([*parts, (low[:, :, 0] | low[:, :, 1] << 4).flatten(1)], 1)


def _pack_q6_k(blocks: Tensor) -> Tensor:
    """16 runs of 16, each w = d * scale * (q - 32)."""
    runs = blocks.view(-1, 16, 16)
    wanted = runs.abs().amax(2) / 31
    d, factor = _halfs(wanted.amax(1) / 127)
    scale = (wanted / factor).round().clamp(0, 127)
    step = (factor * scale).clamp(min=1e-9)[..., None]
    q = ((runs / step).round().clamp(-32, 31) + 32).to(torch.uint8).view(-1, 2, 4, 32)
    low = (q & 15).view(-1, 2, 2, 64)
    high = (q >> 4 << torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]).sum(2)
    return torch.cat(
        [
            (low[:, :, 0] | low[:, :, 1] << 4).flatten(1),
            high.to(torch.uint8).flatten(1),
            scale.to(torch.int8).view(torch.uint8),
            d,
        ],
        1,
    )


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
    generation = json.loads((model / "generation_config.json").read_text())
    ends = generation.get("eos_token_id", config.get("eos_token_id")) or 2
    add_tokenizer(writer, model, ends[0] if isinstance(ends, list) else ends)
    writer.add_bos_token_id(1)
    writer.add_chat_template(ChatTemplate.load(model).source)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    twin = file.with_name(f"{file.stem}-twin")
    shutil.copytree(model, twin)
    plain = load_file(model / "model.safetensors")
    for name, tensor in plain.items():
        told = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert told is not None, name
        kind = tensor_kind(name, tensor, mix)
        ordered = turned(name, tensor, config).float()
        if kind in FALLBACKS:
            raw = pack_k(ordered, kind)
        else:
            raw = gguf.quants.quantize(ordered.numpy(), kind_of(kind))
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
    """Vectors are float32; rows that make no blocks of any kind float16."""
    if tensor.dim() < 2:
        return "F32"
    most, others = MIXES[mix]
    kind = others if any(part in name for part in ("v_proj", "down_proj", "embed")) else most
    for each in (kind, FALLBACKS.get(kind, kind)):
        if tensor.shape[1] % gguf.GGML_QUANT_SIZES[kind_of(each)][0] == 0:
            return each
    return "F16"


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
