"""What stands between latent attention's products and attention, compiled: as its torch twin, and a
row's numbers depend on no other row."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from baton.engine.kernels.cpu.latent import CompiledLatents, LatentSizes
from baton.engine.kernels.cpu.library import CpuKernels
from baton.engine.kernels.rope import PairRotation, Rotation
from baton.engine.models.elementwise import TorchElementwise
from baton.engine.models.layers.latent import EPSILON, TorchLatents
from baton.engine.models.mla import Absorbed
from tests.engine.running import relative_error

SIZES = [(6, 48, 64, 96, 80), (3, 32, 32, 128, 32), (16, 128, 64, 512, 128)]


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def rotation_of(rows: int, rope: int) -> Rotation:
    angles = torch.arange(rows)[:, None] * torch.linspace(0.01, 2.0, rope // 2)
    return Rotation(angles.cos().bfloat16()[:, None], angles.sin().bfloat16()[:, None])


def both(kernels: CpuKernels, sizes: LatentSizes) -> tuple[CompiledLatents, TorchLatents]:
    """The kernels, and their twin in float32."""
    key = noise(1, sizes.heads, sizes.nope, sizes.rank) / math.sqrt(sizes.nope)
    value = noise(2, sizes.heads, sizes.value_dim, sizes.rank) / math.sqrt(sizes.rank)
    norm = 1 + noise(3, sizes.rank) / 8
    packed = kernels.pack(key.transpose(1, 2)), kernels.pack(value)
    twin = TorchLatents(
        Absorbed(key.float(), value.float()), norm.float(), sizes.pairs, TorchElementwise()
    )
    return CompiledLatents(kernels, sizes, norm, *packed, EPSILON), twin


@pytest.mark.parametrize("pairs", PairRotation)
@pytest.mark.parametrize("numbers", SIZES)
@pytest.mark.parametrize("rows", [1, 2, 17, 70])
def test_they_are_their_twin(
    cpu_kernels: CpuKernels, rows: int, numbers: tuple[int, ...], pairs: PairRotation
) -> None:
    sizes = LatentSizes(*numbers, pairs=pairs)
    compiled, twin = both(cpu_kernels, sizes)
    first = noise(4, rows, sizes.queries + sizes.key)
    q, latent = first[:, : sizes.queries], first[:, sizes.queries :]  # parts of wider rows
    rotation = rotation_of(rows, sizes.rope)
    queries, keys = compiled.queries(q, latent, rotation)
    wide = Rotation(rotation.cos.float(), rotation.sin.float())
    their_queries, their_keys = twin.queries(q.float(), latent.float(), wide)
    assert queries.shape == (rows, sizes.heads, sizes.key)
    assert keys.shape == (rows, 1, sizes.key)
    assert relative_error(queries, their_queries) < 0.004, "rounded once"
    assert relative_error(keys, their_keys) < 0.004

    attended = noise(5, rows, sizes.heads, sizes.rank)
    values = compiled.values(attended)
    assert values.shape == (rows, sizes.outputs)
    assert relative_error(values, twin.values(attended.float())) < 0.004

    for row in range(0, rows, 9):
        one = slice(row, row + 1)
        turned = Rotation(rotation.cos[one], rotation.sin[one])
        query, key = compiled.queries(q[one], latent[one], turned)
        assert torch.equal(query[0], queries[row])
        assert torch.equal(key[0], keys[row])
        assert torch.equal(compiled.values(attended[one])[0], values[row])


def test_sizes_that_fill_no_vectors_have_no_kernel() -> None:
    fits = LatentSizes(4, 16, 32, 64, 24, PairRotation.HALVES)
    assert CompiledLatents.suits(fits)
    for numbers in ((4, 16, 16, 64, 24), (4, 16, 32, 40, 24), (4, 15, 32, 64, 24)):
        assert not CompiledLatents.suits(LatentSizes(*numbers, pairs=PairRotation.HALVES))
