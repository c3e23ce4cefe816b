"""A CPU that counts as a device which multiplies 8-bit floats: the twins of the GPU's kernels and
torch's own product on the CPU serve such weights, as kernels do on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from baton.engine.checkpoint import widening
from baton.engine.loading import route
from baton.engine.quantization import float8


@contextmanager
def multiplying() -> Iterator[None]:
    """Weights that are loaded in this context are kept in 8 bits."""
    with ExitStack() as stack:
        for module in (widening, route, float8):
            stack.enter_context(mock.patch.object(module, "float8_serves", return_value=True))
        yield
