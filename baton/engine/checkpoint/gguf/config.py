"""Makes the config.json of a GGUF file from its metadata, and translates the names of its tensors.

No torch. Values that llama.cpp does not write into the file are constants of its code; they are
repeated here. A file with a feature that would change the result and is not supported is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from baton.engine.checkpoint.gguf.header import GgufFile
from baton.protocol.errors import ModelRefused

_CLASSES: Final = {
    "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM", "gemma2": "Gemma2ForCausalLM", "gemma3": "Gemma3ForCausalLM",
}  # fmt: skip
_MODEL_TYPES: Final = {"gemma3": "gemma3_text"}
_OUTSIDE: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_INSIDE: Final = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
_GEMMAS: Final = {
    "ffn_norm": "pre_feedforward_layernorm", "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
_LLAMA3_FACTORS: Final = (8.0, 32.0)  # the first of Llama 3.1 and 3.3, the second of Llama 3.2
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_LENGTH = 1.0, 4.0, 8192
_LLAMA3_RULE: Final[Mapping[str, Any]] = {
    "rope_type": "llama3", "low_freq_factor": _LLAMA3_LOW, "high_freq_factor": _LLAMA3_HIGH,
    "original_max_position_embeddings": _LLAMA3_LENGTH,
}  # fmt: skip
_GEMMA3_LOCAL_THETA, _GEMMA3_PATTERN = 10000.0, 6
_GEMMA2_PATTERN: Final = 2
# Layers of the 27B models, which scale attention scores by another size.
_WIDE_GEMMAS: Final = {"gemma2": 46, "gemma3": 62}


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """Return the config.json of a file. Raises ModelRefused for an architecture or a feature that
    is not supported."""
    architecture = file.architecture
    if architecture not in _CLASSES:
        raise ModelRefused(
            f"{file.path}: GGUF files of {architecture} are not read (only {', '.join(_CLASSES)})",
            field="model",
        )
    if file.of("expert_count"):
        raise ModelRefused(f"{file.path}: GGUF files of mixtures are not read", field="model")
    heads = _integer(file, "attention.head_count")
    hidden = _integer(file, "embedding_length")
    head_dim = file.of("attention.key_length") or file.of("rope.dimension_count") or hidden // heads
    rope_dim = file.of("rope.dimension_count") or head_dim
    if rope_dim != head_dim or file.of("attention.value_length") not in (None, head_dim):
        raise _refused(file, "its heads rotate partly, or values differ in size")
    config: dict[str, Any] = {
        "model_type": _MODEL_TYPES.get(architecture, architecture),
        "architectures": [_CLASSES[architecture]],
        "vocab_size": _vocabulary(file),
        "hidden_size": hidden,
        "intermediate_size": _integer(file, "feed_forward_length"),
        "num_hidden_layers": _integer(file, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _integer(file, "attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": _integer(file, "context_length"),
        "rms_norm_eps": _number(file, "attention.layer_norm_rms_epsilon"),
        "rope_theta": _number(file, "rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "torch_dtype": _dtype(file),
        "quantization_config": {"quant_method": "gguf", "types": _types(file)} | _table(file),
    }
    scaling = _rope_scaling(file, head_dim)
    if scaling is not None:
        config["rope_scaling"] = scaling
    return config | _FAMILIES[architecture](file, config)


def plain_name(file: GgufFile, name: str) -> str | None:
    """Return the name of tensor `name` in a Hugging Face checkpoint; None for rope_freqs.weight,
    which the config replaces.

    Raises ModelRefused for a tensor that the architecture does not have.
    """
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    if name == "rope_freqs.weight":
        return None
    inside = re.fullmatch(r"blk\.([0-9]+)\.([a-z_]+)\.(weight|bias)", name)
    gemma = file.architecture in ("gemma2", "gemma3")
    parts = _INSIDE | _GEMMAS if gemma else _INSIDE
    if inside is None or inside[2] not in parts:
        raise _refused(file, f"{name} is no tensor of {file.architecture} that is known")
    return f"model.layers.{int(inside[1])}.{parts[inside[2]]}.{inside[3]}"


def query_heads(file: GgufFile, name: str) -> int:
    """Return the number of heads of a projection whose rows llama.cpp has reordered; 0 for any
    other tensor."""
    if file.architecture != "llama":
        return 0
    if ".q_proj." in name:
        return _integer(file, "attention.head_count")
    if ".k_proj." in name:
        return _integer(file, "attention.head_count_kv", _integer(file, "attention.head_count"))
    return 0


# ---- families ----


def _llama(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of Llama and Mistral. llama.cpp has one name for both, and no windows."""
    biased = "blk.0.attn_q.bias" in file.tensors
    return {"hidden_act": "silu", "attention_bias": biased, "mlp_bias": False}


def _qwen(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"hidden_act": "silu", "use_sliding_window": False}
    if file.architecture == "qwen3":
        found["attention_bias"] = False
    return found


def _gemma(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    act = "gelu_pytorch_tanh"
    found: dict[str, Any] = {"hidden_activation": act, "attention_bias": False}
    if file.architecture == "gemma":
        return found | {"hidden_act": act}
    layers, window = config["num_hidden_layers"], file.of("attention.sliding_window")
    if not isinstance(window, int) or window < 1:
        raise _refused(file, "it does not say its sliding window")
    wide = layers == _WIDE_GEMMAS[file.architecture]
    per_head = config["hidden_size"] // config["num_attention_heads"]
    found |= {
        "sliding_window": window,
        "query_pre_attn_scalar": per_head if wide else config["head_dim"],
        "attn_logit_softcapping": file.of("attn_logit_softcapping"),
        "final_logit_softcapping": file.of("final_logit_softcapping"),
    }
    third = file.architecture == "gemma3"
    pattern = _GEMMA3_PATTERN if third else _GEMMA2_PATTERN
    full = {layer for layer in range(layers) if (layer + 1) % pattern == 0}
    kinds = ["full_attention" if layer in full else "sliding_attention" for layer in range(layers)]
    found["layer_types"] = kinds
    if third:
        theta = _number(file, "rope.freq_base", 1e6)
        scaling = config.pop("rope_scaling", None) or {"rope_type": "default"}
        local = _number(file, "rope.freq_base_swa", _GEMMA3_LOCAL_THETA)
        found["rope_parameters"] = {
            "full_attention": {"rope_theta": theta, **scaling},
            "sliding_attention": {"rope_theta": local, "rope_type": "default"},
        }
        config.pop("rope_theta")
    return found


_FAMILIES: Final[Mapping[str, Callable[[GgufFile, dict[str, Any]], dict[str, Any]]]] = {
    "llama": _llama, "qwen2": _qwen, "qwen3": _qwen, "gemma": _gemma, "gemma2": _gemma,
    "gemma3": _gemma,
}  # fmt: skip


# ---- values ----


def _rope_scaling(file: GgufFile, head_dim: int) -> dict[str, Any] | None:
    """Return Hugging Face's rope_scaling for the file's; None without scaling. Raises ModelRefused
    for a rule that is not supported."""
    if "rope_freqs.weight" in file.tensors:
        return _llama3(file, head_dim)
    kind, factor = file.of("rope.scaling.type"), file.of("rope.scaling.factor")
    if kind in (None, "none") and factor in (None, 0.0, 1.0):
        return None
    if kind in (None, "linear"):
        return {"rope_type": "linear", "factor": _number(file, "rope.scaling.factor")}
    if kind == "yarn" and file.architecture.startswith("qwen"):
        return {
            "rope_type": "yarn",
            "factor": _number(file, "rope.scaling.factor"),
            "original_max_position_embeddings": _integer(
                file, "rope.scaling.original_context_length"
            ),
        }
    raise _refused(file, f"its RoPE is scaled by {kind}")


def _llama3(file: GgufFile, head_dim: int) -> dict[str, Any]:
    """Return the rule of Llama 3 whose factors of the frequencies the file holds. Raises
    ModelRefused if they belong to no known rule."""
    tensor = file.tensors["rope_freqs.weight"]
    if tensor.kind != "F32" or tensor.shape != (head_dim // 2,):
        raise _refused(file, f"rope_freqs.weight is of type {tensor.kind}, shape {tensor.shape}")
    with file.path.open("rb") as opened:
        opened.seek(tensor.start)
        stored = memoryview(opened.read(2 * head_dim)).cast("f").tolist()
    theta = _number(file, "rope.freq_base", 10000.0)
    for factor in _LLAMA3_FACTORS:
        expected = [_llama3_factor(theta ** (2 * i / head_dim), factor) for i in range(len(stored))]
        if all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(stored, expected, strict=True)):
            return {**_LLAMA3_RULE, "factor": factor}
    raise _refused(file, "the factors of its frequencies (rope_freqs) are of no known rule")


def _llama3_factor(inverse: float, factor: float) -> float:
    """Return the number by which the frequency 1 / `inverse` is divided.

    Source: llama.cpp conversion/llama.py, generate_extra_tensors.
    """
    turns = _LLAMA3_LENGTH / (2 * math.pi * inverse)
    if turns > _LLAMA3_HIGH:
        return 1.0
    if turns < _LLAMA3_LOW:
        return factor
    smooth = (turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
    return 1 / ((1 - smooth) / factor + smooth)


def _vocabulary(file: GgufFile) -> int:
    table = file.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise _refused(file, "there is no token_embd.weight")
    return table.shape[0]


def _dtype(file: GgufFile) -> str:
    """Return float32 or float16 if all matrices are stored so; else bfloat16."""
    kinds = {tensor.kind for tensor in file.tensors.values() if len(tensor.shape) > 1}
    exact = {"F32": "float32", "F16": "float16"}
    return exact[kinds.pop()] if len(kinds) == 1 and kinds <= exact.keys() else "bfloat16"


def _types(file: GgufFile) -> dict[str, int]:
    """Return how many numbers are stored in each type."""
    counts: dict[str, int] = {}
    for tensor in file.tensors.values():
        counts[tensor.kind] = counts.get(tensor.kind, 0) + math.prod(tensor.shape)
    return dict(sorted(counts.items()))


def _table(file: GgufFile) -> dict[str, str]:
    """Return the types of the embedding and of the head."""
    table = file.tensors["token_embd.weight"]
    return {"embedding": table.kind, "head": file.tensors.get("output.weight", table).kind}


def _integer(file: GgufFile, key: str, default: int | None = None) -> int:
    """Return the value of `key`, else `default`. Raises ModelRefused if both are missing, or if the
    value is no positive integer."""
    value = file.of(key)
    if value is None and default is not None:
        return default
    if isinstance(value, list) and value and len(set(value)) == 1:
        value = value[0]  # a list with one value per layer, all equal
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _refused(file, f"{file.architecture}.{key} is {str(value)[:40]}")
    return value


def _number(file: GgufFile, key: str, default: float | None = None) -> float:
    """Return the value of `key`, else `default`. Raises ModelRefused if both are missing, or if the
    value is no positive number."""
    value = file.of(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, float | int) or not 0 < value < math.inf:
        raise _refused(file, f"{file.architecture}.{key} is {str(value)[:40]}")
    return float(value)


def _refused(file: GgufFile, why: str) -> ModelRefused:
    return ModelRefused(f"{file.path}: {why}", field="model")
