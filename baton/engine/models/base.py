"""CausalModel: what the runner asks of a model, whichever route loaded it; ModelAround: another
one at work within."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from baton.engine.models.lora import Adapter
from baton.engine.state.attention import AttentionLayer
from baton.engine.state.batch import Batch
from baton.engine.state.work import ParameterCounts
from baton.protocol.kv_spec import LayerSpec


class CausalModel(Protocol):
    """What both routes offer. Both own weights only; KV, and which rows want which adapter, comes
    with the batch."""

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        ...

    @property
    def max_positions(self) -> int | None:
        """Positions the model was made for; None if it does not say."""
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
        """The model's parameters by what meets them."""
        ...

    def forward(self, token_ids: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """token_ids [T], positions [T] int64 -> hidden [T, H]; writes the batch's KV."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] -> [N, vocab] float32."""
        ...

    def add_adapter(self, adapter: Adapter) -> None:
        """Serve `adapter` to the rows that ask for its id. Raises ModelRefused for layers it
        cannot reach."""
        ...

    def remove_adapter(self, id_: str) -> None:
        """Forget an adapter, also one that was refused halfway."""
        ...


class ModelAround:
    """What a CausalModel says of itself if it runs another one: what that one says."""

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
