"""The headers of safetensors files: what is known of tensors without reading them, and the dtype of
a checkpoint whose config.json states none.

No torch here, because `baton estimate` uses this too. Not here: reading tensors (tensors.py).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from baton.protocol.errors import ModelRefused

_MAX_HEADER_BYTES: Final = 100 << 20  # safetensors' own limit
_FLOATS: Final = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def header(file: Path) -> dict[str, Any]:
    """Return what a file says of its tensors, by their names: `dtype`, `shape`, `data_offsets`.

    Raises ModelRefused for a file of another format. Source: the format of safetensors: header
    length (8 bytes, little-endian), JSON header, data.
    """
    broken = f"{file} is not a safetensors file"
    try:
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            if size > _MAX_HEADER_BYTES:
                raise ModelRefused(broken, field="model")
            found = json.loads(opened.read(size))
    except (OSError, ValueError) as error:
        raise ModelRefused(broken, field="model") from error
    if not isinstance(found, dict):
        raise ModelRefused(broken, field="model")
    found.pop("__metadata__", None)
    return found


def with_dtype(values: dict[str, Any], files: Iterable[Path]) -> dict[str, Any]:
    """Return `values`, a config.json; if it states no dtype and is not quantized, with the one in
    which most numbers of its safetensors `files` are stored. It stays as it is if they hold no
    float32, bfloat16 or float16, or if one is broken: the reader refuses such a file, after what
    config.json shows has been refused.

    transformers takes the first such tensor's dtype. In a checkpoint of several dtypes that may be
    a norm's or a router's, so here the numbers decide.
    """
    parts = (values, values.get("text_config") or {})
    if any(part.get("dtype") or part.get("torch_dtype") for part in parts):
        return values
    if values.get("quantization_config"):
        return values
    numbers: Counter[str] = Counter()
    try:
        for entry in (entry for file in files for entry in header(file).values()):
            if entry["dtype"] in _FLOATS:
                numbers[entry["dtype"]] += math.prod(entry["shape"])
    except (ModelRefused, KeyError, TypeError):
        return values
    if not numbers:
        return values
    return values | {"dtype": _FLOATS[max(numbers, key=numbers.__getitem__)]}
