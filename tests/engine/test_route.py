"""What is refused by its config.json alone: the reason is true, and says what would work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton.engine.checkpoint.checkpoint import open_checkpoint
from baton.engine.config import EngineConfig
from baton.engine.loading.loading import load_model
from baton.engine.loading.route import choose_route
from baton.protocol.errors import ConfigError, ModelRefused
from tests.tiny_models import make_tiny_model

LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 320,
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
HYBRID: dict[str, Any] = {
    "model_type": "granitemoehybrid", "architectures": ["GraniteMoeHybridForCausalLM"],
    "num_hidden_layers": 2, "hidden_size": 64, "mamba_n_heads": 4,
}  # fmt: skip
ENCODER = "is an encoder.*decoder.*Qwen3-Embedding"
CLASSIFIER = r"has no head for tokens.*serve a model that generates"


def route(values: dict[str, Any], **options: Any) -> Any:
    return choose_route(values, EngineConfig("m", device="cpu", **options))


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, ENCODER),
        ({"model_type": "modernbert", "architectures": ["ModernBertModel"]}, ENCODER),
        ({"model_type": "xlm-roberta", "architectures": ["XLMRobertaModel"]}, ENCODER),
        ({"model_type": "bert", "architectures": ["BertForSequenceClassification"]},
         "only the lean route serves classifiers.*'bert'"),
        # Its head is the table of tokens, so nothing seems to be missing.
        (
            {**LLAMA, "architectures": ["LlamaForTokenClassification"],
             "tie_word_embeddings": True},
            CLASSIFIER,
        ),
        (
            {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"],
             "text_config": LLAMA, "vision_config": {"model_type": "clip_vision_model"}},
            r"LlavaForConditionalGeneration.*more than text.*LlamaForCausalLM.*docs/models\.md",
        ),
        (
            {"model_type": "qwen2_vl", "architectures": ["Qwen2VLForConditionalGeneration"]},
            "more than text, and transformers has no language model of it alone",
        ),
        ({"model_type": "t5", "is_encoder_decoder": True}, "only decoders are served"),
        ({"model_type": "abacus", "architectures": ["Abacus"]}, "not an architecture that"),
        ({"model_type": "jamba", "architectures": ["JambaForCausalLM"]}, "Jamba.*state wrongly"),
        ({"model_type": "minimax", "architectures": ["MiniMaxForCausalLM"]}, "state wrongly"),
        ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, "state wrongly"),
        ({"model_type": "falcon_mamba", "architectures": ["FalconMamba"]}, "state wrongly"),
        ({"model_type": "rwkv", "architectures": ["RwkvForCausalLM"]}, "recurrent state"),
        ({**LLAMA, "quantization_config": {"quant_method": "quip"}}, "quantized by quip"),
        (
            {**LLAMA, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"],
             "rms_norm_eps": 1e-5, "rope_theta": 1e4, "num_local_experts": 4,
             "num_experts_per_tok": 5},
            "num_experts_per_tok: 5 of 4 experts",
        ),
    ],
)  # fmt: skip
def test_the_reason_is_true_and_says_what_would_work(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelRefused, match=reason) as error:
        route(values)
    assert error.value.field in ("model", "quantization")


def test_options_that_a_model_cannot_meet() -> None:
    with pytest.raises(ConfigError, match="1000 exceeds the model's own 512"):
        route(LLAMA, max_model_len=1000)
    with pytest.raises(ModelRefused, match="4 query heads cannot be split over 3"):
        route(LLAMA, tensor_parallel_size=3)
    with pytest.raises(ModelRefused, match="only the lean route rounds weights"):
        route({"model_type": "gpt2"}, quantization="int8")
    with pytest.raises(ModelRefused, match="only the lean route splits adapters over ranks"):
        route({"model_type": "gpt2"}, tensor_parallel_size=2, lora_modules=("a=/a",))


def test_integers_without_a_lean_decoder_take_the_universal_route() -> None:
    quantized = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    assert route({"model_type": "gpt2", **quantized}) is None
    assert route({"model_type": "gpt2", **quantized}, tensor_parallel_size=2) is None


def test_what_takes_the_universal_route() -> None:
    assert route({**HYBRID, "layer_types": ["attention"] * 2}) is None
    assert route({**HYBRID, "layer_types": ["mamba", "attention"]}) is None
    assert route({**HYBRID, "layer_types": ["mamba", "attention"]}, tensor_parallel_size=2) is None
    lean = route(LLAMA)
    assert lean.num_layers == 3
    # A reranker that other servers take for a classifier generates its yes or no.
    said = {
        "architectures": ["LlamaForSequenceClassification"],
        "classifier_from_token": ["a", "b"],
    }
    assert route({**LLAMA, **said}) is None


def test_a_lean_decoder_with_a_head_of_classes_is_served() -> None:
    values = {**LLAMA, "architectures": ["LlamaForSequenceClassification"]}
    assert route(values).num_layers == 3
    with pytest.raises(ModelRefused, match="classifiers are not split over ranks"):
        route(values, tensor_parallel_size=2)
    with pytest.raises(ModelRefused, match="only the lean route serves classifiers"):
        route(values, model_impl="transformers")


def test_no_weight_is_looked_at_before_the_layers(tmp_path: Path) -> None:
    path = make_tiny_model("llama", tmp_path)
    values = {"model_type": "jamba", "architectures": ["JambaForCausalLM"]}
    (path / "config.json").write_text(json.dumps(values))
    (path / "model.safetensors").write_bytes(b"nothing that could be read")
    with pytest.raises(ModelRefused, match="computes its recurrent state wrongly"):
        load_model(EngineConfig(str(path), device="cpu"))


def test_gguf_is_named_and_what_to_serve_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = r"GGUF.*give one file of it as --model .*checkpoint of safetensors that it was made"
    path = make_tiny_model("llama", tmp_path / "model")
    (path / "model.safetensors").rename(path / "model-Q4_K_M.gguf")
    with pytest.raises(ModelRefused, match=reason):
        open_checkpoint(str(path))
    (path / "config.json").unlink()
    with pytest.raises(ModelRefused, match=reason):
        open_checkpoint(str(path))
    with pytest.raises(ModelRefused, match="not a whole GGUF file: it does not begin with GGUF"):
        open_checkpoint(str(path / "model-Q4_K_M.gguf"))
    # Of the hub nothing but safetensors and JSON is fetched: the name tells.
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path))
    with pytest.raises(ModelRefused, match=reason):
        open_checkpoint("owner/Model-GGUF")
