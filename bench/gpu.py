"""The GPU kernels and the engine on a GPU, right and how fast: `python -m bench.gpu [--json]`.

    limits      measured: bytes copied per second, and the rate of a large product; shares refer to
                them
    kernels     every Triton kernel against its torch twin; what it moves and computes per second
    attention   decode at long contexts: share of the copy rate that reading K and V reaches
    engine      Qwen3-0.6B's shape, random weights, bfloat16: decode (MBU), prefill (MFU), against
                transformers' continuous batching

Exits 1 if a kernel differs from its twin, 2 without a GPU, because then nothing can be measured.
The same cases also run interpreted (tests/engine/test_gpu_kernels.py) and are compiled
(tools.gpu_kernels).
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from baton.engine.performance.roofline import measure
from baton.engine.state.work import Limits
from bench.engine import LIMITS_S, EngineRow, Generate, needs, ours, rate, shares
from bench.engine_kit import TimedPart, arguments_parser, prepare, tell
from bench.models import LARGE, write_checkpoint
from bench.peer import Took

NO_GPU: Final = 2
NEW_TOKENS: Final = 128
ROWS: Final = (
    EngineRow(LARGE, 512), EngineRow(LARGE, 2048),
    EngineRow(LARGE, 128, 1), EngineRow(LARGE, 2048, 1), EngineRow(LARGE, 128, 32), EngineRow(LARGE,
    1024, 32), EngineRow(LARGE, 128, 128), EngineRow(LARGE, 128, 1, "int8"), EngineRow(LARGE, 128,
    1, "int4"),
)  # fmt: skip
CONTEXTS: Final = (1024, 2048, 4096, 8192)


def best(work: Callable[[], object], times: int = 10) -> float:
    """Return the seconds of the fastest of `times` calls by the GPU's clock, after two warm-ups."""
    found: list[float] = []
    for index in range(times + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        if index >= 2:
            found.append(begin.elapsed_time(end) / 1000)
    return min(found)


def kernels(device: torch.device, limits: Limits, families: Sequence[str]) -> list[dict[str, Any]]:
    """Return, for each kernel in real sizes, its error, its time, and its shares of the limits."""
    from bench.gpu_case import CaseShape
    from bench.gpu_cases import FAMILIES, cases_of  # imports triton

    found: list[dict[str, Any]] = []
    names = families or list(FAMILIES)
    for case in cases_of(CaseShape(device), (torch.bfloat16, torch.float32), names):
        error, seconds = case.error(), best(case.ours)
        row = {
            "kernel": case.name, "right": error <= case.tolerance, "error": error,
            "us": seconds * 1e6,
            "of bandwidth": case.num_bytes / seconds / limits.read_bytes_per_s,
            "of GEMM rate": case.num_flops / seconds / limits.flops_per_s,
        }  # fmt: skip
        found.append(row)
        sys.stderr.write(f"{row}\n")
    return found


def attention(device: torch.device, limits: Limits) -> list[dict[str, Any]]:
    """Measure decode attention alone, in the sizes of the goal."""
    from bench.gpu_case import CaseShape
    from bench.gpu_cases import RULES, attention_cases  # imports triton

    plain = [rule for rule in RULES if rule.name in ("plain", "int8", "fp8")]
    found: list[dict[str, Any]] = []
    for context in CONTEXTS:
        for rows in (1, 32):
            shape = replace(CaseShape(device), contexts=(context,) * rows, prefills=())
            for case in attention_cases(shape, torch.bfloat16, plain):
                if not case.name.startswith("decode"):
                    continue
                seconds = best(case.ours)
                found.append({
                    "context": context, "rows": rows, "kernel": case.name, "us": seconds * 1e6,
                    "of bandwidth": case.num_bytes / seconds / limits.read_bytes_per_s,
                })  # fmt: skip
    return found


# ---- the engine ----


def continuous(model: Any) -> Generate:
    """Return a function for transformers' continuous batching of the same prompts."""
    from transformers import GenerationConfig

    def run(prompts: Sequence[list[int]], new: int) -> Took:
        config = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1)
        torch.cuda.synchronize()
        began, cpu = time.perf_counter(), time.process_time()
        model.generate_batch(list(prompts), generation_config=config)
        torch.cuda.synchronize()
        return Took(time.perf_counter() - began, time.process_time() - cpu)

    return run


@dataclass(frozen=True, slots=True)
class GpuPeer:
    """transformers' model, and how to run it."""

    model: Any
    run: Generate

    def rate(self, row: EngineRow, vocab: int) -> float | None:
        """Return the rate, or None: a peer that cannot run does not stop the benchmark."""
        try:
            rate(self.run, row, vocab, 98, NEW_TOKENS)
            return rate(self.run, row, vocab, 0, NEW_TOKENS).per_s
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:
            sys.stderr.write(f"transformers' continuous batching failed: {error}\n")
            return None


def engine(path: Path, limits: Limits, rounds: int, with_peer: bool) -> list[dict[str, Any]]:
    """Return all rows: medians over rounds, after a warm-up for each."""
    from transformers import AutoModelForCausalLM

    from baton.llm import LLM

    reference: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    vocab = reference.config.vocab_size
    peer = GpuPeer(reference, continuous(reference))
    found: list[dict[str, Any]] = []
    for quantization in dict.fromkeys(row.quantization for row in ROWS):
        reference.to("cpu")
        llm = LLM(
            model=str(path), dtype="bfloat16", device="cuda", quantization=quantization,
            num_kv_blocks=16_384, max_num_seqs=128, max_num_batched_tokens=8192,
            enable_prefix_caching=False,
        )  # fmt: skip
        run = ours(llm)
        for row in (row for row in ROWS if row.quantization == quantization):
            rate(run, row, vocab, 99, NEW_TOKENS)
            work = needs(llm, run, row, vocab)
            speed = statistics.median(
                [rate(run, row, vocab, index, NEW_TOKENS).per_s for index in range(rounds)]
            )
            found.append({
                "row": row.name, "tokens/s": speed, **shares(row, speed, work, limits),
                "transformers": None, "ratio": None,
            })  # fmt: skip
            sys.stderr.write(f"{found[-1]}\n")
        del llm, run
        torch.cuda.empty_cache()
    if with_peer:
        reference.to("cuda")
        for row, told in zip(ROWS, found, strict=True):
            if row.batch and row.quantization == "none":
                theirs = peer.rate(row, vocab)
                told["transformers"] = theirs
                told["ratio"] = told["tokens/s"] / theirs if theirs else None
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return the exit status."""
    parser = arguments_parser("gpu", __doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--families", nargs="*", default=[], help="of kernels (default: all)")
    parser.add_argument("--no-engine", action="store_true", help="the kernels alone")
    parser.add_argument("--no-peer", action="store_true", help="without transformers' batching")
    given = parser.parse_args(arguments)
    prepare(given)
    if not torch.cuda.is_available():
        sys.stderr.write(
            "bench.gpu: torch sees no GPU, so nothing was measured. Without one the kernels are "
            "interpreted (pytest tests/engine/test_gpu_kernels.py) and compiled for sm_90 "
            "(python -m tools.gpu_kernels).\n"
        )
        return NO_GPU
    device = torch.device("cuda")
    limits = measure(device, torch.bfloat16, LIMITS_S)
    name = torch.cuda.get_device_name(device)
    machine = {"GPU": name, "copy GB/s": limits.read_bytes_per_s / 1e9,
               "GEMM TFLOP/s": limits.flops_per_s / 1e12}  # fmt: skip
    parts = [TimedPart("Limits, measured", [machine])]
    rows = kernels(device, limits, given.families)
    parts.append(TimedPart("Kernels against their twins", rows))
    parts.append(TimedPart("Decode attention, share of the copy rate", attention(device, limits)))
    if not given.no_engine:
        with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
            path = write_checkpoint(LARGE, Path(folder))
            shares = engine(path, limits, given.rounds, not given.no_peer)
            parts.append(TimedPart("Engine", shares))
    tell(parts, given.json)
    wrong = [row["kernel"] for row in rows if not row["right"]]
    if wrong:
        sys.stderr.write(f"kernels that differ from their twins: {', '.join(wrong)}\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
