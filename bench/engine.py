"""The engine against transformers' `generate`, row by row: `python -m bench.engine [--json]`.

Random weights of two real shapes, bfloat16, greedy, ends ignored, both in one process and in turn:
    prefill n        tokens of one prompt per second, its first new token included
    decode b@c       new tokens per second of b requests that hold c tokens each, prefill taken off
Beside each: the shares of the machine's own limits, measured in the same run: MBU = bytes that the
row must read (weights, KV) over the read bandwidth, MFU = its FLOPs over the rate of a large matrix
product, as baton/engine/work.py counts both. Integer weights are compared with transformers'
bfloat16; their vocabulary head is rounded as --lm-head-quantization auto says: int8 beside int8 and
int4, w8a8 beside w8a8. --roofline draws the rows under the two limits (bench/roofline.py).
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from baton.engine.roofline import measure as measure_roof
from baton.engine.work import Limits, Work
from baton.llm import LLM
from baton.sampling import SamplingParams
from bench.engine_kit import Part, arguments_parser, prepare, random_prompt, tell
from bench.roofline import Point, Roofline, svg
from bench.transfer_engine import write_model

NEW_TOKENS: Final = 24  # of a decode row
LIMITS_S: Final = 0.4  # for each of the two, beside every row
LARGE, SMALL = "Qwen3-0.6B", "Llama-25M"


@dataclass(frozen=True, slots=True)
class Row:
    """What is measured: `batch` 0 is a prefill of `context` tokens."""

    model: str
    context: int
    batch: int = 0
    quantization: str = "none"

    @property
    def name(self) -> str:
        work = f"decode {self.batch}@{self.context}" if self.batch else f"prefill {self.context}"
        return work if self.quantization == "none" else f"{self.quantization} {work}"


ROWS: Final = (
    Row(LARGE, 512), Row(LARGE, 2048),
    Row(LARGE, 128, 1), Row(LARGE, 2048, 1), Row(LARGE, 128, 8), Row(LARGE, 128, 16),
    Row(LARGE, 512, 0, "int8"), Row(LARGE, 128, 1, "int8"), Row(LARGE, 128, 16, "int8"),
    Row(LARGE, 128, 1, "int4"),
    Row(LARGE, 512, 0, "w8a8"), Row(LARGE, 128, 1, "w8a8"), Row(LARGE, 128, 16, "w8a8"),
    Row(SMALL, 512), Row(SMALL, 128, 1), Row(SMALL, 128, 8), Row(SMALL, 128, 16),
)  # fmt: skip


def write_models(folder: Path) -> dict[str, Path]:
    """Checkpoints of both shapes."""
    large = write_model(folder / "large", vocab_size=151_936)
    config = LlamaConfig(
        vocab_size=8192, hidden_size=512, intermediate_size=1024, num_hidden_layers=8,
        num_attention_heads=8, num_key_value_heads=4, head_dim=64, max_position_embeddings=4096,
        dtype="bfloat16", eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    small = LlamaForCausalLM(config).bfloat16()
    small.save_pretrained(folder / "small")  # pyright: ignore[reportUnknownMemberType]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "small" / name).write_bytes((large / name).read_bytes())
    return {LARGE: large, SMALL: folder / "small"}


Generate = Callable[[Sequence[list[int]], int], float]  # prompts, new tokens -> seconds


def ours(llm: LLM) -> Generate:
    """Through the engine, all requests at once."""

    def run(prompts: Sequence[list[int]], new: int) -> float:
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        began = time.perf_counter()
        llm.generate(prompts, params)
        return time.perf_counter() - began

    return run


def theirs(model: Any) -> Generate:
    """`generate` on one batch without padding."""

    @torch.inference_mode()
    def run(prompts: Sequence[list[int]], new: int) -> float:
        ids = torch.tensor(prompts)
        began = time.perf_counter()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=new,
            max_new_tokens=new, pad_token_id=0,
        )  # fmt: skip
        return time.perf_counter() - began

    return run


def rate(run: Generate, row: Row, vocab: int, seed: int, new: int = NEW_TOKENS) -> float:
    """Tokens per second; decode: what `new` tokens cost beyond the first."""
    prompts = [random_prompt(row.context, seed * 1000 + i, vocab) for i in range(max(1, row.batch))]
    if not row.batch:
        return row.context / run(prompts, 1)
    first = run(prompts, 1)
    return row.batch * new / max(1e-9, run(prompts, new + 1) - first)


def needs(llm: LLM, run: Generate, row: Row, vocab: int) -> Work:
    """What the row's prefill needs, or one token of each of its requests (baton/engine/work.py), as
    the engine counts it."""
    used = llm.engine.stats.utilization

    def counted(new: int) -> Work:
        prompts = [random_prompt(row.context, 7_000 + i, vocab) for i in range(max(1, row.batch))]
        read, flops = used.read_bytes, used.flops
        run(prompts, new)
        return Work(used.read_bytes - read, used.flops - flops)

    first = counted(1)
    if not row.batch:
        return first
    both = counted(2)
    return Work(both.read_bytes - first.read_bytes, both.flops - first.flops)


def shares(row: Row, tokens_per_s: float, work: Work, limits: Limits) -> dict[str, float]:
    """MBU and MFU of work done at this rate, and where it stands on the roofline."""
    per_s = tokens_per_s / (row.batch or row.context)
    return {
        "MBU": work.read_bytes * per_s / limits.read_bytes_per_s,
        "MFU": work.flops * per_s / limits.flops_per_s,
        "FLOP/byte": work.intensity(), "GFLOP/s": work.flops * per_s / 1e9,
    }  # fmt: skip


def pictures(rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """A roofline of each model's rows, under the median of the limits measured beside them."""
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        points = [
            Point(row["row"], row["FLOP/byte"], row["GFLOP/s"] * 1e9,
                  row["GFLOP/s"] * 1e9 / row["ratio"])
            for row in own
        ]  # fmt: skip
        read, flops = (
            statistics.median(row[key] for row in own) for key in ("read GB/s", "GEMM TFLOP/s")
        )
        picture = Roofline(model, read * 1e9, flops * 1e12, points)
        path = folder / f"roofline-{model.lower()}.svg"
        path.write_text(svg(picture))


def measure(model: str, path: Path, rows: Sequence[Row], rounds: int) -> list[dict[str, Any]]:
    """All rows of one model: medians over alternating rounds."""
    found: list[dict[str, Any]] = []
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    baseline = theirs(reference)
    vocab = reference.config.vocab_size
    for quantization in dict.fromkeys(row.quantization for row in rows):
        llm = LLM(
            model=str(path), dtype="bfloat16", quantization=quantization, num_kv_blocks=512,
            enable_prefix_caching=False, threads=torch.get_num_threads(), measure_limits=False,
        )  # fmt: skip
        run = ours(llm)
        for row in (row for row in rows if row.quantization == quantization):
            rates: dict[str, list[float]] = {"baton": [], "transformers": []}
            rate(run, row, vocab, 99)  # warm
            limits = measure_roof(torch.device("cpu"), torch.bfloat16, LIMITS_S)
            work = needs(llm, run, row, vocab)
            for index in range(rounds):
                rates["baton"].append(rate(run, row, vocab, index))
                rates["transformers"].append(rate(baseline, row, vocab, index))
            median = {name: statistics.median(values) for name, values in rates.items()}
            found.append({
                "model": model, "row": row.name, **median,
                "ratio": median["baton"] / median["transformers"],
                "baton min": min(rates["baton"]), "baton max": max(rates["baton"]),
                **shares(row, median["baton"], work, limits),
                "read GB/s": limits.read_bytes_per_s / 1e9,
                "GEMM TFLOP/s": limits.flops_per_s / 1e12,
            })  # fmt: skip
            sys.stderr.write(f"{found[-1]}\n")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = arguments_parser("engine", __doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", default="", help="only rows that contain this, such as decode")
    parser.add_argument("--models", default=f"{LARGE},{SMALL}", help="of the two")
    parser.add_argument("--roofline", type=Path, help="folder for a picture (SVG) per model")
    given = parser.parse_args(arguments)
    prepare(given)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        paths = write_models(Path(folder))
        for model in given.models.split(","):
            asked = [row for row in ROWS if row.model == model and given.rows in row.name]
            if asked:
                rows += measure(model, paths[model], asked, given.rounds)
    if given.roofline is not None:
        pictures(rows, given.roofline)
    tell([Part("Against transformers' generate, tokens/s", rows)], given.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
