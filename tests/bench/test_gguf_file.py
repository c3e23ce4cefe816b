"""Mixtures as GGUF files: the tensors that llama.cpp's own converter would make of them."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from bench.models import MIXTURES, WRITERS
from bench.peers.gguf_file import write_gguf

gguf: Any = importlib.import_module("gguf")  # in the group `test`


def written(name: str, folder: Path) -> tuple[dict[str, torch.Tensor], Any]:
    """A small mixture's tensors, and the reader of its GGUF file."""
    WRITERS[name](folder / "model")
    write_gguf(folder / "model", folder / "model.gguf")
    return load_file(folder / "model" / "model.safetensors"), gguf.GGUFReader(folder / "model.gguf")


def numbers(reader: Any, name: str) -> torch.Tensor:
    """A tensor of the file, widened."""
    (tensor,) = [tensor for tensor in reader.tensors if tensor.name == name]
    return torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))


@pytest.mark.parametrize("name", ["Qwen3-MoE-25M", "DeepSeek-V2-25M"])
def test_experts_are_one_tensor_in_their_order(name: str, tmp_path: Path) -> None:
    weights, reader = written(name, tmp_path)
    for part in ("gate", "up", "down"):
        stacked = numbers(reader, f"blk.3.ffn_{part}_exps.weight")
        for index in range(24):
            expert = weights[f"model.layers.3.mlp.experts.{index}.{part}_proj.weight"]
            assert torch.equal(stacked[index], expert.float())
    gate = weights["model.layers.3.mlp.gate.weight"]
    assert torch.equal(numbers(reader, "blk.3.ffn_gate_inp.weight"), gate.float())
    architecture = {"qwen3_moe": "qwen3moe", "deepseek_v2": "deepseek2"}
    kind = architecture[MIXTURES[name]["model_type"]]
    told = {key: reader.fields[f"{kind}.{key}"].contents() for key in ("expert_count",
            "expert_used_count", "expert_feed_forward_length", "block_count")}  # fmt: skip
    assert list(told.values()) == [24, 4, 128, 8]


def test_keys_and_values_of_latents_are_two_tensors(tmp_path: Path) -> None:
    weights, reader = written("DeepSeek-V2-25M", tmp_path)
    both = weights["model.layers.2.self_attn.kv_b_proj.weight"].float().view(8, 64, 128)
    assert torch.equal(numbers(reader, "blk.2.attn_k_b.weight"), both[:, :32].transpose(1, 2))
    assert torch.equal(numbers(reader, "blk.2.attn_v_b.weight"), both[:, 32:])
    names = ("attention.key_length", "attention.value_length", "attention.key_length_mla",
             "attention.value_length_mla", "attention.head_count_kv", "attention.q_lora_rank",
             "leading_dense_block_count", "expert_shared_count")  # fmt: skip
    told = [reader.fields[f"deepseek2.{name}"].contents() for name in names]
    assert told == [160, 128, 64, 32, 1, 0, 1, 2]
