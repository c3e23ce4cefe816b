"""A real engine that exports its prompts as a prefill node does, for the transfer benchmark.

This module also writes, in seconds, a model of Qwen3-0.6B's shape with random weights: only the
shape matters.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

from baton.engine.config import EngineConfig
from baton.engine.core.assembly import EngineParts, assemble, load_parts
from baton.engine.memory.kv_cache import MakeMemory
from baton.engine.state.interface import Task
from baton.protocol.errors import BatonError
from baton.protocol.handles import KVHandle
from baton.protocol.kv_spec import BlockLists
from baton.protocol.request import Request
from baton.protocol.sampling import SamplingParams
from bench.engine_kit import random_prompt
from kv_transfer.connector import Connector
from prefill_node.role import PrefillExports

DEMO_MODEL: Final = Path(__file__).resolve().parents[1] / "demo_model"
TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
# Qwen3-0.6B, but for the vocabulary: that is the demo model's, whose tokenizer comes along.
SHAPE: Final[dict[str, Any]] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "attention_bias": False,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}


def write_model(path: Path, **overrides: Any) -> Path:
    """Write a whole checkpoint of SHAPE into the folder `path`, and return that folder.

    `overrides` replace keys of its config.
    """
    config = {**SHAPE, **overrides}
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    for name in TOKENIZER_FILES:
        shutil.copy(DEMO_MODEL / name, path / name)
    generator = torch.Generator().manual_seed(0)
    # One long row of noise, from another offset in each tensor: drawing 400 million numbers anew
    # takes longer than the benchmark.
    noise = torch.randn(1 << 22, generator=generator).to(torch.bfloat16)
    weights: dict[str, torch.Tensor] = {}
    for index, (name, shape) in enumerate(_shapes(config).items()):
        if len(shape) == 1:
            weights[name] = torch.ones(shape, dtype=torch.bfloat16)
            continue
        size = shape[0] * shape[1]
        repeated = noise.roll(index * 4099).repeat(-(-size // noise.numel()))[:size]
        weights[name] = (repeated * shape[1] ** -0.5).view(shape)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        shapes |= {
            f"{name}input_layernorm.weight": (hidden,),
            f"{name}post_attention_layernorm.weight": (hidden,),
            f"{name}self_attn.q_proj.weight": (query, hidden),
            f"{name}self_attn.k_proj.weight": (kv, hidden),
            f"{name}self_attn.v_proj.weight": (kv, hidden),
            f"{name}self_attn.o_proj.weight": (hidden, query),
            f"{name}self_attn.q_norm.weight": (config["head_dim"],),
            f"{name}self_attn.k_norm.weight": (config["head_dim"],),
            f"{name}mlp.gate_proj.weight": (inner, hidden),
            f"{name}mlp.up_proj.weight": (inner, hidden),
            f"{name}mlp.down_proj.weight": (hidden, inner),
        }
    return shapes


@dataclass(frozen=True, slots=True)
class PrefillTimes:
    """Three times on the machine's monotonic clock.

    They are: the first step began, the KV of the last layer was written, token 1 was sampled.
    """

    began: float
    last_layer: float
    ended: float


class PrefillEngine:
    """One engine, which computes one prompt at a time on a thread.

    The prefill node's hooks export the prompts.
    """

    def __init__(self, parts: EngineParts) -> None:
        self.engine = assemble(parts, self)
        self._exports: PrefillExports | None = None
        self._running: asyncio.Future[PrefillTimes] | None = None
        self._admitted: asyncio.Future[KVHandle] | None = None
        self._last_layer_at = 0.0
        self._freed: list[BlockLists] = []

    @classmethod
    def load(cls, model: str, tokens: int, threads: int, memory: MakeMemory) -> PrefillEngine:
        """Load the engine for prompts of at most `tokens` tokens; `memory` makes its pool.

        Raises ConfigError.
        """
        blocks = -(-tokens // 32)
        config = EngineConfig(
            model, block_size=32, num_kv_blocks=4 * blocks, threads=threads,
            enable_prefix_caching=False,
        )  # fmt: skip
        return cls(load_parts(config, memory))

    def attach(self, connector: Connector) -> None:
        """Export from now on through `connector`, whose memory is this engine's arena."""
        self._exports = PrefillExports(connector, self._exported, self._lost)

    def unpin(self, blocks: BlockLists) -> None:
        """Free the blocks of an export; the next prompt may use them. Any thread may call this."""
        self._freed.append(blocks)

    # ---- EngineHooks -----------------------------------------------------------------------------
    def may_admit(self, num_tokens: int, num_pending: int) -> bool:
        return True  # one prompt at a time

    def admitted(self, request: Request, blocks: BlockLists, num_tokens: int) -> None:
        assert self._exports is not None, "attach a connector first"
        self._exports.admitted(request, blocks, num_tokens)

    def layer_written(self, layer: int, progress: Sequence[tuple[str, int]]) -> None:
        assert self._exports is not None, "attach a connector first"
        self._last_layer_at = time.monotonic()
        self._exports.layer_written(layer, progress)

    def _exported(self, request: Request, handle: KVHandle) -> None:
        assert self._admitted is not None, "a prompt was begun"
        self._admitted.get_loop().call_soon_threadsafe(self._admitted.set_result, handle)

    def _lost(self, request: Request, error: BatonError) -> None:
        self.engine.abort(request.id)
        assert self._admitted is not None, "a prompt was begun"
        if not self._admitted.done():
            self._admitted.get_loop().call_soon_threadsafe(self._admitted.set_exception, error)

    # ---- one prompt ------------------------------------------------------------------------------
    async def begin(self, seed: int, tokens: int) -> KVHandle:
        """Start to compute a prompt; return its handle as soon as the export exists.

        That is before the first layer is computed.
        """
        prompt = random_prompt(tokens, seed, self.engine.info.vocab_size)
        params = SamplingParams(max_tokens=4, seed=1, temperature=0, ignore_eos=True)
        loop = asyncio.get_running_loop()
        self._admitted = loop.create_future()
        request = Request(f"bench-{seed}", tuple(prompt), params)
        self._running = loop.run_in_executor(None, self._compute, request)
        await asyncio.wait({self._admitted, self._running}, return_when=asyncio.FIRST_COMPLETED)
        if not self._admitted.done():
            await self._running  # raises why it has ended without an export
        return await self._admitted

    async def ended(self) -> PrefillTimes:
        """Wait for token 1 and return the times."""
        assert self._running is not None, "begin a prompt first"
        return await self._running

    def _compute(self, request: Request) -> PrefillTimes:
        assert self._exports is not None, "attach a connector first"
        while self._freed:
            self.engine.unpin(self._freed.pop())
        began = time.monotonic()
        self.engine.add(request, Task.PREFILL)
        while self.engine.has_work:
            for event in self.engine.step():
                self._exports.complete(event.request_id, (event,))
        return PrefillTimes(began, self._last_layer_at, time.monotonic())
