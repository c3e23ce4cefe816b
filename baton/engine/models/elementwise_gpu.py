"""What stands between a decoder's products, with the Triton kernels.

Importing this imports triton.
"""

from __future__ import annotations

from torch import Tensor

from baton.engine.kernels.cpu.library import HeadNorms
from baton.engine.kernels.gpu.norm import MAX_WIDTH, add_norm
from baton.engine.kernels.gpu.rope import rotate
from baton.engine.kernels.gpu.swiglu import swiglu
from baton.engine.kernels.rope import Rotation
from baton.engine.models.config import DecoderConfig


class TritonElementwise:
    """Any float dtype on a GPU; sizes as `suits` says. See elementwise.Elementwise."""

    @staticmethod
    def suits(config: DecoderConfig) -> bool:
        """Whether one program holds a row."""
        return config.hidden_size <= MAX_WIDTH

    def add_norm(
        self, residual: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        """See Elementwise."""
        return residual, add_norm(residual, delta, weight, epsilon)

    def rotate(
        self, qkv: Tensor, rotation: Rotation, num_heads: int, norms: HeadNorms | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See Elementwise."""
        kv_heads = (qkv.shape[1] - num_heads) // 2
        qkv = qkv.contiguous()
        rotate(qkv, rotation, num_heads, norms)
        query, key, value = qkv.split((num_heads, kv_heads, kv_heads), dim=1)
        return query, key, value

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """See Elementwise."""
        return swiglu(gate_up)
