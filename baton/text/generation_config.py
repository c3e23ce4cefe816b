"""Sampling defaults that a model's authors recommend: generation_config.json, as vLLM reads it.

They apply only where a request gives no value. `do_sample: false` means greedy, whatever
temperature stands beside it. The engine reads the end-of-sequence ids of the same file
(baton/engine/checkpoint/checkpoint.py). `max_new_tokens` is ignored, because it would cut answers
without being asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from baton.protocol.errors import InvalidRequest, ModelRefused
from baton.protocol.sampling import SamplingParams
from baton.text.tokenizer import read_json

FIELDS: Final = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
SamplingDefaults = Mapping[str, int | float]  # field of SamplingParams -> value


def sampling_defaults(model_dir: str | Path) -> SamplingDefaults:
    """Return the defaults of a model directory, {} without the file; null values are left out.

    Raises ModelRefused, naming file and field, for values that no request could ask for.
    """
    file = Path(model_dir) / "generation_config.json"
    content = read_json(file)
    found = {name: content[name] for name in FIELDS if content.get(name) is not None}
    if content.get("do_sample") is False:
        found["temperature"] = 0.0
    _check(found, file)
    return found


def _check(found: Mapping[str, Any], file: Path) -> None:
    if not isinstance(found.get("top_k", 0), int):
        raise ModelRefused(f"{file}: top_k must be an integer", field="model")
    try:
        SamplingParams(**found)
    except InvalidRequest as error:
        raise ModelRefused(f"{file}: {error.message}", field="model") from error
