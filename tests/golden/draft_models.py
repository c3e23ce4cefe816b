"""Draft heads for tiny random checkpoints, and the same heads in plain torch, as a reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


def add_mtp(path: Path, seed: int = 3, **config: Any) -> Path:
    """Add a random layer that drafts to the checkpoint in `path`: of the shapes of its last one."""
    values, tensors = _read(path)
    last, hidden = values["num_hidden_layers"] - 1, values["hidden_size"]
    generator = torch.Generator().manual_seed(seed)
    own: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.startswith(f"model.layers.{last}."):
            own[name.replace(f".{last}.", f".{last + 1}.", 1)] = _random(tensor.shape, generator)
    prefix = f"model.layers.{last + 1}."
    own[prefix + "eh_proj.weight"] = _random((hidden, 2 * hidden), generator)
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        own[f"{prefix}{norm}.weight"] = _random((hidden,), generator)
    # Published checkpoints hold copies of both.
    own[prefix + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    if "lm_head.weight" in tensors:
        own[prefix + "shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    _write(path, {**values, "num_nextn_predict_layers": 1, **config}, {**tensors, **own})
    return path


def save_eagle3(
    path: Path, target: Path, draft_vocab: int = 0, seed: int = 5, **config: Any
) -> Path:
    """A random EAGLE-3 head for the Llama in `target`. `draft_vocab`: its tokens, 0 = all."""
    path.mkdir(parents=True, exist_ok=True)
    values, tensors = _read(target)
    hidden, vocab = values["hidden_size"], values["vocab_size"]
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, 3 * hidden), "norm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,), "lm_head.weight": (draft_vocab or vocab, hidden),
    }  # fmt: skip
    for name, tensor in tensors.items():
        if name.startswith("model.layers.0."):
            wide = any(f".{part}_proj.weight" in name for part in "qkv")
            shape = (tensor.shape[0], 2 * hidden) if wide else tuple(tensor.shape)
            shapes[name.replace("model.layers.0.", "midlayer.")] = shape
    own = {name: _random(shape, generator) for name, shape in shapes.items()}
    if draft_vocab:
        known = torch.randperm(vocab, generator=generator)[:draft_vocab].sort().values
        own["d2t"] = known - torch.arange(draft_vocab)
        own["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, known, True)
    kept = (
        "bos_token_id",
        "eos_token_id",
        "torch_dtype",
        "rms_norm_eps",
        "rope_theta",
        "hidden_act",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "max_position_embeddings",
        "attention_bias",
        "mlp_bias",
    )
    head = {key: values[key] for key in kept if key in values}
    head |= {
        "model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1,
        "draft_vocab_size": draft_vocab or vocab, "tie_word_embeddings": False, **config,
    }  # fmt: skip
    _write(path, head, own)
    return path


def make_bigram(path: Path) -> Path:
    """Change the checkpoint in `path` and its layer that drafts so that the head is always right.

    No layer adds anything, so a token depends on the token before it alone; the head hands the
    embedding of that token on.
    """
    values, tensors = _read(path)
    head = f"model.layers.{values['num_hidden_layers']}."
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
        elif name.endswith("norm.weight"):
            tensor.fill_(1.0)
    hidden = values["hidden_size"]
    tensors[head + "eh_proj.weight"] = torch.cat(
        (torch.eye(hidden), torch.zeros(hidden, hidden)), 1
    )
    _write(path, values, tensors)
    return path


def mtp_logits(path: Path, hidden: Tensor, token_ids: Tensor) -> Tensor:
    """A Llama's layer that drafts in plain torch.

    `hidden` [T, H]: the target's, of positions 0 to T - 1; `token_ids` [T]: the tokens behind them.
    Returns logits [T, vocab].
    """
    values, tensors = _read(path)
    prefix = f"model.layers.{values['num_hidden_layers']}."
    own = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
    tokens = _norm(tensors["model.embed_tokens.weight"][token_ids], own["enorm.weight"])
    x = torch.cat((tokens, _norm(hidden, own["hnorm.weight"])), 1) @ own["eh_proj.weight"].T
    normal = _norm(x, own["input_layernorm.weight"])
    x = x + attention(values, own, "self_attn.", normal)
    x = x + mlp(own, "mlp.", _norm(x, own["post_attention_layernorm.weight"]))
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    return _norm(x, own["shared_head.norm.weight"]) @ head.T


def eagle3_logits(path: Path, target: Path, inputs: list[Tensor], token_ids: Tensor) -> Tensor:
    """A head as `save_eagle3` writes it, in plain torch.

    `inputs`: what went into three layers of the target, [T, H] each. For the rest see mtp_logits;
    tokens that the head does not know have the logit -1e30.
    """
    values, own = _read(path)
    _, tensors = _read(target)
    x = torch.cat(inputs, 1) @ own["fc.weight"].T
    layer = {n.removeprefix("midlayer."): t for n, t in own.items() if n.startswith("midlayer.")}
    tokens = _norm(tensors["model.embed_tokens.weight"][token_ids], layer["input_layernorm.weight"])
    both = torch.cat((tokens, _norm(x, layer["hidden_norm.weight"])), 1)
    x = x + attention(values, layer, "self_attn.", both)
    x = x + mlp(layer, "mlp.", _norm(x, layer["post_attention_layernorm.weight"]))
    logits = _norm(x, own["norm.weight"]) @ own["lm_head.weight"].T
    if "d2t" not in own:
        return logits
    whole = torch.full((len(logits), values["vocab_size"]), -1e30)
    whole[:, own["d2t"] + torch.arange(len(own["d2t"]))] = logits
    return whole


def attention(values: dict[str, Any], own: dict[str, Tensor], prefix: str, x: Tensor) -> Tensor:
    """A Llama's causal attention over x [T, inputs] at positions 0 to T - 1 -> [T, H]."""
    dim, count = values["head_dim"], x.shape[0]
    q, k, v = ((x @ own[f"{prefix}{n}_proj.weight"].T).view(count, -1, dim) for n in "qkv")
    base = (values.get("rope_parameters") or values)["rope_theta"]
    angles = torch.arange(count)[:, None] * base ** -(torch.arange(0, dim, 2) / dim)
    cos, sin = angles.cos().repeat(1, 2)[:, None], angles.sin().repeat(1, 2)[:, None]
    q, k = (
        y * cos + torch.cat((-y[..., dim // 2 :], y[..., : dim // 2]), -1) * sin for y in (q, k)
    )
    k, v = (y.repeat_interleave(q.shape[1] // y.shape[1], 1) for y in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * dim**-0.5
    scores += torch.full((count, count), -torch.inf).triu(1)
    attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
    return attended @ own[prefix + "o_proj.weight"].T


def mlp(own: dict[str, Tensor], prefix: str, x: Tensor) -> Tensor:
    """A Llama's MLP."""
    gate = torch.nn.functional.silu(x @ own[prefix + "gate_proj.weight"].T)
    return (gate * (x @ own[prefix + "up_proj.weight"].T)) @ own[prefix + "down_proj.weight"].T


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def _random(shape: Any, generator: torch.Generator) -> Tensor:
    noise = torch.randn(tuple(shape), generator=generator)
    return 1.0 + 0.05 * noise if len(shape) == 1 else noise * (1.2 / shape[-1] ** 0.5)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    values = json.loads((path / "config.json").read_text())
    return values, load_file(path / "model.safetensors")


def _write(path: Path, values: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(values))
