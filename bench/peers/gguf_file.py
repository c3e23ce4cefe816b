"""A Hugging Face checkpoint of a Llama or Qwen3 as a GGUF file, by llama.cpp's own `gguf` package.

It writes only the benchmarks' random checkpoints: one safetensors file, bfloat16, a byte-level
tokenizer. llama.cpp's own converter takes every model, but no package contains that converter.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

# The peer's environment has them, Baton's need not: no types.
gguf: Any = importlib.import_module("gguf")
np: Any = importlib.import_module("numpy")

ARCHITECTURES: Final = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen3": gguf.MODEL_ARCH.QWEN3}
NORMAL, CONTROL = 1, 3  # kinds of a token


def write_gguf(model: Path, path: Path) -> None:
    """Write the checkpoint in the folder `model` to `path`, every number as it is."""
    config = json.loads((model / "config.json").read_text())
    kind = config["model_type"]
    architecture = ARCHITECTURES[kind]
    writer = gguf.GGUFWriter(path, kind)
    _add_shape(writer, config)
    _add_tokenizer(writer, model, config)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for name, tensor in _tensors(model / "model.safetensors"):
        numbers = _interleaved(name, tensor, config) if kind == "llama" else tensor
        told = names.get_name(name, try_suffixes=(".weight",))
        if numbers.ndim == 1:  # llama.cpp multiplies norms in float32
            writer.add_tensor(told, (numbers.astype(np.uint32) << 16).view(np.float32))
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
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)


def _add_tokenizer(writer: Any, model: Path, config: dict[str, Any]) -> None:
    content = json.loads((model / "tokenizer.json").read_text())
    ids: dict[str, int] = content["model"]["vocab"]
    special = {each["content"] for each in content["added_tokens"]}
    words = sorted(ids, key=lambda word: ids[word])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    writer.add_token_types([CONTROL if word in special else NORMAL for word in words])
    writer.add_token_merges([" ".join(pair) for pair in content["model"]["merges"]])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def _tensors(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the name and the bfloat16 numbers of each tensor, as a uint16 array over the file."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(size))
    header.pop("__metadata__", None)
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        flat = np.memmap(path, np.uint16, "r", 8 + size + begin, ((end - begin) // 2,))
        yield name, flat.reshape(entry["shape"])


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
