"""`baton estimate`: parameters that are known, bytes and times by hand, units, refusals, output."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.engine.loading.model_shape import ModelShape, model_shape
from baton.engine.loading.stored_weights import StoredWeights, stored_weights
from baton.engine.performance.device_share import kv_token_bytes
from baton.engine.performance.estimate import RANKS, main, read_config, rows, sized, stored_bytes
from baton.engine.performance.ideal import (
    Estimate,
    EstimateOptions,
    estimate,
)
from baton.engine.performance.units import parse_rate, parse_seconds
from baton.protocol.errors import ConfigError, ModelRefused
from baton.protocol.kv_spec import LayerSpec
from tests.engine.quantized_models import RECIPES
from tests.tiny_models import make_tiny_model

CONFIGS = Path(__file__).parent / "configs"
QUIP = {"quantization_config": {"quant_method": "quip", "bits": 4}}
LLAMA, QWEN, MIXTRAL, DEEPSEEK = "llama-3-8b", "qwen3-0.6b", "mixtral-8x7b", "deepseek-v3"
GPT_OSS = "gpt-oss-20b"
QWEN2_MOE: dict[str, Any] = {
    "model_type": "qwen2_moe", "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 6, "num_experts_per_tok": 2,
    "decoder_sparse_step": 2, "mlp_only_layers": [1], "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}  # fmt: skip

GLM4_LITE: dict[str, Any] = {
    "model_type": "glm4_moe_lite", "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96,
    "moe_intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "n_routed_experts": 6, "num_experts_per_tok": 2, "kv_lora_rank": 32,
    "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "n_shared_experts": 1, "routed_scaling_factor": 1.8, "rms_norm_eps": 1e-5, "n_group": 1,
    "topk_group": 1, "norm_topk_prob": True, "rope_theta": 1e6, "max_position_embeddings": 512,
}  # fmt: skip

MAMBA = {"model_type": "jamba", "architectures": ["JambaForCausalLM"], "num_hidden_layers": 2}


def config(name: str) -> dict[str, Any]:
    return json.loads((CONFIGS / f"{name}.json").read_text())


def shape(name: str, **changes: Any) -> ModelShape:
    return model_shape({**config(name), **changes})


def run(name: str, **options: Any) -> Estimate:
    return estimate(shape(name), EstimateOptions(model=Path(name), **options))


# ---- parameters ----


@pytest.mark.parametrize(
    ("name", "parameters", "active"),
    [
        (LLAMA, 8_030_261_248, 8_030_261_248),  # its model card
        (QWEN, 596_049_920, 596_049_920),
        (MIXTRAL, 46_702_792_704, 12_879_925_248),
        (DEEPSEEK, 671_026_404_352, 37_552_282_624),  # "671B, 37B activated"
        (GPT_OSS, 20_914_757_184, 4_187_440_704),  # its card: 3.61B without the embedding
    ],
)
def test_known_parameter_counts(name: str, parameters: int, active: int) -> None:
    assert (shape(name).parameters, shape(name).active_parameters) == (parameters, active)


@pytest.mark.parametrize(
    "given",
    [
        config(LLAMA),
        {**config(LLAMA), "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        config(QWEN),
        {**config(QWEN), "model_type": "qwen2"},
        {**config(QWEN), "model_type": "mistral", "sliding_window": 77},
        config(MIXTRAL),
        QWEN2_MOE,
        {**QWEN2_MOE, "model_type": "qwen3_moe", "head_dim": 24, "attention_bias": True},
        {**config(DEEPSEEK), "num_hidden_layers": 5},
        {**config(DEEPSEEK), "num_hidden_layers": 4, "q_lora_rank": None, "attention_bias": True},
        GLM4_LITE,
        {**config(GPT_OSS), "num_hidden_layers": 2, "layer_types": None},
    ],
    ids=lambda given: given["model_type"],
)
def test_formulas_agree_with_transformers_on_the_meta_device(given: dict[str, Any]) -> None:
    from baton.engine.loading.shape_on_meta import shape_on_meta

    ours, built = model_shape(given), shape_on_meta(given)
    for name in ("parameters", "active_parameters", "embedding", "matrices", "tied", "vocab_size"):
        assert getattr(ours, name) == getattr(built, name), name
    assert ours.layers == built.layers
    assert built.note == ""


def test_other_families_are_built_without_memory() -> None:
    gpt2 = model_shape({"model_type": "gpt2"})
    assert gpt2.parameters == 124_439_808
    assert gpt2.layers == (LayerSpec(12, 64, 64),) * 12
    gemma = model_shape({"model_type": "gemma2", "num_hidden_layers": 2, "vocab_size": 100})
    assert [layer.window for layer in gemma.layers] == [4096, 0]
    assert gemma.tied


def test_what_cannot_be_served_says_so_and_what_is_no_model_is_refused() -> None:
    assert "0 of 2 layers use" in (model_shape({"model_type": "bloom"}).refused or "")
    with pytest.raises(ModelRefused, match="not an architecture"):
        model_shape({"model_type": "abacus"})
    with pytest.raises(ModelRefused, match="llama lacks 'vocab_size'"):
        model_shape({key: value for key, value in config(LLAMA).items() if key != "vocab_size"})


def test_the_text_part_of_a_multimodal_config_counts() -> None:
    nested = {"model_type": "some_vlm", "text_config": config(QWEN)}
    assert model_shape(nested).parameters == 596_049_920


# ---- KV ----


@pytest.mark.parametrize(
    ("name", "token_bytes"),
    [
        (LLAMA, 32 * 2 * 8 * 128 * 2),  # grouped: 8 of 32 heads
        (QWEN, 28 * 2 * 8 * 128 * 2),
        (MIXTRAL, 32 * 2 * 8 * 128 * 2),
        (DEEPSEEK, 61 * (512 + 64) * 2),  # a latent and its rotated part
    ],
)
def test_kv_bytes_per_token(name: str, token_bytes: int) -> None:
    assert run(name).kv_bytes_per_token == token_bytes


def test_kv_in_one_byte_and_split_over_devices() -> None:
    assert run(LLAMA, kv_cache_dtype="fp8").kv_bytes_per_token == 65_536
    spec = LayerSpec(8, 128, 128)
    assert kv_token_bytes(spec, "int8") == 8 * 256 + 8 * 2 * 4
    assert run(LLAMA, tensor_parallel_size=4).kv_bytes_per_token == 131_072 // 4
    assert run(LLAMA, tensor_parallel_size=16).kv_bytes_per_token == 131_072 // 8  # no half heads
    assert (split := run(DEEPSEEK, tensor_parallel_size=16)).kv_bytes_per_token == 61 * 576 * 2
    assert ("ranks", RANKS) in rows(split)


def test_multi_head_attention_stores_every_head() -> None:
    every = shape(LLAMA, num_key_value_heads=None)
    assert every.layers[0].kv_heads == 32


# ---- memory ----


def test_blocks_and_concurrency_by_hand() -> None:
    found = run(LLAMA, memory="80GB", context=4096)
    assert found.weight_bytes == 16_060_522_496
    assert found.block_bytes == 16 * 131_072
    # widest: gate, up and their product; hidden states four times; logits of 64 rows three times.
    activations = 2048 * (4 * 4096 + 3 * 14336) * 2 + 3 * 64 * 128_256 * 4
    assert found.activation_bytes == activations
    kv_bytes = 72_000_000_000 - 16_060_522_496 - activations
    assert found.kv_bytes == kv_bytes
    assert found.num_blocks == kv_bytes // (16 * 131_072) == 26_511
    assert found.concurrency == 26_511 // 256 == 103


def test_windows_bound_what_a_request_holds_and_reads() -> None:
    windowed = shape(LLAMA, model_type="mistral", sliding_window=1024)
    options = EstimateOptions(model=Path("m"), memory="80GB", bandwidth="1TB/s", context=8192)
    found = estimate(windowed, options)
    assert found.num_blocks is not None
    assert found.concurrency == found.num_blocks // 65  # a window begins within a block
    assert found.decode[0].kv_bytes == 1024 * 131_072


def test_layers_with_a_window_beside_others_hold_blocks_of_their_own() -> None:
    plain = shape(LLAMA)
    sliding = replace(plain.layers[0], window=1024, kind="sliding")
    mixed = replace(plain, layers=tuple((sliding, plain.layers[0]) * 16))
    options = EstimateOptions(model=Path("m"), memory="80GB", context=8192)
    found, whole = estimate(mixed, options), estimate(plain, options)
    assert found.num_blocks is not None
    assert found.block_bytes * 2 == whole.block_bytes == 16 * 131_072
    assert found.concurrency == found.num_blocks // (512 + 65)
    assert found.kv_tokens == found.num_blocks // 2 * 16
    assert found.concurrency is not None
    assert (whole.concurrency or 0) * 1.7 < found.concurrency


@pytest.mark.parametrize(
    ("quantization", "per_weight"), [("int8", 1), ("int4", 0.625), ("w4a8", 0.625), ("fp8", 1)]
)
def test_quantization_shrinks_matrices_alone(quantization: str, per_weight: float) -> None:
    plain = 596_049_920 - 440_401_920
    found = run(QWEN, quantization=quantization, lm_head_quantization="none")
    assert found.weight_bytes == int(plain * 2 + 440_401_920 * per_weight)


def test_a_rounded_head_is_a_copy_if_tied_and_what_a_step_reads() -> None:
    head, others = 151_936 * 1024, 596_049_920 - 440_401_920
    found = run(QWEN, quantization="int4", bandwidth="1TB/s")
    narrow = 440_401_920 * 0.625
    assert found.lm_head_quantization == "int8"
    assert found.weight_bytes == int(others * 2 + narrow + head)
    assert found.decode[0].weight_bytes == int((others - head) * 2 + narrow + head)
    assert ", matrices int4, head int8" in dict(rows(found))["weights"]
    untied = run(LLAMA, lm_head_quantization="int8", bandwidth="1TB/s")
    assert untied.weight_bytes == 16_060_522_496 - 128_256 * 4096
    plain = run(LLAMA, bandwidth="1TB/s").decode[0].weight_bytes
    assert untied.decode[0].weight_bytes == plain - 128_256 * 4096
    assert run(QWEN, quantization="fp8").lm_head_quantization is None


def test_a_quantized_checkpoint_says_how_it_is_stored() -> None:
    published = run(GPT_OSS)  # its config states no dtype
    assert (published.dtype, published.quantization) == ("bfloat16", "mxfp4 (experts)")
    assert 12e9 < published.weight_bytes < 16e9
    deepseek = run(DEEPSEEK)
    assert deepseek.quantization is None
    assert deepseek.weight_bytes == 2 * 671_026_404_352
    assert "stored as fp8, read and kept as bfloat16" in deepseek.note
    rounded = run(DEEPSEEK, quantization="int8", lm_head_quantization="none")
    assert rounded.quantization == "int8"
    plain = 61 * 512 * 128 * 256 + 58 * 256 * 7168  # kv_b_proj and routers, which stay plain
    narrow = 669_172_039_680 - plain
    assert rounded.weight_bytes == narrow + 2 * (671_026_404_352 - narrow)
    groups = {"group_0": {"weights": {"num_bits": 4, "group_size": 32}}}
    stored = {
        "compressed-tensors": {"config_groups": groups},
        "awq": {"bits": 4, "group_size": 128},
        "gptq": {"bits": 8, "group_size": -1},
        "bitsandbytes": {"load_in_4bit": True},
    }
    found = [
        stored_weights({"quantization_config": {"quant_method": m, **stored[m]}}) for m in stored
    ]
    assert [(each.bits, each.group_size) for each in found if each] == [
        (4, 32), (4, 128), (8, 0), (4, 0),
    ]  # fmt: skip
    assert [each.zeros for each in found if each] == [True, True, True, True]
    assert StoredWeights("awq", 4, 128).bytes_per_weight == 0.5 + 8 / 128
    assert StoredWeights("gptq", 4, 128, zeros=False).bytes_per_weight == 0.5 + 4 / 128
    for given, zeros in (
        ({"sym": True}, False),
        ({"sym": False}, True),
        ({"zero_point": 0}, False),
    ):
        quantized = {"quant_method": "gptq", "bits": 4, "group_size": 128, **given}
        each = stored_weights({"quantization_config": quantized})
        assert each is not None
        assert each.zeros is zeros
    with pytest.raises(ModelRefused, match="does not say its bits"):
        stored_weights({"quantization_config": {"quant_method": "quip"}})


def test_weights_that_do_not_fit_are_refused_with_the_sums() -> None:
    with pytest.raises(ConfigError, match=r"0.9 x 80GB is 72.00 GB; 93.41 GB of weights") as error:
        run(MIXTRAL, memory="80GB")
    assert error.value.field == "memory"
    assert run(MIXTRAL, memory="80GB", tensor_parallel_size=2).num_blocks is not None


def test_a_pool_too_small_to_serve_is_refused() -> None:
    found = run(LLAMA, memory="80GB")
    assert found.kv_bytes is not None
    spare = found.kv_bytes - 3 * found.block_bytes  # what may go until three blocks are left
    assert run(LLAMA, memory=str(80 * 10**9 - int(spare / 0.9))).num_blocks == 3
    with pytest.raises(ConfigError, match="less than the 2 blocks of 2,097,152 bytes"):
        run(LLAMA, memory=str(80 * 10**9 - int(spare / 0.9) - 3 * 10**6))


def test_a_draft_model_shares_the_memory() -> None:
    options = EstimateOptions(model=Path("m"), memory="80GB", context=4096)
    alone = estimate(shape(LLAMA), options)
    both = estimate(shape(LLAMA), options, draft=shape(QWEN))
    assert both.draft_weight_bytes == 2 * 596_049_920
    assert both.draft_kv_bytes_per_token == 114_688
    assert alone.kv_bytes is not None
    assert both.kv_bytes is not None
    assert both.kv_bytes == alone.kv_bytes - both.draft_weight_bytes
    assert both.num_blocks == both.kv_bytes // (16 * (131_072 + 114_688))
    assert ("draft model", "1.19 GB of weights, 114.69 kB of KV per token") in rows(both)
    halved = EstimateOptions(model=Path("m"), memory="20GB", tensor_parallel_size=2)
    assert estimate(shape(LLAMA), halved, draft=shape(QWEN)).draft_weight_bytes == 596_049_920
    tight = EstimateOptions(model=Path("m"), memory="18.5GB")
    with pytest.raises(ConfigError, match=r"16\.06 GB of weights, 1\.19 GB of the draft model's"):
        estimate(shape(LLAMA), tight, draft=shape(QWEN))


# ---- times ----


def test_ttft_is_two_flops_per_active_parameter_and_token() -> None:
    assert run(LLAMA, flops="990T", prompt=1000).ttft_s == pytest.approx(
        1000 * 2 * 8_030_261_248 / 990e12
    )
    assert run(MIXTRAL, flops="990T", prompt=1000).ttft_s == pytest.approx(
        1000 * 2 * 12_879_925_248 / 990e12
    )
    halved = run(LLAMA, flops="990T", prompt=1000, tensor_parallel_size=2).ttft_s
    assert halved == pytest.approx(1000 * 2 * 8_030_261_248 / 990e12 / 2)


def test_tpot_is_the_bytes_read_over_the_bandwidth() -> None:
    (step,) = run(LLAMA, bandwidth="3.3TB/s", context=4096).decode
    assert step.weight_bytes == 16_060_522_496 - 2 * 128_256 * 4096  # the input table is looked up
    assert step.kv_bytes == 4096 * 131_072
    assert step.tpot_s == pytest.approx((step.weight_bytes + step.kv_bytes) / 3.3e12)
    assert step.bound == "memory"
    tied = run(QWEN, bandwidth="1TB/s", batch=8, context=100).decode
    assert [each.batch for each in tied] == [1, 8]
    assert tied[1].weight_bytes == 2 * 596_049_920  # tied: the head reads the table
    assert tied[1].kv_bytes == 8 * 100 * 114_688


def test_a_large_batch_is_bound_by_computing() -> None:
    options = {"bandwidth": "3.3TB/s", "flops": "100T", "batch": 512, "context": 16}
    step = run(LLAMA, **options).decode[-1]
    assert (step.batch, step.bound) == (512, "compute")
    assert step.tpot_s == pytest.approx(512 * 2 * 8_030_261_248 / 100e12)


def test_a_batch_reads_the_experts_it_is_expected_to_meet() -> None:
    one, many = run(MIXTRAL, bandwidth="3.3TB/s", batch=4, context=1).decode
    experts = 32 * 8 * 3 * 4096 * 14336
    table = 32_000 * 4096
    assert one.weight_bytes == pytest.approx(2 * (12_879_925_248 - table), rel=1e-9)
    missed = 0.75**4
    assert many.weight_bytes == pytest.approx(
        2 * (46_702_792_704 - table - experts * missed), rel=1e-9
    )


def test_mbu_of_a_measured_tpot() -> None:
    found = run(LLAMA, bandwidth="3.3TB/s", measured_tpot="10ms")
    assert found.mbu == pytest.approx(found.decode[0].bytes_read / (0.010 * 3.3e12))
    assert ("MBU of the measured TPOT", f"{found.mbu:.1%}") in rows(found)


# ---- units, files, output ----


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("3.3TB/s", 3.3e12), ("900 GB/s", 9e11), ("990T", 9.9e14), ("1.98PFLOPS", 1.98e15),
        ("1GiB/s", 2.0**30), ("500", 500.0), ("165tflop/s", 1.65e14),
    ],
)  # fmt: skip
def test_rates(text: str, rate: float) -> None:
    assert parse_rate(text, "flops") == pytest.approx(rate)


@pytest.mark.parametrize("text", ["", "fast", "-1TB/s", "3 apples", "0T"])
def test_what_is_no_rate(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_rate(text, "bandwidth")
    assert error.value.field == "bandwidth"


def test_times() -> None:
    assert parse_seconds("12ms", "x") == pytest.approx(0.012)
    assert parse_seconds("0.5 s", "x") == 0.5
    for text in ("12", "0ms", "soon"):
        with pytest.raises(ConfigError, match="not a time"):
            parse_seconds(text, "x")


@pytest.mark.parametrize(
    ("name", "value"),
    [("batch", 0), ("context", 0), ("tensor_parallel_size", 0), ("gpu_memory_utilization", 1.5)],
)
def test_bad_options_are_named(name: str, value: float) -> None:
    with pytest.raises(ConfigError) as error:
        EstimateOptions(model=Path("m"), **{name: value})  # type: ignore[arg-type]
    assert error.value.field == name


def test_a_checkpoint_shows_the_bytes_of_its_files(tmp_path: Path) -> None:
    path = make_tiny_model("llama", tmp_path)
    tiny = model_shape(read_config(path))
    assert stored_bytes(path) == 4 * tiny.parameters
    (path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0nonsense")
    with pytest.raises(ConfigError, match="not a safetensors file"):
        stored_bytes(path)
    assert stored_bytes(CONFIGS / f"{LLAMA}.json") is None


def test_the_command_prints_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--model", str(CONFIGS / f"{LLAMA}.json"), "--memory", "80GB", "--bandwidth", "3.3TB/s",
        "--flops", "990T",
    ]  # fmt: skip
    assert main(flags) == 0
    table = capsys.readouterr().out
    assert main(flags[1:]) == 0, "the model by its place"
    assert capsys.readouterr().out == table
    for part in ("8,030,261,248", "131.07 kB", "26,511", "103 requests", "16.61 ms", "4.71 ms"):
        assert part in table
    assert main([*flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["parameters"], found["num_blocks"]) == (8_030_261_248, 26_511)
    assert found["decode"][0]["batch"] == 1
    assert main(["--model", "/nowhere"]) == 2
    assert capsys.readouterr().err == "baton estimate: there is no /nowhere\n"


def test_known_families_need_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None;"
        "from baton.engine.performance.estimate import main;"
        f"main(['--model', {str(CONFIGS / f'{DEEPSEEK}.json')!r}, '--json'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["active_parameters"] == 37_552_282_624
    assert found["refused"] == "not known: torch is not installed here"


# ---- what Baton would refuse ----


def test_mixtures_with_latents_are_lean(tmp_path: Path) -> None:
    assert refused(DEEPSEEK, tmp_path, {}) is None, "8-bit floats as they are published"
    plain = {**config(DEEPSEEK), "quantization_config": None}
    for changes in (plain, GLM4_LITE, {**plain, "model_type": "kimi_k2"}):
        file = tmp_path / "config.json"
        file.write_text(json.dumps(changes))
        found = sized(EstimateOptions(model=file, quantization="int8"))
        assert found.refused is None
        for whole in (False, True):
            options: dict[str, Any] = {"enable_expert_parallel": whole}
            split = sized(EstimateOptions(model=file, tensor_parallel_size=2, **options))
            assert split.refused is None
    assert model_shape({**plain, "model_type": "kimi_k2"}).parameters == shape(DEEPSEEK).parameters


def refused(name: str, folder: Path, changes: dict[str, Any], **options: Any) -> str | None:
    file = folder / "config.json"
    file.write_text(json.dumps(config(name) | changes))
    return sized(EstimateOptions(model=file, **options)).refused


@pytest.mark.parametrize(
    ("changes", "options", "reason"),
    [
        ({}, {}, None),
        ({}, {"quantization": "int4", "kv_cache_dtype": "bfloat16", "context": 1}, None),
        ({}, {"quantization": "fp8"}, "is not quantized"),
        ({}, {"kv_cache_dtype": "float32"}, "kv_cache_dtype must be one of auto, int8, fp8"),
        ({}, {"context": 100_000}, "100000 exceeds the model's own 8192 positions"),
        ({}, {"quantization": "w8a8", "tensor_parallel_size": 2}, None),
        ({"quantization_config": RECIPES["w8a8"].config}, {"tensor_parallel_size": 2}, None),
        ({}, {"tensor_parallel_size": 3}, "32 query heads cannot be split over 3 ranks"),
        ({}, {"enable_expert_parallel": True}, "llama has no experts to lie on different ranks"),
        ({"quantization_config": {"quant_method": "fp8"}}, {}, None),
        (QUIP, {}, "quantized by quip are not served"),
        ({"architectures": ["LlamaForTokenClassification"]}, {}, "no head for tokens"),
        ({"is_encoder_decoder": True}, {}, "only decoders"),
    ],
)
def test_it_says_when_baton_would_refuse_what_it_sizes(
    changes: dict[str, Any], options: dict[str, Any], reason: str | None, tmp_path: Path
) -> None:
    """By the checks of the loader itself: see test_route.py for all of its reasons."""
    found = refused(LLAMA, tmp_path, changes, **options)
    assert found is None if reason is None else reason in (found or "")


def test_a_refusal_is_one_line_of_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_tiny_model("llama", tmp_path)
    assert main(["--model", str(path)]) == 0
    assert "refused" not in capsys.readouterr().out
    (path / "tokenizer.json").unlink()
    found = sized(EstimateOptions(model=path))
    assert ("refused by Baton", found.refused) in rows(found)
    assert "there is no tokenizer.json" in (found.refused or "")


def test_layers_that_are_not_served_and_a_draft_that_is_not(tmp_path: Path) -> None:
    assert "computes its recurrent state wrongly" in (refused(LLAMA, tmp_path, MAMBA) or "")
    draft = tmp_path / "draft.json"
    draft.write_text(json.dumps(config(QWEN) | QUIP))
    drafted = {"speculative_model": draft}
    assert "quantized by quip" in (refused(LLAMA, tmp_path, {}, **drafted) or "")
