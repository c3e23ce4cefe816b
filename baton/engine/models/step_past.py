"""What some families ask of transformers' Cache, answered for the rows of a step.

Llama 4 scales the queries of some layers by their positions, which it counts from the length of the
cache. Indexers (DeepSeek V3.2, GLM-5, ...) keep index keys there; they know sequences of equal
length only, so each span of a step gets a call of its own:

    rows of the step       [ chunk of A | token of B | chunk of C ]
    calls of the indexer   [1, A, H]; [1, 1, H]; [1, C, H]  -> the chosen keys of each row

Index keys lie in the pool (attention/indexed.py). KV never passes here: attention pages it itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from baton.engine.attention.indexed import index_of
from baton.engine.models.causal import cache_name
from baton.engine.state.batch import Batch
from baton.protocol.errors import ModelRefused

_PARAMETERS: Final = (
    "hidden_states", "q_resid", "position_embeddings", "attention_mask", "position_ids",
)  # fmt: skip


class StepPast:
    """The cache that the modelling code gets. `batch`: None while a probe runs, which fills
    `index_dims`: the size of a layer's index keys."""

    is_compileable = False

    def __init__(self, batch: Batch | None, positions: Tensor) -> None:
        """`positions` [T]: those of the step's rows."""
        self.batch = batch
        self.index_dims: dict[int, int] = {}
        # Stands for the causal mask, which indexers slice and nothing reads.
        self.mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=positions.device)
        self._before = positions - torch.arange(len(positions), device=positions.device)

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the new keys and values alone."""
        return key, value

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:
        """Return what must be added to a row's number to make its position, [T]."""
        return self._before


class _SpanKeys:
    """The index keys of one span, as an indexer asks for them."""

    def __init__(self, batch: Batch, index: int) -> None:
        self._batch, self._index = batch, index

    def update_indexer(self, keys: Tensor, layer_idx: int) -> Tensor:
        """Store keys [1, rows, dim]; return those of the whole sequence, [1, tokens, dim]."""
        attention = index_of(self._batch)
        return attention.keep_index(layer_idx, keys[0], self._index, self._batch)[None]


class _ProbedKeys:
    """Notes how large the index keys are."""

    def __init__(self, past: StepPast) -> None:
        self._past = past

    def update_indexer(self, keys: Tensor, layer_idx: int) -> Tensor:
        """Return `keys` alone."""
        self._past.index_dims[layer_idx] = keys.shape[-1]
        return keys


@dataclass(frozen=True, slots=True)
class _SplitIndexer:
    """The forward of an indexer over the rows of a step. `own`: transformers' forward; `cache`: its
    name for the cache."""

    own: Callable[..., Tensor]
    cache: str

    def __call__(
        self,
        hidden_states: Tensor,
        q_resid: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        *_: Any,
        **named: StepPast,
    ) -> tuple[Tensor, ...]:
        """Run the rows hidden_states [1, T, H]; return the positions of each span's chosen keys,
        [rows, n]. Writes the step's index keys."""
        given = (hidden_states, q_resid, *position_embeddings)
        past = named[self.cache]
        batch = past.batch
        if batch is None:
            return (self._chosen(given, 0, _ProbedKeys(past)),)
        return tuple(
            self._chosen(
                tuple(x[:, span.first_row : span.first_row + span.num_rows] for x in given),
                span.start,
                _SpanKeys(batch, index),
            )
            for index, span in enumerate(batch.spans)
        )

    def _chosen(
        self, rows: tuple[Tensor, ...], start: int, keys: _SpanKeys | _ProbedKeys
    ) -> Tensor:
        """Run the rows of one sequence from position `start` on."""
        hidden, q_resid, cos, sin = rows
        position = torch.arange(start + hidden.shape[1], device=hidden.device)
        seen = position <= position[start:, None]
        found = self.own(hidden, q_resid, (cos, sin), seen[None], None, **{self.cache: keys})
        return found[0]


def split_indexers(causal: nn.Module) -> bool:
    """Let each indexer of `causal` run over the rows of steps; return whether it has any. Mutates
    the instances, never their classes. Raises ModelRefused for an indexer of another form."""
    found = False
    for module in causal.modules():
        indexer = getattr(module, "indexer", None)
        if not isinstance(indexer, nn.Module):
            continue
        names, cache = inspect.signature(indexer.forward).parameters, cache_name(indexer.forward)
        if cache is None or tuple(names) != (*_PARAMETERS, cache):
            raise ModelRefused(f"{type(indexer).__name__} chooses keys in a way that is not known")
        split = _SplitIndexer(indexer.forward, cache)
        indexer.forward = split  # pyright: ignore[reportAttributeAccessIssue]
        found = True
    return found


def counts_positions(causal: nn.Module) -> bool:
    """Whether some layers count positions from the length of the cache (Llama 4)."""
    return any(getattr(module, "attn_temperature_tuning", False) for module in causal.modules())


@contextmanager
def told(modules: Sequence[nn.Module], context: Any) -> Iterator[None]:
    """Tell `modules` the context of a forward: some families drop its keywords on their way to
    attention (Nemotron, StableLM)."""
    for module in modules:
        vars(module)["baton_context"] = context
    try:
        yield
    finally:
        for module in modules:
            del vars(module)["baton_context"]
