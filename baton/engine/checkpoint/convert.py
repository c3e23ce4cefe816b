"""`baton convert DIR`: safetensors and tokenizer.json for a checkpoint that lacks them.

    what is missing? -> write tokenizer.json, then model.safetensors, into a hidden folder inside
    the target -> rename all files into place, or none

It runs as a process of its own (`python -m baton.engine.checkpoint.convert DIR [--out DIR2]`). It
is the only place that opens a pickled checkpoint, with `weights_only`: a file that holds more than
tensors is refused. No code of a checkpoint runs, and no existing file is changed or replaced.
Names and dtypes of tensors stay as they are.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import import_protobuf
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as transformers_logging
from transformers.utils.import_utils import is_sentencepiece_available

from baton.engine.checkpoint.gguf.folder import WEIGHTS, is_gguf, write_folder
from baton.engine.checkpoint.sentencepiece_model import pipeline_of
from baton.engine.checkpoint.tiktoken_model import is_tiktoken, tiktoken_tokenizer
from baton.protocol.errors import BatonError, ConfigError, ModelRefused
from baton.runtime.config import add_config, parse
from baton.text.tokenizer import read_json

MAX_SHARD_BYTES: Final = 5_000_000_000
SAFETENSORS: Final = "model.safetensors"
SAFETENSORS_INDEX: Final = "model.safetensors.index.json"
PICKLE: Final = "pytorch_model.bin"
PICKLE_INDEX: Final = "pytorch_model.bin.index.json"
# What --out copies: config, generation config, chat template and tokenizer files.
COPIED: Final = ("*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")
_NOT_THE_MODEL: Final = ("adapter", "consolidated")  # names of safetensors that servers do not read
_NORMAL_PIECE: Final = 1  # sentencepiece_model.proto: ModelProto.SentencePiece.Type.NORMAL
_WORD_STARTS: Final = ("\u2581", "\u0120")  # a space in pieces of sentencepiece and of GPT-2
_WORDS_CHECKED: Final = 8


@dataclass(frozen=True, slots=True)
class WrittenFiles:
    """One file that `convert` has written."""

    path: Path
    num_bytes: int

    def __str__(self) -> str:
        return f"wrote {self.path} ({self.num_bytes / 1e6:.2f} MB)"


def convert(
    source: Path, out: Path | None = None, max_shard_bytes: int = MAX_SHARD_BYTES
) -> list[WrittenFiles]:
    """Write what `source` lacks into it, or a complete copy into `out`. Return the written files,
    [] if nothing is missing.

    Raises ModelRefused for what cannot be converted, ConfigError for folders that do not fit,
    OSError for a full or read-only disk. After an error no written file is left behind.
    """
    if is_gguf(source):
        return _convert_gguf(source, out or source.with_suffix(""))
    if not source.is_dir():
        raise ConfigError(f"there is no directory {source}", field="dir")
    if not any((source / name).is_file() for name in ("config.json", "tokenizer_config.json")):
        raise ModelRefused(f"{source} holds no config.json: not a Hugging Face checkpoint")
    pickles = [] if _has_safetensors(source) else _pickles(source)
    has_tokenizer = (source / "tokenizer.json").is_file()
    if has_tokenizer and not pickles:
        return []
    target = out or source
    target.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".baton-convert-", dir=target) as folder:
        stage = Path(folder)
        if not target.samefile(source):
            _stage_copies(source, target, stage)
        if not has_tokenizer and not (target / "tokenizer.json").is_file():
            stage_tokenizer(source, stage)
        if pickles and not _has_safetensors(target):
            stage_weights(source, pickles, stage, max_shard_bytes)
        return _place(stage, target)


def _convert_gguf(source: Path, target: Path) -> list[WrittenFiles]:
    """Write the checkpoint folder of a GGUF file: JSON files, and a link to the file. Return the
    written files, [] if the folder is complete already.

    Raises ModelRefused for a file that is not supported.
    """
    if (target / WEIGHTS).exists():
        return []
    target.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".baton-convert-", dir=target) as folder:
        write_folder(source, Path(folder))
        written = _place(Path(folder), target)
    (target / WEIGHTS).symlink_to(source.resolve())
    return written


def stage_weights(source: Path, pickles: Sequence[Path], stage: Path, max_shard_bytes: int) -> None:
    """Write the tensors of `pickles` as safetensors into `stage`; large ones as shards with an
    index.

    dtypes and names stay. Tied weights are written once, under the name that transformers ties to.
    """
    tensors = read_pickles(source, pickles)
    for name, kept in tied_names(read_json(source / "config.json")).items():
        if name in tensors and kept in tensors and torch.equal(tensors[name], tensors[kept]):
            del tensors[name]
    shards = list(_shards(tensors, max_shard_bytes))
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        weight_map.update(dict.fromkeys(names, file))
        path = stage / (SAFETENSORS if len(shards) == 1 else file)
        save_file(_owned(tensors, names), path, {"format": "pt"})
        # safetensors makes files that only their owner may read; a server may be someone else.
        shutil.copymode(pickles[0], path)
    if len(shards) > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (stage / SAFETENSORS_INDEX).write_text(json.dumps(index, indent=2) + "\n")


def read_pickles(source: Path, pickles: Sequence[Path]) -> dict[str, Tensor]:
    """Read all tensors by name. Raises ModelRefused if a file holds anything else, or lacks a
    tensor that the index names."""
    owner: dict[str, str] = read_json(source / PICKLE_INDEX).get("weight_map", {})
    tensors: dict[str, Tensor] = {}
    for path in pickles:
        content = read_pickle(path)
        tensors.update(
            {name: t for name, t in content.items() if owner.get(name) in (None, path.name)}
        )
    missing = sorted(owner.keys() - tensors.keys())
    if missing:
        raise ModelRefused(f"{source / owner[missing[0]]} lacks the tensor {missing[0]!r}")
    if not tensors:
        raise ModelRefused(f"{pickles[0]} holds no tensors")
    return tensors


def read_pickle(path: Path) -> dict[str, Tensor]:
    """Return the tensors of one file by name; they are mapped, not read, if the format allows it.
    Raises ModelRefused if the file is damaged or holds more than tensors."""
    try:
        # Files from before torch 1.6 are no archives and cannot be mapped.
        mapped = zipfile.is_zipfile(path)
        content: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except OSError as error:
        raise ModelRefused(f"{path} cannot be read: {_line(error)}") from error
    except Exception as error:
        # Whatever the unpickler met: a function to call, a truncated file, no pickle at all.
        raise ModelRefused(
            f"{path} is refused: it is damaged or holds more than tensors ({_line(error)})"
        ) from error
    if not isinstance(content, dict):
        raise ModelRefused(f"{path} is refused: it holds no tensors by name")
    for name, value in content.items():
        plain = isinstance(value, Tensor) and value.layout is torch.strided
        if not isinstance(name, str) or not plain or value.is_quantized:
            raise ModelRefused(f"{path} is refused: its entry {name!r} is not a plain tensor")
    return {name: value.detach() for name, value in content.items()}


def tied_names(config: dict[str, Any]) -> dict[str, str]:
    """Return, by the name of each tensor that transformers does not store, the name of the tensor
    it is tied to.

    {} for a model without tied weights, and for a family that transformers does not know: storing
    both tensors is always right. Source: transformers modeling_utils.py, `_tied_weights_keys`.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        return {}
    try:
        parsed = CONFIG_MAPPING[model_type].from_dict(config)
    except Exception as error:
        # Each family validates in its own way and raises its own errors.
        raise ModelRefused(f"config.json is not one of a {model_type}: {_line(error)}") from error
    if not getattr(parsed, "tie_word_embeddings", False):
        return {}
    if type(parsed) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return {}
    model: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(parsed)]
    tied = model._tied_weights_keys
    return dict(tied) if isinstance(tied, dict) else {}


def stage_tokenizer(source: Path, stage: Path) -> None:
    """Write tokenizer.json into `stage`, and tokenizer_config.json if `source` has none.

    Raises ModelRefused for a tokenizer that transformers cannot convert, or converts into one that
    lacks tokens of the original.
    """
    if is_tiktoken(source):
        tiktoken_tokenizer(source).save(str(stage / "tokenizer.json"))
        return
    expected = _expected_tokens(source)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            source, use_fast=True, trust_remote_code=False, local_files_only=True
        )
        with TemporaryDirectory(dir=stage) as folder:
            tokenizer.save_pretrained(folder)
            kept = ["tokenizer.json"]
            if not (source / "tokenizer_config.json").is_file():
                kept.append("tokenizer_config.json")
            for name in kept:
                (Path(folder) / name).rename(stage / name)
        _fit(source, stage / "tokenizer.json")
        backend = Tokenizer.from_file(str(stage / "tokenizer.json"))
    except ModelRefused:
        raise
    except Exception as error:
        # Conversion runs through a hundred tokenizer classes; each fails in its own way.
        raise ModelRefused(
            f"transformers cannot convert the tokenizer of {source} ({_line(error)})"
        ) from error
    _check_tokenizer(source, type(tokenizer).__name__, backend, expected)


def _fit(source: Path, staged: Path) -> None:
    """Make tokenizer.json split text as its sentencepiece model does, if it comes from one."""
    if _is_bpe_of_files(source):
        return
    converted = json.loads(staged.read_text(encoding="utf-8"))
    legacy = read_json(source / "tokenizer_config.json").get("legacy") is not False
    parts = pipeline_of(_sentencepiece(source), converted, legacy)
    if parts is not None:
        text = json.dumps(converted | parts, ensure_ascii=False, indent=2)
        staged.write_text(text, encoding="utf-8")


def _check_tokenizer(
    source: Path, kind: str, backend: Tokenizer, expected: dict[str, int | None]
) -> None:
    """Raise ModelRefused unless the tokenizer has all `expected` tokens, and decodes an encoded
    text to the same words and spaces.

    transformers makes this necessary: given files that its class does not know, it silently builds
    an empty tokenizer, or one of another kind.
    """
    vocabulary: dict[str, int] = backend.get_vocab()
    lost = [t for t, i in expected.items() if t not in vocabulary or i not in (None, vocabulary[t])]
    if lost:
        raise ModelRefused(
            f"{source}: as a {kind} the tokenizer would lose {len(lost)} of {len(expected)} tokens "
            f"({lost[0]!r}); is tokenizer_class right?"
        )
    words = [
        t[1:]
        for t in expected
        if t.startswith(_WORD_STARTS) and t[1:].isascii() and t[1:].isalpha()
    ]
    text = " ".join(words[:_WORDS_CHECKED])
    back: str = backend.decode(backend.encode(text).ids, skip_special_tokens=True)
    if back.strip() != text:
        raise ModelRefused(
            f"{source}: as a {kind} the tokenizer would turn {text!r} into {back!r}; is "
            "tokenizer_class right?"
        )


def _expected_tokens(source: Path) -> dict[str, int | None]:
    """Return the ids of the slow tokenizer's tokens; None for an id that conversion may change.
    Raises ModelRefused without a tokenizer."""
    if _is_bpe_of_files(source):
        return dict(read_json(source / "vocab.json"))
    pieces = _sentencepiece(source).pieces
    return {piece.piece: None for piece in pieces if piece.type == _NORMAL_PIECE}


def _is_bpe_of_files(source: Path) -> bool:
    return (source / "vocab.json").is_file() and (source / "merges.txt").is_file()


def _sentencepiece(source: Path) -> Any:
    """Read the sentencepiece model in `source` as a ModelProto. Raises ModelRefused without one."""
    models = sorted(source.glob("*.model"))
    if not models:
        raise ModelRefused(
            f"{source} has no tokenizer that can be converted: neither vocab.json and merges.txt "
            "nor a sentencepiece model (tokenizer.model, spiece.model) nor tiktoken.model"
        )
    if not is_sentencepiece_available():
        raise ModelRefused(
            f"to convert {models[0]}, transformers needs a package: pip install sentencepiece"
        )
    messages: Any = import_protobuf()
    proto = messages.ModelProto()
    try:
        proto.ParseFromString(models[0].read_bytes())
    except Exception as error:  # protobuf's own class, which differs between its backends
        raise ModelRefused(f"{models[0]} is not a sentencepiece model") from error
    return proto


def _has_safetensors(folder: Path) -> bool:
    """Whether a server finds weights in `folder`. Raises ModelRefused for an incomplete set."""
    names = sorted(set(read_json(folder / SAFETENSORS_INDEX).get("weight_map", {}).values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ModelRefused(
            f"{folder} holds some of its safetensors but not {missing[0]}: complete them, or "
            f"remove {SAFETENSORS_INDEX} and the others to convert {PICKLE}"
        )
    found = (path.name for path in folder.glob("*.safetensors"))
    return any(not name.startswith(_NOT_THE_MODEL) for name in found)


def _pickles(source: Path) -> list[Path]:
    """Return the pickled weight files, [] if there are none. Raises ModelRefused if one is
    missing."""
    index = source / PICKLE_INDEX
    if not index.is_file():
        single = source / PICKLE
        if not single.is_file() and any(source.glob("pytorch_model-*.bin")):
            raise ModelRefused(f"{source} is incomplete: {PICKLE_INDEX} is missing")
        return [single] if single.is_file() else []
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelRefused(f"{index} names no files")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name or not re.fullmatch(r"pytorch_model.*\.bin", name):
            raise ModelRefused(f"{index} names files elsewhere ({name})")
        if not (source / name).is_file():
            raise ModelRefused(f"{source} is incomplete: {name} is missing")
    return [source / name for name in names]


def _shards(tensors: dict[str, Tensor], max_shard_bytes: int) -> Iterator[list[str]]:
    """Yield the names of the tensors of each file, in order. A tensor that is larger than a shard
    gets a file of its own."""
    names: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        if names and size + tensor.nbytes > max_shard_bytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += tensor.nbytes
    yield names


def _owned(tensors: dict[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
    """Return contiguous tensors, of which no two share memory: safetensors allows no aliases."""
    owned: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name in names:
        tensor = tensors[name].contiguous()
        if tensor.untyped_storage().data_ptr() in storages:
            tensor = tensor.clone()
        storages.add(tensor.untyped_storage().data_ptr())
        owned[name] = tensor
    return owned


def _stage_copies(source: Path, target: Path, stage: Path) -> None:
    """Copy the files of `source` that need no conversion into `stage`. Raises ConfigError if
    `target` has a file of the same name with other contents."""
    patterns = (*COPIED, "*.safetensors") if _has_safetensors(source) else COPIED
    for path in sorted({path for pattern in patterns for path in source.glob(pattern)}):
        if not path.is_file() or path.name == PICKLE_INDEX or path.name.startswith(_NOT_THE_MODEL):
            continue
        existing = target / path.name
        if not existing.exists():
            shutil.copy(path, stage / path.name)
        elif path.suffix != ".safetensors" and existing.read_bytes() != path.read_bytes():
            raise ConfigError(f"{target} holds another {path.name}: give a new --out", field="out")


def _place(stage: Path, target: Path) -> list[WrittenFiles]:
    """Move the staged files into place; after an error remove those that were moved.

    The index is moved first. So until its last shard is in place, readers see an incomplete
    checkpoint, never one that looks whole.
    """
    staged = sorted(stage.iterdir(), key=lambda path: (path.name != SAFETENSORS_INDEX, path.name))
    written: list[WrittenFiles] = []
    try:
        for path in staged:
            final = target / path.name
            if final.exists():
                raise ConfigError(f"{final} has appeared meanwhile; it is left as it is")
            with path.open("rb") as file:
                os.fsync(file.fileno())
            path.rename(final)
            written.append(WrittenFiles(final, final.stat().st_size))
    except BaseException:
        for each in written:
            each.path.unlink(missing_ok=True)
        raise
    return written


def _line(error: BaseException) -> str:
    """Return an error's first line. torch and transformers add lines of advice."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit status: 0 also if nothing is missing, 2 for a refusal."""
    parser = argparse.ArgumentParser(
        prog="baton convert",
        description="Make safetensors and tokenizer.json for a checkpoint that lacks them, or the "
        "folder of a GGUF file (its config and tokenizer, and a link to it).",
    )
    parser.add_argument(
        "dir", type=Path, metavar="DIR", help="the checkpoint's directory, or FILE.gguf"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR2", help="write a complete copy here (default: into DIR)"
    )
    add_config(parser)
    try:
        options = parse(parser, sys.argv[1:] if arguments is None else arguments)
        written = convert(options.dir.expanduser(), options.out and options.out.expanduser())
    except (BatonError, OSError) as error:
        sys.stderr.write(f"baton convert: {_line(error)}\n")
        return 2
    lines = [str(each) for each in written] or [f"nothing to convert in {options.dir}"]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    transformers_logging.set_verbosity_error()  # what matters arrives as one line of ours
    raise SystemExit(main())
