"""Random checkpoints of the two shapes with which the engine is measured.

`python -m bench.models FOLDER` writes them, for servers and programs that need a folder.

Only the shapes matter: Qwen3-0.6B (28 layers, hidden 1024, vocabulary 151,936 tied) and a Llama of
25 million numbers (8 layers, hidden 512, vocabulary 8,192), bfloat16. The same seed gives the same
files. The tokenizer is the demo model's, with further words that no text contains, so that each id
that a random model chooses has a text to stream.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.transfer_engine import DEMO_MODEL, TOKENIZER_FILES, write_model

LARGE, SMALL = "Qwen3-0.6B", "Llama-25M"
LARGE_VOCABULARY: Final = 151_936
SMALL_VOCABULARY: Final = 8192
SPACE: Final = "\u0120"  # as byte-level tokenizers write it


def write_checkpoint(name: str, folder: Path) -> Path:
    """Write the checkpoint `name` into its own folder in `folder`, unless it is there already."""
    path = folder / name
    if not path.exists():
        unfinished = folder / f".{name}"
        shutil.rmtree(unfinished, ignore_errors=True)
        WRITERS[name](unfinished)
        unfinished.rename(path)
    return path


def _write_large(path: Path) -> None:
    write_model(path, vocab_size=LARGE_VOCABULARY)
    widen_tokenizer(path / "tokenizer.json", LARGE_VOCABULARY)


def _write_small(path: Path) -> None:
    config = LlamaConfig(
        vocab_size=SMALL_VOCABULARY, hidden_size=512, intermediate_size=1024, num_hidden_layers=8,
        num_attention_heads=8, num_key_value_heads=4, head_dim=64, max_position_embeddings=4096,
        dtype="bfloat16", eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    small = LlamaForCausalLM(config).bfloat16()
    small.save_pretrained(path)  # pyright: ignore[reportUnknownMemberType]
    for name in TOKENIZER_FILES:
        shutil.copy(DEMO_MODEL / name, path / name)
    widen_tokenizer(path / "tokenizer.json", SMALL_VOCABULARY)


WRITERS: Final[Mapping[str, Callable[[Path], None]]] = {LARGE: _write_large, SMALL: _write_small}


def widen_tokenizer(path: Path, size: int) -> None:
    """Give every id below `size` a text in the tokenizer at `path`, which is written anew.

    No merge leads to the new words, so the ids of a text do not change.
    """
    content = json.loads(path.read_text())
    words: dict[str, int] = content["model"]["vocab"]
    words |= {f"{SPACE}w{index}": index for index in range(len(words), size)}
    path.write_text(json.dumps(content, ensure_ascii=False))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.models", description="Write the benchmarks' random checkpoints."
    )
    parser.add_argument("folder", type=Path, help="made if missing")
    folder: Path = parser.parse_args(arguments).folder
    for name in WRITERS:
        sys.stdout.write(f"{write_checkpoint(name, folder)}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
