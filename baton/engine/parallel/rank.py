"""RankModel: one tensor-parallel rank's share of a lean model; refuse: options without ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from baton.engine.checkpoint.shared_weights import WeightSource
from baton.engine.config import EngineConfig
from baton.engine.models.decoder import Decoder
from baton.engine.models.lora import Adapter
from baton.engine.parallel.group import RankGroup
from baton.engine.parallel.sharding import FIELD, Cuts, RankShards
from baton.engine.state.attention import AttentionLayer
from baton.engine.state.batch import Batch
from baton.engine.state.place import choose_device
from baton.engine.state.work import ParameterCounts
from baton.protocol.errors import ConfigError
from baton.protocol.kv_spec import LayerSpec


@dataclass(frozen=True, slots=True)
class RankModel:
    """Implements CausalModel. Every rank makes the same calls at the same time."""

    decoder: Decoder
    cuts: Cuts
    layers: tuple[LayerSpec, ...]  # the whole model's

    @staticmethod
    def of(cuts: Cuts, share: WeightSource, group: RankGroup) -> RankModel:
        """Build this rank's part of the model. `share`: the weights that a RankShare has cut.
        Raises ModelRefused."""
        shards = RankShards(cuts.config, group)
        decoder = Decoder(cuts.own, share.tensor, share, shards=shards)
        return RankModel(decoder, cuts, cuts.config.layers_in(decoder.place[0]))

    @property
    def vocab_size(self) -> int:
        """See CausalModel."""
        return self.decoder.vocab_size

    @property
    def max_positions(self) -> int | None:
        """See CausalModel."""
        return self.decoder.max_positions

    @property
    def parameter_counts(self) -> ParameterCounts:
        """The parameters of this rank's share; see CausalModel."""
        counts = self.decoder.parameter_counts  # with the whole vocabulary
        return replace(counts, head=-(-counts.head // self.cuts.place.size))

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        """How each layer attends with this rank's heads."""
        return self.decoder.attention_layers

    def add_adapter(self, adapter: Adapter) -> None:
        """See CausalModel. The rank keeps its share of the adapter."""
        self.decoder.add_adapter(self.cuts.adapter(adapter))

    def remove_adapter(self, id_: str) -> None:
        """See CausalModel."""
        self.decoder.remove_adapter(id_)

    def forward(self, token_ids: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """See CausalModel. The result, hidden [T, H], is the same on every rank."""
        return self.decoder.forward(token_ids, positions, batch)

    def logits(self, hidden: Tensor) -> Tensor:
        """See CausalModel. Ranks other than the leader return logits of their share of the
        vocabulary only."""
        return self.decoder.logits(hidden)


def refuse(config: EngineConfig) -> None:
    """Raise ConfigError for options that tensor parallelism does not support yet."""
    without = {
        "deterministic": (config.deterministic, "deterministic"),
        "device": (choose_device(config.device).type != "cpu", "a GPU (--device cpu does)"),
    }
    for field, (asked, name) in without.items():
        if asked:
            raise ConfigError(f"{name} does not go with {FIELD} above 1 yet", field=field)
