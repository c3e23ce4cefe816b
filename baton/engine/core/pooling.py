"""Embeddings and reranking: hidden states of prompts instead of tokens, over the same paged pool.

The life of a PoolingJob:
    admit   a prompt takes blocks for all its tokens, pinned, while the step has tokens left
    step    one forward over chunks of the admitted prompts, at most max_num_batched_tokens
    end     a prompt's last chunk gave its vector: its blocks are free at once
A job never waits and is no request: its blocks are temporary, unknown to the prefix map, and one
block per running request stays free for its growth. Whoever owns the engine's thread alternates
job.step() with engine.step(), or calls run(). At most a step's tokens and the longest prompt are
held at once, so no more than that is evicted of what the pool has cached.
    last    hidden state of the last token      mean    of all tokens, averaged in float32
    rerank  softmax over the logits of "no" and "yes" after the last token
Source: Qwen3-Embedding and Qwen3-Reranker (arXiv 2506.05176); prompts: baton/text/reranking.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.loading.loading import LoadedModel
from baton.engine.memory.block_pool import BlockPool
from baton.engine.memory.kv_cache import KVArena
from baton.engine.running.attention_choice import choose_attention
from baton.engine.state.batch import flatten
from baton.engine.state.interface import SequenceChunk
from baton.protocol.errors import (
    ContextLengthExceeded,
    InternalError,
    InvalidRequest,
    Overloaded,
)
from baton.protocol.handles import NodeLoad
from baton.protocol.kv_spec import BlockLists, HeldBlocks

PoolingKind = Literal["last", "mean"]


class PoolOwner(Protocol):
    """What a job needs of the engine: its blocks, and how many requests run."""

    @property
    def pool(self) -> BlockPool:
        """The pool of the prompts' blocks."""
        ...

    def pin(self, blocks: BlockLists) -> None:
        """Add a reference to each block."""
        ...

    def unpin(self, blocks: BlockLists) -> None:
        """Undo one pin."""
        ...

    def current_load(self) -> NodeLoad:
        """Return the load, which has the number of running requests."""
        ...


class Pooler:
    """The model and the arena, for computing hidden states of prompts. Keeps no state."""

    def __init__(
        self, model: LoadedModel, arena: KVArena, max_num_batched_tokens: int, max_num_seqs: int
    ) -> None:
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self._model = model
        self.windows = arena.groups.windows
        self._block_size = arena.block_size
        self._attention = choose_attention(model, arena)

    @property
    def vocab_size(self) -> int:
        return self._model.info.vocab_size

    @property
    def max_model_len(self) -> int:
        return self._model.info.max_model_len

    @property
    def num_classes(self) -> int:
        """The number of a classifier's classes; 0 = the model is no classifier."""
        head = self._model.classifier
        return 0 if head is None else head.shape[0]

    @torch.inference_mode()
    def forward(self, chunks: Sequence[SequenceChunk]) -> list[Tensor]:
        """Return hidden states of each chunk, [its tokens, H]; write its KV into the arena."""
        device = self._model.device
        step = flatten(chunks, self._attention, self._block_size, device)
        hidden = self._model.forward(step.token_ids, step.positions, step.batch)
        return list(hidden.split([span.num_rows for span in step.batch.spans]))

    @torch.inference_mode()
    def yes_probability(self, hidden: Tensor, yes: int, no: int) -> Tensor:
        """hidden [N, H] float32 -> [N] float32: the probability of `yes` in the softmax over both
        ids' logits.
        """
        logits = self._model.logits(hidden.to(self._model.dtype))
        return logits[:, [no, yes]].softmax(-1)[:, 1]

    @torch.inference_mode()
    def class_logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] float32 -> [N, classes] float32."""
        head = self._model.classifier
        assert head is not None, "whoever asks has looked at num_classes"
        return functional.linear(hidden.to(head.dtype), head).float()


@dataclass(eq=False, slots=True)
class _Prompt:
    """A prompt under way: tokens [0, done) are computed. `total`: the sum of hidden states (for
    mean).
    """

    index: int
    token_ids: Sequence[int]
    blocks: list[HeldBlocks]
    done: int = 0
    total: Tensor | None = None


class PoolingJob:
    """Computes vectors of some prompts.

    It is made and stepped on the engine's thread; call close() when it is given up.
    """

    def __init__(
        self,
        owner: PoolOwner,
        pooler: Pooler,
        prompts: Sequence[Sequence[int]],
        kind: PoolingKind = "last",
        adapter: str = "",
    ) -> None:
        """Raises InvalidRequest, or ContextLengthExceeded for a prompt that can never fit."""
        self._owner = owner
        self._pooler = pooler
        # the most tokens of one forward; may be lowered
        self.most_tokens = pooler.max_num_batched_tokens
        self._kind = kind
        self._adapter = adapter
        self._prompts = prompts
        self._next = 0
        self._active: list[_Prompt] = []
        self._vectors: dict[int, Tensor] = {}
        for token_ids in prompts:
            self._validate(token_ids)

    @property
    def done(self) -> bool:
        return len(self._vectors) == len(self._prompts)

    def run(self, ended: Callable[[int], object] = lambda _: None) -> Tensor:
        """Step to the end; return [prompts, H] float32.

        `ended` is called after each step with the number of prompts that it ended. Raises
        Overloaded if requests hold all blocks.
        """
        try:
            while not self.done:
                before = len(self._vectors)
                if not self.step():
                    raise Overloaded("running requests hold the KV blocks that pooling needs")
                ended(len(self._vectors) - before)
        finally:
            self.close()
        return self.vectors()

    def vectors(self) -> Tensor:
        """Return [prompts, H] float32, in the prompts' order, on the model's device."""
        if not self.done:
            raise InternalError("a pooling job is asked for vectors before its end")
        return torch.stack([self._vectors[index] for index in range(len(self._prompts))])

    def step(self) -> bool:
        """Do one forward. Return False, and change nothing, if no prompt can have blocks."""
        planned = self._plan()
        if not planned:
            return False
        chunks = [
            SequenceChunk(
                request_id=f"pooling-{prompt.index}",
                token_ids=prompt.token_ids[prompt.done : prompt.done + count],
                start=prompt.done,
                blocks=tuple(prompt.blocks),
                adapter=self._adapter,
            )
            for prompt, count in planned
        ]
        hidden = self._pooler.forward(chunks)
        for (prompt, count), rows in zip(planned, hidden, strict=True):
            prompt.done += count
            self._collect(prompt, rows)
        return True

    def close(self) -> None:
        """Free every block; the job cannot go on. Idempotent."""
        for prompt in self._active:
            self._owner.unpin(tuple(prompt.blocks))
        self._active = []

    # ---- inside ----

    def _validate(self, token_ids: Sequence[int]) -> None:
        if not token_ids:
            raise InvalidRequest("a prompt is empty", field="prompt")
        vocab_size = self._pooler.vocab_size
        if min(token_ids) < 0 or max(token_ids) >= vocab_size:
            raise InvalidRequest(
                f"token ids must be at least 0 and below {vocab_size}", field="prompt"
            )
        pool = self._owner.pool
        in_pool = pool.num_blocks // len(self._pooler.windows) * pool.block_size
        limit = min(self._pooler.max_model_len, in_pool)
        if len(token_ids) > limit:
            raise ContextLengthExceeded(
                f"a prompt has {len(token_ids)} tokens; the limit is {limit}", field="prompt"
            )

    def _plan(self) -> list[tuple[_Prompt, int]]:
        """Return (prompt, tokens) of the next forward; admit prompts while tokens and
        blocks last.
        """
        budget = self.most_tokens
        planned: list[tuple[_Prompt, int]] = []
        for prompt in self._active:
            count = min(budget, len(prompt.token_ids) - prompt.done)
            if count:
                planned.append((prompt, count))
                budget -= count
        while budget and self._next < len(self._prompts):
            if len(self._active) >= self._pooler.max_num_seqs:
                break
            admitted = self._admit()
            if admitted is None:
                break
            count = min(budget, len(admitted.token_ids))
            planned.append((admitted, count))
            budget -= count
        return planned

    def _admit(self) -> _Prompt | None:
        token_ids = self._prompts[self._next]
        pool = self._owner.pool
        count, num_groups = pool.blocks_for(len(token_ids)), len(self._pooler.windows)
        if pool.num_free - count * num_groups < self._owner.current_load().running * num_groups:
            return None
        blocks = pool.allocate(count * num_groups)
        if blocks is None:
            return None
        # The allocation's reference becomes a pin: the engine can account for it at any moment.
        held = [HeldBlocks(blocks[at : at + count]) for at in range(0, len(blocks), count)]
        self._owner.pin(tuple(held))
        pool.unref(blocks)
        prompt = _Prompt(self._next, token_ids, held)
        self._active.append(prompt)
        self._next += 1
        return prompt

    def _collect(self, prompt: _Prompt, rows: Tensor) -> None:
        """Take hidden states `rows` [n, H] of the prompt's next tokens; its last ones end the
        prompt.
        """
        if self._kind == "mean":
            added = rows.float().sum(0)
            prompt.total = added if prompt.total is None else prompt.total + added
        if prompt.done < len(prompt.token_ids):
            self._free_invisible(prompt)
            return
        if prompt.total is not None:
            self._vectors[prompt.index] = prompt.total / len(prompt.token_ids)
        else:
            self._vectors[prompt.index] = rows[-1].float()
        self._active.remove(prompt)
        self._owner.unpin(tuple(prompt.blocks))

    def _free_invisible(self, prompt: _Prompt) -> None:
        """Give back the blocks that a window has left behind."""
        for group, window in enumerate(self._pooler.windows):
            held = prompt.blocks[group]
            seen = max(0, prompt.done - window + 1) // self._owner.pool.block_size
            count = min(seen - held.first, len(held.ids) - 1)
            if window and count > 0:
                self._owner.unpin((HeldBlocks(held.ids[:count]),))
                prompt.blocks[group] = HeldBlocks(held.ids[count:], held.first + count)


def normalized(vectors: Tensor) -> Tensor:
    """Scale [N, H] to vectors of length 1, whose products are cosines."""
    return functional.normalize(vectors, dim=-1)
