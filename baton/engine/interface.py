"""The seams inside the engine: values and protocols between scheduler, runner, pool and whoever
drives them.

engine.step() = schedule -> run -> postprocess:
    Scheduler.schedule() -> list[SequenceChunk]   (pure Python: request -> number of tokens)
    Runner.run(chunks)   -> list[int | None]      (torch: one sampled token per chunk that ends at
    its known tokens)
    Engine postprocess   -> list[TokenEvent]
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.kv_spec import LayerSpec
from baton.request import Request
from baton.sampling import SamplingParams


class Task(enum.Enum):
    """What this engine does with a request."""

    LOCAL = "local"  # prefill and decode here
    PREFILL = (
        "prefill"  # whole prompt reserved, never preempted; ends after one sampled token; exported
    )


@dataclass(frozen=True, slots=True)
class SequenceChunk:
    """Work of one step for one sequence.

    Tokens [start, start + len(token_ids)) are computed; KV of [0, start) is in `blocks` already.
    `blocks` covers start + len(token_ids) tokens. `sample` is None unless the chunk reaches the
    last known
    token; then one token is sampled for output index `position`, keyed by (params.seed,
    sample_index, position).
    """

    request_id: str
    token_ids: Sequence[int]
    start: int
    blocks: Sequence[int]
    sample: SamplingParams | None = None
    position: int = 0
    sample_index: int = 0


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What everybody else needs to know of a loaded model."""

    name: str
    digest: str  # over config and weight files' headers and bytes (cheap but content-bound)
    layers: tuple[LayerSpec, ...]
    rope: str  # canonical text of the RoPE rule, for the layout fingerprint
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    kv_dtype: str  # "float32" | "bfloat16" | "float16"
    model_impl: str  # "lean" | "transformers"


class Runner(Protocol):
    """Runs the model on a batch of chunks. Implemented by baton/engine/runner.py, faked in
    tests."""

    def run(
        self, chunks: Sequence[SequenceChunk], on_layer: Callable[[int], None] | None = None
    ) -> list[int | None]:
        """One token per chunk with `sample` set, None for the others, in order.

        Writes the chunks' KV into the arena. `on_layer(layer)` is called on this thread after the
        KV of
        that layer has been written for all chunks (on a GPU: enqueued on the current stream).
        """
        ...


@dataclass(frozen=True, slots=True)
class Reservation:
    """Blocks held for a prompt whose KV arrives from elsewhere.

    `blocks` cover `num_tokens` tokens, in order; tokens [0, start_token) are already there (prefix
    hit), so
    only [start_token, num_tokens) must be written before `Engine.add(request, reservation=...)`.
    """

    request_id: str
    blocks: tuple[int, ...]
    num_tokens: int
    start_token: int
    serial: int = 0  # of this engine: no two reservations are the same


class EngineHooks(Protocol):
    """What a prefill node hangs into its engine. Called on the engine thread; must not block."""

    def admitted(self, request: Request, blocks: tuple[int, ...], num_tokens: int) -> None:
        """A PREFILL request got all its blocks. The engine pinned them once for the export;
        `Engine.unpin` undoes it."""
        ...

    def layer_written(self, layer: int, progress: Sequence[tuple[str, int]]) -> None:
        """KV of `layer` now holds tokens [0, upto) of each PREFILL request of this step: (request
        id, upto)."""
        ...
