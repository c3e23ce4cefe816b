"""Shares of transformers' modules: the logits of one rank for models of the universal route, what a
rank keeps, and what is cut in which way."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest.mark.structures import ParameterSet
from torch import Tensor, nn
from torch.nn import functional

from baton.engine.config import EngineConfig
from baton.engine.loading.loading import LoadedModel, load_model
from baton.engine.models import module_shares
from baton.engine.models.module_shares import first_calls, keep_share
from baton.engine.parallel.group import RankGroup
from baton.engine.performance.estimate import sized
from baton.engine.performance.ideal import EstimateOptions
from baton.engine.state.place import RankPlace, rank_layers
from baton.protocol.errors import ConfigError, ModelRefused
from tests.engine.tensor_parallel_ranks import by_threads, config_of, engine_of_ranks, logits_of
from tests.engine.test_models_lora import linear_layers, make_adapter
from tests.golden.random_models import save_random
from tests.golden.stateful_models import STATEFUL

# Attention with latents that choose their keys; in chunks; with sinks; one product of q, k and v;
# products stored as [inputs, outputs]; attention and MLP side by side.
OTHERS: dict[str, dict[str, Any]] = {
    "deepseek_v32": {
        "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 32, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "n_group": 2, "topk_group": 1, "moe_intermediate_size": 48, "first_k_dense_replace": 1,
        "index_topk": 8, "index_n_heads": 4, "index_head_dim": 16,
    },
    "llama4_text": {
        "num_local_experts": 4, "intermediate_size_mlp": 96, "attention_chunk_size": 16,
        "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9},
    "gpt_neox": {},
    "gpt2": {"n_embd": 64, "n_head": 4, "n_layer": 3, "num_key_value_heads": 4},
    "cohere": {},
}  # fmt: skip
MODELS = {**STATEFUL, **OTHERS}
ALWAYS = {
    "kimi_linear", "nemotron_h", "falcon_h1", "zamba2", "deepseek_v32", "llama4_text", "gpt2",
}  # fmt: skip


def models(*names: str) -> list[ParameterSet]:
    """Parameters for each of `names`: `soak`, but for those that every run takes."""
    return [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.soak) for name in names]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    yield
    logging.getLogger("transformers").setLevel(logging.WARNING)


@pytest.fixture
def all_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small products are gathered, too."""
    monkeypatch.setattr(module_shares, "LEAST_WEIGHTS", 1)


def shares(config: EngineConfig, size: int) -> list[tuple[LoadedModel, Tensor]]:
    """Of each rank its share and its logits."""

    def share(group: RankGroup) -> tuple[LoadedModel, Tensor]:
        loaded = load_model(config, group)
        return loaded, logits_of(loaded, size)

    return by_threads(size, share)


@pytest.mark.parametrize("model_type", models(*MODELS))
@pytest.mark.usefixtures("all_products")
@torch.inference_mode()
def test_logits_of_two_ranks_are_those_of_one(model_type: str, tmp_path: Path) -> None:
    path = save_random(tmp_path, model_type, **MODELS[model_type])
    options = {"model_impl": "transformers"}
    whole = load_model(config_of(path, **options))
    expected = logits_of(whole, 1)
    config = config_of(path, tensor_parallel_size=2, **options)
    ranks = shares(config, 2)
    for loaded, found in ranks:
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
        assert loaded.info == whole.info
        # GPT-OSS' experts have gates and ups in turns, and are not cut.
        assert loaded.weight_bytes < (1 if model_type == "gpt_oss" else 0.7) * whole.weight_bytes
        for spec, mine, all_heads in zip(
            rank_layers(loaded.info.layers, 2), loaded.attention_layers, whole.attention_layers,
            strict=True,
        ):  # fmt: skip
            assert mine.query_heads == all_heads.query_heads // 2
            assert spec.state is None or spec.state.conv[:1] == (spec.state.conv or (0,))[:1]


@pytest.mark.parametrize("model_type", ["nemotron_h", "llama4_text"])
@torch.inference_mode()
def test_four_ranks_that_share_kv_heads(model_type: str, tmp_path: Path) -> None:
    path = save_random(tmp_path, model_type, **MODELS[model_type])
    expected = logits_of(load_model(config_of(path)), 1)
    for _, found in shares(config_of(path, tensor_parallel_size=4), 4):
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(
    "model_type", models(*(name for name in MODELS if not name.startswith("qwen")))
)
@pytest.mark.usefixtures("all_products")
def test_memory_is_what_the_estimate_says(model_type: str, tmp_path: Path) -> None:
    path = save_random(tmp_path, model_type, **MODELS[model_type])
    for size in (1, 2):
        found = sized(EstimateOptions(path, tensor_parallel_size=size, memory="40MB"))
        group = None if size == 1 else RankGroup(RankPlace(0, size), "gloo")
        loaded = load_model(config_of(path, tensor_parallel_size=size), group)
        assert 0.9 < loaded.weight_bytes / found.weight_bytes < 1.1
        layers = rank_layers(loaded.info.layers, size)
        assert found.kv_bytes_per_token == sum(each.token_bytes("float32") for each in layers)


def test_heads_that_ranks_cannot_share(tmp_path: Path) -> None:
    path = save_random(tmp_path, "falcon_h1", **STATEFUL["falcon_h1"])
    why = "4 query heads and 2 KV heads cannot be split over 3"
    with pytest.raises(ConfigError, match=why), engine_of_ranks(str(path), 3):
        pass


def test_adapters_are_refused(tmp_path: Path) -> None:
    path = save_random(tmp_path / "m", "gpt_neox")
    adapter = make_adapter(tmp_path / "a", linear_layers(path, ("dense",)), seed=1)
    with pytest.raises(ModelRefused, match="only the lean route splits adapters") as refused:
        load_model(config_of(path, tensor_parallel_size=2, lora_modules=(f"a={adapter}",)))
    assert refused.value.field == "lora_modules"


# ---- MLPs ----


class Gated(nn.Module):
    """An MLP with biases, gate and up in one product. `interleaved`: their outputs alternate."""

    def __init__(self, interleaved: bool) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(8, 24)
        self.down_proj = nn.Linear(12, 8)
        self._interleaved = interleaved

    def forward(self, rows: Tensor) -> Tensor:
        both = self.gate_up_proj(rows)
        gate, up = (
            both.unflatten(-1, (-1, 2)).unbind(-1) if self._interleaved else both.chunk(2, -1)
        )
        return 2 * self.down_proj(functional.silu(gate) * up)


class Model(nn.Module):
    """An MLP, and a head with the weights of an embedding."""

    def __init__(self, interleaved: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(10, 8)
        self.mlp = Gated(interleaved)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.mlp(self.embed(tokens))
        return self.head(hidden)


TOKENS = torch.arange(6)


def cut(interleaved: bool, size: int) -> list[tuple[Model, int, Tensor]]:
    """Of each rank its share, the bytes that it left out, and what the share computes."""
    whole = Model(interleaved).requires_grad_(False)

    def work(group: RankGroup) -> tuple[Model, int, Tensor]:
        model = copy.deepcopy(whole)
        with first_calls(model) as calls:
            model(TOKENS)
        left_out = keep_share(model, calls, group, mapped=False)
        return model, left_out, model(TOKENS)

    return by_threads(size, work)


def test_an_mlp_whose_shares_add_up_is_cut() -> None:
    expected = Model(False)(TOKENS)
    for rank, (model, left_out, found) in enumerate(cut(False, 2)):
        torch.testing.assert_close(found, expected)
        assert model.mlp.gate_up_proj.weight.shape == (12, 8)
        assert model.mlp.down_proj.weight.shape == (8, 6)
        assert bool(model.mlp.down_proj.bias.any()) == (rank == 0), "the leader's alone"
        assert left_out == 4 * (12 * 8 + 12 + 8 * 6)


def test_an_mlp_whose_shares_do_not_add_up_stays_whole() -> None:
    expected = Model(True)(TOKENS)
    for model, left_out, found in cut(True, 2):
        assert torch.equal(found, expected)
        assert model.mlp.gate_up_proj.weight.shape == (24, 8)
        assert not left_out


@pytest.mark.usefixtures("all_products")
def test_its_products_are_gathered_if_they_are_large() -> None:
    expected = Model(True)(TOKENS)
    for model, left_out, found in cut(True, 2):
        torch.testing.assert_close(found, expected)
        assert model.mlp.gate_up_proj.weight.shape == (12, 8)
        assert model.mlp.down_proj.weight.shape == (4, 12)
        head, table = model.head.weight, model.embed.weight
        assert head.shape == (5, 8)
        assert table.shape == (10, 8)
        assert head.untyped_storage().data_ptr() == table.untyped_storage().data_ptr()
        assert left_out == 4 * (12 * 8 + 12 + 4 * 12 + 4), "the head is a part of the embedding"


@pytest.mark.usefixtures("all_products")
def test_what_ranks_cannot_cut_evenly_stays_whole() -> None:
    expected = Model(False)(TOKENS)
    for model, _, found in cut(False, 5):
        torch.testing.assert_close(found, expected)
        assert model.mlp.gate_up_proj.weight.shape == (24, 8)
        assert model.head.weight.shape == (2, 8)
