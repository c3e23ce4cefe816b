"""Gemma, Phi-3 and GLM-4 on the lean route: transformers' tokens and logits, the universal route's
KV, every weight format, adapters, ranks."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    SiglipVisionConfig,
)

from baton.engine.kernels.rope import attention_factor
from baton.engine.loading.loading import LoadedModel, load_model
from baton.engine.models.config import DecoderConfig
from baton.engine.models.decoder import Decoder
from baton.engine.models.families.keys import NotLean
from baton.engine.models.families.read import decoder_config
from baton.engine.parallel.group import RankGroup
from baton.engine.quantization.integer import Scheme
from tests.engine.quantized_models import quantized_pair
from tests.engine.running import Driver, load, logits_of, native_logits, relative_error
from tests.engine.tensor_parallel_ranks import by_threads, config_of
from tests.engine.tensor_parallel_ranks import logits_of as logits_over_ranks
from tests.engine.test_models_lora import linear_layers, make_adapter, merged_tokens
from tests.engine.test_quantization import rounded_twin
from tests.golden.dense_families import (
    DENSE_MODELS,
    random_shape,
    save_dense,
)
from tests.golden.greedy import our_tokens, random_prompts, transformers_tokens
from tests.golden.random_models import with_random_norms
from tests.tiny_models import VOCAB_SIZE, write_tiny_tokenizer

PROMPTS = random_prompts(VOCAB_SIZE)
PROMPT = random_prompts(VOCAB_SIZE, (41,))[0]
# Whole vectors and whole groups of integers, of what rotates too.
WIDE: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 192, "head_dim": 64, "partial_rotary_factor": 0.5,
}  # fmt: skip
ONE_EACH = ("gemma 2", "gemma 3", "phi 3", "glm 4")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """transformers warns about configs that are unusual on purpose."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    yield
    logging.getLogger("transformers").setLevel(logging.WARNING)


def save_wide(path: Path, name: str, **overrides: Any) -> Path:
    """As save_dense, of WIDE's sizes."""
    sizes = {**WIDE, **overrides}
    if name.startswith("gemma"):
        del sizes["partial_rotary_factor"]
    return save_dense(path, name, **sizes)


def check(path: Path) -> None:
    """Both routes give transformers' tokens and logits and agree on the KV."""
    expected, logits = transformers_tokens(path, PROMPTS), native_logits(path, PROMPT)
    lean, universal = load(path, model_impl="lean"), load(path, model_impl="transformers")
    assert our_tokens(lean, PROMPTS) == expected
    assert relative_error(logits_of(lean, PROMPT), logits) < 1e-5
    assert lean.info.layers == universal.info.layers
    assert lean.info.rope == universal.info.rope
    assert lean.info.max_model_len == universal.info.max_model_len
    assert lean.attention_layers == universal.attention_layers
    counted = replace(lean.model.parameter_counts, last=0, last_experts=0)
    assert counted == universal.model.parameter_counts
    assert lean.weight_bytes == universal.weight_bytes
    chunked = prefilled(lean, (17, 16, 8))
    whole = prefilled(universal, (41,))
    for layer in range(len(lean.info.layers)):
        ours, theirs = chunked.arena.layer(layer), whole.arena.layer(layer)
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def prefilled(loaded: LoadedModel, sizes: Sequence[int]) -> Driver:
    """A driver whose pool holds PROMPT's KV, computed in chunks."""
    driver = Driver(loaded, num_blocks=8)
    driver.logits(PROMPT, range(8), sizes)
    return driver


@pytest.mark.parametrize("name", DENSE_MODELS)
def test_it_is_transformers_model(name: str, tmp_path: Path) -> None:
    path = save_dense(tmp_path, name)
    check(path)
    outputs = our_tokens(load(path), PROMPTS)
    assert len({token for output in outputs for token in output}) > 5  # decisive


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
def test_random_shapes(seed: int, tmp_path: Path) -> None:
    name, shape = random_shape(seed)
    check(save_dense(tmp_path, name, **shape))


@pytest.mark.parametrize("name", ONE_EACH)
def test_in_bfloat16_the_same_as_the_universal_route(name: str, tmp_path: Path) -> None:
    """By the compiled kernels, where there are any; and whole steps, as prefill has it."""
    path = save_wide(tmp_path, name)
    exact = logits_of(load(path), PROMPT)
    lean, universal = (
        load(path, dtype="bfloat16", model_impl=impl) for impl in ("lean", "transformers")
    )
    found = logits_of(lean, PROMPT)
    bound = 1.3 * relative_error(logits_of(universal, PROMPT), exact) + 0.01
    assert relative_error(found, exact) < bound
    by_row = Driver(lean).logits(PROMPT, range(6), [1] * len(PROMPT))
    assert relative_error(by_row, exact) < bound
    assert isinstance(lean.model, Decoder)
    if lean.model.step is not None:
        assert lean.model.step.num_steps == len(PROMPT)


@pytest.mark.parametrize("scheme", ["int8", "w8a8", "int4", "w4a8"])
@pytest.mark.parametrize("name", [*ONE_EACH])
def test_weights_rounded_on_load(name: str, scheme: Scheme, tmp_path: Path) -> None:
    path = save_wide(tmp_path / "model", name, tie_word_embeddings=False)
    rounded, twin = load(path, quantization=scheme), load(rounded_twin(path, scheme))
    assert rounded.weight_bytes < 0.6 * twin.weight_bytes
    error = relative_error(logits_of(rounded, PROMPT), logits_of(twin, PROMPT))
    assert error < (0.1 if scheme in ("w8a8", "w4a8") else 2e-5)


@pytest.mark.parametrize("name", ["w8a8", "w4a16", "gptq-asymmetric", "awq"])
@pytest.mark.parametrize("kind", ["phi 3", "glm 4"])
def test_checkpoints_of_integers(kind: str, name: str, tmp_path: Path) -> None:
    """Products that are one tensor are so as integers, too."""
    first, second = (save_wide(tmp_path / each, kind) for each in ("quantized", "twin"))
    quantized, twin = quantized_pair(name, first, second)
    loaded = load(quantized)
    assert loaded.info.model_impl == "lean"
    error = relative_error(logits_of(loaded, PROMPT), logits_of(load(twin), PROMPT))
    assert error < (0.05 if name in ("w8a8", "w4a8") else 2e-5)


@pytest.mark.parametrize("scheme", ["none", "int8"])
@pytest.mark.parametrize("name", [*ONE_EACH, "glm"])
@torch.inference_mode()
def test_logits_of_two_and_four_ranks_are_those_of_one(
    name: str, scheme: Any, tmp_path: Path
) -> None:
    """Two KV heads: four ranks hold them twice; adapters are cut as the products are."""
    path = save_wide(tmp_path / "model", name, num_key_value_heads=2)
    adapter = make_adapter(tmp_path / "a", linear_layers(path, ("_proj",)), seed=1)
    config = config_of(path, quantization=scheme, lora_modules=(f"a={adapter}",))
    whole = load_model(config)
    expected = logits_over_ranks(whole, 1)
    for size in (2, 4):
        split = config_of(
            path, quantization=scheme, lora_modules=(f"a={adapter}",), tensor_parallel_size=size
        )

        def share(group: RankGroup) -> Tensor:
            return logits_over_ranks(load_model(split, group), group.place.size)  # noqa: B023

        found = by_threads(size, share)[0]
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("name", ONE_EACH)
def test_adapters(name: str, tmp_path: Path) -> None:
    """Of products in one tensor, too, beside rows without."""
    base = save_dense(tmp_path / "base", name)
    modules = linear_layers(base, ("_proj",))
    adapter = make_adapter(tmp_path / "a", modules, seed=1)
    loaded = load(base, lora_modules=(f"a={adapter}",))
    assert loaded.info.model_impl == "lean"
    expected = {"": merged_tokens(base, None, PROMPTS), "a": merged_tokens(base, adapter, PROMPTS)}
    assert expected["a"] != expected[""]
    names = ("a", "", "a", "", "a")
    found = our_tokens(loaded, PROMPTS, adapters=names)
    assert found == [expected[name][index] for index, name in enumerate(names)]


@pytest.mark.parametrize("name", ["gemma 3", "phi 3"])
def test_classifiers(name: str, tmp_path: Path) -> None:
    path = save_dense(tmp_path, name)
    config = json.loads((path / "config.json").read_text())
    kind = {"gemma 3": "Gemma3Text", "phi 3": "Phi3"}[name]
    config |= {
        "architectures": [f"{kind}ForSequenceClassification"],
        "id2label": {"0": "a", "1": "b"},
    }
    (path / "config.json").write_text(json.dumps(config))
    tensors = load_file(path / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    tensors["score.weight"] = torch.randn(2, 64, generator=torch.Generator().manual_seed(4))
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    loaded = load(path)
    assert loaded.info.model_impl == "lean"
    assert loaded.classifier is not None
    driver = Driver(loaded)
    with torch.inference_mode():
        model: Any = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
        expected = model(input_ids=torch.tensor([PROMPT])).logits[0]
        hidden: list[Tensor] = []
        plain = loaded.model.logits
        loaded.model.logits = lambda rows: hidden.append(rows) or plain(rows)  # type: ignore[method-assign,func-returns-value]
        driver.logits(PROMPT, range(8), [len(PROMPT)])
    torch.testing.assert_close(hidden[0][-1] @ loaded.classifier.T, expected, atol=1e-4, rtol=1e-4)


def save_with_images(path: Path) -> Path:
    """A tiny Gemma 3 with a model of images, its norms random too."""
    text = Gemma3TextConfig(
        vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=256,
        sliding_window=9, query_pre_attn_scalar=20,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )  # fmt: skip
    vision = SiglipVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        image_size=32, patch_size=16,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Gemma3ForConditionalGeneration(
        Gemma3Config(
            text_config=text, vision_config=vision, image_token_index=300, boi_token_index=301,
            eoi_token_index=302, mm_tokens_per_image=4,
        )
    )  # fmt: skip
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 1.2 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(path)
    write_tiny_tokenizer(path)
    return with_random_norms(path)


def test_the_language_model_of_a_model_of_images(tmp_path: Path) -> None:
    """It is read alone; an adapter of the whole names its modules."""
    path = save_with_images(tmp_path / "base")
    sizes = {f"model.language_model.layers.{i}.self_attn.q_proj": (64, 64) for i in range(3)}
    adapters = (f"a={make_adapter(tmp_path / 'a', sizes, seed=1)}",)
    lean = load(path, lora_modules=adapters)
    universal = load(path, model_impl="transformers", lora_modules=adapters)
    assert lean.info.model_impl == "lean"
    assert lean.info.layers == universal.info.layers
    assert lean.info.rope == universal.info.rope
    assert lean.info.digest == universal.info.digest
    assert lean.weight_bytes < universal.weight_bytes
    prompts = random_prompts(300)
    for names in (("",) * 5, ("a", "", "a", "", "a")):
        expected = our_tokens(universal, prompts, adapters=names)
        assert our_tokens(lean, prompts, adapters=names) == expected


# ---- configs ----

GEMMA3_1B: dict[str, Any] = {  # as published, without what changes nothing
    "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attn_logit_softcapping": None, "cache_implementation": "hybrid",
    "final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152, "intermediate_size": 6912, "max_position_embeddings": 32768,
    "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 26,
    "num_key_value_heads": 1, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000,
    "sliding_window": 512, "sliding_window_pattern": 6, "vocab_size": 262144,
}  # fmt: skip
PHI4_MINI: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "auto_map": {},
    "embd_pdrop": 0.0, "full_attn_mod": 1, "hidden_act": "silu", "hidden_size": 3072,
    "intermediate_size": 8192, "interpolate_factor": 1, "lm_head_bias": False,
    "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "phi3",
    "num_attention_heads": 24, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75, "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 262144,
    "rope_scaling": {
        "long_factor": [1.0] * 48, "short_factor": [1.0] * 48, "type": "longrope",
    },
    "tie_word_embeddings": True, "vocab_size": 200064,
}  # fmt: skip
GLM4_9B: dict[str, Any] = {
    "architectures": ["Glm4ForCausalLM"], "attention_bias": False, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 13696,
    "max_position_embeddings": 32768, "model_type": "glm4", "num_attention_heads": 32,
    "num_hidden_layers": 40, "num_key_value_heads": 2, "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "vocab_size": 151552,
}  # fmt: skip
GEMMA2_2B: dict[str, Any] = {
    **{key: value for key, value in GEMMA3_1B.items() if not key.startswith(("rope_", "sliding"))},
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "rope_theta": 10000.0,
    "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 4096,
    "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip


GEMMA3_4B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999,
    "eoi_token_index": 256000, "eos_token_id": [1, 106], "image_token_index": 262144,
    "initializer_range": 0.02, "mm_tokens_per_image": 256, "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
        "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0", "vision_config": {},
}  # fmt: skip


def test_what_a_config_of_images_leaves_out_is_transformers_default() -> None:
    whole = Gemma3TextConfig(**GEMMA3_4B["text_config"]).to_dict()
    expected = decoder_config({**whole, "architectures": None})
    assert decoder_config(GEMMA3_4B) == replace(expected, prefix="language_model.")


def test_published_configs_are_read() -> None:
    gemma: DecoderConfig = decoder_config(GEMMA3_1B)
    assert gemma.tied_embeddings
    assert gemma.windows[:7] == (512, 512, 512, 512, 512, 0, 512)
    assert gemma.ropes[gemma.rope_of(5)].theta == 1e6
    assert gemma.ropes[gemma.rope_of(6)].theta == 1e4
    phi = decoder_config(PHI4_MINI)
    assert (phi.turned, phi.head_dim, phi.rope.kind) == (96, 128, "longrope")
    assert attention_factor(phi.rope) == pytest.approx(1.1902380714238083)
    glm = decoder_config(GLM4_9B)
    assert (glm.turned, glm.qkv_bias, glm.output_bias) == (64, False, False)
    assert decoder_config(GEMMA2_2B).windows[:3] == (4096, 0, 4096)


@pytest.mark.parametrize(
    ("config", "changes", "reason"),
    [
        (GEMMA3_1B, {"made_up": 1}, "made_up"),
        (GEMMA3_1B, {"use_sliding_window": True}, "use_sliding_window"),
        (GEMMA3_1B, {"query_pre_attn_scalar": ...}, "absent"),
        (GEMMA3_1B, {"use_bidirectional_attention": True}, "causal"),
        (GEMMA3_1B, {"hidden_activation": "gelu"}, "hidden_activation"),
        (GEMMA3_1B, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        (GEMMA3_1B, {"sliding_window": None}, "without a window"),
        (GEMMA3_1B, {"layer_types": ["full_attention"] * 25}, "layer_types"),
        (GEMMA3_1B, {"layer_types": ["chunked_attention"] * 26}, "layer_types"),
        (GEMMA3_1B, {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "RoPE"),
        (GEMMA3_1B, {"rope_parameters": {"rope_type": "default"}}, "rope_parameters"),
        (GEMMA3_1B, {"sliding_window_pattern": ..., "_sliding_window_pattern": 3}, "pattern"),
        (GEMMA3_4B, {"made_up": 1}, "made_up"),
        (GEMMA3_4B, {"tie_word_embeddings": False}, "tie_word_embeddings"),
        (GEMMA3_4B, {"architectures": ["Gemma3ForSequenceClassification"]}, "architectures"),
        (GEMMA2_2B, {"attn_logit_softcapping": ...}, "absent"),
        (GEMMA2_2B, {"final_logit_softcapping": 0}, "softcapping"),
        (GEMMA2_2B, {"sliding_window_pattern": 3}, "sliding_window_pattern"),
        (PHI4_MINI, {"attention_bias": True}, "attention_bias"),
        (PHI4_MINI, {"interpolate_factor": 2}, "interpolate_factor"),
        (PHI4_MINI, {"partial_rotary_factor": 0.5}, "short factors"),
        (PHI4_MINI, {"partial_rotary_factor": None}, "partial_rotary_factor"),
        (PHI4_MINI, {"original_max_position_embeddings": ...}, "original"),
        (PHI4_MINI, {"rope_scaling": {**PHI4_MINI["rope_scaling"], "mscale": 2}}, "RoPE"),
        (PHI4_MINI, {"rope_scaling": {**PHI4_MINI["rope_scaling"], "type": "su"}}, "RoPE"),
        (PHI4_MINI, {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "RoPE"),
        (PHI4_MINI, {"rope_scaling": {"type": "linear", "factor": 4.0}}, "RoPE"),
        (PHI4_MINI, {"layer_types": ["full_attention"] * 32}, "layer_types"),
        (GLM4_9B, {"attention_bias": ...}, "absent"),
        (GLM4_9B, {"hidden_act": "gelu"}, "hidden_act"),
        (GLM4_9B, {"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        (GLM4_9B, {"rope_scaling": {"type": "longrope"}}, "RoPE"),
        (GLM4_9B, {"sliding_window": 5}, "sliding_window"),
    ],
)
def test_what_the_lean_route_does_not_compute(
    config: dict[str, Any], changes: dict[str, Any], reason: str
) -> None:
    """`...`: the key is absent."""
    changed = {key: value for key, value in {**config, **changes}.items() if value is not ...}
    with pytest.raises(NotLean, match=reason):
        decoder_config(changed)
