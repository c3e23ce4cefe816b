"""The header of a GGUF file: its metadata, and where its tensors lie. No torch.

    magic "GGUF", version, number of tensors, number of keys; keys with typed values; for each
    tensor its name, sizes (the fastest first), type and offset; padding; the tensors' bytes

All sizes in a file are checked against the file's length before they are used. So a damaged or
hostile file is refused before it costs memory or time. Source: ggml's docs/gguf.md; ggml-common.h.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from baton.protocol.errors import ModelRefused

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_STRING, _ARRAY = 8, 9
_NUMBERS: Final = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip
_MAX_KEYS: Final = 1 << 16
_MAX_TENSORS: Final = 1 << 20
_MAX_DIMENSIONS: Final = 4
_ALIGNMENT: Final = 32
# (numbers in a block, bytes of a block) of each type, by ggml's name of the type.
BLOCKS: Final = {
    "F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), "Q4_0": (32, 18), "Q4_1": (32, 20),
    "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34), "Q4_K": (256, 144),
    "Q5_K": (256, 176), "Q6_K": (256, 210),
}  # fmt: skip
_TYPES: Final = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1",
    10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS",
    17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S",
    23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16",
    34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of a file. `kind`: its type. `shape`: in torch's order, the slowest dimension
    first. `start`: where its bytes begin in the file."""

    name: str
    kind: str
    shape: tuple[int, ...]
    start: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, which is a run along the last dimension."""
        numbers, size = BLOCKS[self.kind]
        return self.shape[-1] // numbers * size


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The header of a file. `num_bytes`: its length, up to the padding before the tensors."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    num_bytes: int

    def of(self, key: str) -> Any:
        """Return the value of ARCHITECTURE.`key`; None if the file does not have it."""
        return self.metadata.get(f"{self.architecture}.{key}")

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture"))


def read_gguf(path: Path) -> GgufFile:
    """Read the header of `path`. Raises ModelRefused with what is wrong with it."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Header(path, data).read()
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise ModelRefused(f"{path} is not a GGUF file: {error}", field="model") from error


class _Header:
    """Reads the header of a mapped file from front to back."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at = path, data, 0

    def read(self) -> GgufFile:
        if self._bytes(len(_MAGIC)) != _MAGIC:
            raise self._refused("it does not begin with GGUF")
        version = self._number("<I")
        if version not in _VERSIONS:
            raise self._refused(f"its version is {version} (read are {_VERSIONS})")
        num_tensors, num_keys = self._number("<Q"), self._number("<Q")
        if num_tensors > _MAX_TENSORS or num_keys > _MAX_KEYS:
            raise self._refused(f"it claims {num_tensors} tensors and {num_keys} keys")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string()
            metadata[key] = self._value(self._number("<I"), nested=False)
        if metadata.get("split.count", 1) not in (0, 1):
            raise self._refused("it is one of several: join them with llama-gguf-split --merge")
        found = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment > 1 << 20:
            raise self._refused(f"its alignment is {alignment}")
        header = self._at
        begin = -(-header // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for tensor in found:
            self._check(tensor, begin + tensor.start, tensor.name in tensors)
            tensors[tensor.name] = GgufTensor(
                tensor.name, tensor.kind, tensor.shape, begin + tensor.start
            )
        return GgufFile(self._path, metadata, tensors, header)

    def _tensor(self) -> GgufTensor:
        name = self._string()
        dimensions = self._number("<I")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise self._refused(f"{name} has {dimensions} dimensions")
        sizes = [self._number("<Q") for _ in range(dimensions)]
        kind = self._number("<I")
        kind = _TYPES.get(kind, f"number {kind}")
        return GgufTensor(name, kind, tuple(reversed(sizes)), self._number("<Q"))

    def _check(self, tensor: GgufTensor, start: int, known: bool) -> None:
        """Raise ModelRefused for a tensor of a type that is not supported, with an impossible
        shape, that occurs twice, or whose bytes reach beyond the file's end."""
        if tensor.kind not in BLOCKS:
            raise ModelRefused(
                f"{self._path}: {tensor.name} is of type {tensor.kind}, which is not read (only "
                f"{', '.join(BLOCKS)})", field="model",
            )  # fmt: skip
        numbers, size = BLOCKS[tensor.kind]
        rows = math.prod(tensor.shape[:-1])
        if known or 0 in tensor.shape or tensor.shape[-1] % numbers:
            raise self._refused(f"{tensor.name} is of shape {tensor.shape}, or there twice")
        if start + rows * (tensor.shape[-1] // numbers) * size > len(self._data):
            raise self._refused(f"it ends before {tensor.name} does")

    def _value(self, kind: int, *, nested: bool) -> Any:
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY or nested:
            raise self._refused(f"it holds a value of type {kind}")
        kind, count = self._number("<I"), self._number("<Q")
        if count > len(self._data) - self._at:
            raise self._refused(f"it ends within a list of {count}")
        if kind in _NUMBERS:
            layout = f"<{count}{_NUMBERS[kind][1]}"
            return list(struct.unpack(layout, self._bytes(struct.calcsize(layout))))
        read: Callable[[], Any] = (
            self._string if kind == _STRING else lambda: self._value(kind, nested=True)
        )
        return [read() for _ in range(count)]

    def _number(self, layout: str) -> Any:
        return struct.unpack(layout, self._bytes(struct.calcsize(layout)))[0]

    def _string(self) -> str:
        return self._bytes(self._number("<Q")).decode("utf-8", "replace")

    def _bytes(self, count: int) -> bytes:
        if count > len(self._data) - self._at:
            raise self._refused("it ends within its header")
        self._at += count
        return self._data[self._at - count : self._at]

    def _refused(self, why: str) -> ModelRefused:
        return ModelRefused(f"{self._path} is not a whole GGUF file: {why}", field="model")
