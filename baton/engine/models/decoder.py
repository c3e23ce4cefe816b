"""The lean decoder: Llama, Mistral, Qwen2 and Qwen3; all that differs is read from the config.

Against transformers' modelling code: Q, K and V in one product, gate and up in one product,
rotation of query and key heads at once, no cache objects. In float32 it gives the universal route's
tokens. The batch (where KV lives) arrives as an argument; the decoder owns weights only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.attention.base import AttentionLayer
from baton.engine.batch import Batch
from baton.engine.linear import Linear, LinearFormat
from baton.engine.models.config import DecoderConfig
from baton.engine.models.rope import Rotation, inverse_frequencies
from baton.kv_spec import LayerSpec

ReadTensor = Callable[
    [str], Tensor
]  # a checkpoint's tensor by name, in the model's dtype and place


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Weights of one layer. H = hidden, D = head_dim, I = intermediate size."""

    input_norm: Tensor  # [H]
    qkv: Linear  # [H] -> [(heads + 2 * kv_heads) * D]
    query_norm: Tensor | None  # [D]
    key_norm: Tensor | None  # [D]
    output: Linear  # [heads * D] -> [H]
    mlp_norm: Tensor  # [H]
    gate_up: Linear  # [H] -> [2 * I]
    down: Linear  # [I] -> [H]


class Decoder:
    """A decoder-only transformer over flattened tokens and a paged KV pool."""

    def __init__(self, config: DecoderConfig, read: ReadTensor, linear: LinearFormat) -> None:
        """Read and merge all weights; `linear` decides their format."""
        self._config = config
        self._embedding = read("model.embed_tokens.weight")
        self._layers = [_read_layer(config, i, read, linear) for i in range(config.num_layers)]
        self._final_norm = read("model.norm.weight")
        head = self._embedding if config.tied_embeddings else read("lm_head.weight")
        self._head = linear(head, None)
        frequencies = inverse_frequencies(config.rope, config.head_dim)
        self._frequencies = frequencies.to(self._embedding.device)

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self._config.vocab_size

    @property
    def max_positions(self) -> int | None:
        """Positions the model was made for."""
        return self._config.max_positions

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """What each layer stores per token."""
        return self._config.layers

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        """How each layer attends."""
        return self._config.attention_layers

    def forward(self, token_ids: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """token_ids [T], positions [T] -> hidden [T, H]; writes the batch's KV into the pool."""
        eps = self._config.rms_norm_eps
        rotation = Rotation.at(positions, self._frequencies, self._embedding.dtype)
        residual = functional.embedding(token_ids, self._embedding)
        for index, layer in enumerate(self._layers):
            hidden = _norm(residual, layer.input_norm, eps)
            residual = residual + self._attend(index, layer, hidden, rotation, batch)
            hidden = _norm(residual, layer.mlp_norm, eps)
            gate, up = layer.gate_up(hidden).chunk(2, dim=-1)
            residual = residual + layer.down(functional.silu(gate) * up)
        return _norm(residual, self._final_norm, eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] -> [N, vocab] float32."""
        return self._head(hidden).float()

    def _attend(
        self, index: int, layer: DecoderLayer, hidden: Tensor, rotation: Rotation, batch: Batch
    ) -> Tensor:
        """hidden [T, H] -> [T, H]."""
        config = self._config
        heads, kv_heads = config.num_heads, config.num_kv_heads
        qkv = layer.qkv(hidden).view(hidden.shape[0], heads + 2 * kv_heads, config.head_dim)
        query_key, value = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if layer.query_norm is not None and layer.key_norm is not None:
            query = _norm(query_key[:, :heads], layer.query_norm, config.rms_norm_eps)
            key = _norm(query_key[:, heads:], layer.key_norm, config.rms_norm_eps)
            query_key = torch.cat((query, key), dim=1)
        rotated = rotation.rotate(query_key)
        attended = batch.attend(index, rotated[:, :heads], rotated[:, heads:], value)
        return layer.output(attended.flatten(1))


def tensor_names(config: DecoderConfig) -> Iterator[str]:
    """Every tensor that a checkpoint of this config holds; a tied head may be stored once more."""
    yield "model.embed_tokens.weight"
    yield "model.norm.weight"
    if not config.tied_embeddings:
        yield "lm_head.weight"
    biased = {
        "self_attn.q_proj": config.qkv_bias,
        "self_attn.k_proj": config.qkv_bias,
        "self_attn.v_proj": config.qkv_bias,
        "self_attn.o_proj": config.output_bias,
        "mlp.gate_proj": config.mlp_bias,
        "mlp.up_proj": config.mlp_bias,
        "mlp.down_proj": config.mlp_bias,
    }
    norms = ["input_layernorm", "post_attention_layernorm"]
    if config.qk_norm:
        norms += ["self_attn.q_norm", "self_attn.k_norm"]
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        yield from (f"{prefix}{name}.weight" for name in (*norms, *biased))
        yield from (f"{prefix}{name}.bias" for name, has_bias in biased.items() if has_bias)


def _read_layer(
    config: DecoderConfig, index: int, read: ReadTensor, linear: LinearFormat
) -> DecoderLayer:
    prefix = f"model.layers.{index}."

    def merged(names: tuple[str, ...], has_bias: bool) -> Linear:
        """Projections of one input, stacked along their outputs."""
        weight = _stack([read(f"{prefix}{name}.weight") for name in names])
        bias = _stack([read(f"{prefix}{name}.bias") for name in names]) if has_bias else None
        return linear(weight, bias)

    attention = tuple(f"self_attn.{part}_proj" for part in ("q", "k", "v"))
    return DecoderLayer(
        input_norm=read(prefix + "input_layernorm.weight"),
        qkv=merged(attention, config.qkv_bias),
        query_norm=read(prefix + "self_attn.q_norm.weight") if config.qk_norm else None,
        key_norm=read(prefix + "self_attn.k_norm.weight") if config.qk_norm else None,
        output=merged(("self_attn.o_proj",), config.output_bias),
        mlp_norm=read(prefix + "post_attention_layernorm.weight"),
        gate_up=merged(("mlp.gate_proj", "mlp.up_proj"), config.mlp_bias),
        down=merged(("mlp.down_proj",), config.mlp_bias),
    )


def _stack(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension."""
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)
