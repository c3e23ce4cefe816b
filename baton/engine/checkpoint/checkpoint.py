"""A checkpoint on disk: where it is, what its JSON files say, its tensors, its digest.

Only safetensors are read, never a pickle, never code from the checkpoint (`auto_map` is ignored).
Not here: reading tensors (tensors.py), building a model from them (loading.py, models/).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import xxhash

from baton.engine.checkpoint.gguf.folder import WEIGHTS, gguf_folder, is_gguf
from baton.engine.checkpoint.headers import with_dtype
from baton.engine.config import EngineConfig
from baton.protocol.errors import ConfigError, ModelRefused
from baton.runtime.cache_folder import cache_folder, remembered

# The files that a server may need. Weights are downloaded as safetensors only, never as .bin.
HUB_FILES: Final = ("*.safetensors", "*.json", "*.jinja")
HUB_SKIPPED: Final = ("original/*", "onnx/*", "consolidated*")
# Values of --quantization that say what is done to weights when they are loaded.
ROUNDED: Final = ("none", "int8", "w8a8", "int4", "w4a8", "widened")
_UNBOUND_KEYS: Final = ("_name_or_path", "transformers_version")  # differ between equal checkpoints
_MAX_HEADER_BYTES: Final = 100 << 20  # safetensors' own limit
_READ_BYTES: Final = 1 << 20  # are hashed while they lie in a core's cache


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A directory with config.json, tokenizer.json and safetensors. `config`: the content of
    config.json, with the tensors' dtype if it states none (headers.py). `generation`: that of
    generation_config.json, {} without one."""

    path: Path
    config: dict[str, Any]
    generation: dict[str, Any]
    weight_files: tuple[Path, ...]

    @property
    def stored_bytes(self) -> int:
        """Bytes of the files of weights."""
        return sum(path.stat().st_size for path in self.weight_files)

    @property
    def text_config(self) -> dict[str, Any]:
        """See text_config."""
        return text_config(self.config)

    @property
    def model_type(self) -> str:
        """Hugging Face's name of the family."""
        return self.config.get("model_type") or "unknown"

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """All token ids that end a sample: those of generation_config.json, else of config.json."""
        for source in (self.generation, self.config, self.text_config):
            value = source.get("eos_token_id")
            if value is not None:
                return tuple(value) if isinstance(value, list) else (value,)
        return ()


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the language model's part of a config.json: in a multimodal checkpoint its
    text_config, else the whole."""
    return config.get("text_config") or config


def open_checkpoint(model: str, has_tokenizer: bool = True) -> Checkpoint:
    """Find the checkpoint of `model` (a directory or a hub id) and read its JSON files.

    `has_tokenizer`: it must have one. Raises ModelRefused with what is missing and the command that
    helps.
    """
    path = _find(model)
    config = _read_json(path / "config.json")
    if config is None:
        raise _lacking(model, path, f"{model}: there is no config.json in {path}")
    weight_files = _weight_files(model, path)
    if has_tokenizer and not (path / "tokenizer.json").is_file():
        raise ModelRefused(
            f"{model}: there is no tokenizer.json in {path}; make one with: baton convert {path}",
            field="model",
        )
    generation = _read_json(path / "generation_config.json") or {}
    return Checkpoint(path, with_dtype(config, weight_files), generation, weight_files)


def as_stored(config: EngineConfig) -> EngineConfig:
    """Return `config` with quantization "none" if --quantization names the method by which the
    checkpoint is quantized already.

    Raises ConfigError if the checkpoint is stored in another way.
    """
    if config.quantization in ROUNDED:
        return config
    return stored_as_named(config, open_checkpoint(config.model).config)


def stored_as_named(config: EngineConfig, values: Mapping[str, Any]) -> EngineConfig:
    """As `as_stored`, of a checkpoint whose config.json has `values`. Raises ConfigError."""
    if config.quantization in ROUNDED:
        return config
    stored = values.get("quantization_config") or {}
    method = str(stored.get("quant_method") or "not quantized")
    if method != config.quantization:
        text = f"--quantization {config.quantization}: {config.model} is {method}"
        raise ConfigError(text, field="quantization")
    return replace(config, quantization="none")


def parse_modules(entries: Sequence[str]) -> dict[str, Path]:
    """Parse NAME=PATH entries into directories by adapter name. Raises ConfigError with the entry
    that is wrong."""
    found: dict[str, Path] = {}
    for entry in entries:
        name, separator, path = entry.partition("=")
        if not separator or not name or not path:
            raise ConfigError(f"lora_modules: {entry!r} is not NAME=PATH", field="lora_modules")
        if name in found:
            raise ConfigError(f"lora_modules: {name!r} is given twice", field="lora_modules")
        found[name] = Path(path).expanduser()
    return found


def adapter_files(name: str, path: Path) -> tuple[Path, Path]:
    """Return the paths of the config and the weights of the adapter in directory `path`. Raises
    ModelRefused if a file is missing."""
    files = path / "adapter_config.json", path / "adapter_model.safetensors"
    for file in files:
        if not file.is_file():
            raise ModelRefused(f"adapter {name}: there is no {file}", field="lora_modules")
    return files


def digest(checkpoint: Checkpoint) -> str:
    """Return the hex SHA-256 over the config and over the name, size, header and content hash of
    each weight file. A file that has not changed since it was hashed is not read again."""
    config = {key: value for key, value in checkpoint.config.items() if key not in _UNBOUND_KEYS}
    total = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for file in checkpoint.weight_files:
        header = _header(file)
        total.update(f"\n{file.name} {file.stat().st_size} ".encode())
        total.update(header + bytes.fromhex(_content_hash(file)))
    return total.hexdigest()


def _find(model: str) -> Path:
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if is_gguf(path):
        return gguf_folder(path)
    if path.exists() or model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise _lacking(model, path, f"{model} is neither a directory nor a hub id (owner/name)")
    return _download(model)


def _download(model: str) -> Path:
    """Fetch a checkpoint from the hub, or find it in the hub's local cache."""
    # Lazy: a local directory needs no HTTP stack.
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(
            model, allow_patterns=list(HUB_FILES), ignore_patterns=list(HUB_SKIPPED)
        )
    except Exception as error:
        # The hub's client raises its HTTP library's errors, which differ from version to version.
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelRefused(
            f"{model} is not a local directory and cannot be fetched from the Hugging Face hub "
            f"({reason}); download it elsewhere and give its directory as --model",
            field="model",
        ) from error
    return Path(found)


def _lacking(model: str, path: Path, what: str) -> ModelRefused:
    """Return the refusal of a checkpoint for `what`. If the model is in GGUF's format, the refusal
    says how to serve that instead."""
    if model.lower().endswith("gguf") or any(path.glob("*.gguf")):
        what = (
            f"{model} is in GGUF's format: give one file of it as --model (FILE.gguf), which is "
            "read and widened, or serve the checkpoint of safetensors that it was made from"
        )
    return ModelRefused(what, field="model")


def _weight_files(model: str, path: Path) -> tuple[Path, ...]:
    """Return the files that hold the model's weights, sorted by name. Raises ModelRefused if there
    are none, or one is missing."""
    index = _read_json(path / "model.safetensors.index.json")
    if (path / WEIGHTS).is_file() and not any(path.glob("*.safetensors")):
        names = [WEIGHTS]
    elif index is not None:
        names = sorted(set(index.get("weight_map", {}).values()))
        if any(Path(name).name != name for name in names):
            raise ModelRefused(
                f"{path}: the safetensors index names files elsewhere", field="model"
            )
    elif (path / "model.safetensors").is_file():
        names = ["model.safetensors"]
    else:
        skipped = ("consolidated", "adapter")
        found = sorted(file.name for file in path.glob("*.safetensors"))
        names = [name for name in found if not name.startswith(skipped)]
    if not names:
        what = f"there are no safetensors in {path}; make them with: baton convert {path}"
        raise _lacking(model, path, what)
    missing = [name for name in names if not (path / name).is_file()]
    if missing:
        raise ModelRefused(f"{path} is incomplete: {missing[0]} is missing", field="model")
    return tuple(path / name for name in names)


def _read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in `path`; None if there is no such file. Raises ModelRefused if the
    file holds anything else."""
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelRefused(f"cannot read {path}: {error}", field="model") from error
    if not isinstance(content, dict):
        raise ModelRefused(f"{path} does not hold a JSON object", field="model")
    return content


def _header(path: Path) -> bytes:
    """Return the safetensors header, empty for a GGUF file. Raises ModelRefused for a broken
    one."""
    with path.open("rb") as file:
        prefix = file.read(8)
        header_bytes = 0 if path.name == WEIGHTS else int.from_bytes(prefix, "little")
        if len(prefix) < 8 or header_bytes > _MAX_HEADER_BYTES:
            raise ModelRefused(f"{path} is not a safetensors file", field="model")
        return file.read(header_bytes)


def _content_hash(path: Path) -> str:
    """Return the xxh3_128 of the whole file, in hex."""
    try:
        folder = cache_folder("digests")
    except OSError:  # no home: nothing can be remembered
        return _hashed(path)
    return remembered(path, _hashed, folder)


def _hashed(path: Path) -> str:
    """Return the xxh3_128 of the whole file, in hex, reading it."""
    content = xxhash.xxh3_128()
    part = memoryview(bytearray(_READ_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(part):
            content.update(part[:count])
    return content.hexdigest()
