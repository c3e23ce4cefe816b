"""Which attention backend serves a loaded model."""

from __future__ import annotations

from baton.engine.attention.base import Attention, KVViews
from baton.engine.attention.compiled import CompiledAttention
from baton.engine.attention.fixed_order import FixedOrderAttention
from baton.engine.attention.torch_cpu import TorchAttention
from baton.engine.kernels.cpu.library import kernels_for
from baton.engine.loading import LoadedModel


def choose_attention(loaded: LoadedModel, pool: KVViews) -> Attention:
    """The backend for `loaded` over `pool`: compiled, torch's, or the one of fixed order."""
    if loaded.deterministic:
        return FixedOrderAttention(pool, loaded.attention_layers)
    compiled = kernels_for(loaded.dtype, loaded.device)
    if compiled is not None:
        return CompiledAttention(pool, loaded.attention_layers, compiled)
    return TorchAttention(pool, loaded.attention_layers)
