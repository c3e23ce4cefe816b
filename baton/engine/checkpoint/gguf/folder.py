"""A GGUF file as a checkpoint's folder: what the file says, as the JSON files of Hugging Face's.

    file.gguf -> config.json, generation_config.json, tokenizer.json, tokenizer_config.json, and
                 model.gguf, a link to the file

The folder lies in Baton's cache and is made once per file; weights are not copied. So router, nodes
and whoever else wants a model's folder get one. No torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, Final

from baton.engine.checkpoint.gguf.config import gguf_config
from baton.engine.checkpoint.gguf.header import read_gguf
from baton.engine.checkpoint.gguf.tokenizer import gguf_generation, gguf_tokenizer
from baton.protocol.errors import ModelRefused
from baton.runtime.cache_folder import cache_folder

SUFFIX: Final = ".gguf"
WEIGHTS: Final = "model.gguf"
_VERSION: Final = 2  # of what is written: another one makes another folder


def is_gguf(model: str | Path) -> bool:
    """Whether `model` is a file in this format, by its name."""
    path = Path(model).expanduser()
    return path.suffix.lower() == SUFFIX and path.is_file()


def gguf_folder(file: Path, cache: Path | None = None) -> Path:
    """The checkpoint's folder of `file`, made now if it is not there yet.

    Raises ModelRefused for a file that is not read, and where the folder cannot be written.
    """
    file = file.expanduser().resolve()
    try:
        folder = (cache or cache_folder("gguf")) / _name(file)
        if not (folder / WEIGHTS).exists():
            _make(file, folder)
    except OSError as error:
        raise ModelRefused(f"{file} cannot be unpacked: {error}", field="model") from error
    return folder


def write_folder(file: Path, folder: Path) -> None:
    """Write the JSON files of `file` into `folder`. Raises ModelRefused, OSError."""
    header = read_gguf(file)
    tokenizer, tokenizer_config = gguf_tokenizer(header)
    files: dict[str, dict[str, Any]] = {
        "config.json": gguf_config(header),
        "generation_config.json": gguf_generation(header),
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": tokenizer_config,
    }
    for name, content in files.items():
        text = json.dumps(content, ensure_ascii=False)
        (folder / name).write_text(text, encoding="utf-8")


def _name(file: Path) -> str:
    """Of the folder: another one for each file, and for each content as far as its times tell."""
    found = file.stat()
    said = f"{_VERSION} {file} {found.st_size} {found.st_mtime_ns}"
    return f"{file.stem}-{hashlib.sha256(said.encode()).hexdigest()[:16]}"


def _make(file: Path, folder: Path) -> None:
    """All of the folder or nothing, whoever else makes it at the same time."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    stage = Path(tempfile.mkdtemp(prefix=".baton-", dir=folder.parent))
    try:
        write_folder(file, stage)
        (stage / WEIGHTS).symlink_to(file)
        try:
            os.rename(stage, folder)
        except OSError:
            if not (folder / WEIGHTS).exists():  # not made by someone else meanwhile
                raise
    finally:
        shutil.rmtree(stage, ignore_errors=True)
