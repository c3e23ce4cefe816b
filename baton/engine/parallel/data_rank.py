"""DataRank: one rank of a data-parallel group, an engine whose routed experts lie on all ranks.

    attention, embedding, head, norms, shared experts    whole, for this rank's own requests
    routed experts                                       this rank holds its share of each layer's

Its life: made -> a model is loaded with it -> meet(), once all ranks have loaded -> rounds
-> close().
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from torch import Tensor
from torch._C._distributed_c10d import Store

from baton.engine.checkpoint.shared_weights import WeightSource
from baton.engine.config import EngineConfig
from baton.engine.models.base import ModelAround
from baton.engine.models.config import DecoderConfig
from baton.engine.models.decoder import Decoder, Whole
from baton.engine.parallel.exchange import FIELD, ExpertExchange, held_experts
from baton.engine.parallel.group import RankGroup
from baton.engine.parallel.lockstep import Lockstep, WakeSockets
from baton.engine.state.batch import Batch
from baton.engine.state.place import RankPlace, choose_device
from baton.protocol.errors import ConfigError, ModelRefused

KIND: Final = "data-parallel"


class DataRank:
    """A rank's end of its group. `directory`: a folder of this group alone, where ranks meet."""

    def __init__(self, place: RankPlace, directory: Path) -> None:
        self.place = place
        self.group = RankGroup(place, "gloo", kind=KIND)
        self._wakes = WakeSockets(directory, place)
        self.lockstep = Lockstep(self.group, self._wakes)

    def meet(self, store: Store) -> None:
        """Connect to the other ranks through `store`; they must call this too. Raises
        InternalError."""
        self.group.connect(store)

    def model(self, config: DecoderConfig, weights: WeightSource) -> LockstepModel:
        """Build the model with this rank's share of the experts. `config`: the whole model's.
        Raises ModelRefused."""
        experts = config.experts
        assert experts is not None, "the route has refused a model without experts"
        held = replace(experts, held=held_experts(experts.count, self.place))
        shards = DataShards(ExpertExchange(self.group, self.lockstep, experts.count))
        own = replace(config, experts=held)
        return LockstepModel(Decoder(own, weights.tensor, weights, shards=shards), self.lockstep)

    def close(self) -> None:
        """Close the sockets by which ranks wake each other. Idempotent."""
        self._wakes.close()


class DataShards(Whole):
    """Shards of a data-parallel rank: the model is in one piece except for its experts."""

    def __init__(self, exchange: ExpertExchange) -> None:
        self.dispatch = exchange


class LockstepModel(ModelAround):
    """Implements CausalModel: each forward is one round, in which all ranks take part."""

    def __init__(self, decoder: Decoder, lockstep: Lockstep) -> None:
        super().__init__(decoder)
        self._lockstep = lockstep
        lockstep.set_empty_forward(decoder.empty_forward)

    def forward(self, token_ids: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """See CausalModel. Any error inside ends the group."""
        self._lockstep.begin(len(token_ids))
        with self._lockstep.fatal():
            return self._model.forward(token_ids, positions, batch)

    def logits(self, hidden: Tensor) -> Tensor:
        """See CausalModel. Other ranks take no part in it."""
        return self._model.logits(hidden)


def refuse(config: EngineConfig, lean: DecoderConfig | None, classifier: bool) -> None:
    """Raise ConfigError for options, ModelRefused for models that data-parallel ranks do not
    support. `lean`: the model's config; None = only the universal route serves the model."""
    without = {
        "tensor_parallel_size": (config.tensor_parallel_size > 1, "tensor_parallel_size above 1"),
        "deterministic": (config.deterministic, "deterministic"),
        "async_scheduling": (config.async_scheduling, "async_scheduling"),
        "device": (choose_device(config.device).type != "cpu", "a GPU (--device cpu does)"),
    }
    for field, (asked, name) in without.items():
        if asked:
            raise ConfigError(f"{name} does not go with {FIELD} above 1 yet", field=field)
    if lean is None or classifier or lean.delta is not None:
        what = "classifiers" if classifier else "models of the universal route"
        if lean is not None and lean.delta is not None:
            what = "models with recurrent state"
        raise ModelRefused(f"{what} do not go with {FIELD} above 1", field=FIELD)
    if lean.experts is None:
        raise ModelRefused(
            f"{FIELD} is for mixtures of experts, whose experts the ranks share; this model has "
            "none: start more nodes",
            field=FIELD,
        )
    held_experts(lean.experts.count, RankPlace(0, config.data_parallel_size))
