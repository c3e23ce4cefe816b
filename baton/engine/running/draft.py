"""DraftModelProposer: a small model guesses the next tokens of a large one, with the same noise.

It draws its guesses as the target will draw: same params, seed, sample, position, and noise keyed
by vocabulary id. Where the two models' distributions agree, the same token wins for both, so
guesses stand far more often than independent draws would.

The life of a branch (one sample of one request) in the draft's own pool:
    first ask   -> blocks; its history is computed, over several calls if it is long (meanwhile no
                   guesses)
    each ask    -> KV from where the history went another way (rejected guesses) is dropped, the
                   rest is computed, guesses are drawn step by step, all branches together
    forget()    -> its blocks are free; also if others need the room and it was not asked for lately
The pool is its own: no guess ever meets a block of the target. Both pools are sized together
(memory.py), so that each token of the target's has its place in the draft's.
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
    """One sample of one request: `tokens` are those whose KV is in `blocks`; the first `known` of
    them were history, not guesses, when it was last asked for."""

    blocks: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    known: int = 0

    def rewind(self, history: Sequence[int]) -> None:
        """Keep what is a proper prefix of `history`: at least its last token is computed again."""
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
    """An ask under way. `tokens` = its history, then the guesses so far."""

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
        """The next `num_tokens` tokens to compute; draws a guess if they are all there are."""
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
        """`pool_tokens`: tokens of KV over all branches; as many as the target's pool holds is
        never short. `max_batched_tokens`: most tokens that one propose() computes of histories.

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
        # A rejected guess may rewind a branch to any token: windows free nothing here.
        groups = one_group(info.layers)
        arena = KVArena(groups, num_blocks, block_size, info.kv_dtype, loaded.device)
        self._pool = BlockPool(num_blocks, block_size, enable_prefix_caching=False)
        self._runner = ModelRunner(loaded, arena)
        self._max_len = info.max_model_len
        self._eos_token_ids = target.eos_token_ids
        self._max_batched_tokens = max_batched_tokens
        # Least recently asked for first.
        self._branches: OrderedDict[tuple[str, int], _Branch] = OrderedDict()

    @property
    def pool(self) -> BlockPool:
        """Who holds what; for checks and metrics."""
        return self._pool

    def propose(self, asks: Sequence[DraftAsk]) -> list[list[int]]:
        """See Proposer.propose. Runs the draft model max(max_drafts) times at most."""
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
        """Room for an ask's history and guesses; None if there is none, or nothing to guess."""
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
        """Blocks, if need be of branches that nobody asks for now."""
        while self._pool.num_free < count:
            idle = next((key for key in self._branches if key not in keys), None)
            if idle is None:
                return None
            self._pool.unref(self._branches.pop(idle).blocks)
        return self._pool.allocate(count)

    def _catch_up(self, guesses: Sequence[_Guess]) -> list[tuple[_Guess, SequenceChunk]]:
        """Chunks of the histories that lack KV, the shortest first, within the token budget."""
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
        """Whether no further guess is of use: enough, or the last one would end the sample."""
        token = guess.tokens[-1]
        ends = token in guess.params.stop_token_ids or (
            not guess.params.ignore_eos and token in self._eos_token_ids
        )
        return ends or guess.num_guesses >= guess.limit
