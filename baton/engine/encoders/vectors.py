"""From a text's hidden states to its vector: sentence-transformers' Pooling, Dense and Normalize.

All of it is computed in float32. Source: sentence-transformers' modules of these names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from baton.protocol.errors import ModelRefused
from baton.text.sentence_files import DenseModule, Mode, PoolingModule, SentenceFiles

_ACTIVATIONS: Final[dict[str, Callable[[], nn.Module]]] = {
    "Identity": nn.Identity,
    "Tanh": nn.Tanh,
    "ReLU": nn.ReLU,
    "GELU": nn.GELU,
    "SiLU": nn.SiLU,
    "Sigmoid": nn.Sigmoid,
}


class VectorMaker:
    """Makes vectors of hidden states as a checkpoint's modules say."""

    def __init__(self, files: SentenceFiles, hidden_size: int, device: torch.device) -> None:
        """Read the weights of Dense modules. Raises ModelRefused for one that does not fit."""
        self._pooling = files.pooling
        self._modules: list[nn.Module | None] = []  # None: scale to length 1
        self.size = hidden_size * len(files.pooling.modes)
        for module in files.modules:
            if not isinstance(module, DenseModule):
                self._modules.append(None)
                continue
            if module.in_features != self.size:
                message = f"{module.folder}: a Dense of {module.in_features} over {self.size}"
                raise ModelRefused(message, field="model")
            self._modules.append(_dense(module).to(device))
            self.size = module.out_features

    @torch.inference_mode()
    def vector(self, hidden: Tensor, pooling: PoolingModule | None = None) -> Tensor:
        """hidden [tokens, H] -> [size] float32, not scaled at its end. `pooling`: instead of the
        checkpoint's modules."""
        rows = hidden.float()
        if pooling is not None:
            return pooled(rows, pooling)
        vector = pooled(rows, self._pooling)
        for module in self._modules:
            vector = functional.normalize(vector, dim=-1) if module is None else module(vector)
        return vector


def pooled(rows: Tensor, pooling: PoolingModule) -> Tensor:
    """rows [tokens, H] -> [H times modes]."""
    return torch.cat([_by_mode(rows, mode) for mode in pooling.modes])


def _by_mode(rows: Tensor, mode: Mode) -> Tensor:
    match mode:
        case "cls":
            return rows[0]
        case "lasttoken":
            return rows[-1]
        case "max":
            return rows.amax(0)
        case "mean":
            return rows.mean(0)
        case "mean_sqrt_len_tokens":
            return rows.sum(0) / len(rows) ** 0.5
        case "weightedmean":
            weights = torch.arange(1, len(rows) + 1, device=rows.device, dtype=rows.dtype)
            return (rows * weights[:, None]).sum(0) / weights.sum()


def _dense(module: DenseModule) -> nn.Module:
    make = _ACTIVATIONS.get(module.activation)
    if make is None:
        message = f"{module.folder}: activation {module.activation} is not served"
        raise ModelRefused(message, field="model")
    file = module.folder / "model.safetensors"
    if not file.is_file():
        raise ModelRefused(f"there is no {file}", field="model")
    linear = nn.Linear(module.in_features, module.out_features, bias=module.bias)
    named = {
        name.removeprefix("linear."): tensor.float() for name, tensor in load_file(file).items()
    }
    try:
        linear.load_state_dict(named)
    except RuntimeError as error:
        raise ModelRefused(
            f"{file} does not fit its config.json: {error}", field="model"
        ) from error
    return nn.Sequential(linear, make()).requires_grad_(False).eval()
