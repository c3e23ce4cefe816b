"""A step of a dense decoder that attends layer by layer: one compiled call between the attention of
two layers (layer_part.h). Not here: who attends, and which steps may use it
(models/compiled_step.py).
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from baton.engine.kernels.cpu.step import StepArgs, StepModel

NO_LAYER = -1


class _PartArgs(ctypes.Structure):
    """PartArgs of step_args.h."""

    _fields_ = (
        ("step", StepArgs),
        ("after", ctypes.c_int64),
        ("before", ctypes.c_int64),
        ("attended", ctypes.c_void_p),
    )


class LayerParts:
    """One step of T rows.

    `qkv` [T, heads + 2 * kv_heads, dim]: of the layer that is to attend, with queries rotated; keys
    and values are in the pool, here perhaps not. The next call overwrites it. `hidden` [T, H]: once
    the last norm is done.
    """

    def __init__(
        self, model: StepModel, args: StepArgs, residual: Tensor, alive: object = None
    ) -> None:
        """`args`: StepModel.arguments, which need `alive`. `residual` [T, H]: the embeddings, which
        are overwritten."""
        rows, sizes = len(residual), model.sizes
        self._model, self._alive, self._residual = model, alive, residual
        self.hidden = torch.empty(rows, sizes.hidden, dtype=torch.bfloat16)
        self._scratch = torch.empty(rows * sizes.scratch, dtype=torch.bfloat16)
        self._args = _PartArgs(args)
        step = self._args.step
        step.rows, step.residual = rows, residual.data_ptr()
        step.out, step.scratch = self.hidden.data_ptr(), self._scratch.data_ptr()
        self.qkv = self._scratch[: rows * sizes.qkv].view(rows, -1, sizes.dim)

    def of(self, rows: Tensor) -> LayerParts:
        """Return a step of those rows alone [R], which can only be ended: it stores no keys."""
        return LayerParts(self._model, self._args.step, self._residual[rows])

    def run(self, after: int, before: int, attended: Tensor | None) -> None:
        """Compute from what the layer `after` `attended` to [T, heads, dim] up to the attention of
        the layer `before`, whose keys and values go to the pool.

        NO_LAYER in place of `after`: from the embeddings; of `before`: to the last norm.
        """
        self._args.after, self._args.before = after, before
        self._args.attended = None if attended is None else attended.data_ptr()
        self._model.call_part(ctypes.byref(self._args))
