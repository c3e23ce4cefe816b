"""Model folders of every family that reads images, with small tokenizers that have its tokens; and
transformers' own processors over the same files."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from unittest import mock

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.pixtral import image_processing_pil_pixtral as pil_pixtral
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

_TORCHVISION: Final = "transformers.models.pixtral.image_processing_pixtral"
CORPUS = ["What is in this picture?\n\nA fox. \n\n\n user model", "the quick brown fox"]
QWEN = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
GEMMA = ("<start_of_image>", "<end_of_image>", "<image_soft_token>")
PIXTRAL = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
_FRAME = "{{% for m in messages %}}<|{{{{ m.role }}}}|>\n{{% if m.content is string %}}{{{{ m.content }}}}{{% else %}}{{% for c in m.content %}}{{% if c.type == 'image' %}}{image}{{% else %}}{{{{ c.text }}}}{{% endif %}}{{% endfor %}}{{% endif %}}\n{{% endfor %}}{{% if add_generation_prompt %}}<|assistant|>{{% endif %}}"  # noqa: E501


def template_of(image: str) -> str:
    """A chat template that writes `image` for an image, and parts of text as they are."""
    return _FRAME.format(image=image)


@dataclass(frozen=True)
class Family:
    """One family: its config.json, its processor's files, and its template's marker."""

    name: str
    tokens: tuple[str, ...]
    config: dict[str, Any]
    files: dict[str, dict[str, Any]]
    image: str  # what the template writes

    @property
    def template(self) -> str:
        return template_of(self.image)


def backend_of(tokens: tuple[str, ...]) -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>", "<|user|>", "<|assistant|>", *tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def _ids(tokens: tuple[str, ...], **names: str) -> dict[str, int]:
    return {name: 4 + tokens.index(token) for name, token in names.items()}


def _qwen(model_type: str, processor: dict[str, Any]) -> Family:
    ids = _ids(QWEN, image_token_id="<|image_pad|>", video_token_id="<|video_pad|>")
    return Family(
        model_type,
        QWEN,
        {"model_type": model_type, **ids},
        {"preprocessor_config.json": processor},
        "<|vision_start|><|image_pad|><|vision_end|>",
    )


# Small images on purpose: patches of a few pixels.
FAMILIES = {
    family.name: family
    for family in (
        _qwen(
            "qwen2_5_vl",
            {"min_pixels": 400, "max_pixels": 6400, "patch_size": 7, "merge_size": 2},
        ),
        _qwen(
            "qwen3_vl",
            {
                "size": {"shortest_edge": 256, "longest_edge": 9000},
                "patch_size": 8,
                "merge_size": 2,
            },
        ),
        _qwen("qwen3_5", {"size": {"shortest_edge": 512, "longest_edge": 4000}, "patch_size": 8}),
        Family(
            "gemma3",
            GEMMA,
            {
                "model_type": "gemma3",
                "mm_tokens_per_image": 6,
                **_ids(
                    GEMMA,
                    image_token_index="<image_soft_token>",
                    boi_token_index="<start_of_image>",
                    eoi_token_index="<end_of_image>",
                ),
            },
            {"preprocessor_config.json": {"size": {"height": 28, "width": 28}}},
            "<start_of_image>",
        ),
        Family(
            "mistral3",
            PIXTRAL,
            {"model_type": "mistral3", **_ids(PIXTRAL, image_token_index="[IMG]")},
            {
                "preprocessor_config.json": {"size": {"longest_edge": 96}},
                "processor_config.json": {"patch_size": 7, "spatial_merge_size": 2},
            },
            "[IMG]",
        ),
    )
}


def save(family: Family, folder: Path) -> Path:
    """Write the family's model folder, without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    backend_of(family.tokens).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (folder / "config.json").write_text(json.dumps(family.config))
    (folder / "chat_template.jinja").write_text(family.template)
    for name, content in family.files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def theirs(family: Family) -> Any:
    """transformers' processor of the family, over the same files. Videos are left out: their
    processors need torchvision."""
    named = dict(zip(("boi_token", "eoi_token", "image_token"), GEMMA, strict=True))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend_of(family.tokens),
        extra_special_tokens=named if family.name == "gemma3" else {},
        pad_token="</s>",
    )
    images = family.files["preprocessor_config.json"]
    if family.name == "gemma3":
        count = family.config["mm_tokens_per_image"]
        return Gemma3Processor(Gemma3ImageProcessorPil(**images), tokenizer, image_seq_length=count)
    if family.name == "mistral3":
        return pixtral(PixtralImageProcessorPil(**images), tokenizer, family)
    return _Unchecked(Qwen2VLImageProcessorPil(**images), tokenizer, None)


class _Unchecked(Qwen3VLProcessor):
    """A processor that may do without one for videos."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        return type(argument)


def pixtral(images: Any, tokenizer: Any, family: Family) -> Any:
    """transformers' PixtralProcessor, whose module takes one function from a module that needs
    torchvision; the same function is in the module that needs Pillow alone."""
    with mock.patch.dict(sys.modules, {_TORCHVISION: pil_pixtral}):
        module = importlib.import_module("transformers.models.pixtral.processing_pixtral")
    return module.PixtralProcessor(images, tokenizer, **family.files["processor_config.json"])
