"""Chooses the attention backend for a loaded model."""

from __future__ import annotations

from baton.engine.attention.compiled import CompiledAttention
from baton.engine.attention.fixed_order import FixedOrderAttention
from baton.engine.attention.indexed import with_index
from baton.engine.attention.torch_cpu import TorchAttention
from baton.engine.kernels.cpu.library import kernels_for
from baton.engine.kernels.gpu.support import triton_serves
from baton.engine.loading.loading import LoadedModel
from baton.engine.state.attention import Attention, KVViews


def choose_attention(loaded: LoadedModel, pool: KVViews) -> Attention:
    """Return the backend for `loaded` over `pool`, for index keys as well if the model has them."""
    layers = loaded.attention_layers
    return with_index(pool, layers, _choose(loaded, pool))


def _choose(loaded: LoadedModel, pool: KVViews) -> Attention:
    """Return the backend for all but index keys.

    A deterministic model gets the one of fixed order, a GPU Triton's; a CPU the compiled kernels if
    they know dtype and pool, else torch.
    """
    if loaded.deterministic:
        return FixedOrderAttention(pool, loaded.attention_layers)
    if triton_serves(loaded.device):
        from baton.engine.attention.triton_backend import TritonAttention  # imports triton

        return TritonAttention(pool, loaded.attention_layers)
    compiled = kernels_for(loaded.dtype, loaded.device)
    if compiled is not None:
        return CompiledAttention(pool, loaded.attention_layers, compiled)
    return TorchAttention(pool, loaded.attention_layers)
