"""What `baton up` checks before anything starts: options, paths, and whether memory suffices.

Each of these errors would stop the start later, too, but in the log of some process.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from baton.engine.checkpoint.checkpoint import (
    Checkpoint,
    adapter_files,
    as_stored,
    open_checkpoint,
    parse_modules,
)
from baton.engine.checkpoint.kinds import GGUF_KEPT_BYTES
from baton.engine.checkpoint.weight_folder import FOLDER, LEAST_BYTES
from baton.engine.config import EngineConfig, parse_bytes
from baton.engine.memory.available_memory import available_memory
from baton.node.config import NodeConfig
from baton.protocol.errors import ConfigError
from baton.runtime.cache_folder import cache_folder, is_local
from baton.runtime.config import load
from baton.text.chat_template import ChatTemplate
from deploy.plan import (
    NO_TLS,
    UpOptions,
    computes_on_cpu,
    node_options,
    router_options,
)
from router.config import RouterConfig

_DTYPE_BYTES: Final = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}
_ROUNDED_BYTES: Final = {"int8": 1.0, "w8a8": 1.0, "int4": 0.5, "w4a8": 0.5}
SHM: Final = "shm"


def check_options(options: UpOptions, flags: Mapping[str, object]) -> None:
    """Raise ConfigError for options that router or nodes would refuse."""
    front = router_options(options, flags) | options.keys
    router = load(RouterConfig, front, os.environ)
    replace(router, workers=1).check()  # for several workers a Redis will be started
    router.admin_ring()  # reads both files of keys
    if router.tls is not None:
        router.tls.server_context()
    for role in ("prefill", "decode", "encode"):
        told = node_options(role, options, flags)
        load(NodeConfig, told, {**os.environ, **NO_TLS}).check()
        load(EngineConfig, told, os.environ)


def check_machine(options: UpOptions, flags: Mapping[str, object]) -> None:
    """Raise ConfigError for a path that does not exist, and for more than memory can hold."""
    told = node_options("decode", options, flags)
    node = load(NodeConfig, told, {**os.environ, **NO_TLS})
    engine = as_stored(load(EngineConfig, told, os.environ))
    check_paths(node, engine)
    router = load(RouterConfig, router_options(options, flags), os.environ)
    ChatTemplate.load(router.model, router.chat_template)
    if computes_on_cpu({"device": engine.device}):
        try:
            available = available_memory()
        except ConfigError:
            return  # the kernel does not report available memory, so nothing is checked
        check_memory(engine, options.num_prefill + options.decode, available)


def check_paths(node: NodeConfig, engine: EngineConfig) -> None:
    """Check model, draft model, adapters, and the folders of the lanes. Raises ConfigError."""
    open_checkpoint(engine.model)
    if engine.speculative_model is not None:
        open_checkpoint(engine.speculative_model, engine.speculative_method == "draft")
    for name, path in parse_modules(engine.lora_modules).items():
        adapter_files(name, path)
    folders = {"kv_unix_dir": node.kv_unix_dir}
    if SHM in node.kv_lanes.split(","):  # asked for by name: the node would not start without it
        folders["kv_shm_dir"] = node.kv_shm_dir
    for field, folder in folders.items():
        if folder is not None and not Path(folder).is_dir():
            flag = field.replace("_", "-")
            raise ConfigError(f"--{flag} {folder} is no folder", field=field)


def check_memory(engine: EngineConfig, nodes: int, available: int) -> None:
    """Raise ConfigError if `available` bytes are too few for weights and KV of `nodes` nodes.

    Each node has the KV that was asked for, and weights of its own unless the host holds them once.
    """
    checkpoint = open_checkpoint(engine.model)
    weights = weight_bytes(checkpoint, engine)
    asked = engine.kv_cache_memory
    kv = 0 if asked is None else parse_bytes(asked, field="kv_cache_memory")
    copies = 1 if held_once(checkpoint, weights, engine) else nodes
    needed = copies * weights + nodes * kv
    if needed <= available:
        return
    parts = f"{nodes} x ({_gb(weights)} of weights" + (f" + {_gb(kv)} of KV)" if kv else ")")
    if copies < nodes:
        parts = f"{_gb(weights)} of weights, held once, + {nodes} x {_gb(kv)} of KV"
    ways = [
        *(["fewer nodes"] if nodes > 1 and (copies > 1 or kv) else []),
        *(["--quantization int8"] if engine.quantization == "none" else []),
        *(["a smaller --kv-cache-memory"] if kv else []),
    ]
    advice = f"; try {', '.join(ways)}" if ways else ""
    raise ConfigError(
        f"{parts} = {_gb(needed)}, but only {_gb(available)} of memory are available{advice}",
        field="kv_cache_memory" if copies * weights <= available else "model",
    )


def held_once(checkpoint: Checkpoint, weights: int, engine: EngineConfig) -> bool:
    """Return whether all nodes of this host map one copy of `weights` bytes, as far as can be told
    before they start."""
    if not engine.shared_weights or checkpoint.stored_bytes < LEAST_BYTES:
        return False
    places = [FOLDER]
    with suppress(OSError):
        cache = cache_folder("weights")
        if engine.kept_weight_bytes != 0 and is_local(cache):
            places.append(next(each for each in cache.parents if each.is_dir()))
    try:
        return any(shutil.disk_usage(place).free >= weights for place in places)
    except OSError:
        return False


def weight_bytes(checkpoint: Checkpoint, engine: EngineConfig) -> int:
    """Return a lower bound of the bytes of the weights in memory, by the files' sizes."""
    stored = checkpoint.stored_bytes
    config: dict[str, Any] = checkpoint.text_config
    name = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    before = _DTYPE_BYTES.get(name)
    quantized: dict[str, Any] = checkpoint.config.get("quantization_config") or {}
    types: dict[str, int] = quantized.get("types") or {}  # a GGUF file's, by numbers
    if before is None or (quantized and not types):
        return 0 if engine.quantization in _ROUNDED_BYTES else stored
    after = before if engine.dtype == "auto" else _DTYPE_BYTES[engine.dtype]
    if types and engine.quantization == "none" and engine.model_impl != "transformers":
        return _kept_bytes(config, quantized, after)
    numbers = sum(types.values()) or stored / before
    return int(numbers * _ROUNDED_BYTES.get(engine.quantization, after))


def _kept_bytes(config: dict[str, Any], quantized: dict[str, Any], after: float) -> int:
    """Of a GGUF file whose products keep their integers; its table is widened, beside the head
    that is tied to it."""
    types: dict[str, int] = quantized["types"]
    kept = sum(count * GGUF_KEPT_BYTES.get(kind, after) for kind, count in types.items())
    embedding = quantized["embedding"]
    if embedding in GGUF_KEPT_BYTES:
        head = GGUF_KEPT_BYTES[embedding] * (not config["tie_word_embeddings"])
        kept += config["vocab_size"] * config["hidden_size"] * (after - head)
    return int(kept)


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
