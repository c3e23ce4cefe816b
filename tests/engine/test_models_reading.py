"""The universal route reads what transformers reads, parameter by parameter and buffer by buffer,
out of tensors that stay in their files until they have a place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from baton.engine.checkpoint.checkpoint import open_checkpoint
from baton.engine.checkpoint.tensors import TensorReader
from baton.engine.models.causal import read_causal
from baton.protocol.errors import ModelRefused
from tests.golden.random_models import save_random
from tests.tiny_models import make_tiny_model

CPU = torch.device("cpu")
# Renamed and merged tensors (experts), buffers that no file holds (RoPE of each kind), tied heads,
# biases kept in float32 (DeepSeek's router).
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    }},
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4},
    "gpt_neox": {},
    "gemma3_text": {"query_pre_attn_scalar": 16},
    "phi3": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    "deepseek_v3": {
        "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "head_dim": 8,
        "qk_rope_head_dim": 8, "v_head_dim": 12, "num_key_value_heads": 4, "n_routed_experts": 4,
        "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip


def storages(model: torch.nn.Module) -> list[tuple[str, ...]]:
    """Names that share one memory: what is tied."""
    named: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        named.setdefault(parameter.data_ptr(), []).append(name)
    return sorted(tuple(names) for names in named.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_what_transformers_reads(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    path = save_random(tmp_path / family, family, **FAMILIES[family])
    expected: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    found = read_causal(open_checkpoint(str(path)), dtype)
    assert type(found) is type(expected)
    assert storages(found) == storages(expected)
    for ours, theirs in (
        (dict(found.named_parameters()), dict(expected.named_parameters())),
        (dict(found.named_buffers()), dict(expected.named_buffers())),
    ):
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert ours[name].dtype == tensor.dtype, name
            assert torch.equal(ours[name], tensor), name


def test_tensors_that_are_missing_or_misshapen_are_named(tmp_path: Path) -> None:
    path = make_tiny_model("gpt2", tmp_path)
    tensors = load_file(path / "model.safetensors")
    save_file({**tensors, "transformer.ln_f.bias": torch.ones(3)}, path / "model.safetensors")
    with pytest.raises(ModelRefused, match=r"wrong shape.*ln_f\.bias"):
        read_causal(open_checkpoint(str(path)), torch.float32)
    del tensors["transformer.h.1.mlp.c_fc.weight"]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ModelRefused, match=r"missing .*h\.1\.mlp\.c_fc\.weight"):
        read_causal(open_checkpoint(str(path)), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_lazy_tensor_is_read_into_its_own_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    stored = {
        "matrix": torch.randn(700, 900, generator=torch.Generator().manual_seed(0)) * 50,
        "number": torch.tensor(3.5),
        "nothing": torch.zeros(0, 4),
    }
    save_file(stored, tmp_path / "a.safetensors")
    lazy = TensorReader([tmp_path / "a.safetensors"], torch.float32, CPU).lazy()
    for name, tensor in stored.items():
        found = lazy[name][...].to(device="cpu", dtype=dtype)
        assert found.dtype == dtype
        assert torch.equal(found, tensor.to(dtype))
        assert torch.equal(lazy[name].to(), tensor)


def test_a_file_that_becomes_shorter_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    save_file({"x": torch.ones(1000)}, file)
    lazy = TensorReader([file], torch.float32, CPU).lazy()
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelRefused, match="shorter"):
        lazy["x"].to(dtype=torch.bfloat16)
