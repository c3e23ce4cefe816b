"""Weights: a model reads its tensors and linear layers from it, whatever the checkpoint's format.
"Plain" means floating-point weights, neither quantized nor rounded.

    plain checkpoint                      -> plain layers
    plain checkpoint, --quantization      -> each linear layer is quantized as it is read
    quantized checkpoint                  -> its integers in its own scheme; other layers plain
    checkpoint of 4- or 8-bit floats      -> the reader widens it (widening.py) to plain weights;
                                             gpt-oss's experts stay in 4 bits if kernels support it,
                                             8-bit floats stay so on GPUs that multiply them
    GGUF                                  -> its integers, if the reader keeps them; else widened
    --lm-head-quantization                -> a head that is stored plain is quantized as it is read

Only products are ever quantized: embeddings, norms and routers stay as they are. The rounded head
of tied embeddings is a copy: tokens are looked up in the table that was stored.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from baton.engine.checkpoint.float4 import Float4Layout, float4_layout
from baton.engine.checkpoint.quantized_checkpoint import Layout, module_names
from baton.engine.checkpoint.tensors import TensorReader
from baton.engine.checkpoint.widening import integer_layout
from baton.engine.quantization.float8 import Float8Format, Float8Weight, stack_float8
from baton.engine.quantization.int_weight import IntWeight
from baton.engine.quantization.integer import QuantizedFormat, Scheme, quantize, stack_weights
from baton.engine.quantization.linear import Linear, LinearFormat, SideBySide, choose_linear
from baton.protocol.errors import ModelRefused

HEAD: Final = "lm_head"
TABLE: Final = "model.embed_tokens"
StoredWeight = IntWeight | Float8Weight | Tensor
CORRECTION: Final = ".e_score_correction_bias"  # the bias of DeepSeek-V3's routers


@dataclass(frozen=True, slots=True)
class WeightFormats:
    """How layers are made: `plain` makes those of plain weights, `integers` those of integers,
    `floats` those of 8-bit floats.

    `scheme`: what plain weights are quantized to as they are read. `head`: the same for a plain
    head. None = they are not quantized.
    """

    plain: LinearFormat
    integers: QuantizedFormat
    floats: Float8Format
    scheme: Scheme | None
    head: Scheme | None = None


class Share(Protocol):
    """Which part of a checkpoint a tensor-parallel rank reads."""

    def tensor(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of the tensor `name`; the whole if ranks do not split it."""
        ...

    def weight(self, module: str, whole: StoredWeight) -> StoredWeight:
        """Return this rank's part of a product's weight [out, in]. Raises ModelRefused if the
        weight cannot be cut."""
        ...

    def adds_bias(self, module: str, part: StoredWeight) -> bool:
        """Whether this rank adds the bias of product `module`. `part`: this rank's weight."""
        ...


class Weights:
    """A checkpoint under the names that it would have unquantized. Implements linear.Linears."""

    def __init__(
        self,
        reader: TensorReader,
        formats: WeightFormats,
        layout: Layout | None,
        share: Share | None = None,
    ) -> None:
        """`share`: cuts what is read to a rank's part; None = everything is read."""
        self._reader, self._formats, self._layout = reader, formats, layout
        self._share = share
        self._modules = module_names(reader.names, layout) if layout else frozenset[str]()
        self._tensor_bytes: dict[str, int] = {}  # by tensor name: a tied tensor counts once
        self.rounded_head_bytes = 0  # bytes of a head of integers, once it has been read
        own = layout.tensors if layout else ()
        hidden = {f"{module}.{tensor}" for module in self._modules for tensor in own}
        # GPTQ's tools write a bias of zeros where the model has none.
        rounded = () if isinstance(layout, Float4Layout) else self._modules
        biases = (f"{module}.bias" for module in rounded)
        hidden |= {b for b in biases if b in reader.names and not reader.read(b).any()}
        self.names = (reader.names - hidden) | {f"{module}.weight" for module in self._modules}

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of all weights that are not quantized."""
        return self._reader.dtype

    @property
    def device(self) -> torch.device:
        """The device that all weights are read to."""
        return self._reader.device

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights read so far, in the form in which they are kept."""
        return sum(self._tensor_bytes.values())

    def counting_anew(self) -> Weights:
        """Return the same weights with a count of their own, which begins at 0."""
        other = copy.copy(self)
        other._tensor_bytes = {}
        other.rounded_head_bytes = 0
        return other

    def tensor(self, *names: str) -> Tensor:
        """Read tensors, stacked along their first dimension, in the model's dtype; integers are
        widened.

        The bias that balances experts is always float32, as its last bits can decide a choice.
        """
        quantized = any(name.removesuffix(".weight") in self._modules for name in names)
        if names[0].endswith(CORRECTION):
            whole = self._reader.read_as_stored(names[0]).float()
        elif self._share is None and not quantized:
            whole = self._reader.read(*names)
        else:
            parts = [self._tensor(name) for name in names]
            whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        self._count(names, whole.nbytes)
        return whole

    def read(self, modules: Sequence[str], has_bias: bool) -> Linear:
        """See Linears.read."""
        names = [f"{module}.weight" for module in modules]
        biases = [f"{module}.bias" for module in modules] if has_bias else []
        plain = self._layout is None and self._formats.scheme is None
        plain = plain and not any(map(self._reader.keeps, names))
        if plain and self._share is None:
            return self._formats.plain(
                self.tensor(*names), self.tensor(*biases) if biases else None
            )
        parts = [self._weight(module) for module in modules]
        self._count(names, sum(_num_bytes(part) for part in parts))
        adds_bias = self._share is None or self._share.adds_bias(modules[0], parts[0])
        bias = self.tensor(*biases) if biases and adds_bias else None
        whole = _stacked(parts)
        return self._side_by_side(parts, bias) if whole is None else self._layer(whole, bias)

    def derived(self, name: str, make: Callable[[Tensor], Tensor]) -> Tensor:
        """See Linears.derived."""
        return make(self.tensor(name))

    def head(self, tied: bool) -> Linear:
        """See Linears.head."""
        if not tied:
            weight = self._part(HEAD, self._stored(HEAD))
        else:
            name = f"{TABLE}.weight"
            table = self._reader.kept(name)
            weight = self.tensor(name) if table is None else self._part(HEAD, table)
        if isinstance(weight, Tensor) and self._formats.head is not None:
            weight = _rounded(HEAD, weight, self._formats.head, "lm_head_quantization")
        if not isinstance(weight, Tensor):
            self.rounded_head_bytes = weight.num_bytes
        if not isinstance(weight, Tensor) or not tied:
            self._count((f"{HEAD}.weight",), _num_bytes(weight))
        return self._layer(weight, None)

    def _tensor(self, name: str) -> Tensor:
        """Read one tensor, or this rank's part of it."""
        module = name.removesuffix(".weight")
        whole = self._stored(module) if module in self._modules else self._reader.read(name)
        if not isinstance(whole, Tensor):
            whole = whole.dequantized(self._reader.dtype)
        return whole if self._share is None else self._share.tensor(name, whole)

    def _layer(self, weight: StoredWeight, bias: Tensor | None) -> Linear:
        """Make a linear layer of weight [out, in] and bias [out]."""
        if isinstance(weight, IntWeight):
            return self._formats.integers(weight, bias)
        if isinstance(weight, Float8Weight):
            return self._formats.floats(weight, bias)
        return self._formats.plain(weight, bias)

    def _part(self, module: str, whole: StoredWeight) -> StoredWeight:
        return whole if self._share is None else self._share.weight(module, whole)

    def _weight(self, module: str) -> StoredWeight:
        """Read the weight of one module, and round it if a scheme asks for it. A rank's part is cut
        after rounding, so it has the integers of the whole weight."""
        weight = self._stored(module)
        scheme = self._formats.scheme
        if isinstance(weight, Tensor) and scheme is not None:
            weight = _rounded(module, weight, scheme, "quantization")
        return self._part(module, weight)

    def _stored(self, module: str) -> StoredWeight:
        """Read the weight of one module: integers or 8-bit floats as they are stored, or plain."""
        if self._layout is not None and module in self._modules:
            return self._layout.weight(module, self._reader)
        name = f"{module}.weight"
        kept = self._reader.kept(name)
        return self._reader.read(name) if kept is None else kept

    def _side_by_side(self, parts: Sequence[StoredWeight], bias: Tensor | None) -> Linear:
        """Make one layer of modules of one input that have different formats: some may be on the
        checkpoint's ignore list, and a GGUF file may store values with more bits. Neighbours of the
        same format become one product."""
        runs: list[StoredWeight] = []
        for part in parts:
            both = _stacked([runs[-1], part]) if runs else None
            if both is None:
                runs.append(part)
            else:
                runs[-1] = both
        biases = [None] * len(runs) if bias is None else bias.split([run.shape[0] for run in runs])
        return SideBySide(tuple(map(self._layer, runs, biases)))

    def _count(self, names: Sequence[str], num_bytes: int) -> None:
        for name in names:
            self._tensor_bytes[name] = 0
        self._tensor_bytes[names[0]] = num_bytes


def _stacked(parts: Sequence[StoredWeight]) -> StoredWeight | None:
    """Return the parts stacked along their outputs; None if their formats differ."""
    integers = [part for part in parts if isinstance(part, IntWeight)]
    floats = [part for part in parts if isinstance(part, Float8Weight)]
    plain = [part for part in parts if isinstance(part, Tensor)]
    if len(integers) == len(parts):
        return stack_weights(integers)
    if len(floats) == len(parts):
        return stack_float8(floats)
    if len(plain) < len(parts):
        return None
    return plain[0] if len(plain) == 1 else torch.cat(plain)


def _num_bytes(weight: StoredWeight) -> int:
    return weight.nbytes if isinstance(weight, Tensor) else weight.num_bytes


def _rounded(module: str, weight: Tensor, scheme: Scheme, field: str) -> IntWeight:
    """Round a weight to `scheme`. `field`: the option that asked for it. Raises ModelRefused if the
    number of inputs cannot be split into groups."""
    try:
        return quantize(weight, scheme)
    except ValueError as error:
        raise ModelRefused(
            f"{module} cannot be quantized to {scheme}: {error}", field=field
        ) from error


def open_weights(
    reader: TensorReader,
    quantization_config: Mapping[str, Any] | None,
    scheme: Scheme | None,
    device: torch.device,
    head: Scheme | None = None,
    share: Share | None = None,
) -> Weights:
    """Return the weights that `reader` reads. `scheme`, `head`: see WeightFormats. `share`: see
    Weights.

    Raises ModelRefused for a quantized checkpoint whose layout is not understood.
    """
    layout = integer_layout(quantization_config) or float4_layout(reader.names)
    integers = QuantizedFormat(reader.dtype, device)
    floats = Float8Format(reader.dtype, device)
    plain = choose_linear(reader.dtype, device)
    return Weights(reader, WeightFormats(plain, integers, floats, scheme, head), layout, share)
