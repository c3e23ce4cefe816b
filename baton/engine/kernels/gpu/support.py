"""Whether the Triton kernels serve a device, and why not. Importing it does not import triton."""

from __future__ import annotations

import functools
import importlib
import logging
import os
from typing import Final

import torch

logger = logging.getLogger(__name__)
SWITCH: Final = "BATON_GPU_KERNELS"  # "off": torch's own kernels serve
FLOAT8_CAPABILITY: Final = (8, 9)


def triton_serves(device: torch.device) -> bool:
    """Whether the kernels serve tensors on `device`; the reason is logged once."""
    return device.type == "cuda" and _found()[0]


def float8_serves(device: torch.device) -> bool:
    """Whether `device` multiplies 8-bit floats (e4m3), and the kernels serve it: NVIDIA's cards of
    compute capability 8.9 and above."""
    if not triton_serves(device) or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device) >= FLOAT8_CAPABILITY


def state() -> str:
    """Return a text for people: which kernels serve on a GPU of this machine, and why."""
    if not torch.cuda.is_available():
        return "none: torch sees no GPU"
    return _found()[1]


@functools.cache
def _found() -> tuple[bool, str]:
    found, state = False, f"torch's own serve: {SWITCH} is off"
    if os.environ.get(SWITCH) != "off":
        try:
            version = importlib.import_module("triton").__version__
            found, state = True, f"Triton {version}"
        except ImportError as error:
            state = f"torch's own serve: triton cannot be imported ({error})"
    logger.info("GPU kernels: %s", state)
    return found, state
