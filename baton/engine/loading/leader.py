"""The leader: the tensor-parallel rank that has the engine. It sends each forward to the other
ranks, and runs its own share.

`LeaderModel` is a CausalModel, so scheduler, runner, sampler and pooler do not know of ranks.
forward() sends the step to the other ranks before it computes the leader's share, and broadcasts
the rows of its images; logits() tells them which rows need logits, and broadcasts these rows if
they are not all rows of the step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from baton.engine.config import EngineConfig
from baton.engine.loading.loading import LoadedModel, load_model
from baton.engine.models.base import ModelAround
from baton.engine.models.config import DecoderConfig
from baton.engine.models.draft_heads import DraftHead, MtpHead
from baton.engine.parallel.group import RankGroup
from baton.engine.parallel.image_rows import share_rows
from baton.engine.parallel.messages import ALL_ROWS, MessageKind, encode_step
from baton.engine.parallel.ranks import Ranks, StartRank, start_process, threads_of
from baton.engine.state.batch import Batch
from baton.engine.state.place import LEADER, RankPlace
from baton.protocol.kv_spec import LayerSpec


class LeaderModel(ModelAround):
    """Implements CausalModel over rank 0's share of the model and the ranks that hold the other
    shares. `layers` are the whole model's, the other properties rank 0's."""

    def __init__(self, loaded: LoadedModel, ranks: Ranks, group: RankGroup) -> None:
        """`loaded`: rank 0's share."""
        super().__init__(loaded.model)
        self._ranks = ranks
        self._adapters = loaded.info.adapters
        self._group = group
        self._dtype = loaded.dtype
        self._last: Tensor | None = None

    def forward(self, token_ids: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """See CausalModel. Any error inside ends the group of ranks."""
        written = None if batch.on_layer is None else Written(batch.on_layer)
        with self._ranks.fatal():
            self._ranks.send(
                MessageKind.FORWARD, encode_step(token_ids, positions, batch, self._adapters)
            )
            if batch.images is not None:
                images = share_rows(batch.images, self._group, self._dtype)
                batch = replace(batch, images=images)
            if written is not None:
                batch = replace(batch, on_layer=written)
            self._last = self._model.forward(token_ids, positions, batch)
            if written is not None:
                written.finish()
        return self._last

    def logits(self, hidden: Tensor) -> Tensor:
        """See CausalModel."""
        with self._ranks.fatal():
            if hidden is self._last:
                self._ranks.send(MessageKind.LOGITS, ALL_ROWS)
            else:
                self._ranks.send(MessageKind.LOGITS, len(hidden).to_bytes(8, "little"))
                self._group.broadcast(hidden)
            return self._model.logits(hidden)


class LeaderHead:
    """Implements DraftHead over rank 0's share of the head's layer and the others' shares. States,
    which all ranks need, are broadcast; the rest of the head is whole on rank 0."""

    def __init__(self, head: DraftHead, model: LeaderModel, ranks: Ranks, group: RankGroup) -> None:
        """`head`: with rank 0's share. `model`: makes the logits of a head that has none."""
        self._head, self._model = head, model
        self._ranks, self._group = ranks, group

    @property
    def config(self) -> DecoderConfig:
        """See DraftHead."""
        return self._head.config

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """See DraftHead."""
        return self._head.layers

    @property
    def taps(self) -> tuple[int, ...]:
        """See DraftHead."""
        return self._head.taps

    def states(self, hidden: Tensor, tapped: Mapping[int, Tensor]) -> Tensor:
        """See DraftHead."""
        return self._head.states(hidden, tapped)

    def forward(self, states: Tensor, token_ids: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """See DraftHead. Any error inside ends the group of ranks."""
        with self._ranks.fatal():
            self._ranks.send(MessageKind.DRAFT, encode_step(token_ids, positions, batch))
            states = self._group.broadcast(states)
            return self._head.forward(states, token_ids, positions, batch)

    def logits(self, states: Tensor) -> Tensor:
        """See DraftHead. An MtpHead's are the target's, which all ranks make."""
        if isinstance(self._head, MtpHead):
            return self._model.logits(states)
        return self._head.logits(states)


class Written:
    """Calls `report` with a layer once all ranks have written its KV. They have after the layer's
    sum over the ranks, so the report comes with the next layer's write, or in finish()."""

    def __init__(self, report: Callable[[int], None]) -> None:
        self._report = report
        self._pending: int | None = None

    def __call__(self, layer: int) -> None:
        self.finish()
        self._pending = layer

    def finish(self) -> None:
        if self._pending is not None:
            self._report(self._pending)
            self._pending = None


def load_leader(config: EngineConfig, start_rank: StartRank = start_process) -> LoadedModel:
    """Start the other ranks, and load the leader's share while they load theirs.

    Raises what loading.load_model does.
    """
    torch.set_num_threads(threads_of(config))
    group = RankGroup(RankPlace(LEADER, config.tensor_parallel_size), "gloo")
    ranks = Ranks.start(config, group, start_rank)
    try:
        loaded = load_model(config, group)
        ranks.await_loaded()
    except BaseException:
        ranks.close()
        raise
    model = LeaderModel(loaded, ranks, group)
    # The ranks end with the model, also if no engine is ever made of it.
    weakref.finalize(model, ranks.close)
    head = None if loaded.head is None else LeaderHead(loaded.head, model, ranks, group)
    return replace(loaded, model=model, ranks=ranks, head=head)
