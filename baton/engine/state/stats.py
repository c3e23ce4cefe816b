"""EngineStats: what an engine has done since its start. Counters only grow; means are exponential.

Only the engine thread writes it. For a consistent reading, another thread calls `copy()` through
EngineThread.call. Any thread may read `num_layers` at any time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final

from baton.engine.state.sequence import SequenceState
from baton.engine.state.work import SMOOTHING, Utilization

# Upper bounds of the tokens of a step; vLLM's.
STEP_TOKENS: Final = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(slots=True)
class EngineStats:
    """Counters (requests, tokens, chunks) and moving means (seconds, tokens per second)."""

    num_requests: int = 0  # added here
    num_finished: int = 0  # ended by a token: stop, length, or token 1 of a PREFILL task
    num_aborted: int = 0
    num_failed: int = 0
    num_handed_on: int = 0  # requests that left with their KV, to go on in another engine
    num_left_behind_tokens: int = 0  # of those requests: tokens to compute again there
    departures: dict[str, int] = field(default_factory=dict[str, int])  # by departure.Leaving
    num_steps: int = 0
    num_steps_ahead: int = 0  # steps that were planned while the step before them ran
    num_spare_core_steps: int = 0  # steps that also ran on cores of other nodes, which were idle
    # How many steps computed up to STEP_TOKENS[i] tokens, and more than the bound before; the last
    # count is of steps beyond all bounds.
    step_tokens: list[int] = field(default_factory=lambda: [0] * (len(STEP_TOKENS) + 1))
    num_counted_tokens: int = 0  # of these steps
    # Sum over requests of the time that each waited: the node adds what passed before the engine
    # had it, or had room for its KV, and the engine what passes until it has a place in a step.
    queue_seconds: float = 0.0
    num_layers: int = 0  # layers computed for prompts, those of the current step included
    num_preemptions: int = 0  # requests preempted, by swapping or for recomputation
    num_swap_outs: int = 0  # requests
    num_swap_ins: int = 0  # requests
    num_swapped_out_blocks: int = 0  # copied to host memory
    num_swapped_in_blocks: int = 0  # copied back (the prefix map still had the others)
    num_forks: int = 0  # times that a block table was shared (parallel samples, beams)
    num_copied_blocks: int = 0  # copies on write
    num_adopted_blocks: int = 0  # blocks read where they lie, in another node's pool
    num_taken_over_blocks: int = 0  # adopted blocks that were copied into own ones later
    num_window_freed_blocks: int = 0  # given back because no layer could see them any more
    num_export_refusals: int = 0  # steps that left a PREFILL request waiting for export room
    num_pooled_prompts: int = 0  # prompts whose hidden states were asked for
    num_pooled_tokens: int = 0  # tokens of pooled prompts
    num_drafted_tokens: int = 0  # proposed and verified
    num_accepted_tokens: int = 0  # drafted tokens that were accepted
    num_first_step_drafts: int = 0  # of the proposed: in a request's first step here
    num_prefix_query_tokens: int = 0  # looked up in the prefix map
    num_prefix_hit_tokens: int = 0  # looked-up tokens that were found
    num_prompt_tokens: int = 0  # computed in prefill chunks, recomputed ones included, hits not
    num_generated_tokens: int = 0  # sampled
    num_encoded_images: int = 0  # that the vision tower ran over
    num_reused_images: int = 0  # whose rows another request's had made
    num_fetched_images: int = 0  # whose rows an encode node had made
    num_replayed_tokens: int = 0  # known output tokens computed again one by one (exact resumes)
    num_prefill_chunks: int = 0  # rows that computed part of a prompt
    num_chunked_prompts: int = 0  # prompts that took more than one chunk
    step_seconds: float = 0.0  # moving mean
    prefill_tokens_per_s: float = 0.0  # over steps that prefill; recent steps count most
    copy_bytes_per_s: float = 0.0  # moving mean over copies to and from host memory
    recent_prefill_tokens: float = 0.0  # fading sums, whose ratio is prefill_tokens_per_s
    recent_prefill_seconds: float = 0.0
    num_checkpoint_hits: int = 0  # prefix hits that began with a copied recurrent state
    num_checkpoints_stored: int = 0  # copies of recurrent state that were made for later prompts
    num_checkpoints_replaced: int = 0  # of these: dropped, because another one needed the room
    num_rollbacks: int = 0  # recurrent states that went back behind refused drafts
    own_prefill_tokens_per_s: float = 0.0  # prefill_tokens_per_s without lent cores
    recent_own_prefill_seconds: float = 0.0  # as if each step had run on the own cores alone
    utilization: Utilization = field(default_factory=Utilization)

    @property
    def prefix_hit_rate(self) -> float:
        """Share of looked-up tokens found in the prefix map, 0 before the first look-up."""
        queries = self.num_prefix_query_tokens
        return self.num_prefix_hit_tokens / queries if queries else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Share of drafted tokens that the model accepted, 0 before the first draft."""
        drafted = self.num_drafted_tokens
        return self.num_accepted_tokens / drafted if drafted else 0.0

    def copy_done(self, num_bytes: int, seconds: float) -> None:
        """Count a copy between pool and host memory."""
        if num_bytes and seconds > 0:
            first = self.copy_bytes_per_s == 0.0
            self.copy_bytes_per_s = _mean(self.copy_bytes_per_s, num_bytes / seconds, first=first)

    def step_done(self, seconds: float, num_prefill_tokens: int, share: float = 1.0) -> None:
        """Count a step that took `seconds` and computed `num_prefill_tokens` tokens of prompts.
        `share`: the cores that it ran on, over the own ones.
        """
        self.step_seconds = _mean(self.step_seconds, seconds, first=self.num_steps == 0)
        if num_prefill_tokens and seconds > 0:
            # A ratio of sums, not a mean of ratios: a step with a few prompt tokens costs almost as
            # much as one without, and says little about the rate of a long prompt.
            kept = 1 - SMOOTHING
            self.recent_prefill_tokens = kept * self.recent_prefill_tokens + num_prefill_tokens
            self.recent_prefill_seconds = kept * self.recent_prefill_seconds + seconds
            self.prefill_tokens_per_s = self.recent_prefill_tokens / self.recent_prefill_seconds
            own = kept * self.recent_own_prefill_seconds + seconds * share
            self.recent_own_prefill_seconds = own
            self.own_prefill_tokens_per_s = self.recent_prefill_tokens / own
        self.num_prompt_tokens += num_prefill_tokens
        self.num_steps += 1
        counted = self.num_prompt_tokens + self.num_generated_tokens
        self.step_tokens[bisect_left(STEP_TOKENS, counted - self.num_counted_tokens)] += 1
        self.num_counted_tokens = counted
        self.utilization.step_done(seconds, share)

    def left(self, leaving: str, num_left_behind: int = 0) -> None:
        """Count a request that was asked to leave this engine.

        `leaving` says whether it left, or why it stays; `num_left_behind` is the number of its
        tokens whose KV stayed.
        """
        self.departures[leaving] = self.departures.get(leaving, 0) + 1
        self.num_left_behind_tokens += num_left_behind

    def copy(self) -> EngineStats:
        utilization = replace(self.utilization)
        return replace(
            self,
            departures=dict(self.departures),
            step_tokens=list(self.step_tokens),
            utilization=utilization,
        )


def _mean(mean: float, value: float, *, first: bool) -> float:
    return value if first else mean + SMOOTHING * (value - mean)


@dataclass(frozen=True, slots=True)
class KVUsage:
    """What the pool's blocks hold for requests at one moment; counts of blocks and token slots."""

    allocated_blocks: int = 0  # held by sequences; a shared block counts once
    table_blocks: int = 0  # entries of all block tables: blocks needed without sharing
    shared_blocks: int = 0  # held by more than one sequence
    allocated_slots: int = 0
    used_slots: int = 0  # slots that hold a computed token
    state_slots: int = 0  # of recurrent state; 0 = the model keeps none
    used_state_slots: int = 0
    exported_state_slots: int = 0  # of those used: pinned for exports
    checkpoint_slots: int = 0  # rows for copies of state at the ends of prefixes
    used_checkpoint_slots: int = 0

    @classmethod
    def of(cls, sequences: Iterable[SequenceState], size: int) -> KVUsage:
        """Count what blocks of `size` tokens hold for these sequences now. It walks all block
        tables.
        """
        counts: Counter[int] = Counter()
        filled: dict[int, int] = {}
        for sequence in sequences:
            for table in sequence.tables:
                counts.update(table.blocks)
                for index, block in enumerate(table.blocks, table.num_freed):
                    here = min(size, max(0, sequence.num_computed - index * size))
                    filled[block] = max(here, filled.get(block, 0))
        return cls(
            allocated_blocks=len(counts),
            table_blocks=counts.total(),
            shared_blocks=sum(1 for count in counts.values() if count > 1),
            allocated_slots=len(counts) * size,
            used_slots=sum(filled.values()),
        )

    @property
    def waste(self) -> float:
        """Share of allocated slots that hold no token, 0 when nothing is allocated."""
        return 1 - self.used_slots / self.allocated_slots if self.allocated_slots else 0.0

    @property
    def saved(self) -> float:
        """Share of the blocks that would be needed without sharing, and are not needed with it."""
        return 1 - self.allocated_blocks / self.table_blocks if self.table_blocks else 0.0
