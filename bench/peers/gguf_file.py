"""A Hugging Face checkpoint as a GGUF file, by llama.cpp's own `gguf` package.

It writes only the benchmarks' random checkpoints of Llama, Qwen3, Qwen3-MoE, DeepSeek-V2 (without
YaRN) and Qwen3.5 (dense, with as many value heads as key heads): one safetensors file, bfloat16, a
byte-level tokenizer. llama.cpp's own converter takes every model, but no package contains that
converter.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from bench.peers.protocol import Unsupported

# The peer's environment has them, Baton's need not: no types.
gguf: Any = importlib.import_module("gguf")
np: Any = importlib.import_module("numpy")

ARCHITECTURES: Final = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "deepseek_v2": gguf.MODEL_ARCH.DEEPSEEK2,
    "qwen3_5_text": gguf.MODEL_ARCH.QWEN35,
}
EXPERT: Final = re.compile(r"(.*\.mlp\.experts\.)\d+\.(.*)")
NORMAL, CONTROL = 1, 3  # kinds of a token


def write_gguf(model: Path, path: Path) -> None:
    """Write the checkpoint in the folder `model` to `path`, every number as it is."""
    config = json.loads((model / "config.json").read_text())
    kind = config["model_type"]
    architecture = ARCHITECTURES[kind]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    _add_shape(writer, config)
    if kind == "deepseek_v2":
        _add_latent_shape(writer, config)
    else:
        _add_heads(writer, config)
    add_tokenizer(writer, model, config["eos_token_id"])
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    tensors = _stacked(_tensors(model / "model.safetensors"), config)
    if kind == "qwen3_5_text":
        _add_state_shape(writer, config)
        tensors = (_recurrent(name, tensor) for name, tensor in tensors)
    for name, tensor in tensors:
        numbers = _interleaved(name, tensor, config) if kind == "llama" else tensor
        told = names.get_name(name, try_suffixes=(".weight", ".bias"))
        # llama.cpp multiplies norms in float32, and its converter leaves gates in it.
        if numbers.dtype == np.float32:
            writer.add_tensor(told, numbers)
        elif numbers.ndim == 1 or name.endswith("mlp.gate.weight"):
            writer.add_tensor(told, _widened(numbers))
        else:
            raw = np.ascontiguousarray(numbers).view(np.uint8)
            writer.add_tensor(told, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_shape(writer: Any, config: dict[str, Any]) -> None:
    rope: dict[str, Any] = config.get("rope_parameters") or config
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    if "num_experts_per_tok" in config:
        writer.add_expert_count(_num_experts(config))
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def _add_heads(writer: Any, config: dict[str, Any]) -> None:
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    rope: dict[str, Any] = config.get("rope_parameters") or config
    writer.add_rope_dimension_count(
        int(config["head_dim"] * rope.get("partial_rotary_factor", 1.0))
    )


def _add_state_shape(writer: Any, config: dict[str, Any]) -> None:
    """Gated delta rule beside full attention. Source: llama.cpp, conversion/qwen.py."""
    key_heads, value_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if key_heads != value_heads:
        raise Unsupported(f"{key_heads} key heads for {value_heads} value heads")
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(key_heads)
    writer.add_ssm_time_step_rank(value_heads)
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * value_heads)
    writer.add_full_attention_interval(config["layer_types"].index("full_attention") + 1)
    writer.add_rope_dimension_sections([*config["rope_parameters"]["mrope_section"], 0])


def _add_latent_shape(writer: Any, config: dict[str, Any]) -> None:
    """Latent attention as one KV head of latents, and DeepSeek-V2's experts.

    Source: llama.cpp, conversion/deepseek.py. The rank of queries is told even where queries have
    none: llama.cpp requires it of all models but those of 26 and 27 layers.
    """
    latent, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_head_count_kv(1)
    writer.add_q_lora_rank(config["q_lora_rank"] or 0)
    writer.add_kv_lora_rank(latent)
    writer.add_key_length(latent + rotated)
    writer.add_value_length(latent)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rotated)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_rope_dimension_count(rotated)
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])


def _num_experts(config: dict[str, Any]) -> int:
    names = ("n_routed_experts", "num_local_experts", "num_experts")
    return next(config[name] for name in names if name in config)


def add_tokenizer(writer: Any, model: Path, end: int) -> None:
    """The byte-level tokenizer of `model`, as llama.cpp has one; `end`: id of the end of a text."""
    content = json.loads((model / "tokenizer.json").read_text())
    ids: dict[str, int] = content["model"]["vocab"]
    special = {each["content"] for each in content["added_tokens"]}
    words = sorted(ids, key=lambda word: ids[word])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    writer.add_token_types([CONTROL if word in special else NORMAL for word in words])
    writer.add_token_merges([" ".join(pair) for pair in content["model"]["merges"]])
    writer.add_eos_token_id(end)
    writer.add_add_bos_token(False)


def _tensors(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the name and the numbers of each tensor, as an array over the file: of float32
    (DeepSeek's routers), or uint16 for bfloat16."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(size))
    header.pop("__metadata__", None)
    for name, entry in header.items():
        begin, shape = 8 + size + entry["data_offsets"][0], tuple(entry["shape"])
        kind = np.float32 if entry["dtype"] == "F32" else np.uint16
        yield name, np.memmap(path, kind, "r", begin, shape)


def _stacked(
    tensors: Iterable[tuple[str, Any]], config: dict[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Yield the tensors with all experts of a layer in one, and keys and values of latents in two.

    [outputs, inputs] of each expert become [experts, outputs, inputs]. Of each head, the key's part
    of `kv_b_proj` is transposed, because llama.cpp multiplies queries by it.
    """
    experts: dict[str, list[tuple[int, Any]]] = {}
    for name, tensor in tensors:
        if found := EXPERT.fullmatch(name):
            index = int(name.removeprefix(found[1]).partition(".")[0])
            whole = found[1] + found[2]
            parts = experts.setdefault(whole, [])
            parts.append((index, tensor))
            if len(parts) == _num_experts(config):
                ordered = sorted(experts.pop(whole), key=lambda part: part[0])
                yield whole, np.stack([part for _, part in ordered])
        elif name.endswith("kv_b_proj.weight"):
            heads, nope = config["num_attention_heads"], config["qk_nope_head_dim"]
            both = tensor.reshape(heads, -1, tensor.shape[1])
            yield name.replace("kv_b_proj", "k_b_proj"), both[:, :nope].swapaxes(1, 2)
            yield name.replace("kv_b_proj", "v_b_proj"), both[:, nope:]
        else:
            yield name, tensor


def _recurrent(name: str, tensor: Any) -> tuple[str, Any]:
    """Return a tensor of Qwen3.5 as llama.cpp has it: decays as factors, norms with their 1."""
    if name.endswith(".A_log"):
        return name, -np.exp(_widened(tensor))
    if name.endswith(".dt_bias"):
        return name.replace(".dt_bias", ".dt_proj.bias"), tensor
    if name.endswith(".conv1d.weight"):
        return name, _widened(tensor.squeeze(1))
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return name, _widened(tensor) + np.float32(1)
    return name, tensor


def _widened(numbers: Any) -> Any:
    """Return float32 numbers from bfloat16 as uint16, or float32 as it is."""
    if numbers.dtype == np.float32:
        return numbers
    return (numbers.astype(np.uint32) << 16).view(np.float32)


def _interleaved(name: str, tensor: Any, config: dict[str, Any]) -> Any:
    """Return the weights of queries or keys in the order of llama.cpp's Llama.

    It rotates pairs of neighbours, not of halves. Other tensors are returned as they are.
    Source: llama.cpp, conversion/llama.py, `permute`.
    """
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    part = next((part for part in heads if f".{part}." in name), None)
    if part is None:
        return tensor
    halves = tensor.reshape(config[heads[part]], 2, -1, tensor.shape[1])
    return halves.swapaxes(1, 2).reshape(tensor.shape)
