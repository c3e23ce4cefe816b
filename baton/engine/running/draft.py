"""DraftModelProposer: a small model guesses the next tokens of a large one, with the same noise.

The draft model samples as the target will: with the same params, seed, sample, position, and noise
keyed by vocabulary id. Where the distributions of the two models agree, both choose the same token.
So far more guesses are accepted than with independent draws.

The life of a branch (one sample of one request) in the draft's own pool:
    first ask   -> it gets blocks; its history is computed, over several calls if it is long (no
                   guesses until it is complete)
    each ask    -> KV that does not match the history (rejected guesses) is dropped, missing KV is
                   computed, guesses are drawn step by step, for all branches together
    forget()    -> its blocks are freed; this also happens to the least recently asked branch when
                   others need room
The draft has its own pool: no guess ever uses a block of the target. Both pools are sized together
(sizing.py), so that the draft's pool has room for each token of the target's.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from baton.engine.config import DEFAULT_BLOCK_SIZE
from baton.engine.loading.loading import LoadedModel
from baton.engine.memory.block_pool import BlockPool
from baton.engine.memory.kv_cache import KVArena
from baton.engine.memory.layer_groups import one_group
from baton.engine.running.runner import ModelRunner
from baton.engine.sampling.proposer import DraftAsk
from baton.engine.state.interface import ModelInfo, SequenceChunk
from baton.protocol.errors import ConfigError
from baton.protocol.kv_spec import HeldBlocks
from baton.protocol.sampling import SamplingParams

DEFAULT_BATCHED_TOKENS: Final = 2048


@dataclass(slots=True)
class _Branch:
    """One sample of one request.

    `tokens` are those whose KV is in `blocks`. The first `known` of them were history, not guesses,
    at the last ask.
    """

    blocks: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    known: int = 0

    def rewind(self, history: Sequence[int]) -> None:
        """Keep the tokens that are a proper prefix of `history`; its last token is always
        recomputed.
        """
        count = min(len(self.tokens), len(history) - 1)
        same = min(self.known, count)
        if self.tokens[:same] != list(history[:same]):
            same = 0
        while same < count and self.tokens[same] == history[same]:
            same += 1
        del self.tokens[same:]
        self.known = same


@dataclass(slots=True)
class _Guess:
    """An ask in progress. `tokens` is its history, followed by the guesses so far."""

    ask: DraftAsk
    branch: _Branch
    params: SamplingParams
    limit: int
    tokens: list[int]

    @property
    def guesses(self) -> list[int]:
        return self.tokens[len(self.ask.history) :]

    @property
    def num_guesses(self) -> int:
        return len(self.tokens) - len(self.ask.history)

    def chunk(self, num_tokens: int) -> SequenceChunk:
        """Return a chunk of the next `num_tokens` tokens; it draws a guess if it reaches the last
        one.
        """
        start = len(self.branch.tokens)
        end = start + num_tokens
        return SequenceChunk(
            request_id=self.ask.request_id,
            token_ids=self.tokens[start:end],
            start=start,
            blocks=(HeldBlocks(self.branch.blocks),),
            sample=self.params if end == len(self.tokens) else None,
            position=self.ask.position + self.num_guesses,
            sample_index=self.ask.sample_index,
            history=self.tokens,
            num_prompt=len(self.ask.history) - self.ask.position,
        )


class DraftModelProposer:
    """Implements proposer.Proposer with a model, an arena and a block pool of its own."""

    def __init__(
        self,
        loaded: LoadedModel,
        target: ModelInfo,
        pool_tokens: int,
        block_size: int = DEFAULT_BLOCK_SIZE["cpu"],
        max_batched_tokens: int = DEFAULT_BATCHED_TOKENS,
    ) -> None:
        """Make a pool for the draft model and a runner over it.

        `pool_tokens`: tokens of KV over all branches; the number of the target's pool always
        suffices. `max_batched_tokens`: the most history tokens that one propose() computes.

        Raises ConfigError if the two models do not share a vocabulary.
        """
        info = loaded.info
        if info.vocab_size != target.vocab_size:
            raise ConfigError(
                f"the draft model {info.name} has a vocabulary of {info.vocab_size} tokens, "
                f"{target.name} has {target.vocab_size}: they must share one",
                field="speculative_model",
            )
        num_blocks = max(1, -(-pool_tokens // block_size))
        # One group without windows, because a rejected guess may rewind a branch to any token.
        groups = one_group(info.layers)
        arena = KVArena(groups, num_blocks, block_size, info.kv_dtype, loaded.device)
        self._pool = BlockPool(num_blocks, block_size, enable_prefix_caching=False)
        self._runner = ModelRunner(loaded, arena)
        self._max_len = info.max_model_len
        self._eos_token_ids = target.eos_token_ids
        self._max_batched_tokens = max_batched_tokens
        # In order of the last ask, oldest first.
        self._branches: OrderedDict[tuple[str, int], _Branch] = OrderedDict()

    @property
    def pool(self) -> BlockPool:
        """Return the block pool; for checks and metrics."""
        return self._pool

    def propose(self, asks: Sequence[DraftAsk]) -> list[list[int]]:
        """See Proposer.propose. It runs the draft model at most max(max_drafts) times."""
        keys = {(ask.request_id, ask.sample_index) for ask in asks}
        guesses = [self._begin(ask, keys) for ask in asks]
        active = [guess for guess in guesses if guess is not None]
        work = self._catch_up(active)
        while work:
            results = self._runner.run([chunk for _, chunk in work])
            drawn: list[_Guess] = []
            for (guess, chunk), result in zip(work, results, strict=True):
                guess.branch.tokens.extend(chunk.token_ids)
                if result.sampled is not None:
                    guess.tokens.append(result.sampled.token_ids[0])
                    drawn.append(guess)
            work = [(guess, guess.chunk(1)) for guess in drawn if not self._done(guess)]
        return [
            [] if guess is None else guess.tokens[len(guess.ask.history) :] for guess in guesses
        ]

    def forget(self, request_id: str) -> None:
        """See Proposer.forget."""
        for key in [key for key in self._branches if key[0] == request_id]:
            self._pool.unref(self._branches.pop(key).blocks)

    def check(self) -> None:
        """Prove that every used block belongs to exactly one branch. Raises InternalError."""
        branches = self._branches.values()
        self._pool.check(Counter(block for branch in branches for block in branch.blocks))

    def _begin(self, ask: DraftAsk, keys: set[tuple[str, int]]) -> _Guess | None:
        """Allocate blocks for an ask's history and guesses; None if there is no room or no guess to
        make.
        """
        limit = min(ask.max_drafts, self._max_len - len(ask.history))
        if limit < 1:
            return None
        key = (ask.request_id, ask.sample_index)
        branch = self._branches.setdefault(key, _Branch())
        self._branches.move_to_end(key)
        branch.rewind(ask.history)
        missing = self._pool.blocks_for(len(ask.history) + limit - 1) - len(branch.blocks)
        if missing > 0:
            blocks = self._allocate(missing, keys)
            if blocks is None:
                return None
            branch.blocks.extend(blocks)
        params = ask.params
        if params.logprobs is not None:  # nobody reads the log probabilities of a guess
            params = replace(params, logprobs=None)
        return _Guess(ask, branch, params, limit, list(ask.history))

    def _allocate(self, count: int, keys: set[tuple[str, int]]) -> list[int] | None:
        """Allocate `count` blocks, if necessary from branches without a current ask; None if too
        few.
        """
        while self._pool.num_free < count:
            idle = next((key for key in self._branches if key not in keys), None)
            if idle is None:
                return None
            self._pool.unref(self._branches.pop(idle).blocks)
        return self._pool.allocate(count)

    def _catch_up(self, guesses: Sequence[_Guess]) -> list[tuple[_Guess, SequenceChunk]]:
        """Return chunks of the histories that lack KV, shortest first, within the token budget."""
        budget = self._max_batched_tokens
        work: list[tuple[_Guess, SequenceChunk]] = []
        for guess in sorted(guesses, key=lambda g: len(g.tokens) - len(g.branch.tokens)):
            count = min(budget, len(guess.tokens) - len(guess.branch.tokens))
            if count:
                work.append((guess, guess.chunk(count)))
                guess.branch.known = len(guess.branch.tokens) + count
                budget -= count
        return work

    def _done(self, guess: _Guess) -> bool:
        """Whether to stop guessing: the limit is reached, or the last guess would end the
        sample.
        """
        token = guess.tokens[-1]
        ends = token in guess.params.stop_token_ids or (
            not guess.params.ignore_eos and token in self._eos_token_ids
        )
        return ends or guess.num_guesses >= guess.limit
