"""Speculation: who guesses, and how many guesses a step may ask for.

The scheduler decides which blocks drafts may use; the runner decides which drafts are accepted.
Drafts change no output: a draft is accepted iff it equals the token that the target samples there.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from baton.engine.config import EngineConfig
from baton.engine.memory.block_tables import BlockTables
from baton.engine.memory.layer_groups import group_layers
from baton.engine.memory.state_sizes import slot_bytes
from baton.engine.sampling.proposer import DraftAsk, HeadProposer, NgramProposer, Proposer
from baton.engine.state.interface import ModelInfo
from baton.engine.state.sequence import SequenceState
from baton.protocol.errors import ConfigError

if TYPE_CHECKING:  # lazy at run time, see load_draft()
    from baton.engine.loading.loading import LoadedModel

log = logging.getLogger(__name__)


class Drafter:
    """Asks `proposer` for at most `num_tokens` drafts per sequence and step."""

    def __init__(self, proposer: Proposer, num_tokens: int) -> None:
        self._proposer = proposer
        self._num_tokens = num_tokens

    @classmethod
    def of(cls, proposer: Proposer | None, config: EngineConfig) -> Drafter | None:
        """Return a drafter with the configured number of drafts; None without a proposer."""
        return None if proposer is None else cls(proposer, config.num_speculative_tokens)

    def propose(
        self, sequences: Sequence[SequenceState], budget: int
    ) -> list[tuple[SequenceState, list[int]]]:
        """Return drafts for `sequences`, at most `budget` tokens in all.

        Earlier sequences are served first. A sequence without drafts is not in the result.
        """
        asks: list[tuple[SequenceState, DraftAsk]] = []
        for sequence in sequences:
            params = sequence.request.params
            if sequence.exact_chunk is not None:
                continue  # drafts would change the shape of the steps that follow
            # The last token of an output needs no guess for a next one.
            room = params.max_tokens - sequence.num_outputs - 1
            count = min(self._num_tokens, room, budget)
            if count <= 0:
                continue
            budget -= count
            ask = DraftAsk(
                sequence.request.id, sequence.tokens, count, params, sequence.num_outputs,
                sequence.sample_index, sequence.drafts,
            )  # fmt: skip
            asks.append((sequence, ask))
        drafts = self._proposer.propose([ask for _, ask in asks]) if asks else []
        cut = (
            (sequence, sequence.possible(draft[: ask.max_drafts]))
            for (sequence, ask), draft in zip(asks, drafts, strict=True)
        )
        return [(sequence, draft) for sequence, draft in cut if draft]

    def propose_within(
        self, sequences: Sequence[SequenceState], budget: int, tables: BlockTables
    ) -> dict[SequenceState, list[int]]:
        """Return what propose() does, cut to what `tables` have room for, which takes blocks.

        A recurrent state before the drafts is kept; a sequence without a slot for it has none.
        """
        kept: dict[SequenceState, list[int]] = {}
        for sequence, drafts in self.propose(sequences, budget):
            if not tables.states.keep(sequence):
                continue
            known = len(sequence.tokens)
            if not tables.grow(sequence, known + len(drafts)):
                del drafts[tables.room(sequence) - known :]
            if drafts:
                kept[sequence] = drafts
            else:
                tables.states.settle(sequence, refused=False)
        return kept

    def forget(self, request_id: str) -> None:
        self._proposer.forget(request_id)


def load_draft(config: EngineConfig) -> LoadedModel | None:
    """Load the configured draft model; return None if there is none.

    Call it before the pools are sized, because its weights take memory, too. Raises ModelRefused or
    ConfigError as loading.load_model does.
    """
    if config.speculative_method != "draft" or config.speculative_model is None:
        return None
    # A late import, because engines over other runners need no model code.
    from baton.engine.loading.loading import load_model

    return load_model(
        replace(
            config,
            model=config.speculative_model,
            served_model_name=(),
            max_model_len=None,
            lora_modules=(),
            tensor_parallel_size=1,  # small: the leader alone runs it
            data_parallel_size=1,  # whole on each rank
            enable_expert_parallel=False,
            speculative_method="none",
            speculative_model=None,
        )
    )


def load_proposer(
    config: EngineConfig, target: ModelInfo, draft: LoadedModel | None = None
) -> Proposer | None:
    """Return the configured proposer for `target`; None without speculation.

    `config` is resolved; `draft` is the result of load_draft. Raises ConfigError for a draft model
    that does not fit the target.
    """
    if config.speculative_method == "none":
        return None
    if draft is not None and slot_bytes(draft.info.layers):
        raise ConfigError(
            f"the draft model {draft.info.name} keeps recurrent state, and cannot go back behind "
            "its rejected guesses: draft with a model that keeps KV alone, or with n-grams",
            field="speculative_model",
        )
    if config.speculative_method == "ngram":
        return NgramProposer()
    if config.speculative_method in ("mtp", "eagle3"):
        return HeadProposer()
    # A late import, because only this method needs a second model.
    from baton.engine.running.draft import DraftModelProposer

    if draft is None or config.num_kv_blocks is None or config.block_size is None:
        raise ConfigError("a draft model is not configured", field="speculative_model")
    num_groups = group_layers(target.layers, target.kv_dtype).num_groups
    pool_tokens = config.num_kv_blocks // num_groups * config.block_size
    log.info("draft model %s guesses for %s", draft.info.name, target.name)
    return DraftModelProposer(
        draft, target, pool_tokens, config.block_size, config.max_num_batched_tokens
    )
