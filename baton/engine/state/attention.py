"""The attention seam: write a step's keys and values into the pool, attend to what a row may see.

One backend per file (torch_cpu.py, reference.py). A backend is built once per runner from the
pool's views and the model's `AttentionLayer`s; a model never sees the pool.
Not here: how blocks are allocated (block_pool.py), how a step is laid out (batch.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:  # Batch carries an Attention: the two types name each other
    from baton.engine.state.batch import Batch


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """How one layer attends, beyond what it stores.

    `window` 0 = unlimited, else a query at position p sees keys in (p - window, p].
    `softcap`: scores become softcap * tanh(scores / softcap). `sinks` [query_heads]: one extra
    logit per head that takes probability and gives nothing. `latent` > 0 (MLA): one latent per
    token is both key and value: the pool has no V, a value is the first `latent` dims of its key.
    """

    query_heads: int
    scale: float
    window: int = 0
    softcap: float | None = None
    sinks: Tensor | None = None
    latent: int = 0


class KVViews(Protocol):
    """What attention needs of the pool. `group_of`: the layer group of each layer, whose tables in
    a batch name its blocks."""

    @property
    def group_of(self) -> tuple[int, ...]: ...

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """K [num_blocks, block_size, kv_heads, k_dim] and V [..., v_dim] of one layer, as views."""
        ...

    def scales(self, layer: int) -> tuple[Tensor, Tensor]:
        """int8 KV: K's and V's scales, each [num_blocks, block_size, kv_heads] float32, as views.

        Raises InternalError for a pool of any other dtype.
        """
        ...


class Attention(Protocol):
    """Paged causal attention of one model on one device."""

    @property
    def group_of(self) -> tuple[int, ...]:
        """As the pool's."""
        ...

    def write(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Store k [T, kv_heads, k_dim] and v [T, kv_heads, v_dim] at flat `slots` [T]; mutates the
        pool. MLA: v has v_dim 0."""
        ...

    def attend(self, layer: int, q: Tensor, batch: Batch) -> Tensor:
        """q [T, query_heads, k_dim] -> [T, query_heads, v_dim]
        (MLA: latent); reads the pool only."""
        ...
