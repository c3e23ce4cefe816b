"""W8A8 as the library compressed-tensors 0.20 saves it, over ranks: one rank's numbers.

`saved` writes the bytes that the library wrote of the same model (preset W8A8, scales of
calculate_qparams, int-quantized), compared once, tensor by tensor; CONFIG is what it put into
config.json.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.engine.config import EngineConfig
from baton.engine.loading.loading import LoadedModel, load_model
from baton.engine.memory.kv_cache import KVArena
from baton.engine.memory.layer_groups import one_group
from baton.engine.running.attention_choice import choose_attention
from baton.engine.state.batch import flatten
from baton.engine.state.place import rank_layers
from baton.llm import LLM
from baton.protocol.request import Request
from tests.engine.quantized_models import SHAPE
from tests.engine.running import relative_error
from tests.engine.tensor_parallel_ranks import BLOCK, CHUNKS, NEXT, by_threads, engine_of_ranks
from tests.engine.test_tensor_parallel_engine import GREEDY, PROMPTS, answers
from tests.tiny_models import make_tiny_model

CONFIG: Final[dict[str, Any]] = {
    "config_groups": {
        "group_0": {
            "format": "int-quantized",
            "input_activations": {
                "dynamic": True, "group_size": None, "num_bits": 8, "strategy": "token",
                "symmetric": True, "type": "int",
            },
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "dynamic": False, "group_size": None, "num_bits": 8, "strategy": "channel",
                "symmetric": True, "type": "int",
            },
        },
    },
    "format": "int-quantized", "global_compression_ratio": None, "ignore": ["lm_head"],
    "kv_cache_scheme": None, "moe_sparsity_config": None, "quant_method": "compressed-tensors",
    "quantization_status": "compressed", "sparsity_config": {}, "transform_config": {},
    "version": "0.20.0",
}  # fmt: skip


def saved(path: Path) -> Path:
    """A tiny Qwen3 of bfloat16, rounded as the library does it: scales are bfloat16 too."""
    make_tiny_model("qwen3", path, **SHAPE)
    tensors: dict[str, torch.Tensor] = {}
    for name, stored in load_file(path / "model.safetensors").items():
        weight = stored.bfloat16()
        if name.endswith("_proj.weight"):
            peaks = weight.float().abs().amax(1, keepdim=True)
            scale = (peaks / 127.5).bfloat16()
            tensors[f"{name}_scale"] = scale
            weight = (weight / scale).round().clamp(-128, 127).to(torch.int8)
        tensors[name] = weight
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    values = json.loads((path / "config.json").read_text())
    values |= {"quantization_config": CONFIG, "dtype": "bfloat16"}
    values.pop("torch_dtype", None)
    (path / "config.json").write_text(json.dumps(values))
    return path


@pytest.mark.parametrize("head", ["none", "w8a8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [2, 4])
@torch.inference_mode()
def test_ranks_compute_the_numbers_of_one(size: int, dtype: Any, head: Any, tmp_path: Path) -> None:
    """Of two ranks hidden states bit for bit, and the logits of a w8a8 head; a plain head's product
    is made of slices, which may round otherwise. Four ranks share KV heads: a rank attends with
    fewer queries per KV head, and those products may round otherwise."""
    bound = 1e-5 if dtype == "float32" else 1e-2
    config = EngineConfig(
        str(saved(tmp_path)), device="cpu", dtype=dtype, lm_head_quantization=head
    )
    hidden, expected = _computed(load_model(config), 1)
    config = replace(config, tensor_parallel_size=size)
    ranks = by_threads(size, lambda group: _computed(load_model(config, group), size))
    for found, _ in ranks:
        assert relative_error(found, hidden) < bound
        assert size == 4 or torch.equal(found, hidden)
    logits = ranks[0][1]
    assert relative_error(logits, expected) < bound
    if (size, head) == (2, "w8a8"):
        assert torch.equal(logits, expected)
    assert logits.argmax(-1).equal(expected.argmax(-1))


def _computed(loaded: LoadedModel, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and logits of all rows of CHUNKS, then NEXT, on this rank."""
    info = loaded.info
    arena = KVArena(one_group(rank_layers(info.layers, size)), 8, BLOCK, info.kv_dtype)
    attention = choose_attention(loaded, arena)
    hidden: list[torch.Tensor] = []
    logits: list[torch.Tensor] = []
    for chunks in (CHUNKS, NEXT):
        step = flatten(chunks, attention, BLOCK, loaded.device)
        hidden.append(loaded.forward(step.token_ids, step.positions, step.batch))
        logits.append(loaded.logits(hidden[-1]))
    return torch.cat(hidden), torch.cat(logits)


def test_an_engine_of_two_ranks_writes_what_one_writes(tmp_path: Path) -> None:
    path = str(saved(tmp_path))
    options: dict[str, Any] = {"num_kv_blocks": 96, "block_size": 8, "max_num_seqs": 64}
    asked = [Request(f"r{i}", prompt, GREEDY) for i, prompt in enumerate(PROMPTS)]
    expected = answers(LLM(path, "float32", threads=1, **options).engine, asked)
    with engine_of_ranks(path, 2, **options) as engine:
        assert answers(engine, asked) == expected
