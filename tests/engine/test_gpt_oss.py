"""GPT-OSS on the lean route: transformers' tokens and logits, the universal route's KV."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.engine.checkpoint.kinds import MXFP4_KEPT_BYTES
from baton.engine.config import AUTO_HEADS
from baton.engine.kernels.cpu import library
from baton.engine.kernels.cpu.experts import ExpertKernels
from baton.engine.kernels.cpu.library import CpuKernels
from baton.engine.kernels.cpu.quantized import integer_kernels_for
from baton.engine.loading.loading import load_model
from baton.engine.models.experts import Experts
from baton.engine.models.families.keys import NotLean
from baton.engine.models.families.read import decoder_config
from baton.engine.parallel.group import RankGroup
from baton.engine.performance.estimate import sized
from baton.engine.performance.ideal import EstimateOptions
from baton.engine.quantization.integer import SCHEMES, Scheme, quantize
from baton.engine.state.interface import SequenceChunk
from baton.engine.state.place import RankPlace
from baton.llm import LLM
from baton.protocol.errors import ModelRefused
from baton.protocol.sampling import SamplingParams
from tests.block_lists import held
from tests.engine.running import Driver, load, logits_of, native_logits, relative_error
from tests.engine.tensor_parallel_ranks import by_threads, config_of, engine_of_ranks
from tests.engine.tensor_parallel_ranks import logits_of as rank_logits
from tests.engine.test_models_lora import linear_layers, make_adapter, merged_tokens
from tests.engine.widened_models import packed_experts
from tests.golden.gpt_oss_models import GPT_OSS_MODELS, WIDE, random_sizes, save_gpt_oss
from tests.golden.greedy import our_tokens, random_prompts, transformers_tokens
from tests.tiny_models import VOCAB_SIZE

CONFIGS = Path(__file__).parent / "configs"
PROMPTS = random_prompts(VOCAB_SIZE)
PROMPT = random_prompts(VOCAB_SIZE, (41,))[0]


@pytest.mark.parametrize("name", GPT_OSS_MODELS)
def test_it_is_transformers_model(name: str, tmp_path: Path) -> None:
    path = save_gpt_oss(tmp_path, **GPT_OSS_MODELS[name])
    expected, logits = transformers_tokens(path, PROMPTS), native_logits(path, PROMPT)
    lean, universal = load(path), load(path, model_impl="transformers")
    assert (lean.info.model_impl, universal.info.model_impl) == ("lean", "transformers")
    assert our_tokens(lean, PROMPTS) == expected
    assert len({token for output in expected for token in output}) > 10  # decisive
    assert relative_error(logits_of(lean, PROMPT), logits) < 1e-5
    chunked = Driver(lean).logits(PROMPT, range(6), [1, 17, 3, 20])
    assert relative_error(chunked, logits) < 1e-5
    # Nodes of both routes serve together.
    assert lean.info.layers == universal.info.layers
    for ours, other in zip(lean.attention_layers, universal.attention_layers, strict=True):
        assert ours.sinks is not None
        assert other.sinks is not None
        assert torch.equal(ours.sinks, other.sinks)
        assert (ours.window, ours.scale) == (other.window, other.scale)
    # Biases that are stacked look like matrices to the universal route.
    counts, theirs = lean.model.parameter_counts, universal.model.parameter_counts
    experts = decoder_config(json.loads((path / "config.json").read_text())).experts
    assert experts is not None
    biases = experts.count * (2 * experts.size + 64) * len(experts.layers)
    both = counts.experts + biases
    assert replace(counts, experts=both, last=0, last_experts=0) == theirs
    assert lean.weight_bytes == universal.weight_bytes


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=[pytest.mark.long] * (seed > 2) + [pytest.mark.soak] * (seed > 9))
        for seed in range(20)
    ],
)
def test_random_configurations(seed: int, tmp_path: Path) -> None:
    path = save_gpt_oss(tmp_path, **random_sizes(seed))
    lean = load(path)
    assert lean.info.model_impl == "lean"
    assert our_tokens(lean, PROMPTS) == transformers_tokens(path, PROMPTS)
    assert relative_error(logits_of(lean, PROMPT), native_logits(path, PROMPT)) < 1e-5


def as_published(path: Path) -> dict[str, Any]:
    """The config, as the family's own checkpoints spell it."""
    config = json.loads((path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    return config | {
        "rope_theta": rope.pop("rope_theta"), "rope_scaling": rope, "initial_context_length": 64,
        "experts_per_token": config["num_experts_per_tok"], "router_aux_loss_coef": 0.9,
    }  # fmt: skip


def test_published_keys_are_understood(tmp_path: Path) -> None:
    path = save_gpt_oss(tmp_path)
    published = json.loads((CONFIGS / "gpt-oss-20b.json").read_text())
    del published["quantization_config"]  # as the route reads it
    assert decoder_config(published).windows == (128, 0) * 12
    config = as_published(path)
    assert decoder_config(config) == decoder_config(json.loads((path / "config.json").read_text()))
    config.pop("swiglu_alpha", None)
    experts = decoder_config(config).experts
    assert experts is not None
    assert experts.clamped is not None
    assert experts.clamped.alpha == 1.702


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "layer_types"),
        ({"sliding_window": 0}, "window of 0"),
        ({"experts_per_token": 3}, "differ"),
        ({"num_experts": 5}, "differ"),
        ({"swiglu_limit": None}, "absent"),
        ({"rope_scaling": None}, "RoPE rule"),
        ({"rope_theta": None}, "rope_theta"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"moe_intermediate_size": 48}, "not understood"),
    ],
)
def test_other_configs_are_not_lean(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    config = as_published(save_gpt_oss(tmp_path, num_hidden_layers=3)) | changes
    with pytest.raises(NotLean, match=reason):
        decoder_config({key: value for key, value in config.items() if value is not None})


def test_misshapen_experts_are_refused(tmp_path: Path) -> None:

    path = save_gpt_oss(tmp_path)
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.1.mlp.experts.gate_up_proj"
    save_file({**tensors, name: tensors[name][0].clone()}, path / "model.safetensors")
    with pytest.raises(ModelRefused, match=r"experts\.gate_up_proj"):
        load(path, model_impl="lean")


@torch.inference_mode()
def continued(driver: Driver, ids: Sequence[int], count: int) -> list[int]:
    """Greedy tokens behind a prompt whose KV, but for its last token's, lies in the pool."""
    known = list(ids)
    for _ in range(count):
        start = len(known) - 1
        (logits,) = driver.step([SequenceChunk("s", known[start:], start, held(range(8)))])
        known.append(int(logits[-1].argmax()))
    return known[len(ids) :]


def test_kv_of_one_route_serves_the_other(tmp_path: Path) -> None:
    path = save_gpt_oss(tmp_path)
    drivers = [Driver(load(path, model_impl=impl), 8) for impl in ("lean", "transformers")]
    for driver, sizes in zip(drivers, ((41,), (17, 16, 8)), strict=True):
        driver.logits(PROMPT, range(8), sizes)
    ours, theirs = (driver.arena for driver in drivers)
    expected = transformers_tokens(path, [PROMPT])[0]
    for layer in range(3):
        for mine, other in zip(ours.layer(layer), theirs.layer(layer), strict=True):
            torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)
    for source, target in ((ours, drivers[1]), (theirs, drivers[0])):
        for layer in range(3):
            for here, there in zip(target.arena.layer(layer), source.layer(layer), strict=True):
                here.copy_(there)
        assert continued(target, PROMPT, len(expected)) == expected


def test_in_bfloat16_as_near_as_the_universal_route(tmp_path: Path) -> None:
    path = save_gpt_oss(tmp_path, **WIDE)
    exact = logits_of(load(path), PROMPT)
    lean, universal = (
        relative_error(logits_of(load(path, dtype="bfloat16", model_impl=impl), PROMPT), exact)
        for impl in ("lean", "transformers")
    )
    assert lean < 1.5 * universal + 0.01


def test_experts_run_in_one_compiled_call(cpu_kernels: CpuKernels, tmp_path: Path) -> None:
    path = save_gpt_oss(tmp_path, **WIDE)
    model = load(path, dtype="bfloat16")
    with mock.patch.object(
        ExpertKernels, "_run", autospec=True, side_effect=ExpertKernels._run
    ) as called:
        ours = Driver(model).logits(PROMPT, range(8), [40, 1])
    assert called.call_count == 2 * len(model.info.layers)
    with mock.patch.object(library, "_found", return_value=(None, "")):
        theirs = Driver(load(path, dtype="bfloat16")).logits(PROMPT, range(8), [40, 1])
    assert relative_error(ours, theirs) < 0.05


def rounded_twin(path: Path, scheme: Scheme) -> Path:
    """A plain checkpoint of what `scheme` rounds the products of `path` to."""
    twin = path.with_name(f"{path.name}-{scheme}")
    shutil.copytree(path, twin)
    head = cast(Scheme, AUTO_HEADS[scheme])
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight") or name == "lm_head.weight":
            its = head if name == "lm_head.weight" else scheme
            tensors[name] = quantize(tensor, its).dequantized(torch.float32)
        elif name.endswith("_proj"):
            rounded = [quantize(each.t(), scheme).dequantized(torch.float32).t() for each in tensor]
            tensors[name] = torch.stack(rounded).contiguous()
    save_file(tensors, twin / "model.safetensors", {"format": "pt"})
    return twin


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_rounded_on_load(scheme: Scheme, tmp_path: Path) -> None:
    """Attention's products and the experts'; not the router."""
    path = save_gpt_oss(tmp_path / "model", **WIDE)
    rounded = load(path, quantization=scheme)
    assert rounded.info.model_impl == "lean"
    assert rounded.weight_bytes < 0.45 * load(path).weight_bytes
    error = relative_error(
        logits_of(rounded, PROMPT), logits_of(load(rounded_twin(path, scheme)), PROMPT)
    )
    assert error < (0.15 if scheme in ("w8a8", "w4a8") else 2e-5)  # its activations are rounded too


def test_adapters_of_attention(tmp_path: Path) -> None:
    base = save_gpt_oss(tmp_path / "base")
    ends = ("q_proj", "k_proj", "v_proj", "o_proj")
    adapter = make_adapter(tmp_path / "a", linear_layers(base, ends), seed=1)
    loaded = load(base, lora_modules=(f"a={adapter}",))
    assert loaded.info.model_impl == "lean"
    plain = transformers_tokens(base, PROMPTS)
    adapted = merged_tokens(base, adapter, PROMPTS)
    assert plain != adapted
    names = ["a", "", "a", "", "a"]
    expected = [(adapted if name else plain)[i] for i, name in enumerate(names)]
    assert our_tokens(loaded, PROMPTS, adapters=names) == expected
    layers = {"model.layers.0.mlp.experts.1.gate_proj": (64, 96)}
    with pytest.raises(ModelRefused, match="does not adapt"):
        load(base, lora_modules=(f"b={make_adapter(tmp_path / 'b', layers, seed=1)}",))


def test_engines_of_ranks_give_transformers_tokens(tmp_path: Path) -> None:
    """Long prompts in chunks, prefixes that are cached, windows whose blocks are given back."""
    path = save_gpt_oss(tmp_path, num_hidden_layers=4)
    prompts = [*PROMPTS, PROMPT[:32] + PROMPTS[1]]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    options: dict[str, Any] = {
        "num_kv_blocks": 96, "block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 4,
    }  # fmt: skip
    expected = transformers_tokens(path, prompts)
    whole = LLM(str(path), "float32", threads=1, **options).engine
    assert whole.arena.groups.num_groups == 2
    for _ in range(2):  # the second time out of the cache
        outputs = LLM("unread", engine=whole).generate(prompts, params)
        assert [list(output.token_ids) for output in outputs] == expected
    assert whole.stats.num_window_freed_blocks > 0
    with engine_of_ranks(str(path), 2, **options) as engine:
        outputs = LLM("unread", engine=engine).generate(prompts, params)
        assert [list(output.token_ids) for output in outputs] == expected


def packed_pair(path: Path) -> tuple[Path, Path]:
    """Experts in MXFP4 as published, and the plain model in bfloat16 of the same numbers."""
    twin = save_gpt_oss(path / "twin", **WIDE, num_attention_heads=8, num_key_value_heads=4)
    return packed_experts(path, twin)


def test_mxfp4_stays_in_four_bits(cpu_kernels: CpuKernels, tmp_path: Path) -> None:
    """Of ranks, too; the numbers are those of the widened weights."""
    if integer_kernels_for(torch.bfloat16, torch.device("cpu")) is None:
        pytest.skip("no integer kernels here")
    path, twin = packed_pair(tmp_path)
    packed, plain = load(path, dtype="bfloat16"), load(twin, dtype="bfloat16")
    assert packed.info.model_impl == "lean"
    experts = packed.model._layers[0].mlp  # type: ignore[attr-defined]
    assert isinstance(experts, Experts)
    assert isinstance(experts.together, ExpertKernels)
    assert packed.weight_bytes < 0.6 * plain.weight_bytes
    exact, found = logits_of(plain, PROMPT), logits_of(packed, PROMPT)
    near = relative_error(exact, logits_of(load(twin), PROMPT))
    assert relative_error(found, exact) < 1.5 * near + 0.01
    config = config_of(path, tensor_parallel_size=2)
    config = replace(config, dtype="bfloat16")
    [shared, _] = by_threads(2, lambda group: rank_logits(load_model(config, group), 2))
    alone = rank_logits(packed, 1)
    assert relative_error(shared, alone) < 1.5 * near + 0.01


BIG = {
    "hidden_size": 256, "intermediate_size": 256, "head_dim": 32, "num_attention_heads": 8,
    "num_key_value_heads": 4,
}  # fmt: skip


def test_the_estimate_counts_experts_in_four_bits(cpu_kernels: CpuKernels, tmp_path: Path) -> None:
    """Of what ranks hold, and of the memory of the packed layers."""
    if integer_kernels_for(torch.bfloat16, torch.device("cpu")) is None:
        pytest.skip("no integer kernels here")
    path, _ = packed_experts(tmp_path, save_gpt_oss(tmp_path / "twin", **BIG))
    for size, whole_experts in ((1, False), (2, False), (2, True), (4, False), (4, True)):
        options: dict[str, Any] = {
            "tensor_parallel_size": size, "enable_expert_parallel": whole_experts,
        }  # fmt: skip
        found = sized(EstimateOptions(model=path, dtype="bfloat16", **options))
        assert found.refused is None
        assert found.quantization == "mxfp4 (experts)"
        config = replace(config_of(path, **options), dtype="bfloat16")
        for rank in range(size):
            group = None if size == 1 else RankGroup(RankPlace(rank, size), "gloo")
            held = load_model(config, group).weight_bytes
            assert 0.95 < held / found.weight_bytes < 1.1, (size, whole_experts, rank)
    alone = load(path, dtype="bfloat16")
    layers = [layer.mlp.experts for layer in alone.model._layers]  # type: ignore[attr-defined]
    products = [each for experts in layers for e in experts for each in (e.gate_up, e.down)]
    packed = sum(each.packed.panels.nbytes + each.packed.peaks.nbytes for each in products)
    weights = len(layers) * 4 * 3 * 256 * 256
    assert packed == pytest.approx(MXFP4_KEPT_BYTES * weights, rel=0.1)
    for wide in ({"quantization": "widened"}, {"dtype": "float32"}):
        options: dict[str, Any] = {"dtype": "bfloat16", **wide}
        found = sized(EstimateOptions(model=path, **options))
        held = load(path, **options).weight_bytes
        assert found.quantization is None
        assert 0.95 < held / found.weight_bytes < 1.1


def test_scales_too_far_apart_for_the_kernels_are_widened(
    cpu_kernels: CpuKernels, tmp_path: Path
) -> None:
    path, _ = packed_pair(tmp_path)
    file = path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.experts.down_proj_scales"
    tensors[name][1, 3, 0] -= 20
    save_file(tensors, file, {"format": "pt"})
    assert load(path, dtype="bfloat16").info.model_impl == "lean"
    tensors[name][1, 3, 0] = 255
    save_file(tensors, file, {"format": "pt"})
    for dtype in ("bfloat16", "float32"):
        with pytest.raises(ModelRefused, match="not finite"):
            load(path, dtype=dtype)
