"""LoRA: adapters in PEFT's format against transformers with their weights merged, token for token.

PEFT's forward is W x + scale * B (A x); a merged model's weight W + scale * B A gives the same
numbers but for rounding, so its greedy tokens are the reference. Every run mixes adapters, and rows
without one, in the same steps.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from baton.engine.config import EngineConfig
from baton.engine.core.assembly import build_engine
from baton.engine.loading.loading import LoadedModel, load_model
from baton.protocol.adapters import adapter_name
from baton.protocol.errors import ConfigError, ModelRefused, UnsupportedFeature
from baton.protocol.request import Request
from baton.protocol.sampling import SamplingParams
from tests.adapters import id_of
from tests.engine.driving import run, tokens_of
from tests.golden.greedy import NEW_TOKENS, our_tokens, random_prompts, transformers_tokens
from tests.golden.random_models import save_random
from tests.tiny_models import VOCAB_SIZE, make_tiny_model

PROMPTS = random_prompts(VOCAB_SIZE)
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PEFT_CONFIG: dict[str, Any] = {  # as PEFT 0.17 writes it
    "alpha_pattern": {}, "auto_mapping": None, "base_model_name_or_path": "base", "bias": "none",
    "corda_config": None, "eva_config": None, "exclude_modules": None, "fan_in_fan_out": False,
    "inference_mode": True, "init_lora_weights": True, "layer_replication": None,
    "layers_pattern": None, "layers_to_transform": None, "loftq_config": {}, "lora_alpha": 16,
    "lora_bias": False, "lora_dropout": 0.05, "megatron_config": None,
    "megatron_core": "megatron.core", "modules_to_save": None, "peft_type": "LORA",
    "qalora_group_size": 16, "r": 4, "rank_pattern": {}, "revision": None, "target_modules": [],
    "target_parameters": None, "task_type": "CAUSAL_LM", "trainable_token_indices": None,
    "use_dora": False, "use_qalora": False, "use_rslora": False,
}  # fmt: skip


def linear_layers(base: Path, ends: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of each linear layer of the decoder whose name ends so."""
    model: Any = AutoModelForCausalLM.from_pretrained(base)
    found: dict[str, tuple[int, int]] = {}
    for name, module in model.named_modules():
        if name.endswith(ends) and isinstance(module, torch.nn.Linear | Conv1D):
            first, second = module.weight.shape
            found[name] = (first, second) if isinstance(module, Conv1D) else (second, first)
    return found


def make_adapter(path: Path, layers: dict[str, tuple[int, int]], seed: int, **config: Any) -> Path:
    """A random adapter of `layers`, strong enough to change tokens."""
    merged: dict[str, Any] = {**PEFT_CONFIG, "target_modules": sorted(layers), **config}
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for module, (inputs, outputs) in layers.items():
        rank = merged["rank_pattern"].get(module.rpartition(".")[2], merged["r"])
        for side, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            noise = torch.randn(shape, generator=generator) * (0.3 / math.sqrt(shape[1]))
            tensors[f"base_model.model.{module}.lora_{side}.weight"] = noise
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors", {"format": "pt"})
    (path / "adapter_config.json").write_text(json.dumps(merged))
    return path


def merged_model(base: Path, adapter: Path | None) -> Any:
    """transformers with the adapter merged into its weights, in float32."""
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if adapter is not None:
        config = json.loads((adapter / "adapter_config.json").read_text())
        tensors = load_file(adapter / "adapter_model.safetensors")
        for name in [name for name in tensors if ".lora_A." in name]:
            path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            last = path.rpartition(".")[2]
            rank = config["rank_pattern"].get(last, config["r"])
            alpha = config["alpha_pattern"].get(last, config["lora_alpha"])
            scale = alpha / (math.sqrt(rank) if config["use_rslora"] else rank)
            delta = tensors[name.replace("lora_A", "lora_B")] @ tensors[name] * scale
            module = model.get_submodule(path)
            module.weight.data += delta.T if isinstance(module, Conv1D) else delta
    return model.eval()


def merged_tokens(base: Path, adapter: Path | None, prompts: list[list[int]]) -> list[list[int]]:
    """The reference: what that model says."""
    return transformers_tokens(merged_model(base, adapter), prompts)


def load(base: Path, impl: Any, **adapters: Path) -> LoadedModel:
    """The base with adapters, on the CPU in float32."""
    modules = tuple(f"{name}={path}" for name, path in adapters.items())
    return load_model(
        EngineConfig(
            str(base), dtype="float32", device="cpu", model_impl=impl, lora_modules=modules
        )
    )


@pytest.mark.parametrize(
    ("kind", "impl"),
    [
        ("llama", "transformers"),
        ("qwen2", "lean"),
        pytest.param("llama", "lean", marks=pytest.mark.long),
        pytest.param("qwen2", "transformers", marks=pytest.mark.long),
    ],
)
def test_adapters_share_a_batch_with_each_other_and_with_none(
    kind: str, impl: str, tmp_path: Path
) -> None:
    base = make_tiny_model(kind, tmp_path / "base")
    everything = linear_layers(base, ALL)
    some = {name: size for name, size in everything.items() if "q_proj" in name or ".1." in name}
    adapters = {
        "all": make_adapter(tmp_path / "all", everything, seed=1),
        "some": make_adapter(tmp_path / "some", some, seed=2, r=8, use_rslora=True),
        "patterns": make_adapter(
            tmp_path / "patterns", everything, seed=3,
            rank_pattern={"v_proj": 2}, alpha_pattern={"down_proj": 32},
        ),
    }  # fmt: skip
    loaded = load(base, impl, **adapters)
    assert list(map(adapter_name, loaded.info.adapters)) == ["all", "some", "patterns"]
    assert loaded.info.model_impl == impl
    expected = {
        name: merged_tokens(base, path, PROMPTS) for name, path in {**adapters, "": None}.items()
    }
    for i, prompt_tokens in enumerate(expected["all"]):
        assert len({tuple(prompt_tokens), *(tuple(expected[n][i]) for n in expected)}) > 2
    for names in (
        ("all", "", "some", "all", "patterns"),
        ("", "patterns", "all", "some", ""),
        ("",) * 5,
        ("some",) * 5,
    ):
        found = our_tokens(loaded, PROMPTS, adapters=names)
        assert found == [expected[name][i] for i, name in enumerate(names)]


@pytest.mark.parametrize(
    ("family", "overrides", "ends"),
    [
        ("gpt2", {}, ("c_attn", "c_fc", "c_proj")),
        ("gpt_neox", {}, ("query_key_value", "dense_4h_to_h")),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2}, ("q_proj", "o_proj")),
        (
            "deepseek_v3",
            {
                "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "head_dim": 8,
                "qk_rope_head_dim": 8, "v_head_dim": 12, "num_key_value_heads": 4,
                "first_k_dense_replace": 3,
            },
            ("q_b_proj", "kv_a_proj_with_mqa", "o_proj", "gate_proj"),
        ),
    ],
)  # fmt: skip
def test_adapters_of_other_families(
    family: str, overrides: dict[str, Any], ends: tuple[str, ...], tmp_path: Path
) -> None:
    if family == "gpt2":
        base = make_tiny_model(family, tmp_path / "base")
    else:
        base = save_random(tmp_path / "base", family, **overrides)
    adapter = make_adapter(tmp_path / "a", linear_layers(base, ends), seed=1)
    loaded = load(base, "auto", a=adapter)
    expected = {"": merged_tokens(base, None, PROMPTS), "a": merged_tokens(base, adapter, PROMPTS)}
    assert expected["a"] != expected[""]
    names = ("a", "", "a", "", "a")
    found = our_tokens(loaded, PROMPTS, adapters=names)
    assert found == [expected[name][i] for i, name in enumerate(names)]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return make_tiny_model("llama", tmp_path / "base")


@pytest.mark.parametrize("impl", ["lean", "transformers"])
@pytest.mark.parametrize(
    ("layers", "config", "reason"),
    [
        ({"model.layers.0.self_attn.q_proj": (64, 64)}, {"use_dora": True}, "use_dora"),
        ({"model.layers.0.self_attn.q_proj": (64, 64)}, {"bias": "all"}, "bias"),
        (
            {"model.layers.0.self_attn.q_proj": (64, 64)},
            {"modules_to_save": ["lm_head"]},
            "modules_to_save",
        ),
        ({"model.layers.0.self_attn.q_proj": (64, 64)}, {"peft_type": "IA3"}, "not of PEFT's"),
        ({"model.layers.0.self_attn.q_proj": (64, 64)}, {"made_up": 3}, "made_up"),
        (
            {"model.layers.0.self_attn.q_proj": (64, 64)},
            {"init_lora_weights": "pissa_niter_4"},
            "init_lora_weights = 'pissa_niter_4'",
        ),
        ({"model.layers.0.self_attn.q_proj": (64, 48)}, {}, "sizes"),
        ({"model.layers.9.self_attn.q_proj": (64, 64)}, {}, r"model\.layers\.9"),
        ({"lm_head": (64, VOCAB_SIZE)}, {}, "lm_head"),
        ({"model.embed_tokens": (VOCAB_SIZE, 64)}, {}, "embed_tokens"),
    ],
)
def test_what_cannot_be_served_exactly_is_refused(
    base: Path, impl: str, layers: Any, config: Any, reason: str, tmp_path: Path
) -> None:
    adapter = make_adapter(tmp_path / "a", layers, 1, **config)
    with pytest.raises(ModelRefused, match=reason) as refusal:
        load(base, impl, mine=adapter)
    assert "mine" in str(refusal.value)
    assert refusal.value.field == "lora_modules"


def test_an_absorbed_projection_is_refused(tmp_path: Path) -> None:
    sizes = {
        "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
        "v_head_dim": 12, "num_key_value_heads": 4, "head_dim": 8, "first_k_dense_replace": 3,
    }  # fmt: skip
    base = save_random(tmp_path / "base", "deepseek_v3", **sizes)
    adapter = make_adapter(tmp_path / "a", linear_layers(base, ("kv_b_proj",)), 1)
    with pytest.raises(ModelRefused, match="kv_b_proj is absorbed"):
        load(base, "auto", a=adapter)


def test_broken_adapters_are_refused(base: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "a", {"model.layers.0.self_attn.q_proj": (64, 64)}, 1)
    good = (adapter / "adapter_config.json").read_text()
    (adapter / "adapter_config.json").write_text(json.dumps({**json.loads(good), "r": 5}))
    with pytest.raises(ModelRefused, match="rank 4, its config says 5"):
        load(base, "auto", a=adapter)
    (adapter / "adapter_config.json").write_text("{")
    with pytest.raises(ModelRefused, match="cannot read"):
        load(base, "auto", a=adapter)
    (adapter / "adapter_config.json").write_text(good)
    half = {"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": torch.zeros(4, 64)}
    save_file(half, adapter / "adapter_model.safetensors")
    with pytest.raises(ModelRefused, match="lacks A or B"):
        load(base, "auto", a=adapter)
    save_file({"something.else": torch.zeros(2)}, adapter / "adapter_model.safetensors")
    with pytest.raises(ModelRefused, match=r"something\.else"):
        load(base, "auto", a=adapter)
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelRefused, match="there is no"):
        load(base, "auto", a=adapter)


@pytest.mark.parametrize("entries", [("a",), ("=x",), ("a=",), ("a=x", "a=y")])
def test_module_entries_are_name_and_path(base: Path, entries: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="lora_modules"):
        load_model(EngineConfig(str(base), lora_modules=entries))


def test_an_adapters_id_is_bound_to_its_contents(base: Path, tmp_path: Path) -> None:
    """KV is found by the id: two nodes must mean the same weights by it. The model is the same
    whatever adapters there are."""
    layers = {"model.layers.0.self_attn.q_proj": (64, 64)}
    one = make_adapter(tmp_path / "one", layers, seed=1)
    other = make_adapter(tmp_path / "other", layers, seed=2)
    infos = [
        load(base, "lean", **adapters).info
        for adapters in ({}, {"a": one}, {"a": other}, {"b": one}, {"a": one})
    ]
    assert len({info.digest for info in infos}) == 1
    assert len({info.adapters for info in infos}) == 4
    assert infos[1].adapters == infos[4].adapters


def test_the_engine_serves_adapters_by_name(base: Path, tmp_path: Path) -> None:
    """Whole engine: the same prompt under two names and none shares no KV, and no tokens."""
    layers = linear_layers(base, ALL)
    adapters = {name: make_adapter(tmp_path / name, layers, seed) for seed, name in enumerate("ab")}
    modules = tuple(f"{name}={path}" for name, path in adapters.items())
    engine = build_engine(
        EngineConfig(
            str(base), dtype="float32", device="cpu", lora_modules=modules, block_size=4,
            num_kv_blocks=128, max_num_seqs=4, max_num_batched_tokens=16, check_invariants=True,
        )
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    prompt = PROMPTS[2]
    for turn in range(2):  # the second time with prefix hits
        names = {f"{name}{turn}": name for name in ("a", "", "b")}
        for request_id, name in names.items():
            id_ = id_of(engine.info, name)
            engine.add(Request(request_id, tuple(prompt), params, adapter=id_))
        events = run(engine)
        for request_id, name in names.items():
            expected = merged_tokens(base, adapters.get(name), [prompt])[0]
            assert tokens_of(events[request_id]) == expected
    assert engine.stats.num_prefix_hit_tokens == 3 * (len(prompt) - 1) // 4 * 4
    with pytest.raises(UnsupportedFeature, match="no adapter 'c'") as refusal:
        engine.validate(Request("x", tuple(prompt), params, adapter="c"))
    assert refusal.value.field == "adapter"
