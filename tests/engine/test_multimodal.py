"""The language model of a multimodal checkpoint, saved alone by an example, is served."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

from baton.engine.config import EngineConfig
from baton.engine.loading.loading import load_model
from baton.protocol.errors import ModelRefused
from examples.text_model import save_alone
from tests.golden.greedy import our_tokens, random_prompts, transformers_tokens
from tests.tiny_models import VOCAB_SIZE, write_tiny_tokenizer


def save_llava(path: Path) -> None:
    torch.manual_seed(0)
    text = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        image_size=32, patch_size=16,
    )  # fmt: skip
    model = LlavaForConditionalGeneration(LlavaConfig(text_config=text, vision_config=vision))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 1.2 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(path)
    write_tiny_tokenizer(path)


def test_saved_alone_it_gives_the_whole_model_s_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    save_llava(tmp_path / "model")
    with pytest.raises(ModelRefused, match="LlamaForCausalLM, can be served once it is saved"):
        load_model(EngineConfig("model", device="cpu"))
    save_alone("model", "text-model")
    loaded = load_model(EngineConfig("text-model", dtype="float32", device="cpu"))
    assert loaded.info.model_impl == "lean"
    whole = AutoModelForImageTextToText.from_pretrained("model", dtype=torch.float32)
    prompts = random_prompts(VOCAB_SIZE, (3, 17))
    assert our_tokens(loaded, prompts, 8) == transformers_tokens(whole, prompts, 8)
