"""Layers that draft (`mtp.*`) for the tiny Qwen3-Next and Qwen3.5 of hybrid_models.py, and the same
layers built of transformers' own, as a reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpLayer

LAYER: Final = "mtp.layers.0."
FINAL_NORM: Final = "mtp.norm.weight"
_WITH_IMAGES: Final = "model.language_model."
_OWN: Final = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")


def add_head(path: Path, seed: int = 3) -> Path:
    """Add a random layer that drafts to the checkpoint in `path`, of the shapes of its first layer
    with full attention. Of a Qwen3-Next the config says nothing of it, as published."""
    values, tensors = _read(path)
    text = values.get("text_config") or values
    generator = torch.Generator().manual_seed(seed)
    hidden, full = text["hidden_size"], text["layer_types"].index("full_attention")
    prefix = _WITH_IMAGES if "text_config" in values else "model."
    copied = f"{prefix}layers.{full}."
    shapes = {
        LAYER + name.removeprefix(copied): tensor.shape
        for name, tensor in tensors.items()
        if name.startswith(copied)
    }
    shapes |= {f"{name}.weight": torch.Size([hidden]) for name in _OWN}
    shapes["mtp.fc.weight"] = torch.Size([hidden, 2 * hidden])
    own = {name: _random(shape, generator) for name, shape in shapes.items()}
    if text["model_type"] != "qwen3_next":
        text["mtp_num_hidden_layers"] = 1
    _write(path, values, {**tensors, **own})
    return path


def make_bigram(path: Path, added: float = 0.0) -> Path:
    """Change the checkpoint in `path` and its layer that drafts so that the head is always right.

    Layers add their outputs times `added`. Without any a token depends on the one before it alone,
    though the states are those of all tokens; the head hands the embedding of that token on.
    """
    values, tensors = _read(path)
    for name, tensor in tensors.items():
        of_head = added * (not name.startswith(LAYER))
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")):
            tensor.mul_(of_head)
        elif name.endswith("norm.weight") or "pre_fc_norm" in name:
            tensor.fill_(float(name.endswith("linear_attn.norm.weight")))
    fc = tensors["mtp.fc.weight"]
    fc.copy_(torch.eye(*fc.shape))
    _write(path, values, tensors)
    return path


def reference(path: Path, ids: list[int]) -> tuple[Tensor, list[Tensor]]:
    """What transformers computes for `ids`.

    Returns the hidden states of ids[:-2], [T, H]; and the states of the layer that drafts behind
    them, [T, H] each: of a pass with ids[1:-1] and of one over its own states, with ids[2:].
    """
    causal: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    config, decoder = causal.config.get_text_config(), causal.get_decoder()
    full = config.layer_types.index("full_attention")
    layer = MtpLayer(config, type(decoder.layers[full]), type(decoder.norm), full)
    own = load_file(path / "model.safetensors")
    parts = (layer.enorm, layer.hnorm, layer.eh_proj, layer.post_norm)
    for name, part in zip(_OWN, parts, strict=True):
        assert part is not None
        part.weight.data = own[f"{name}.weight"]
    block = {n.removeprefix(LAYER): t for n, t in own.items() if n.startswith(LAYER)}
    layer.mtp_block.load_state_dict(_stacked(block), strict=True)
    tokens, count = torch.tensor([ids]), len(ids) - 2
    positions = torch.arange(count)[None]
    hidden = decoder(input_ids=tokens[:, :count], use_cache=False).last_hidden_state
    found = [hidden]
    for ahead in (1, 2):
        embedded = decoder.embed_tokens(tokens[:, ahead : count + ahead])
        rotation = decoder.rotary_emb(embedded, positions)
        found.append(layer(embedded, found[-1], rotation, None, positions, None))
    return hidden[0], [state[0] for state in found[1:]]


def _stacked(block: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts that have tensors of their own, as transformers' modules hold them."""
    single = "mlp.experts.0.gate_proj.weight"
    if single not in block:
        return block
    kept = {name: tensor for name, tensor in block.items() if ".experts." not in name}
    count = sum(name.endswith("gate_proj.weight") and ".experts." in name for name in block)
    gates, ups, downs = (
        torch.stack([block[f"mlp.experts.{index}.{part}_proj.weight"] for index in range(count)])
        for part in ("gate", "up", "down")
    )
    kept["mlp.experts.gate_up_proj"] = torch.cat((gates, ups), dim=1)
    kept["mlp.experts.down_proj"] = downs
    return kept


def _random(shape: torch.Size, generator: torch.Generator) -> Tensor:
    noise = torch.randn(tuple(shape), generator=generator)
    return 0.2 * noise if len(shape) == 1 else noise * (1.2 / shape[-1] ** 0.5)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    values = json.loads((path / "config.json").read_text())
    return values, load_file(path / "model.safetensors")


def _write(path: Path, values: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(values))
