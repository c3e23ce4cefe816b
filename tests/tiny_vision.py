"""Tiny random checkpoints that read images, one per family, made by transformers from configs; and
what transformers itself generates with them.

    <vision start> placeholders ... <vision end>           Qwen, Gemma 3
    [IMG] x columns, [IMG_BREAK] per row, [IMG_END]        Mistral 3
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from baton.protocol.images import ImageInput, digest_of
from tests.images.families import GEMMA, PIXTRAL, QWEN, template_of
from tests.tiny_models import EOS_ID, VOCAB_SIZE, write_tiny_tokenizer

KINDS: Final = (
    "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "gemma3", "mistral3"
)  # fmt: skip
IMAGE, BREAK, END = 300, 301, 302
_PATCH = 4
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 256, "tie_word_embeddings": False,
    "eos_token_id": EOS_ID, "pad_token_id": 0, "bos_token_id": 1,
}  # fmt: skip
_MROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
_QWEN_VISION: dict[str, Any] = {
    "depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": _PATCH,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 64,
}  # fmt: skip
_QWEN_IDS: dict[str, Any] = {
    "image_token_id": IMAGE, "video_token_id": 303, "vision_start_token_id": 301,
    "vision_end_token_id": END, "tie_word_embeddings": False,
}  # fmt: skip
_MIXTURE: dict[str, Any] = {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
}  # fmt: skip


def _config(kind: str) -> dict[str, Any]:
    if kind == "qwen2_5_vl":
        rope = {**_MROPE, "mrope_section": [2, 3, 3]}
        vision = {**_QWEN_VISION, "window_size": 16, "fullatt_block_indexes": [1]}
        return {"text_config": {**_TEXT, "rope_parameters": rope}, "vision_config": vision,
                **_QWEN_IDS}  # fmt: skip
    if kind == "qwen3_vl_moe":
        dense = _config("qwen3_vl")
        return {**dense, "text_config": {**dense["text_config"], **_MIXTURE}}
    if kind == "qwen3_5_moe":
        dense = _config("qwen3_5")
        shared = {**_MIXTURE, "shared_expert_intermediate_size": 48}
        return {**dense, "text_config": {**dense["text_config"], **shared}}
    if kind == "qwen3_vl":
        rope = {**_MROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
        vision = {**_QWEN_VISION, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64}
        return {"text_config": {**_TEXT, "rope_parameters": rope}, "vision_config": vision,
                **_QWEN_IDS}  # fmt: skip
    if kind == "qwen3_5":
        rope = {**_MROPE, "mrope_section": [2, 1, 1], "mrope_interleaved": True,
                "partial_rotary_factor": 0.5}  # fmt: skip
        linear = {
            "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
            "linear_num_value_heads": 4, "num_hidden_layers": 4,
        }  # fmt: skip
        vision = {**_QWEN_VISION, "num_position_embeddings": 64}
        return {"text_config": {**_TEXT, **linear, "rope_parameters": rope},
                "vision_config": vision, **_QWEN_IDS}  # fmt: skip
    siglip: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "patch_size": _PATCH, "image_size": 32, "head_dim": 16,
    }  # fmt: skip
    if kind == "gemma3":
        text = {
            **_TEXT, "sliding_window": 24, "query_pre_attn_scalar": 16, "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        }  # fmt: skip
        siglip["model_type"] = "siglip_vision_model"
        return {"text_config": text, "vision_config": siglip,
                "mm_tokens_per_image": 16, "image_token_index": IMAGE, "boi_token_index": 301,
                "eoi_token_index": END, "tie_word_embeddings": False}  # fmt: skip
    assert kind == "mistral3"
    return {"text_config": {**_TEXT, "model_type": "mistral"},
            "vision_config": {**siglip, "model_type": "pixtral", "image_size": 64},
            "spatial_merge_size": 2, "image_token_index": IMAGE, "vision_feature_layer": -1,
            "tie_word_embeddings": False}  # fmt: skip


def processor(kind: str) -> Any:
    """The image processor of a family, small."""
    if kind == "gemma3":
        return Gemma3ImageProcessorPil(size={"height": 32, "width": 32})
    if kind == "mistral3":
        return PixtralImageProcessorPil(size={"longest_edge": 64}, patch_size=2 * _PATCH)
    size = {"shortest_edge": 16 * 16, "longest_edge": 64 * 64}
    return Qwen2VLImageProcessorPil(size=size, patch_size=_PATCH, merge_size=2)


def make_vision_model(kind: str, path: Path, seed: int = 0) -> Path:
    """Write a complete checkpoint of family `kind` into the folder `path` and return it."""
    torch.manual_seed(seed)
    config: Any = CONFIG_MAPPING[kind].from_dict(_config(kind))
    model: Any = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:  # decisive: tokens differ from position to position
                inputs = parameter.shape[-1] if "experts" in name else parameter[0].numel()
                spread = 1.0 if "embed_tokens" in name else 2.0 / inputs**0.5
                seen = "merger" in name or "projector" in name  # images matter
                parameter.normal_(0.0, 3 * spread if seen else spread)
    model.save_pretrained(path)
    processor(kind).save_pretrained(path)
    write_tiny_tokenizer(path)
    return path


def make_chat_model(kind: str, path: Path) -> Path:
    """The same, whose tokenizer has the family's tokens for images, and a template that writes
    them."""
    make_vision_model(kind, path)
    if kind == "gemma3":
        begin, end, image = GEMMA
        written, names = begin, (image, begin, end)
    elif kind == "mistral3":
        written, names = PIXTRAL[0], PIXTRAL
        sizes = {"patch_size": _PATCH, "spatial_merge_size": 2}
        (path / "processor_config.json").write_text(json.dumps(sizes))
    else:
        begin, end, image, video = QWEN
        written, names = begin + image + end, (image, begin, end, video)
    (path / "chat_template.jinja").write_text(template_of(written))
    file = path / "tokenizer.json"
    content = json.loads(file.read_text())
    model = content["model"]
    taken = dict(enumerate(names, IMAGE))
    gone = {piece for piece, index in model["vocab"].items() if index in taken}
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) not in gone]
    kept = {piece: index for piece, index in model["vocab"].items() if index not in taken}
    model["vocab"] = kept | {name: index for index, name in taken.items()}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    content["added_tokens"] += [
        {"id": index, "content": name, "special": True, **plain} for index, name in taken.items()
    ]
    file.write_text(json.dumps(content))
    return path


def picture(seed: int, height: int = 24, width: int = 32) -> bytes:
    """A PNG file of a few seeded colours."""
    colours = np.random.default_rng(seed).integers(0, 256, (3, 4, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(colours).resize((width, height), Image.Resampling.NEAREST).save(file, "PNG")
    return file.getvalue()


def processed(kind: str, files: Sequence[bytes]) -> dict[str, Any]:
    """What the image processor makes of the files."""
    options = {"patch_size": 2 * _PATCH} if kind == "mistral3" else {}
    pictures = [Image.open(io.BytesIO(file)) for file in files]
    return dict(processor(kind)(images=pictures, return_tensors="pt", **options))


def tokens_of(kind: str, file: bytes) -> list[int]:
    """The tokens of one image in a prompt, as the family's processor writes them."""
    if kind == "gemma3":
        return [301, *[IMAGE] * 16, END]
    made = processed(kind, [file])
    if kind == "mistral3":
        height, width = (int(side) // (2 * _PATCH) for side in made["image_sizes"][0])
        rows = [*[IMAGE] * width, BREAK] * height
        return [*rows[:-1], END]
    _, height, width = (int(side) for side in made["image_grid_thw"][0])
    return [301, *[IMAGE] * (height * width // 4), END]


def prompt_of(
    kind: str, parts: Sequence[bytes | Sequence[int]]
) -> tuple[tuple[int, ...], tuple[ImageInput, ...]]:
    """The tokens and images of a prompt of texts (token ids) and files."""
    ids, images = list[int](), list[ImageInput]()
    for part in parts:
        if not isinstance(part, bytes):
            ids += part
            continue
        tokens = tokens_of(kind, part)
        first = tokens.index(IMAGE)
        last = len(tokens) - 1 - tokens[::-1].index(IMAGE)
        images.append(ImageInput(digest_of(part), len(ids) + first, last + 1 - first, part))
        ids += tokens
    return tuple(ids), tuple(images)


@torch.inference_mode()
def generated(
    path: Path, kind: str, prompt: Sequence[int], images: Sequence[ImageInput], count: int
) -> list[int]:
    """The greedy tokens of transformers' own generate."""
    model: Any = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    ids = torch.tensor([prompt])
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if images:
        given |= processed(kind, [image.data for image in images])
        given.pop("num_crops", None)
        types = torch.zeros_like(ids)
        for image in images:
            types[0, image.start : image.end] = 1
        if kind == "gemma3":
            given["token_type_ids"] = types
        elif kind != "mistral3":
            given["mm_token_type_ids"] = types
    out = model.generate(**given, max_new_tokens=count, do_sample=False, eos_token_id=None,
                         pad_token_id=0)  # fmt: skip
    return out[0, len(prompt) :].tolist()
