"""Which attention backend serves a loaded model."""

from __future__ import annotations

from baton.engine.attention.base import Attention, KVViews
from baton.engine.attention.fixed_order import FixedOrderAttention
from baton.engine.attention.torch_cpu import TorchAttention
from baton.engine.loading import LoadedModel


def choose_attention(loaded: LoadedModel, pool: KVViews) -> Attention:
    """The backend for `loaded` over `pool`: torch's, or the one of fixed order."""
    backend = FixedOrderAttention if loaded.deterministic else TorchAttention
    return backend(pool, loaded.attention_layers)
