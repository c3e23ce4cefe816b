"""`baton estimate`: parameters, memory, ideal TTFT and TPOT of a model on a machine, as a table.

It runs as a process of its own (`python -m baton.engine.performance.estimate`), because torch is
needed for families that no formula counts, and to say whether Baton would serve the model. A
config.json suffices. If weights lie beside it, the bytes of their files are shown, too. ideal.py
has the arithmetic, route.py decides about refusal.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from baton.engine.checkpoint.gguf.folder import gguf_folder, is_gguf
from baton.engine.checkpoint.headers import header, with_dtype
from baton.engine.checkpoint.kinds import widened_kind
from baton.engine.checkpoint.seeing import family_of, served_config
from baton.engine.config import EngineConfig
from baton.engine.loading.head_shape import eagle3_shape, mtp_shape
from baton.engine.loading.model_shape import ModelShape, model_shape
from baton.engine.performance.ideal import Estimate, EstimateOptions, estimate
from baton.protocol.errors import BatonError, ConfigError
from baton.runtime.config import add_options, load, parse
from baton.text.sentence_files import is_encoder, sentence_files
from baton.text.tokenizer import read_json

_WEIGHTS: Final = ("*.safetensors", "*.bin", "*.gguf")
RANKS: Final = "served on the CPU of one host; refused on GPUs, where ranks have not been proven"
_ASKED: Final = (  # options that EngineConfig has under the same name
    "dtype", "quantization", "lm_head_quantization", "tensor_parallel_size",
    "data_parallel_size", "enable_expert_parallel", "block_size", "gpu_memory_utilization",
    "language_model_only", "max_num_batched_tokens", "max_num_seqs", "num_state_checkpoints",
)  # fmt: skip


# ---- files ----


def read_config(model: Path) -> dict[str, Any]:
    """Return the config.json in or at `model`, or that of a GGUF file; if it states no dtype, with
    that of the tensors beside it. Raises ConfigError, ModelRefused.
    """
    if is_gguf(model):
        model = gguf_folder(model)
    file = model / "config.json" if model.is_dir() else model
    if not file.is_file():
        raise ConfigError(f"there is no {file}", field="model")
    values = read_json(file)
    return with_dtype(values, sorted(model.glob("*.safetensors"))) if model.is_dir() else values


def stored_bytes(model: Path) -> int | None:
    """Return the bytes of all tensors in the safetensors files of the folder, by their headers.

    For a GGUF file return its size. Return None without such files.
    """
    if is_gguf(model):
        return model.stat().st_size
    if not model.is_dir():
        return None
    files = sorted(model.glob("*.safetensors"))
    if not files:
        return None
    return sum(_tensor_bytes(file) for file in files)


def _tensor_bytes(file: Path) -> int:
    """Return the bytes of a file's tensors, by its header."""
    try:
        offsets = [entry["data_offsets"] for entry in header(file).values()]
        return sum(end - start for start, end in offsets)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} is not a safetensors file", field="model") from error


def refusal(options: EstimateOptions, result: Estimate) -> str | None:
    """Return why Baton would refuse to serve this model, None if it would not.

    It runs the checks of an engine's start.
    """
    try:
        # Late imports: these modules need torch, the arithmetic does not.
        from baton.engine.checkpoint.checkpoint import open_checkpoint, stored_as_named
        from baton.engine.loading.route import choose_route
    except ImportError:
        return "not known: torch is not installed here"
    asked: dict[str, Any] = {name: getattr(options, name) for name in _ASKED}
    if options.kv_cache_dtype != result.dtype:
        asked["kv_cache_dtype"] = options.kv_cache_dtype
    if options.context is not None:
        asked["max_model_len"] = max(2, options.context)
    model, draft = options.model.expanduser(), options.speculative_model
    try:
        values = _served(options)
        if options.quantization == widened_kind(values.get("quantization_config")) == "fp8":
            asked["quantization"] = "none"  # as it is stored, on a GPU that multiplies it
        engine = stored_as_named(EngineConfig(str(model), **asked), values)
        if is_encoder(values):
            from baton.engine.encoders.encoder import refuse  # lazy: transformers takes seconds

            refuse(values, engine)
            sentence_files(model if model.is_dir() else model.parent)
        else:
            choose_route(values, engine)
        if is_gguf(model) or any(any(model.glob(pattern)) for pattern in _WEIGHTS):
            open_checkpoint(str(model))
        if draft is not None and options.speculative_method == "draft":
            choose_route(read_config(draft.expanduser()), EngineConfig(str(draft)))
    except BatonError as reason:
        return str(reason)
    return None


def _served(options: EstimateOptions) -> dict[str, Any]:
    """Return the config.json as an engine reads it; of a file alone, images are read. A layer that
    drafts goes with text alone."""
    model = options.model.expanduser()
    alone = options.language_model_only or options.speculative_method == "mtp"
    values = read_config(model)
    return served_config(values, model, alone=alone) if alone or model.is_dir() else values


def _shape(values: dict[str, Any]) -> ModelShape:
    """Return the sizes of the model of a config.json, those of its vision tower included."""
    if family_of(values) is None:
        return model_shape(values)
    from baton.engine.loading.shape_on_meta import shape_on_meta  # lazy: it takes transformers

    return shape_on_meta(values)


def sized(options: EstimateOptions) -> Estimate:
    """Return the estimate for the model that `options` name. Raises ModelRefused, ConfigError."""
    model, draft = options.model.expanduser(), options.speculative_model
    shape = _shape(_served(options))
    drafts = None if draft is None else model_shape(read_config(draft.expanduser()))
    if options.speculative_method == "mtp":
        drafts = mtp_shape(read_config(model))
    elif options.speculative_method == "eagle3" and draft is not None:
        drafts = eagle3_shape(read_config(draft.expanduser()))
    result = estimate(shape, options, stored_bytes(model), drafts)
    return replace(result, refused=refusal(options, result) or shape.refused)


# ---- for people ----


def as_json(result: Estimate) -> str:
    """Return one JSON object with numbers in bytes and seconds."""
    return json.dumps(asdict(result), indent=2)


def rows(result: Estimate) -> list[tuple[str, str]]:
    """Return the lines of the table, as (name, value)."""
    r = result
    stored = "" if r.stored_bytes is None else f" ({_size(r.stored_bytes)} in the files)"
    several = r.tensor_parallel_size * r.data_parallel_size > 1
    device = " per device" if several else ""
    alone = ", on the first device alone" if several else ""
    quantized = f", matrices {r.quantization}" if r.quantization else ""
    quantized += f", head {r.lm_head_quantization}" if r.lm_head_quantization else ""
    lines = [("parameters", _count(r.parameters))]
    if r.active_parameters != r.parameters:
        lines.append(("active per token", _count(r.active_parameters)))
    lines += [
        (f"weights{device}", f"{_size(r.weight_bytes)} as {r.dtype}{quantized}{stored}"),
        *([("vision tower", f"{_size(r.tower_bytes)} of them{alone}")] if r.tower_bytes else []),
        *(_kv_rows(r, device) if r.kv_bytes_per_token else []),
        (f"activations{device}", f"about {_size(r.activation_bytes)} (measured at a real start)"),
    ]
    if r.state_bytes:
        slots = ""
        if r.state_slots is not None:
            slots = f", {r.state_slots:,} slots and {r.state_checkpoints:,} checkpoints in it"
        lines.append((f"state per request{device}", f"{_size(r.state_bytes)}{slots}"))
    if r.draft_weight_bytes:
        draft = f"{_size(r.draft_weight_bytes)} of weights, {_size(r.draft_kv_bytes_per_token)}"
        lines.append((f"draft model{device}", f"{draft} of KV per token"))
    if r.kv_bytes is not None and r.num_blocks is not None and r.kv_tokens is not None:
        lines += [
            (f"KV memory{device}", _size(r.kv_bytes)),
            ("KV blocks", f"{r.num_blocks:,} ({r.kv_tokens:,} tokens)"),
            ("concurrency", f"{r.concurrency:,} requests of {r.context:,} tokens"),
        ]
    if r.ttft_s is not None:
        told = "ideal TTFT" if r.kv_bytes_per_token else "ideal time"
        lines.append((told, f"{_time(r.ttft_s)} for a prompt of {r.prompt:,} tokens"))
    for step in r.decode:
        rate = step.batch / step.tpot_s
        text = (
            f"{_time(step.tpot_s)} at {r.context:,} tokens of context: "
            f"{_size(step.bytes_read)} read, {step.bound} bound, {rate:,.0f} tokens/s"
        )
        lines.append((f"ideal TPOT, batch {step.batch}", text))
    if r.decode:
        lines.append(("MBU", "bytes read per step / (measured TPOT x bandwidth)"))
    if r.mbu is not None:
        lines.append(("MBU of the measured TPOT", f"{r.mbu:.1%}"))
    ranks = RANKS if several else None
    for name, text in (("note", r.note), ("ranks", ranks), ("refused by Baton", r.refused)):
        lines += [(name, text)] if text else []
    return lines


def _kv_rows(r: Estimate, device: str) -> list[tuple[str, str]]:
    return [
        (f"KV per token{device}", f"{_size(r.kv_bytes_per_token)} as {r.kv_cache_dtype}"),
        (f"KV block{device}", f"{_size(r.block_bytes)} for {r.block_size} tokens"),
    ]


def _count(number: int) -> str:
    return f"{number:,} ({number / 1e9:.2f} B)"


def _size(num_bytes: float) -> str:
    for unit, power in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= power:
            return f"{num_bytes / power:,.2f} {unit}"
    return f"{num_bytes:,.0f} bytes"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f} ms" if seconds < 1 else f"{seconds:,.2f} s"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 2 for a refusal, else 0."""
    parser = argparse.ArgumentParser(
        prog="baton estimate",
        description="What a model needs, and the best that a machine could do with it. `baton "
        "estimate MODEL` is `baton estimate --model MODEL`.",
    )
    add_options(parser, EstimateOptions)
    asked = list(sys.argv[1:] if arguments is None else arguments)
    if asked and not asked[0].startswith("-"):
        asked.insert(0, "--model")
    try:
        given = parse(parser, asked)
        options = load(EstimateOptions, given, os.environ)
        result = sized(options)
    except (BatonError, OSError) as error:
        sys.stderr.write(f"baton estimate: {error}\n")
        return 2
    if options.json:
        sys.stdout.write(as_json(result) + "\n")
        return 0
    table = Table("", f"{result.model_type}", box=None, pad_edge=False)
    for name, value in rows(result):
        table.add_row(name, value)
    Console().print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
