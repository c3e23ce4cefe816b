"""What each weight format loses: `python -m tests.engine.format_losses [--model DIR]`.

The products of a Llama's layers are rounded on load, or packed as the tests pack them (to nearest;
GPTQ's and AWQ's own tools calibrate, and llama.cpp's searches for better scales), GGUF files with
their embeddings too; the model is loaded in float32 and compared with the plain one on the answers
of the demo glossary and on a text that the demo model never saw: relative error of the logits,
Kullback-Leibler divergence in nats per token, share of other greedy tokens. Bits per weight: of
what is packed, scales included.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.engine.checkpoint.gguf.header import read_gguf
from baton.engine.quantization.integer import Scheme, quantize
from baton.text.tokenizer import Tokenizer
from bench.quantization import UNSEEN, UNSEEN_TOKENS, TimedAnswer, all_logits, glossary, load
from tests.engine.float8_device import multiplying
from tests.engine.gguf_models import MIXES, write_gguf
from tests.engine.quantized_models import RECIPES, quantized_pair
from tests.engine.widened_models import FORMATS, edit_config

MODEL_FILE = "model.safetensors"
MULTIPLIED = ", multiplied"  # as on a GPU that multiplies 8-bit floats
SKIPPED = ("fp8-small-blocks", "fp8-static", "fp8-modelopt", "fp8-deepseek", "nvfp4-modelopt")


@dataclass(frozen=True, slots=True)
class Losses:
    """Against the plain model, per token."""

    error: float
    divergence: float
    other: float


def bits_on_load(model: Path, scheme: Scheme) -> float:
    """Mean bits of a weight of the layers' products, rounded on load."""
    plain = load_file(model / MODEL_FILE)
    weights = [weight for key, weight in plain.items() if key.endswith("_proj.weight")]
    num_bytes = sum(quantize(weight.float(), scheme).num_bytes for weight in weights)
    return 8 * num_bytes / sum(weight.numel() for weight in weights)


def integer_models(model: Path, folder: Path) -> Iterator[tuple[str, Path, float]]:
    """(name, checkpoint, bits per packed weight) of compressed-tensors, GPTQ and AWQ."""
    names = load_file(model / MODEL_FILE).keys()
    for name in RECIPES:
        path, twin = folder / name, folder / f"{name}-twin"
        for each in (path, twin):
            shutil.copytree(model, each)
        quantized_pair(name, path, twin)
        packed, numbers = load_file(path / MODEL_FILE), load_file(twin / MODEL_FILE)
        added = [key for key in packed if key not in names and not key.endswith(".bias")]
        kept = [key for key in names if key.endswith("_proj.weight")]
        num_bytes = sum(packed[key].nbytes for key in [*added, *(k for k in kept if k in packed)])
        yield name, path, 8 * num_bytes / sum(numbers[key].numel() for key in kept)


def packed_copy(name: str, model: Path, path: Path) -> float:
    """Copy `model` to `path`, its layers' products packed as FORMATS[name]. Return the bits per
    packed weight."""
    shutil.copytree(model, path)
    format_, plain = FORMATS[name], load_file(model / MODEL_FILE)
    tensors = dict(plain)
    numbers = num_bytes = 0
    for key, weight in plain.items():
        if key.endswith("_proj.weight"):
            del tensors[key]
            packed, _ = format_.pack(key.removesuffix(".weight"), weight.float())
            tensors.update(packed)
            numbers += weight.numel()
            num_bytes += sum(each.nbytes for each in packed.values())
    save_file(tensors, path / MODEL_FILE, {"format": "pt"})
    edit_config(path, quantization_config=format_.config)
    return 8 * num_bytes / numbers


def packed_models(model: Path, folder: Path) -> Iterator[tuple[str, Path, float]]:
    """(name, checkpoint or file, bits per packed weight) of each format."""
    yield from integer_models(model, folder)
    for name in FORMATS:
        if name in SKIPPED:
            continue
        path = folder / name
        bits = packed_copy(name, model, path)
        yield name, path, bits
        if name in ("fp8-tensor", "fp8-channel", "fp8-block"):
            yield name + MULTIPLIED, path, bits
    for mix in MIXES:
        if mix not in ("F32", "old", "older"):
            file = folder / f"{mix}.gguf"
            write_gguf(model, file, mix)
            tensors = [each for each in read_gguf(file).tensors.values() if len(each.shape) > 1]
            num_bytes = sum(each.shape[0] * each.row_bytes for each in tensors)
            numbers = sum(each.shape[0] * each.shape[1] for each in tensors)
            yield f"GGUF {mix}", file, 8 * num_bytes / numbers


def models(model: Path, folder: Path) -> Iterator[tuple[str, Path, float, dict[str, Any]]]:
    """(name, what is loaded, bits per weight, the engine's options) of each format."""
    for scheme in get_args(Scheme):
        options = {"quantization": scheme, "lm_head_quantization": "none"}
        yield f"{scheme} on load", model, bits_on_load(model, scheme), options
    for name, path, bits in packed_models(model, folder):
        yield name, path, bits, {}


def losses(found: Tensor, exact: Tensor) -> Losses:
    """Logits [tokens, vocab] against exact ones."""
    error = float((found - exact).norm() / exact.norm())
    expected = exact.log_softmax(-1)
    divergence = (expected.exp() * (expected - found.log_softmax(-1))).sum(-1).mean()
    other = (found.argmax(-1) != exact.argmax(-1)).float().mean()
    return Losses(error, float(divergence), float(other))


def texts(model: Path, every: int) -> tuple[list[TimedAnswer], list[TimedAnswer]]:
    """(answers that the demo model knows, a text that it does not)."""
    tokenizer = Tokenizer.load(model)
    ids = tokenizer.encode(UNSEEN.read_text(encoding="utf-8"), add_special_tokens=False)
    return list(glossary(tokenizer, every)), [TimedAnswer(ids[:UNSEEN_TOKENS], 1)]


def main() -> int:
    parser = argparse.ArgumentParser(description="What each weight format loses.")
    parser.add_argument("--model", type=Path, default=Path("demo_model"))
    parser.add_argument("--every", type=int, default=4, help="of so many glossary entries one")
    given = parser.parse_args()
    kinds = texts(given.model, given.every)
    plain = load(given.model, dtype="float32")
    exact = [torch.cat(all_logits(plain, answers)) for answers in kinds]
    heads = ("format", "bits per weight", "logit error", "KL", "other greedy token")
    sys.stdout.write(f"| {' | '.join(heads)} | of unseen text: error | KL | other |\n|")
    sys.stdout.write("---|" * 8 + "\n")
    with tempfile.TemporaryDirectory() as folder:
        for name, path, bits, options in models(given.model.resolve(), Path(folder)):
            with multiplying() if name.endswith(MULTIPLIED) else nullcontext():
                model = load(path, dtype="float32", **options)
            cells = [name, f"{bits:.2f}"]
            for answers, expected in zip(kinds, exact, strict=True):
                each = losses(torch.cat(all_logits(model, answers)), expected)
                cells += [f"{each.error:.4f}", f"{each.divergence:.2g}", f"{each.other:.1%}"]
            sys.stdout.write(f"| {' | '.join(cells)} |\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
