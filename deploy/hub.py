"""Finds the model of `baton up`: a local directory, or a hub id that is downloaded once.

Otherwise every node, and the router, which needs the tokenizer, would download it separately.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from baton.engine.checkpoint.gguf_folder import WEIGHTS, gguf_folder, is_gguf
from baton.protocol.errors import ModelRefused

# The same patterns as in baton/engine/checkpoint/checkpoint.py, which needs torch. A pickle is
# never fetched.
WANTED = ("*.safetensors", "*.json", "*.jinja")
SKIPPED = ("original/*", "onnx/*", "consolidated*")


def local_model(model: str, fetch: Callable[[str], str] | None = None) -> Path:
    """Return the directory of `model`, which is a path or `owner/name`.

    For a GGUF file it is a folder in the cache. Raises ModelRefused, naming the way out.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return _whole(path.resolve())
    if is_gguf(path):
        return gguf_folder(path)
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        text = f"--model {model} is neither a directory nor a Hugging Face hub id (owner/name)"
        raise ModelRefused(text, field="model")
    try:
        return Path((fetch or _fetch)(model))
    except (OSError, ValueError) as error:
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        raise ModelRefused(
            f"{model} cannot be fetched from the Hugging Face hub ({reason}); "
            "download it elsewhere and give its directory as --model",
            field="model",
        ) from error


def _whole(path: Path) -> Path:
    """Return `path` if it has the files that every process needs; else raise ModelRefused."""
    if not (path / "config.json").is_file():
        text = f"--model {path}: there is no config.json in it, so it is no model"
        raise ModelRefused(text, field="model")
    weights = WEIGHTS if (path / WEIGHTS).is_file() else "*.safetensors"
    for wanted in (weights, "tokenizer.json"):
        if not any(path.glob(wanted)):
            text = f"--model {path}: there is no {wanted} in it; make it with: baton convert {path}"
            raise ModelRefused(text, field="model")
    return path


def _fetch(model: str) -> str:
    from huggingface_hub import snapshot_download

    return str(snapshot_download(model, allow_patterns=list(WANTED), ignore_patterns=list(SKIPPED)))
