"""The attention seam: write the keys and values of a step into the pool, then attend.

Each backend has its own file (torch_cpu.py, reference.py). A backend is built once per runner from
the pool's views and the model's `AttentionLayer`s; a model never sees the pool.
Not here: the allocation of blocks (block_pool.py), the layout of a step (batch.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:  # Batch carries an Attention: the two types name each other
    from baton.engine.state.batch import Batch


@dataclass(frozen=True, slots=True)
class Reach:
    """How far back a query sees. `window` and `chunked`: see AttentionLayer."""

    window: int = 0
    chunked: bool = False

    def first(self, position: int) -> int:
        """Return the first key that a query at `position` sees."""
        if self.chunked:
            return position // self.window * self.window
        return max(0, position - self.window + 1) if self.window else 0

    def hidden(self, keys: Tensor, queries: Tensor) -> Tensor:
        """Return where queries may not see keys; both are positions whose shapes broadcast."""
        future = keys > queries
        if self.chunked:
            return future | (keys < queries // self.window * self.window)
        return future | (keys <= queries - self.window) if self.window else future


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """How one layer attends, besides what it stores.

    `window`: a query at position p sees keys in (p - window, p]; 0 means all keys up to p.
    `chunked`: positions form chunks of `window` tokens, and a query sees the keys of its own chunk
    up to p.
    `softcap`: scores become softcap * tanh(scores / softcap).
    `sinks` [query_heads]: one extra logit per head, which takes probability and adds no value.
    `latent` > 0 (MLA): the pool has no V. One latent per token serves as key and value: the value
    is the first `latent` dims of the key.
    """

    query_heads: int
    scale: float
    window: int = 0
    softcap: float | None = None
    sinks: Tensor | None = None
    latent: int = 0
    chunked: bool = False

    @property
    def reach(self) -> Reach:
        """How far back its queries see."""
        return Reach(self.window, self.chunked)


class KVViews(Protocol):
    """What attention needs of the pool.

    `group_of` maps each layer to its layer group; the group's tables in a batch name its blocks.
    """

    @property
    def group_of(self) -> tuple[int, ...]: ...

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return views of a layer's K [num_blocks, block_size, kv_heads, k_dim] and V [...,
        v_dim].
        """
        ...

    def scales(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return views of the scales of K and V, if the pool stores int8.

        Each is [num_blocks, block_size, kv_heads] float32. Raises InternalError for another dtype.
        """
        ...


class Attention(Protocol):
    """Paged causal attention of one model on one device."""

    @property
    def group_of(self) -> tuple[int, ...]:
        """Return `group_of` of the pool."""
        ...

    def write(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Store k [T, kv_heads, k_dim] and v [T, kv_heads, v_dim] in the pool at flat `slots` [T].

        With MLA v has v_dim 0.
        """
        ...

    def attend(self, layer: int, q: Tensor, batch: Batch) -> Tensor:
        """Attend with q [T, query_heads, k_dim]; return [T, query_heads, v_dim], with MLA `latent`
        dims.

        It only reads the pool.
        """
        ...
