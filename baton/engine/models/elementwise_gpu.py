"""The elementwise operations of a decoder (norms, rotation, gates), by Triton kernels.

Importing this imports triton.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from baton.engine.kernels.cpu.library import HeadNorms
from baton.engine.kernels.gpu.norm import MAX_WIDTH, add_norm
from baton.engine.kernels.gpu.rope import rotate
from baton.engine.kernels.gpu.swiglu import gated
from baton.engine.kernels.rope import PairRotation, Rotation
from baton.engine.models.config import DecoderConfig
from baton.engine.models.elementwise import TorchElementwise


@dataclass(frozen=True, slots=True)
class TritonElementwise:
    """Implements elementwise.Elementwise on a GPU, for any float dtype and sizes that `suits`
    allows.

    `in_torch` rotates heads of which only some dims rotate, and heads whose neighbouring dims
    rotate together.
    """

    in_torch: TorchElementwise = field(default_factory=TorchElementwise)

    @staticmethod
    def suits(config: DecoderConfig) -> bool:
        """Whether a row of the hidden size fits into one program of the norm kernel."""
        return config.hidden_size <= MAX_WIDTH

    def norm_weight(self, stored: Tensor) -> Tensor:
        """See Elementwise."""
        return self.in_torch.norm_weight(stored)

    def add_norm(
        self, residual: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        """See Elementwise."""
        return residual, add_norm(residual, delta, weight, epsilon)

    def rotate(
        self, qkv: Tensor, rotation: Rotation, num_heads: int, norms: HeadNorms | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See Elementwise."""
        if rotation.rotated < qkv.shape[2] or rotation.pairs is not PairRotation.HALVES:
            return self.in_torch.rotate(qkv, rotation, num_heads, norms)
        kv_heads = (qkv.shape[1] - num_heads) // 2
        qkv = qkv.contiguous()
        rotate(qkv, rotation, num_heads, norms)
        query, key, value = qkv.split((num_heads, kv_heads, kv_heads), dim=1)
        return query, key, value

    def gated(self, gate_up: Tensor) -> Tensor:
        """See Elementwise."""
        return gated(gate_up, self.in_torch.activation == "gelu_tanh")

    def gate_heads(self, x: Tensor, gates: Tensor) -> Tensor:
        """See Elementwise."""
        return self.in_torch.gate_heads(x, gates)
