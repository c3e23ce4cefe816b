"""The elementwise operations of a decoder (norms, rotation, gates), in torch or compiled.

The compiled operations round once where torch rounds after each operation. Products are in
quantization/linear.py, attention is in attention/.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.kernels.cpu.library import CpuKernels, HeadNorms, kernels_for
from baton.engine.kernels.gpu.support import triton_serves
from baton.engine.kernels.rope import Rotation
from baton.engine.models.config import Activation, DecoderConfig


class Elementwise(Protocol):
    """Norms, rotation and gates. H = hidden size, D = head_dim, I = intermediate size."""

    def norm_weight(self, stored: Tensor) -> Tensor:
        """Return a norm's weight as `add_norm` and `rotate` take it. `stored`: the weight [H] as
        the checkpoint holds it."""
        ...

    def add_norm(
        self, residual: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        """Return (residual + delta, the RMSNorm of this sum), all [T, H]. A `delta` of None adds
        nothing. May mutate `residual`."""
        ...

    def rotate(
        self, qkv: Tensor, rotation: Rotation, num_heads: int, norms: HeadNorms | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Split qkv [T, heads + 2 * kv_heads, D] into query [T, heads, D], key and value
        [T, kv_heads, D]. Query and key are normalized, if `norms` are given, and then rotated. May
        mutate `qkv`."""
        ...

    def gated(self, gate_up: Tensor) -> Tensor:
        """Return activation(gate) * up [T, I] for gate_up [T, 2 * I]."""
        ...

    def gate_heads(self, x: Tensor, gates: Tensor) -> Tensor:
        """Return x * sigmoid(gates), all [T, heads, D]. May mutate `x`."""
        ...


@dataclass(frozen=True, slots=True)
class TorchElementwise:
    """Implements Elementwise by torch operations, for any dtype and device."""

    norm_offset: float = 0.0
    activation: Activation = "silu"

    def norm_weight(self, stored: Tensor) -> Tensor:
        """See Elementwise. The offset is added in float32: a narrower dtype would lose digits."""
        return stored.float() + self.norm_offset if self.norm_offset else stored

    def add_norm(
        self, residual: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        """See Elementwise."""
        if delta is not None:
            residual = residual + delta
        return residual, norm(residual, weight, epsilon)

    def rotate(
        self, qkv: Tensor, rotation: Rotation, num_heads: int, norms: HeadNorms | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See Elementwise."""
        kv_heads = (qkv.shape[1] - num_heads) // 2
        query_key, value = qkv[:, : num_heads + kv_heads], qkv[:, num_heads + kv_heads :]
        if norms is not None:
            query = norm(query_key[:, :num_heads], norms.query, norms.epsilon)
            key = norm(query_key[:, num_heads:], norms.key, norms.epsilon)
            query_key = torch.cat((query, key), dim=1)
        rotated = rotation.rotate(query_key)
        return rotated[:, :num_heads], rotated[:, num_heads:], value

    def gated(self, gate_up: Tensor) -> Tensor:
        """See Elementwise."""
        gate, up = gate_up.chunk(2, dim=-1)
        if self.activation == "gelu_tanh":
            return functional.gelu(gate, approximate="tanh") * up
        return functional.silu(gate) * up

    def gate_heads(self, x: Tensor, gates: Tensor) -> Tensor:
        """See Elementwise."""
        return x * gates.sigmoid()


@dataclass(frozen=True, slots=True)
class CompiledElementwise:
    """Implements Elementwise by compiled kernels: bfloat16, on a CPU that supports the kernels, for
    sizes that `suits` allows."""

    kernels: CpuKernels
    norm_offset: float = 0.0
    activation: Activation = "silu"

    @staticmethod
    def suits(config: DecoderConfig) -> bool:
        """Whether every row that the kernels see is a whole number of vectors of 16 numbers."""
        sizes = [config.hidden_size, config.intermediate_size]
        if config.latent is None:
            sizes += [config.head_dim // 2, config.turned // 2]
        else:
            sizes += config.latent.rank, config.latent.query_rank
        if config.experts is not None:
            sizes.append(config.experts.shared_size)
        return not any(size % 16 for size in sizes)

    def norm_weight(self, stored: Tensor) -> Tensor:
        """See Elementwise. The weight stays as stored: the kernels add the offset."""
        return stored

    def add_norm(
        self, residual: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        """See Elementwise."""
        normal = self.kernels.add_norm(residual, delta, weight, epsilon, self.norm_offset)
        return residual, normal

    def rotate(
        self, qkv: Tensor, rotation: Rotation, num_heads: int, norms: HeadNorms | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See Elementwise."""
        kv_heads = (qkv.shape[1] - num_heads) // 2
        qkv = qkv.contiguous()
        self.kernels.rotate(qkv, rotation, num_heads, norms)
        query, key, value = qkv.split((num_heads, kv_heads, kv_heads), dim=1)
        return query, key, value

    def gated(self, gate_up: Tensor) -> Tensor:
        """See Elementwise."""
        return self.kernels.gated(gate_up, self.activation == "gelu_tanh")

    def gate_heads(self, x: Tensor, gates: Tensor) -> Tensor:
        """See Elementwise."""
        x = x.contiguous()
        self.kernels.gate_heads(x, gates)
        return x


def choose_elementwise(
    config: DecoderConfig, dtype: torch.dtype, device: torch.device
) -> Elementwise:
    """Return the Triton kernels on a GPU that has Triton, the compiled ones on a CPU that supports
    them, if the model's sizes allow it; else torch operations."""
    in_torch = TorchElementwise(config.norm_offset, config.activation)
    if triton_serves(device):
        from baton.engine.models.elementwise_gpu import TritonElementwise  # imports triton

        return TritonElementwise(in_torch) if TritonElementwise.suits(config) else in_torch
    compiled = kernels_for(dtype, device)
    if compiled is None or not CompiledElementwise.suits(config):
        return in_torch
    return CompiledElementwise(compiled, config.norm_offset, config.activation)


def norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return the RMSNorm of x over the last dimension. If `weight` has another (wider) dtype, the
    norm is computed in that dtype and then rounded to x's."""
    if weight.dtype != x.dtype:
        return norm(x.to(weight.dtype), weight, epsilon).to(x.dtype)
    return functional.rms_norm(x, (x.shape[-1],), weight, epsilon)
