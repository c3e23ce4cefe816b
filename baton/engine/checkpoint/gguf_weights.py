"""The tensors of a GGUF file under the names of its checkpoint, widened.

    name     token_embd, blk.N.attn_q, ... -> model.embed_tokens, model.layers.N.self_attn.q_proj
    numbers  by block: small integers times scales (and minus minima), in float32
    order    llama.cpp turns the rows of a Llama's queries and keys so that the two numbers which
             rotate together lie side by side; here they are half a head apart
    norms    a Gemma's are stored plus one

Source: ggml-quants.c (dequantize_row_*); llama.cpp conversion/llama.py (permute), gemma.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from baton.engine.checkpoint.gguf_config import plain_name, query_heads
from baton.engine.checkpoint.gguf_header import BLOCKS, GgufFile, GgufTensor, read_gguf
from baton.engine.checkpoint.stored import Readable, Slab, StoredTensor, WidenedTensor, refused

_STORED: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_K_SCALES: Final = 12  # bytes that hold 8 scales and 8 minima of 6 bits


def gguf_tensors(path: Path) -> dict[str, Readable]:
    """Every tensor of the file. Raises ModelRefused for a broken file, and for a tensor that its
    architecture does not have."""
    file = read_gguf(path)
    found: dict[str, Readable] = {}
    for tensor in file.tensors.values():
        name = plain_name(file, tensor.name)
        if name is not None:
            found[name] = _readable(file, tensor, name)
    return found


def _readable(file: GgufFile, tensor: GgufTensor, name: str) -> Readable:
    shift = 1.0 if file.architecture.startswith("gemma") and name.endswith("norm.weight") else 0.0
    heads = query_heads(file, name)
    if heads and tensor.shape[0] % (2 * heads):
        raise refused(name, f"{tensor.shape[0]} rows are no {heads} heads")
    if tensor.kind in _STORED:
        stored = StoredTensor(file.path, _STORED[tensor.kind], tensor.shape, tensor.start)
        if not heads and not shift:
            return stored
    else:
        bytes_ = (*tensor.shape[:-1], tensor.row_bytes)
        stored = StoredTensor(file.path, torch.uint8, bytes_, tensor.start)

    def open_slabs() -> Slab:
        rows = stored.read()
        if heads:
            rows = rows[_halves(len(rows), heads)]
        return functools.partial(_slab, rows, tensor, shift)

    return WidenedTensor(name, tensor.shape, (stored,), open_slabs)


def _halves(rows: int, heads: int) -> Tensor:
    """Where each row of a query or key projection lies among llama.cpp's."""
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()


def _slab(rows: Tensor, tensor: GgufTensor, shift: float, start: int, stop: int) -> Tensor:
    part = rows[start:stop]
    if tensor.kind in _STORED:
        return part.float() - shift
    numbers = widen_blocks(part.reshape(-1, BLOCKS[tensor.kind][1]), tensor.kind)
    return numbers.view(stop - start, *tensor.shape[1:]) - shift


def widen_blocks(blocks: Tensor, kind: str) -> Tensor:
    """blocks uint8 [n, bytes of a block] of type `kind` -> float32 [n, numbers of a block]."""
    return _WIDENERS[kind](blocks.contiguous())


def _halfs(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each block: float32 [n, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(bytes_: Tensor, run: int) -> Tensor:
    """The low halves of each run of bytes, then their high halves: [n, 2 * bytes]."""
    runs = bytes_.unflatten(1, (-1, 1, run))
    return torch.cat((runs & 15, runs >> 4), 2).flatten(1)


def _fifth_bits(bytes_: Tensor) -> Tensor:
    """32 bits of four bytes, the lowest first: [n, 32]."""
    return (bytes_.unsqueeze(2) >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1)


def _q4_0(blocks: Tensor) -> Tensor:
    return _halfs(blocks, 0) * (_nibbles(blocks[:, 2:], 16).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _halfs(blocks, 0) * _nibbles(blocks[:, 4:], 16).float() + _halfs(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    numbers = _nibbles(blocks[:, 6:], 16) | _fifth_bits(blocks[:, 2:6]) << 4
    return _halfs(blocks, 0) * (numbers.float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    numbers = _nibbles(blocks[:, 8:], 16) | _fifth_bits(blocks[:, 4:8]) << 4
    return _halfs(blocks, 0) * numbers.float() + _halfs(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8).float() * _halfs(blocks, 0)


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Of the 8 runs of a block: float32 [n, 8, 1] each."""
    packed = blocks[:, 4 : 4 + _K_SCALES]
    low, middle, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((low & 63, high & 15 | low >> 2 & 48), 1).float()
    minima = torch.cat((middle & 63, high >> 4 | middle >> 2 & 48), 1).float()
    scales, minima = _halfs(blocks, 0) * scales, _halfs(blocks, 2) * minima
    return scales.unsqueeze(2), minima.unsqueeze(2)


def _q4_k(blocks: Tensor) -> Tensor:
    scales, minima = _scales_and_minima(blocks)
    numbers = _nibbles(blocks[:, 4 + _K_SCALES :], 32).float().unflatten(1, (8, 32))
    return (scales * numbers - minima).flatten(1)


def _q5_k(blocks: Tensor) -> Tensor:
    scales, minima = _scales_and_minima(blocks)
    fifths = blocks[:, 4 + _K_SCALES : 4 + _K_SCALES + 32].unsqueeze(1)
    fifths = fifths >> torch.arange(8, dtype=torch.uint8)[:, None] & 1  # [n, 8, 32]
    numbers = _nibbles(blocks[:, 4 + _K_SCALES + 32 :], 32).unflatten(1, (8, 32))
    return (scales * (numbers | fifths << 4).float() - minima).flatten(1)


def _q6_k(blocks: Tensor) -> Tensor:
    scales = _halfs(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float()
    low = _nibbles(blocks[:, :128], 64)
    high = blocks[:, 128:192].unflatten(1, (2, 1, 32))
    high = high >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None] & 3  # [n, 2, 4, 32]
    numbers = (low | high.flatten(1) << 4).float() - 32
    return (scales.unsqueeze(2) * numbers.unflatten(1, (16, 16))).flatten(1)


_WIDENERS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q4_K": _q4_k,
    "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip
