"""SequenceState: one request inside the engine. Mutable; the scheduler alone writes it, but for its
tokens, which the engine appends.

    tokens   [ prompt ............ | output ......... ]     all known tokens
             0                  num_prompt        len(tokens)
    KV       [ computed ...... ) [ to compute ........ )    at least one, while it runs
             0          num_computed
    blocks   cover every computed token; the first `num_registered` of them are in the prefix map

There are no phases: a sequence with one token to compute decodes, one with more prefills.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton import block_hashes
from baton.engine.interface import SequenceChunk, Task
from baton.request import FinishReason, Request


@dataclass(eq=False, slots=True)
class SequenceState:
    """State of one sample (index 0) of one request. `order` counts arrivals in this engine."""

    request: Request
    task: Task
    order: int
    root: bytes
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_registered: int = 0
    num_cached_tokens: int = 0  # prompt tokens that the first admission found in the prefix map
    num_prefill_chunks: int = 0  # of the prefill under way
    prefilling: bool = True  # from an admission with more than one token to compute to its sample
    admitted_before: bool = False  # it was preempted: it has precedence and is counted once
    dropped: bool = False  # aborted during a step: its sampled token is thrown away
    _hashes: list[bytes] = field(default_factory=list)

    @property
    def key(self) -> tuple[int, int]:
        """First come, first served within priority (lower runs first)."""
        return (self.request.priority, self.order)

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_outputs(self) -> int:
        """Output tokens known so far: the absolute output index of the next one."""
        return len(self.tokens) - self.num_prompt

    @property
    def num_uncomputed(self) -> int:
        return len(self.tokens) - self.num_computed

    def hashes(self, count: int, block_size: int) -> Sequence[bytes]:
        """Chained hashes of the first `count` blocks, all of them full of known tokens."""
        while len(self._hashes) < count:
            index = len(self._hashes)
            tokens = self.tokens[index * block_size : (index + 1) * block_size]
            parent = self._hashes[-1] if self._hashes else self.root
            self._hashes.append(block_hashes.chain(parent, tokens))
        return self._hashes[:count]

    def chunk(self, num_tokens: int) -> SequenceChunk:
        """Work for the next `num_tokens` tokens; samples if they reach the last known one."""
        end = self.num_computed + num_tokens
        last = end == len(self.tokens)
        return SequenceChunk(
            request_id=self.request.id,
            token_ids=self.tokens[self.num_computed : end],
            start=self.num_computed,
            blocks=self.blocks,
            sample=self.request.params if last else None,
            position=self.num_outputs if last else 0,
        )

    def finish(
        self, eos_token_ids: Sequence[int], max_len: int
    ) -> tuple[FinishReason | None, int | None]:
        """Whether the last known token ends the sample, and the stop id that does."""
        params = self.request.params
        if self.num_outputs > 0:
            token = self.tokens[-1]
            if token in params.stop_token_ids:
                return FinishReason.STOP, token
            if not params.ignore_eos and token in eos_token_ids:
                return FinishReason.STOP, token
            if self.num_outputs >= params.max_tokens or len(self.tokens) >= max_len:
                return FinishReason.LENGTH, None
        return None, None
