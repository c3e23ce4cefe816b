"""Qwen3-Next and Qwen3.5 on the lean route: transformers' tokens and logits, the universal route's
KV and states, every weight format, adapters; and what is refused."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.engine.kernels.cpu.delta_rule import CompiledDeltaRule
from baton.engine.loading.loading import LoadedModel
from baton.engine.loading.model_shape import model_shape
from baton.engine.loading.route import choose_route
from baton.engine.loading.shape_on_meta import shape_on_meta
from baton.engine.models.decoder import Decoder
from baton.engine.models.elementwise import CompiledElementwise
from baton.engine.models.families.keys import NotLean
from baton.engine.models.families.read import decoder_config
from baton.engine.models.layers.delta import DeltaAttention
from baton.engine.quantization.integer import Scheme
from baton.protocol.errors import ConfigError, ModelRefused
from tests.engine.running import Driver, load, logits_of, native_logits, relative_error
from tests.engine.tensor_parallel_ranks import config_of
from tests.engine.test_models_lora import linear_layers, make_adapter, merged_tokens
from tests.engine.test_quantization import rounded_twin
from tests.golden.greedy import our_tokens, random_prompts, transformers_tokens
from tests.golden.hybrid_models import HYBRID_MODELS, save_hybrid, save_with_images
from tests.tiny_models import VOCAB_SIZE

PROMPTS = random_prompts(VOCAB_SIZE)
PROMPT = random_prompts(VOCAB_SIZE, (41,))[0]
# Whole vectors and whole groups of integers, of what rotates too.
WIDE: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 192, "head_dim": 64, "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64, "linear_key_head_dim": 32, "linear_value_head_dim": 48,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    yield
    logging.getLogger("transformers").setLevel(logging.WARNING)


def save_wide(path: Path, name: str, **overrides: Any) -> Path:
    """As save_hybrid, of WIDE's sizes."""
    moe = ("moe_intermediate_size", "shared_expert_intermediate_size")
    dense = HYBRID_MODELS[name][0] == "qwen3_5_text"
    sizes = {key: WIDE[key] for key in WIDE if not (dense and key in moe)}
    return save_hybrid(path, name, **sizes, **overrides)


def prefilled(loaded: LoadedModel, sizes: list[int]) -> Driver:
    """A driver that holds PROMPT's KV and states, computed in chunks."""
    driver = Driver(loaded, num_blocks=8)
    driver.logits(PROMPT, range(8), sizes)
    return driver


@pytest.mark.parametrize("name", HYBRID_MODELS)
def test_it_is_transformers_model(name: str, tmp_path: Path) -> None:
    path = save_hybrid(tmp_path, name)
    expected, logits = transformers_tokens(path, PROMPTS), native_logits(path, PROMPT)
    lean, universal = load(path, model_impl="lean"), load(path, model_impl="transformers")
    assert our_tokens(lean, PROMPTS) == expected
    assert len({token for output in expected for token in output}) > 5  # decisive
    assert relative_error(logits_of(lean, PROMPT), logits) < 1e-5
    assert lean.info.layers == universal.info.layers
    assert lean.info.rope == universal.info.rope
    assert lean.attention_layers == universal.attention_layers
    counted = replace(lean.model.parameter_counts, last=0, last_experts=0)
    assert counted == universal.model.parameter_counts
    assert lean.weight_bytes == universal.weight_bytes
    chunked, whole = prefilled(lean, [17, 1, 16, 7]), prefilled(universal, [41])
    for layer in range(len(lean.info.layers)):
        stored = "states" if lean.info.layers[layer].state is not None else "arena"
        ours, theirs = (
            each.states.views(layer) if stored == "states" else each.arena.layer(layer)
            for each in (chunked, whole)
        )
        for one, other in zip(ours, theirs, strict=True):
            assert one is not None
            assert other is not None
            assert relative_error(one, other) < 1e-5


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_the_language_model_of_a_model_of_images(family: str, tmp_path: Path) -> None:
    """It is read alone; so are experts that are one tensor per layer."""
    path = save_with_images(tmp_path, family)
    lean = load(path)
    assert lean.info.model_impl == "lean"
    assert our_tokens(lean, PROMPTS) == transformers_tokens(path, PROMPTS)


@pytest.mark.parametrize("name", ["qwen3 next", "qwen3.5", "qwen3.5 moe"])
def test_in_bfloat16_the_same_as_the_universal_route(name: str, tmp_path: Path) -> None:
    """By the compiled kernels, where there are any; and token by token."""
    path = save_wide(tmp_path, name)
    exact = logits_of(load(path), PROMPT)
    lean, universal = (
        load(path, dtype="bfloat16", model_impl=impl) for impl in ("lean", "transformers")
    )
    assert lean.info.layers == universal.info.layers
    bound = 1.3 * relative_error(logits_of(universal, PROMPT), exact) + 0.01
    assert relative_error(logits_of(lean, PROMPT), exact) < bound
    by_row = Driver(lean).logits(PROMPT, range(6), [1] * len(PROMPT))
    assert relative_error(by_row, exact) < bound
    assert isinstance(lean.model, Decoder)
    first = lean.model._layers[0]
    assert isinstance(first.attention, DeltaAttention)
    compiled = isinstance(lean.model._between, CompiledElementwise)
    assert isinstance(first.attention.rule, CompiledDeltaRule) is compiled


@pytest.mark.parametrize("scheme", ["int8", "w8a8", "int4", "w4a8"])
def test_weights_rounded_on_load(scheme: Scheme, tmp_path: Path) -> None:
    path = save_wide(tmp_path / "model", "qwen3 next")
    rounded, twin = load(path, quantization=scheme), load(rounded_twin(path, scheme))
    assert rounded.weight_bytes < 0.6 * twin.weight_bytes
    error = relative_error(logits_of(rounded, PROMPT), logits_of(twin, PROMPT))
    # Rounded rows: the model is so sensitive that bfloat16 alone makes an error of 0.05.
    assert error < (0.3 if scheme in ("w8a8", "w4a8") else 2e-5)


@pytest.mark.parametrize("name", ["qwen3 next", "qwen3.5"])
def test_adapters(name: str, tmp_path: Path) -> None:
    """Of linear attention and of gated attention, beside rows without."""
    base = save_hybrid(tmp_path / "base", name)
    ends = ("in_proj_qkv", "in_proj_a", "in_proj_qkvz", "out_proj", "q_proj", "o_proj")
    adapter = make_adapter(tmp_path / "a", linear_layers(base, ends), seed=1)
    loaded = load(base, lora_modules=(f"a={adapter}",))
    expected = {"": merged_tokens(base, None, PROMPTS), "a": merged_tokens(base, adapter, PROMPTS)}
    assert expected["a"] != expected[""]
    names = ("a", "", "a", "", "a")
    found = our_tokens(loaded, PROMPTS, adapters=names)
    assert found == [expected[name][index] for index, name in enumerate(names)]


def test_what_is_refused(tmp_path: Path) -> None:
    path = save_hybrid(tmp_path, "qwen3 next")
    for options, text in (
        ({"tensor_parallel_size": 4}, "2 key heads of linear attention cannot be split over 4"),
        ({"data_parallel_size": 2}, "models with recurrent state do not go with"),
        ({"deterministic": True}, "how the prompt is cut"),
        ({"speculative_method": "mtp"}, "lacks tensors"),
    ):
        with pytest.raises((ModelRefused, ConfigError), match=text) as error:
            load(path, **options)
        assert error.value.field == next(iter(options))


QWEN35: dict[str, Any] = {  # as published, fewer layers
    "architectures": ["Qwen3_5ForConditionalGeneration"], "image_token_id": 248056,
    "model_type": "qwen3_5", "tie_word_embeddings": True, "video_token_id": 248057,
    "vision_start_token_id": 248053, "vision_end_token_id": 248054, "vision_config": {},
    "text_config": {
        "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True,
        "dtype": "bfloat16", "eos_token_id": 248044, "full_attention_interval": 4,
        "head_dim": 256, "hidden_act": "silu", "hidden_size": 1024, "initializer_range": 0.02,
        "intermediate_size": 3584, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144, "mlp_only_layers": [],
        "model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False, "num_attention_heads": 8,
        "num_hidden_layers": 8, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
        "tie_word_embeddings": True, "use_cache": True, "vocab_size": 248320,
        "rope_parameters": {
            "mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default",
            "rope_theta": 10000000, "partial_rotary_factor": 0.25,
        },
    },
}  # fmt: skip


COUNTED: dict[str, Any] = {
    "model_type": "qwen3_next", "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 40, "num_hidden_layers": 5,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24, "num_experts": 6,
    "num_experts_per_tok": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
    "linear_key_head_dim": 16, "linear_value_head_dim": 12, "linear_conv_kernel_dim": 3,
    "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "mlp_only_layers": [1], "decoder_sparse_step": 2,
            "layer_types": ["full_attention", *["linear_attention"] * 4],
        },
        {"model_type": "qwen3_5_moe_text", "attention_bias": True},
        {"model_type": "qwen3_5_text", "num_experts": None, "dtype": "bfloat16"},
    ],
)  # fmt: skip
def test_sizes_are_counted_as_transformers_builds_them(changes: dict[str, Any]) -> None:
    ours, built = (of({**COUNTED, **changes}) for of in (model_shape, shape_on_meta))
    for name in ("parameters", "active_parameters", "embedding", "matrices", "tied", "layers"):
        assert getattr(ours, name) == getattr(built, name), name
    assert built.note == ""


def changed(**text: Any) -> dict[str, Any]:
    return {**QWEN35, "text_config": {**QWEN35["text_config"], **text}}


def test_a_published_config_is_read() -> None:
    found = decoder_config(QWEN35)
    assert found.delta is not None
    assert sorted(found.delta.layers) == [0, 1, 2, 4, 5, 6]
    assert (found.turned, found.rope.theta, found.rope.parameters) == (64, 1e7, ())
    assert found.tied_embeddings
    assert found.prefix == "model.language_model."


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (changed(attn_output_gate=False), "attn_output_gate False"),
        (changed(mamba_ssm_dtype="bfloat16"), "mamba_ssm_dtype"),
        (changed(layer_types=["sliding_attention"] * 8), "layer_types"),
        (changed(linear_num_value_heads=24), "24 value heads for 16 key heads"),
        (changed(tie_word_embeddings=False), "two values of tie_word_embeddings"),
        (changed(something_new=1), "something_new"),
        ({**QWEN35, "architectures": ["Other"]}, "architectures"),
        ({**QWEN35, "something_new": 1}, "something_new"),
    ],
)
def test_what_is_not_understood_is_not_lean(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotLean, match=reason):
        decoder_config(config)
    with pytest.raises(ModelRefused, match=reason):
        choose_route(config, config_of(Path("model"), model_impl="lean"))
