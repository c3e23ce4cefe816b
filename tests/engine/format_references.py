"""Each quantized format beside the library that defines it.

    python -m tests.engine.format_references

Run it where compressed-tensors, gptqmodel, bitsandbytes and accelerate are installed, too. A format
is packed into random small Llamas and Qwens (--count of them). transformers reads each checkpoint
through the format's own library, on the CPU and in float32; Baton reads the same files. The table
has the greatest relative error of the logits and the greatest Kullback-Leibler divergence (nats per
token) between the two, and how many checkpoints either side refused, with the first reason.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from baton.protocol.errors import ModelRefused
from tests.engine.format_losses import losses
from tests.engine.quantized_models import RECIPES, quantized_pair
from tests.engine.running import load, logits_of
from tests.engine.widened_models import FORMATS, widened_pair
from tests.tiny_models import VOCAB_SIZE, make_tiny_model

PROMPT_TOKENS: Final = 40
KINDS: Final = ("llama", "qwen2", "qwen3", "mistral")


@dataclass(slots=True)
class Row:
    """Of one format: the greatest differences so far, and who refused how often."""

    error: float = 0.0
    divergence: float = 0.0
    compared: int = 0
    refused: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)  # by the library

    def add(self, found: Tensor, expected: Tensor) -> None:
        """Logits [tokens, vocab] of Baton and of the library."""
        each = losses(found, expected)
        self.error = max(self.error, each.error)
        self.divergence = max(self.divergence, each.divergence)
        self.compared += 1

    def cells(self) -> list[str]:
        """For the table."""
        said = "; ".join([*self.refused[:1], *self.unread[:1]])
        return [
            str(self.compared), f"{self.error:.1e}", f"{self.divergence:.1e}",
            str(len(self.refused)), str(len(self.unread)), said,
        ]  # fmt: skip


def reference_logits(path: Path, config: dict[str, Any], ids: list[int]) -> Tensor:
    """Logits [tokens, vocab] of the library that transformers reads this format with."""
    options: dict[str, Any] = {}
    match config["quant_method"]:
        case "compressed-tensors":
            from transformers import CompressedTensorsConfig

            options["quantization_config"] = CompressedTensorsConfig(run_compressed=False)
        case "gptq":
            from transformers import GPTQConfig

            options["quantization_config"] = GPTQConfig(bits=config["bits"], backend="torch")
        case "awq":
            from transformers.utils.quantization_config import AwqBackend, AwqConfig

            options["quantization_config"] = AwqConfig(
                bits=4,
                group_size=config["group_size"],
                zero_point=True,
                backend=AwqBackend.TORCH_AWQ,
            )
        case "fp8":
            from transformers import FineGrainedFP8Config

            options["quantization_config"] = FineGrainedFP8Config(dequantize=True)
        case _:
            pass
    with torch.inference_mode():
        model: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, device_map="cpu", **options
        )
        if config["quant_method"] == "bitsandbytes":
            model = model.dequantize(torch.float32)  # its products round what they multiply
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()


def shapes(count: int, seed: int) -> list[tuple[str, dict[str, Any]]]:
    """Random (kind of model, sizes): hidden and inner sizes are multiples of 128 so that every
    library's blocks fit; other sizes are the tests' own business."""
    draw = random.Random(seed)

    def shape() -> tuple[str, dict[str, Any]]:
        return draw.choice(KINDS), {
            "hidden_size": draw.choice((128, 256)),
            "intermediate_size": draw.choice((128, 256, 384)),
            "num_hidden_layers": draw.choice((1, 2)),
            "tie_word_embeddings": draw.random() < 0.5,
        }

    return [shape() for _ in range(count)]


def compare(
    pair: Callable[[Path, Path], object], config: dict[str, Any], count: int, seed: int
) -> Row:
    """`pair` packs the first of two copies of a plain checkpoint."""
    row, draw = Row(), random.Random(seed)
    for kind, sizes in shapes(count, seed):
        ids = [draw.randrange(5, VOCAB_SIZE) for _ in range(PROMPT_TOKENS)]
        with tempfile.TemporaryDirectory() as folder:
            packed, twin = Path(folder) / "packed", Path(folder) / "twin"
            for each in (packed, twin):
                make_tiny_model(kind, each, **sizes)
            pair(packed, twin)
            try:
                found = logits_of(load(packed), ids)
            except ModelRefused as reason:
                row.refused.append(f"Baton: {reason}")
                continue
            try:
                expected = reference_logits(packed, config, ids)
            except Exception as error:  # noqa: BLE001 - libraries fail in ways of their own
                row.unread.append(f"library: {type(error).__name__}: {str(error)[:160]}")
                continue
            row.add(found, expected)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description="Baton beside each format's own library.")
    parser.add_argument("--count", type=int, default=20, help="random models per format")
    parser.add_argument("--only", default="", help="formats whose name contains this")
    given = parser.parse_args()
    heads = ("format", "compared", "logit error", "KL", "refused by Baton", "unread", "why")
    sys.stdout.write(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}\n")
    formats: list[tuple[str, Callable[[Path, Path], object], dict[str, Any]]] = [
        (name, lambda a, b, name=name: quantized_pair(name, a, b), recipe.config)
        for name, recipe in RECIPES.items()
    ]
    formats += [
        (name, lambda a, b, name=name: widened_pair(name, a, b), each.config)
        for name, each in FORMATS.items()
    ]
    for seed, (name, pair, config) in enumerate(formats):
        if given.only in name:
            row = compare(pair, config, given.count, seed)
            sys.stdout.write(f"| {' | '.join([name, *row.cells()])} |\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
