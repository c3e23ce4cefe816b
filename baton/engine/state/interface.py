"""The seams inside the engine: between scheduler, runner, pool and whoever drives them.

engine.step() = plan -> run -> finish:
    Scheduler.schedule() -> StepPlan              (pure Python: request -> number of tokens)
    Runner.run(chunks)   -> list[ChunkResult]     (torch: tokens, where all known ones are computed)
    Outputs.take(...)    -> list[TokenEvent]
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from baton.engine.state.occurrences import Occurrences
from baton.guided.guide import Guide
from baton.protocol.events import TokenLogprob
from baton.protocol.kv_spec import BlockLists, LayerSpec
from baton.protocol.request import Request
from baton.protocol.sampling import SamplingParams


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
    `blocks`, a list per layer group, cover start + len(token_ids) tokens, but for a hole that the
    group's layers cannot see. `sample` is None unless the chunk reaches the
    last known token; then a token is sampled for output index `position`, keyed by
    (params.seed, sample_index, position).

    `num_drafts` > 0 (speculation): the last so many of token_ids are proposals, not known tokens;
    a token is sampled at each of the last num_drafts + 1 positions, for output indices position,
    position + 1, ...; proposal i stands iff it equals the token sampled for its position.
    `num_candidates` > 0 (beam search): no token is drawn, so many most probable ones are found.
    `fan_out`: of these samples, not of sample_index, a token each is drawn behind the last one.
    `history` holds all known tokens, prompt first (`num_prompt` of them), for whoever needs the
    past: penalties, bad words, prompt logprobs. It does not include drafts. `occurrences`: what was
    counted of it at earlier steps, kept by whoever keeps the sequence; None = counted anew.
    `guide`: follows the output through params.guided, kept like `occurrences`; None = unguided.
    `prompt_logprobs` is params.prompt_logprobs, set in every chunk of a prompt (`sample` in the
    last one only): so many alternatives for each prompt token that the chunk predicts.
    """

    request_id: str
    token_ids: Sequence[int]
    start: int
    blocks: BlockLists
    sample: SamplingParams | None = None
    position: int = 0
    sample_index: int = 0
    history: Sequence[int] = ()
    num_prompt: int = 0
    num_drafts: int = 0
    num_candidates: int = 0
    fan_out: tuple[int, ...] = ()
    adapter: str = ""
    prompt_logprobs: int | None = None
    occurrences: Occurrences | None = field(default=None, compare=False, repr=False)
    guide: Guide | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Sampled:
    """What one chunk with `sample` set yields.

    `token_ids`: the sampled token; with drafts, the accepted ones and the first that differs; with
    `fan_out`, that of each of its samples.
    `logprobs[i]` belongs to token_ids[i] (the token itself first, then the best alternatives);
    empty unless params.logprobs is set. `candidates`: beam search, best first, then token_ids is
    empty.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    candidates: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """A chunk's result: `sampled` iff its `sample` is set and it reached the end.

    `prompt_logprobs[i]` is about prompt token `start + 1 + i` (given all before it); filled when
    the chunk's prompt_logprobs is set, for the prompt positions that this chunk computed.
    """

    sampled: Sampled | None = None
    prompt_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()


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
    adapters: tuple[str, ...] = ()  # ids of the LoRA adapters that requests may ask for
    generates: bool = True  # a classifier does not
    dtype: str = ""  # what it computes in; as kv_dtype, if nothing is said

    @property
    def kv_token_bytes(self) -> int:
        """KV of one token, as it travels."""
        dtype = self.kv_dtype
        return sum(layer.token_bytes(dtype) + layer.scale_bytes(dtype) for layer in self.layers)

    @property
    def precision(self) -> str:
        """What models must have in common for each other's requests to come out alike."""
        same = self.dtype in ("", self.kv_dtype)
        return self.kv_dtype if same else f"{self.dtype}, KV {self.kv_dtype}"


class Runner(Protocol):
    """Runs the model on a batch of chunks.

    Implemented by baton/engine/running/runner.py, faked in tests.
    """

    def run(
        self, chunks: Sequence[SequenceChunk], on_layer: Callable[[int], None] | None = None
    ) -> list[ChunkResult]:
        """One result per chunk, in order.

        Writes the chunks' KV into the arena. `on_layer(layer)` is called on this thread after the
        KV of that layer has been written for all chunks (on a GPU: enqueued on the current stream).
        """
        ...


@dataclass(frozen=True, slots=True)
class Reservation:
    """Blocks held for a prompt whose KV arrives from elsewhere.

    `blocks`, a list per layer group, cover `num_tokens` tokens, in order, but for what a window's
    layers will never see; tokens [0, start_token) are already there (prefix hit), so only
    [start_token, num_tokens) must be written before `Engine.add(request, reservation=...)`, in a
    windowed group those from first_visible() on. `precision` is what the KV was made in, if not as
    the pool stores it: it answers only for requests of the same.

    `adopting`: the full blocks stay where they are, in another pool, and `Engine.add` wants the ids
    of all (adoption.py); only the block behind the full ones is held here, and nothing need be
    written.
    """

    request_id: str
    blocks: BlockLists
    num_tokens: int
    start_token: int
    serial: int = 0  # of this engine: no two reservations are the same
    precision: str | None = None
    adopting: bool = False


class EngineHooks(Protocol):
    """What a prefill node hangs into its engine. Called on the engine thread; must not block."""

    def may_admit(self, num_tokens: int, num_pending: int) -> bool:
        """Whether an export of so many tokens has room now, beside `num_pending` tokens that this
        step is about to export. If not, the PREFILL request waits, and all behind it:
        Engine.unpin() lets the engine ask again. Must be true for one alone."""
        ...

    def admitted(self, request: Request, blocks: BlockLists, num_tokens: int) -> None:
        """A PREFILL request got all its blocks, but for prefix hits that no layer will look at.

        The engine pinned them once for the export; `Engine.unpin` undoes it.
        """
        ...

    def layer_written(self, layer: int, progress: Sequence[tuple[str, int]]) -> None:
        """KV of `layer` is there up to token `upto` of each PREFILL request here: (id, upto)."""
        ...
