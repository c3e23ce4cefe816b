"""StateArena: the recurrent states of all running sequences, a slot for each sequence; behind
the slots, rows of the same kind for checkpoints (state_checkpoints.py).

A slot is a row of bytes: per layer the inputs of its convolution, then its matrices, each on a
64-byte boundary. So a copy of a slot is one copy, whatever the layers. A slot is not cleared: a
sequence that begins at token 0 reads nothing and writes everything.
Not here: who owns which slot (state_slots.py), KV (kv_cache.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.engine.memory.state_sizes import aligned, slot_bytes
from baton.protocol.kv_spec import LayerSpec, StateSpec


class StateArena:
    """`num_slots` slots for the states of `layers`, then `num_checkpoints` rows more, on one
    device.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        num_slots: int,
        device: str | torch.device = "cpu",
        num_checkpoints: int = 0,
        memory: Tensor | None = None,
    ) -> None:
        """`memory`: zeros, uint8, as many as all rows have bytes; None = memory of its own, on
        `device`."""
        self.num_slots = num_slots
        self.num_checkpoints = num_checkpoints
        self.slot_bytes = slot_bytes(layers)
        count = num_slots + num_checkpoints
        if memory is None:
            memory = torch.zeros(count * self.slot_bytes, dtype=torch.uint8, device=device)
        self._rows = memory.view(count, self.slot_bytes)
        self._views: dict[int, tuple[Tensor | None, Tensor | None]] = {}
        self._places: dict[int, tuple[slice, slice]] = {}  # in a row, without padding
        at = 0
        for layer, spec in enumerate(layers):
            if spec.state is not None:
                behind = at + aligned(spec.state.conv_bytes)
                self._places[layer] = (
                    slice(at, at + spec.state.conv_bytes),
                    slice(behind, behind + spec.state.recurrent_bytes),
                )
                self._views[layer] = self._layer(spec.state, at)
                at = behind + aligned(spec.state.recurrent_bytes)

    @property
    def num_bytes(self) -> int:
        return self._rows.nbytes

    def views(self, layer: int) -> tuple[Tensor | None, Tensor | None]:
        """Return a layer's convolution inputs and matrices of all slots, [num_slots, ...], without
        a copy; None for what the layer does not keep. Numbers of a slot lie side by side."""
        return self._views[layer]

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return copies [N, ...] of a layer's convolution inputs and matrices in `slots` [N]."""
        conv, recurrent = self._views[layer]
        return (
            None if conv is None else conv.index_select(0, slots),
            None if recurrent is None else recurrent.index_select(0, slots),
        )

    def write(
        self, layer: int, slots: Tensor, conv: Tensor | None, recurrent: Tensor | None
    ) -> None:
        """Store what read() returns, in `slots` [N]."""
        for view, new in zip(self._views[layer], (conv, recurrent), strict=True):
            if view is not None and new is not None:
                view.index_copy_(0, slots, new.to(view.dtype))

    def copy(self, source: int, target: int) -> None:
        """Copy a slot."""
        self._rows[target] = self._rows[source]

    def read_slots(self, slots: Sequence[int]) -> Tensor:
        """Return copies of slots in host memory, uint8 [len(slots), slot_bytes]."""
        return self._rows[torch.tensor(slots, device=self._rows.device)].cpu()

    def write_slots(self, rows: Tensor, slots: Sequence[int]) -> None:
        """Copy rows, uint8 [len(slots), slot_bytes], into slots."""
        index = torch.tensor(slots, device=self._rows.device)
        self._rows.index_copy_(0, index, rows.to(self._rows.device))

    def layer_bytes(self, layer: int, slot: int) -> tuple[Tensor, ...]:
        """Return views of a layer's convolution inputs and matrices in one slot, uint8 [bytes]:
        joined they are the layer's state. Views of what the layer lacks are empty.
        """
        conv, recurrent = self._places[layer]
        return self._rows[slot, conv], self._rows[slot, recurrent]

    def _layer(self, spec: StateSpec, at: int) -> tuple[Tensor | None, Tensor | None]:
        behind = at + aligned(spec.conv_bytes)
        return (
            self._view(at, spec.conv, spec.conv_dtype),
            self._view(behind, spec.recurrent, spec.recurrent_dtype),
        )

    def _view(self, at: int, shape: tuple[int, ...], dtype: str) -> Tensor | None:
        if not shape:
            return None
        kind: torch.dtype = getattr(torch, dtype)
        size = int(torch.Size(shape).numel()) * kind.itemsize
        return self._rows[:, at : at + size].view(kind).unflatten(1, shape)
