"""The seams inside the engine: between scheduler, runner, pool and their callers.

engine.step() = plan -> run -> finish:
    Scheduler.schedule() -> StepPlan              (pure Python: sequence -> number of tokens)
    Runner.run(chunks)   -> list[ChunkResult]     (torch: samples a token where a chunk asks for it)
    Outputs.take(...)    -> list[TokenEvent]
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from baton.engine.state.images import PromptImages
from baton.engine.state.occurrences import Occurrences
from baton.guided.guide import Guide
from baton.protocol.events import TokenLogprob
from baton.protocol.kv_spec import BlockLists, LayerSpec
from baton.protocol.request import Request
from baton.protocol.sampling import SamplingParams

NO_SLOT: Final = -1  # state slot of a sequence that holds no recurrent state


class Task(enum.Enum):
    """What this engine does with a request."""

    LOCAL = "local"  # prefill and decode here
    PREFILL = (
        "prefill"  # whole prompt reserved, never preempted; ends after one sampled token; exported
    )


@dataclass(frozen=True, slots=True)
class SequenceChunk:
    """The work of one step for one sequence.

    Tokens [start, start + len(token_ids)) are computed; the KV of [0, start) is in `blocks`
    already. `blocks` has a list per layer group. The lists cover start + len(token_ids) tokens,
    except the first blocks that a group's layers no longer see. `sample` is None unless the chunk
    reaches the last known token. If it is set, a token is sampled for output index `position`, with
    noise keyed by (params.seed, sample_index, position).

    `num_drafts` > 0 (speculation): the last `num_drafts` of token_ids are proposals, not known
    tokens. A token is sampled at each of the last num_drafts + 1 positions, for output indices
    position, position + 1, ...; proposal i is accepted iff it equals the token sampled for its
    position. `num_candidates` > 0 (beam search): no token is drawn; that many most probable tokens
    are found. `fan_out`: if not empty, one token is drawn behind the last known one for each of
    these sample indices, and none for sample_index. `history` holds all known tokens, prompt first
    (`num_prompt` of them), without drafts; penalties, bad words and prompt logprobs need it.
    `occurrences` has the counts of `history` from earlier steps; None means to count anew. `guide`
    follows the output through params.guided; None means no grammar. `prompt_logprobs` is
    params.prompt_logprobs, set in every chunk of a prompt (`sample` in the last chunk only): the
    number of alternatives for each prompt token that the chunk predicts. `state_slot` has the
    recurrent state behind `start`, in a model that keeps one. `images` are those of the prompt.
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
    state_slot: int = NO_SLOT
    occurrences: Occurrences | None = field(default=None, compare=False, repr=False)
    guide: Guide | None = field(default=None, compare=False, repr=False)
    images: PromptImages | None = field(default=None, compare=False, repr=False)

    @property
    def rows_read(self) -> int:
        """The number of its last rows whose hidden states are read, for logits."""
        if self.prompt_logprobs is not None:
            return len(self.token_ids)
        if self.sample is None:
            return 0
        return 1 if self.fan_out else self.num_drafts + 1


@dataclass(frozen=True, slots=True)
class Sampled:
    """What one chunk with `sample` set yields.

    `token_ids` is the sampled token. With drafts it is the accepted ones and the first sampled
    token that differs from its draft. With `fan_out` it is one token for each of those samples.
    `logprobs[i]` belongs to token_ids[i]: the token itself first, then the best alternatives. It is
    empty unless params.logprobs is set. `candidates` is the result for a beam, best first; then
    token_ids is empty. `drafts`: what the model's draft head guesses behind token_ids.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    candidates: tuple[TokenLogprob, ...] = ()
    drafts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """A chunk's result. `sampled` is None unless the chunk's `sample` is set.

    `prompt_logprobs[i]` is about prompt token `start + 1 + i`, given all tokens before it. It is
    filled if the chunk's prompt_logprobs is set, for the prompt positions that this chunk computed.
    """

    sampled: Sampled | None = None
    prompt_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the rest of the engine and the nodes need to know of a loaded model."""

    name: str
    digest: str  # hash over the config and the names, sizes, headers and contents of weight files
    layers: tuple[LayerSpec, ...]
    rope: str  # canonical text of the RoPE rule, for the layout fingerprint
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    kv_dtype: str  # "float32" | "bfloat16" | "float16"
    model_impl: str  # "lean" | "transformers"
    adapters: tuple[str, ...] = ()  # ids of the LoRA adapters that requests may ask for
    generates: bool = True  # False for a classifier and for an encoder
    encodes: bool = False  # an encoder: it keeps no KV
    dtype: str = ""  # the dtype in which it computes; "" = kv_dtype
    sees: bool = False  # it reads images
    outputs_differ: bool = False  # a prompt's token has other KV than the same token as output

    @property
    def kv_token_bytes(self) -> int:
        """Return the bytes of one token's KV, scales included, as a transfer sends it."""
        dtype = self.kv_dtype
        return sum(layer.token_bytes(dtype) + layer.scale_bytes(dtype) for layer in self.layers)

    @property
    def precision(self) -> str:
        """Return the dtypes that nodes must share so that they give the same tokens for a
        request.
        """
        same = self.dtype in ("", self.kv_dtype)
        return self.kv_dtype if same else f"{self.dtype}, KV {self.kv_dtype}"


class Runner(Protocol):
    """Runs the model on a batch of chunks.

    Implemented by baton/engine/running/runner.py, faked in tests.
    """

    def run(
        self, chunks: Sequence[SequenceChunk], on_layer: Callable[[int], None] | None = None
    ) -> list[ChunkResult]:
        """Run the model and return one result per chunk, in order.

        Writes the chunks' KV and states into the arena. `on_layer(layer)` is called on this thread
        after the KV and the states of that layer have been written for all chunks (on a GPU:
        enqueued on the current stream).
        """
        ...


@dataclass(frozen=True, slots=True)
class Reservation:
    """Blocks held for a prompt whose KV arrives from elsewhere.

    `blocks` has a list per layer group. The lists cover `num_tokens` tokens in order, except blocks
    that a windowed group will never see. Tokens [0, start_token) are already there (prefix hit), so
    only [start_token, num_tokens) must be written before `Engine.add(request, reservation=...)`; in
    a windowed group only those from first_visible() on. In a model that keeps recurrent state, the
    state behind `num_tokens` tokens must be written as well, into the slot that `blocks` name.
    `precision` says in which precision the KV was made, None if in that of the pool. Its blocks are
    prefix hits only at that precision.

    `adopting`: the full blocks stay in another node's pool, and `Engine.add` needs the ids of all
    blocks (adoption.py). Then only the block after the full ones is held here, and nothing must be
    written.
    """

    request_id: str
    blocks: BlockLists
    num_tokens: int
    start_token: int
    serial: int = 0  # a number that no other reservation of this engine has
    precision: str | None = None
    adopting: bool = False


class EngineHooks(Protocol):
    """What a prefill node adds to its engine. Called on the engine thread; must not block."""

    def may_admit(self, num_tokens: int, num_pending: int) -> bool:
        """Whether an export of `num_tokens` tokens has room now, in addition to `num_pending`
        tokens.

        The `num_pending` tokens are those that this step is about to export. If the answer is
        False, the PREFILL request and all requests behind it wait until Engine.unpin() lets the
        engine ask again. It must be True for a single export with nothing pending.
        """
        ...

    def admitted(self, request: Request, blocks: BlockLists, num_tokens: int) -> None:
        """Take note that a PREFILL request got its blocks, except prefix hits that no layer will
        see.

        The engine has pinned the blocks, and the slot of the recurrent state if there is one, once
        for the export; `Engine.unpin` releases them.
        """
        ...

    def layer_written(self, layer: int, progress: Sequence[tuple[str, int]]) -> None:
        """Take note that `layer` has KV up to token `upto` of each PREFILL request here: (id,
        upto).
        """
        ...
