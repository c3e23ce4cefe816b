"""Makes a checkpoint folder for a GGUF file, with the JSON files of a Hugging Face checkpoint.

    file.gguf -> config.json, generation_config.json, tokenizer.json, tokenizer_config.json, and
                 model.gguf, a link to the file

The folder lies in Baton's cache and is made once per file; weights are not copied. So the router,
the nodes and all other code that needs a model's folder can use a GGUF file. No torch.
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
_VERSION: Final = 2  # of the folder's contents; a new version gets a new folder


def is_gguf(model: str | Path) -> bool:
    """Whether `model` is the path of an existing file whose name ends in .gguf."""
    path = Path(model).expanduser()
    return path.suffix.lower() == SUFFIX and path.is_file()


def gguf_folder(file: Path, cache: Path | None = None) -> Path:
    """Return the checkpoint folder of `file`; make it if there is none yet.

    Raises ModelRefused for a file that is not supported, and if the folder cannot be written.
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
    """Return the name of the file's folder. It changes with the file's path, size and time of last
    change."""
    found = file.stat()
    said = f"{_VERSION} {file} {found.st_size} {found.st_mtime_ns}"
    return f"{file.stem}-{hashlib.sha256(said.encode()).hexdigest()[:16]}"


def _make(file: Path, folder: Path) -> None:
    """Make the folder, completely or not at all, even if other processes make it at the same
    time."""
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
