"""LoRA on transformers' own modules: deltas added by forward hooks on its linear layers.

A module of transformers does not pass the step's keywords on to its linear layers. So while a
forward runs, an object that the model and its hooks share holds the rows that want an adapter.
Hooks leave the modules as they are: names, weights and attributes stay what the modelling code
expects.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from baton.engine.models.causal import decoder_name
from baton.engine.models.lora import Adapter, AdapterRows, LowRank, apply_deltas
from baton.protocol.errors import ModelRefused


@dataclass(slots=True)
class _ActiveRows:
    """The running step's rows by adapter id; empty between steps."""

    groups: Sequence[AdapterRows] = ()


@dataclass(slots=True)
class _AdaptedModule:
    """Deltas of one linear layer, by adapter id. An instance is the layer's forward hook."""

    inputs: int
    outputs: int
    active: _ActiveRows
    deltas: dict[str, LowRank] = field(default_factory=dict)

    def __call__(self, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """Return the layer's output with the deltas added to the rows that want them. The input is
        [..., in], the output [..., out]."""
        if not self.active.groups:
            return output
        x, y = inputs[0].reshape(-1, self.inputs), output.reshape(-1, self.outputs)
        return apply_deltas(x, y, self.deltas, self.active.groups).view(output.shape)


class HookedAdapters:
    """The adapters of one transformers model."""

    def __init__(self, causal: Any, untouchable: Container[nn.Module]) -> None:
        """`untouchable`: modules that use the weights of their `kv_b_proj` without calling it, so
        that a hook on it would never run."""
        self._modules: dict[str, nn.Module] = dict(causal.named_modules())
        self._decoder = decoder_name(causal) + "."
        self._untouchable = untouchable
        self._active = _ActiveRows()
        self._adapted: dict[str, _AdaptedModule] = {}

    @contextmanager
    def rows(self, groups: Sequence[AdapterRows]) -> Iterator[None]:
        """Within this context, the hooks add deltas to these rows."""
        self._active.groups = groups
        try:
            yield
        finally:
            self._active.groups = ()

    def add(self, adapter: Adapter, run: Callable[[], int]) -> None:
        """Register hooks on the adapter's layers. `run` runs a few rows through the model and
        returns how many.

        Raises ModelRefused for a layer that is absent, of other sizes, or does not see every row.
        """
        layers = {path: self._layer(adapter.name, path) for path in adapter.deltas}
        for path, delta in adapter.deltas.items():
            inputs, outputs = _sizes(layers[path])
            if (delta.down.shape[1], delta.up.shape[0]) != (inputs, outputs):
                raise _refused(adapter.name, f"{path} has other sizes in this model")
        self._check_rows(adapter.name, layers, run)
        for path, layer in layers.items():
            if path not in self._adapted:
                self._adapted[path] = _AdaptedModule(*_sizes(layer), self._active)
                layer.register_forward_hook(self._adapted[path])
            self._adapted[path].deltas[adapter.id] = adapter.deltas[path]

    def remove(self, id_: str) -> None:
        """Forget the deltas of the adapter `id_`. Its hooks stay registered and add nothing."""
        for adapted in self._adapted.values():
            adapted.deltas.pop(id_, None)

    def _layer(self, name: str, path: str) -> nn.Linear | Conv1D:
        layer = self._modules.get(path)
        if layer is None:
            raise _refused(name, f"this model has no {path}")
        if not isinstance(layer, nn.Linear | Conv1D):
            raise _refused(name, f"{path} is a {type(layer).__name__}, not a linear layer")
        if not path.startswith(self._decoder):
            raise _refused(name, f"{path} is outside the decoder")
        parent, _, child = path.rpartition(".")
        if parent.endswith(".indexer"):
            raise _refused(name, f"{path} belongs to an indexer, which runs sequence by sequence")
        if child == "kv_b_proj" and self._modules[parent] in self._untouchable:
            raise _refused(name, f"{path} is absorbed into attention")
        return layer

    def _check_rows(
        self, name: str, layers: dict[str, nn.Linear | Conv1D], run: Callable[[], int]
    ) -> None:
        """Raise ModelRefused for a layer that does not see each row exactly once (an expert, say):
        it cannot be adapted by row."""
        met: dict[str, list[int]] = {path: [] for path in layers}

        def counting(path: str, inputs: int) -> Callable[..., None]:
            def count(_: nn.Module, given: tuple[Tensor, ...], __: Tensor) -> None:
                met[path].append(given[0].numel() // inputs)

            return count

        hooks = [
            layer.register_forward_hook(counting(path, _sizes(layer)[0]))
            for path, layer in layers.items()
        ]
        try:
            num_rows = run()
        finally:
            for hook in hooks:
                hook.remove()
        for path, counts in met.items():
            if counts != [num_rows]:
                raise _refused(name, f"{path} does not see every token once")


def _sizes(layer: nn.Linear | Conv1D) -> tuple[int, int]:
    """(inputs, outputs) of a layer; GPT-2's Conv1D stores its weight as [in, out]."""
    first, second = layer.weight.shape
    return (first, second) if isinstance(layer, Conv1D) else (second, first)


def _refused(name: str, reason: str) -> ModelRefused:
    return ModelRefused(f"adapter {name}: {reason}", field="lora_modules")
