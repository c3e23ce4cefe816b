"""transformers' model with its parameters in a file of weights that processes of a host share.

The first process reads the checkpoint, and moves each parameter into the file. Others give the
file's tensors to transformers as a checkpoint that needs no cast, so that it takes them as they
are. All map the file copy-on-write: modelling code that writes to a parameter changes its own copy
of a page. Buffers are in the file too, but each process has its own.
"""

from __future__ import annotations

import logging
from typing import Any, Final

import torch
from torch import Tensor, nn

from baton.engine.checkpoint.checkpoint import Checkpoint
from baton.engine.checkpoint.weight_file import ReadingFile, WritingFile
from baton.engine.models.causal import ModelPart, read_causal
from baton.protocol.errors import ModelRefused
from baton.runtime import heap

logger = logging.getLogger(__name__)
NAMES: Final = "names"  # no tensor of a model has a name without a dot


def causal_once(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    file: ReadingFile | WritingFile | None,
    part: ModelPart = ModelPart.WHOLE,
) -> Any:
    """Return what read_causal returns, with its parameters in `file`; None = in its own memory.

    Raises what read_causal does.
    """
    if isinstance(file, ReadingFile):
        mapped = _mapped(checkpoint, dtype, file, part)
        return read_causal(checkpoint, dtype, part=part) if mapped is None else mapped
    causal = read_causal(checkpoint, dtype, part=part)
    if file is not None:
        _move(causal, file)
    return causal


def _state(causal: nn.Module) -> dict[str, Tensor]:
    """Return the parameters, tied ones once, and the buffers that belong to the state."""
    state = causal.state_dict(keep_vars=True)
    found: dict[str, Tensor] = dict(causal.named_parameters())
    found.update({n: t for n, t in state.items() if not isinstance(t, nn.Parameter)})
    return found


def _move(causal: nn.Module, file: WritingFile) -> None:
    """Write the state to `file`, and make the parameters views of it."""
    state = _state(causal)
    for name, tensor in state.items():
        written = file.take(name, lambda tensor=tensor: tensor.data)
        if isinstance(tensor, nn.Parameter):
            tensor.data = written
            heap.give_back(written.nbytes)  # else both copies are held until the last has moved
    file.take(NAMES, lambda: tuple(state))
    file.seal(sum(parameter.nbytes for parameter in causal.parameters()), 0)
    heap.trim()


def _mapped(
    checkpoint: Checkpoint, dtype: torch.dtype, file: ReadingFile, part: ModelPart
) -> Any | None:
    """Return the model made of the file's tensors; None if transformers does not take all of them
    as they are."""
    parts: dict[str, Tensor] = {}
    for name in file.take(NAMES, tuple[str, ...]):
        tensor = file.take(name, _absent)
        if tensor is not None:
            parts[name] = tensor
    try:
        causal = read_causal(checkpoint, dtype, parts, part)
    except ModelRefused as reason:
        logger.info("weights are not shared: %s", reason)
        return None
    state = _state(causal)
    if state.keys() != parts.keys():
        logger.info("weights are not shared: %s is made of other tensors", type(causal).__name__)
        return None
    for name, tensor in state.items():
        if isinstance(tensor, nn.Parameter):
            same = tensor.data_ptr() == parts[name].data_ptr() and tensor.dtype == parts[name].dtype
        else:
            same = torch.equal(tensor, parts[name])
        if not same:
            logger.info("weights are not shared: transformers does not take %s as it is", name)
            return None
    return causal


def _absent() -> Tensor | None:
    """What a file has for a tensor that it could not hold."""
    return None
