"""Weights: what a model reads its tensors and linear layers from, whatever the checkpoint holds.

    plain checkpoint                      -> plain layers
    plain checkpoint, --quantization      -> each linear layer quantized as it is read
    quantized checkpoint                  -> its integers in its own scheme; the rest plain
    one of small floats                   -> widened by the reader (widening.py): as a plain one;
                                             experts of gpt-oss stay in 4 bits where kernels can
    GGUF                                  -> its integers, if they were asked for; else widened
    --lm-head-quantization                -> a head that is stored plain quantized as it is read

Only products are ever quantized: embeddings, norms and routers stay as they are. The rounded head
of tied embeddings is a copy: tokens are looked up in the table that was stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from baton.engine.checkpoint.float4 import Float4Layout, float4_layout
from baton.engine.checkpoint.quantized_checkpoint import Layout, module_names
from baton.engine.checkpoint.tensors import TensorReader
from baton.engine.checkpoint.widening import integer_layout
from baton.engine.quantization.integer import (
    IntWeight,
    QuantizedFormat,
    Scheme,
    quantize,
    stack_weights,
)
from baton.engine.quantization.linear import Linear, LinearFormat, SideBySide, choose_linear
from baton.protocol.errors import ModelRefused

HEAD: Final = "lm_head"
TABLE: Final = "model.embed_tokens"
StoredWeight = IntWeight | Tensor
CORRECTION: Final = ".e_score_correction_bias"  # DeepSeek-V3's, of its routers


@dataclass(frozen=True, slots=True)
class WeightFormats:
    """How layers are held: plain ones by `plain`, integer ones by `integers`.

    `scheme`: what plain checkpoints are quantized to as they are read, `head`: what a plain head
    is; None = not.
    """

    plain: LinearFormat
    integers: QuantizedFormat
    scheme: Scheme | None
    head: Scheme | None = None


class Share(Protocol):
    """Which part of a checkpoint a tensor-parallel rank reads."""

    def tensor(self, name: str, whole: Tensor) -> Tensor:
        """Its part of an embedding or a bias; other tensors whole."""
        ...

    def weight(self, module: str, whole: StoredWeight) -> StoredWeight:
        """Its part of a product's weight [out, in]. Raises ModelRefused if it cannot be cut."""
        ...

    def adds_bias(self, module: str, part: StoredWeight) -> bool:
        """Whether this rank, with this part of the product's weight, adds its part of the bias."""
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
        """`share`: the part that is read; None = everything."""
        self._reader, self._formats, self._layout = reader, formats, layout
        self._share = share
        self._modules = module_names(reader.names, layout) if layout else frozenset[str]()
        self._tensor_bytes: dict[str, int] = {}  # by tensor name: a tied one counts once
        self.rounded_head_bytes = 0  # of a head of integers, once it was read
        own = layout.tensors if layout else ()
        hidden = {f"{module}.{tensor}" for module in self._modules for tensor in own}
        # GPTQ's tools write a bias of zeros where the model has none.
        rounded = () if isinstance(layout, Float4Layout) else self._modules
        biases = (f"{module}.bias" for module in rounded)
        hidden |= {b for b in biases if b in reader.names and not reader.read(b).any()}
        self.names = (reader.names - hidden) | {f"{module}.weight" for module in self._modules}

    @property
    def dtype(self) -> torch.dtype:
        """Of all that is plain."""
        return self._reader.dtype

    @property
    def device(self) -> torch.device:
        """Where all of it is put."""
        return self._reader.device

    @property
    def num_bytes(self) -> int:
        """Bytes of what was read so far, as it is kept."""
        return sum(self._tensor_bytes.values())

    def tensor(self, *names: str) -> Tensor:
        """Tensors stacked along their first dimension, in the model's dtype; integers widened.

        The bias that balances experts is in float32 always: its last bits decide a choice.
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
        plain = plain and not any(map(self._reader.has_integers, names))
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

    def head(self, tied: Tensor | None) -> Linear:
        """See Linears.head."""
        if tied is None:
            weight = self._part(HEAD, self._stored(HEAD))
        else:
            table = self._reader.integers(f"{TABLE}.weight")
            weight = tied if table is None else self._part(HEAD, table)
        if isinstance(weight, Tensor) and self._formats.head is not None:
            weight = _rounded(HEAD, weight, self._formats.head, "lm_head_quantization")
        if isinstance(weight, IntWeight):
            self.rounded_head_bytes = weight.num_bytes
        if isinstance(weight, IntWeight) or tied is None:
            self._count((f"{HEAD}.weight",), _num_bytes(weight))
        return self._layer(weight, None)

    def _tensor(self, name: str) -> Tensor:
        """One tensor, or this rank's part of it."""
        module = name.removesuffix(".weight")
        whole = self._stored(module) if module in self._modules else self._reader.read(name)
        if isinstance(whole, IntWeight):
            whole = whole.dequantized(self._reader.dtype)
        return whole if self._share is None else self._share.tensor(name, whole)

    def _layer(self, weight: StoredWeight, bias: Tensor | None) -> Linear:
        """weight [out, in], bias [out]."""
        if isinstance(weight, IntWeight):
            return self._formats.integers(weight, bias)
        return self._formats.plain(weight, bias)

    def _part(self, module: str, whole: StoredWeight) -> StoredWeight:
        return whole if self._share is None else self._share.weight(module, whole)

    def _weight(self, module: str) -> StoredWeight:
        """The weight of one module: the checkpoint's integers, or rounded here, or plain. A rank's
        part has the integers of the whole."""
        weight = self._stored(module)
        scheme = self._formats.scheme
        if isinstance(weight, Tensor) and scheme is not None:
            weight = _rounded(module, weight, scheme, "quantization")
        return self._part(module, weight)

    def _stored(self, module: str) -> StoredWeight:
        """The weight of one module as the checkpoint has it."""
        if self._layout is not None and module in self._modules:
            return self._layout.weight(module, self._reader)
        name = f"{module}.weight"
        integers = self._reader.integers(name)
        return self._reader.read(name) if integers is None else integers

    def _side_by_side(self, parts: Sequence[StoredWeight], bias: Tensor | None) -> Linear:
        """Modules of one input in different formats (some are on the checkpoint's ignore list, a
        GGUF file has more bits for values), neighbours of one format as one."""
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
    """The parts stacked along their outputs; None if their formats differ."""
    integers = [part for part in parts if isinstance(part, IntWeight)]
    if integers:
        return stack_weights(integers) if len(integers) == len(parts) else None
    plain = [part for part in parts if isinstance(part, Tensor)]
    return plain[0] if len(plain) == 1 else torch.cat(plain)


def _num_bytes(weight: StoredWeight) -> int:
    return weight.num_bytes if isinstance(weight, IntWeight) else weight.nbytes


def _rounded(module: str, weight: Tensor, scheme: Scheme, field: str) -> IntWeight:
    """`field`: the option that asked for it. Raises ModelRefused if the inputs make no groups."""
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
    """The weights behind `reader`; `scheme` and `head` None = as the checkpoint stores them.
    `share`: see Weights.

    Raises ModelRefused for a quantized checkpoint whose layout is not understood.
    """
    layout = integer_layout(quantization_config) or float4_layout(reader.names)
    integers = QuantizedFormat(reader.dtype, device)
    plain = choose_linear(reader.dtype, device)
    return Weights(reader, WeightFormats(plain, integers, scheme, head), layout, share)
