"""The leader: the rank that has the engine. It sends the others each forward, and runs its own.

`LeaderModel` is a model like any other, so scheduler, runner, sampler and pooler know nothing of
ranks: forward() sends the step to all ranks before it computes its own share of it, logits() names
the rows. One message a step in plain decoding, two where not every row is asked about.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from baton.engine.config import EngineConfig
from baton.engine.loading.loading import LoadedModel, load_model
from baton.engine.models.base import ModelAround
from baton.engine.parallel.group import RankGroup
from baton.engine.parallel.messages import ALL_ROWS, MessageKind, encode_step
from baton.engine.parallel.ranks import Ranks, StartRank, start_process, threads_of
from baton.engine.state.batch import Batch
from baton.engine.state.place import LEADER, RankPlace


class LeaderModel(ModelAround):
    """Implements CausalModel over rank 0's share and the ranks that have the others. `layers` are
    the whole model's, the other properties rank 0's."""

    def __init__(self, loaded: LoadedModel, ranks: Ranks, group: RankGroup) -> None:
        """`loaded`: rank 0's share."""
        super().__init__(loaded.model)
        self._ranks = ranks
        self._adapters = loaded.info.adapters
        self._group = group
        self._last: Tensor | None = None

    def forward(self, token_ids: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """See CausalModel. Any error inside loses the group."""
        written = None if batch.on_layer is None else Written(batch.on_layer)
        with self._ranks.fatal():
            self._ranks.send(
                MessageKind.FORWARD, encode_step(token_ids, positions, batch, self._adapters)
            )
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


class Written:
    """Reports a layer when all ranks have written it: behind the layer's sum over the ranks, so
    with the next layer's own write, or at the end."""

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
    """Start the other ranks and load this one's share beside them.

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
    # Who forgets the model, or fails on the way to an engine, leaves no processes behind.
    weakref.finalize(model, ranks.close)
    return replace(loaded, model=model, ranks=ranks)
