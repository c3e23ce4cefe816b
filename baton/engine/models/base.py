"""CausalModel: what the runner asks of a model, whichever route loaded it. ModelAround: the base of
models that wrap another model."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from baton.engine.models.lora import Adapter
from baton.engine.state.attention import AttentionLayer
from baton.engine.state.batch import Batch
from baton.engine.state.work import ParameterCounts
from baton.protocol.kv_spec import LayerSpec


class CausalModel(Protocol):
    """What a model of the lean route and one of the universal route offer. A model owns weights
    only. The batch says where KV lies, and which rows want which adapter."""

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        ...

    @property
    def max_positions(self) -> int | None:
        """Positions the model was made for; None if its config does not state them."""
        ...

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """What each layer stores per token."""
        ...

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        """How each layer attends."""
        ...

    @property
    def parameter_counts(self) -> ParameterCounts:
        """How many parameters the model has, by which rows are multiplied with them."""
        ...

    def forward(self, token_ids: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """Run token_ids [T], positions [T] int64 -> hidden [T, H]; write the batch's KV."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] -> [N, vocab] float32."""
        ...

    def add_adapter(self, adapter: Adapter) -> None:
        """Apply `adapter` to the rows that ask for its id. Raises ModelRefused if it changes layers
        that this model cannot adapt."""
        ...

    def remove_adapter(self, id_: str) -> None:
        """Forget an adapter, also one that `add_adapter` refused after it had taken a part."""
        ...


class ModelAround:
    """The properties and adapters of a CausalModel that wraps another model: all are the wrapped
    model's."""

    def __init__(self, model: CausalModel) -> None:
        self._model = model

    @property
    def vocab_size(self) -> int:
        """See CausalModel."""
        return self._model.vocab_size

    @property
    def max_positions(self) -> int | None:
        """See CausalModel."""
        return self._model.max_positions

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """See CausalModel."""
        return self._model.layers

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        """See CausalModel."""
        return self._model.attention_layers

    @property
    def parameter_counts(self) -> ParameterCounts:
        """See CausalModel."""
        return self._model.parameter_counts

    def add_adapter(self, adapter: Adapter) -> None:
        """See CausalModel."""
        self._model.add_adapter(adapter)

    def remove_adapter(self, id_: str) -> None:
        """See CausalModel."""
        self._model.remove_adapter(id_)
