"""The tensors of a GGUF file under the names of a Hugging Face checkpoint.

    name     token_embd, blk.N.attn_q, ... -> model.embed_tokens, model.layers.N.self_attn.q_proj
    numbers  read by block (blocks.py): widened in float32, or kept as integers for products
    order    llama.cpp reorders the rows of a Llama's query and key projections: two numbers that
             rotate together are neighbours. It is undone here: they are half a head apart
    norms    the weights of a Gemma's norms are stored plus one

Source: llama.cpp conversion/llama.py (permute), gemma.py.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from baton.engine.checkpoint.gguf.blocks import integers_of, read_blocks, widen_blocks
from baton.engine.checkpoint.gguf.config import plain_name, query_heads
from baton.engine.checkpoint.gguf.header import BLOCKS, GgufFile, GgufTensor, read_gguf
from baton.engine.checkpoint.stored import (
    SLAB_NUMBERS,
    Readable,
    Slab,
    StoredTensor,
    WidenedTensor,
    refused,
)
from baton.engine.quantization.int_weight import IntWeight
from baton.engine.quantization.integer import stack_weights

_STORED: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def gguf_tensors(path: Path, *, integers: bool = False) -> dict[str, Readable]:
    """Return all tensors of the file by name. `integers`: quantized matrices can also be read as
    integers.

    Raises ModelRefused for a broken file, and for a tensor that its architecture does not have.
    """
    file = read_gguf(path)
    found: dict[str, Readable] = {}
    for tensor in file.tensors.values():
        name = plain_name(file, tensor.name)
        if name is not None:
            found[name] = _readable(file, tensor, name, integers)
    return found


def _readable(file: GgufFile, tensor: GgufTensor, name: str, integers: bool) -> Readable:
    shift = 1.0 if file.architecture.startswith("gemma") and name.endswith("norm.weight") else 0.0
    heads = query_heads(file, name)
    if heads and tensor.shape[0] % (2 * heads):
        raise refused(name, f"{tensor.shape[0]} rows are no {heads} heads")
    plain = tensor.kind in _STORED
    if plain:
        stored = StoredTensor(file.path, _STORED[tensor.kind], tensor.shape, tensor.start)
        if not heads and not shift:
            return stored
    else:
        bytes_ = (*tensor.shape[:-1], tensor.row_bytes)
        stored = StoredTensor(file.path, torch.uint8, bytes_, tensor.start)

    def rows() -> Tensor:
        whole = stored.read()
        return whole[_halves(len(whole), heads)] if heads else whole

    def open_slabs() -> Slab:
        return functools.partial(_slab, rows(), tensor, shift)

    def open_integers() -> IntWeight:
        return _integers(rows(), tensor, name)

    kept = integers and not plain and len(tensor.shape) == 2
    return WidenedTensor(
        name, tensor.shape, (stored,), open_slabs, open_kept=open_integers if kept else None
    )


def _halves(rows: int, heads: int) -> Tensor:
    """Return, for each row of a query or key projection, its index in llama.cpp's order."""
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()


def _slab(rows: Tensor, tensor: GgufTensor, shift: float, start: int, stop: int) -> Tensor:
    part = rows[start:stop]
    if tensor.kind in _STORED:
        return part.float() - shift
    numbers = widen_blocks(part.reshape(-1, BLOCKS[tensor.kind][1]), tensor.kind)
    return numbers.view(stop - start, *tensor.shape[1:]) - shift


def _integers(rows: Tensor, tensor: GgufTensor, name: str) -> IntWeight:
    """Read rows [out, bytes of a row] as integers, some outputs at a time. Raises ModelRefused for
    scales that are not finite."""
    parts: list[IntWeight] = []
    for some in rows.split(max(1, SLAB_NUMBERS // tensor.shape[1])):
        blocks = read_blocks(some.reshape(-1, BLOCKS[tensor.kind][1]), tensor.kind)
        if not blocks.is_finite():
            raise refused(name, "some of its weights are not finite")
        parts.append(integers_of(blocks, len(some)))
    whole = stack_weights(parts)
    assert whole is not None, "blocks of one type have one format"
    return whole
