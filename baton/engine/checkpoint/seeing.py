"""Which checkpoints read images, by their config.json and the files of their image processor."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from baton.engine.checkpoint.checkpoint import Checkpoint
from baton.engine.config import EngineConfig

log = logging.getLogger(__name__)

# What transformers reads an image processor's options from.
PROCESSOR_FILES: Final = ("preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True, slots=True)
class Family:
    """How a family of models reads images.

    `sizes`: the processor's output that its vision tower gets beside the pixels; None = none.
    `grid`: positions have three parts (M-RoPE). `mutual`: the tokens of an image see each other,
    also later ones. `breaks`: tokens that end its rows stand between an image's placeholders.
    """

    sizes: str | None = None
    grid: bool = False
    mutual: bool = False
    breaks: bool = False


_QWEN: Final = Family("image_grid_thw", grid=True)
_PIXTRAL: Final = Family("image_sizes", breaks=True)
FAMILIES: Final = {
    "gemma3": Family(mutual=True),
    "mistral3": _PIXTRAL,
    "qwen2_5_vl": _QWEN,
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
    "qwen3_vl": _QWEN,
    "qwen3_vl_moe": _QWEN,
}


def family_of(values: dict[str, Any]) -> Family | None:
    """Return how the model of a config.json reads images; None if it reads none."""
    named: list[str] = values.get("architectures") or [""]
    if not values.get("vision_config") or not named[0].endswith("ForConditionalGeneration"):
        return None
    kind = values.get("model_type") or "unknown"
    if kind == "llava" and values["vision_config"].get("model_type") == "pixtral":
        return _PIXTRAL
    return FAMILIES.get(kind)


def as_served(checkpoint: Checkpoint, config: EngineConfig) -> Checkpoint:
    """Return the checkpoint; as one of a language model, if the configuration wants that alone or
    no file says how images are processed."""
    alone = config.language_model_only or config.model_impl == "lean"
    values = served_config(checkpoint.config, checkpoint.path, alone=alone)
    return checkpoint if values is checkpoint.config else replace(checkpoint, config=values)


def served_config(values: dict[str, Any], folder: Path, *, alone: bool) -> dict[str, Any]:
    """Return `values`, a config.json; as those of a language model, if that `alone` is wanted or no
    file in `folder` says how images are processed."""
    if family_of(values) is None:
        return values
    if not alone:
        if any((folder / name).exists() for name in PROCESSOR_FILES):
            return values
        log.info("%s has no image processor's file: served for text", folder)
    return {key: value for key, value in values.items() if key != "architectures"}


def processor_digest(path: Path) -> str:
    """Return a digest of the files that say how images are processed."""
    total = hashlib.sha256()
    for name in PROCESSOR_FILES:
        file = path / name
        total.update(file.read_bytes() if file.exists() else b"-")
    return total.hexdigest()
