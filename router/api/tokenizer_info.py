"""/tokenizer_info: vLLM's, what tokenizer_config.json says, and the chat template in use."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, cast

from baton.text.tokenizer import read_json
from router.services import RouterServices

_PLACES: Final = ("vocab_file", "merges_file", "tokenizer_file", "name_or_path")  # on this machine


def tokenizer_info(services: RouterServices) -> dict[str, Any]:
    """The configuration without paths; tokens by their text alone."""
    told = read_json(Path(services.config.model) / "tokenizer_config.json")
    info = {name: _plain(value) for name, value in told.items() if name not in _PLACES}
    info.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    template = services.chat_template
    if template is not None:
        info["chat_template"] = template.source
    return info


def _plain(value: Any) -> Any:
    """Added tokens are objects with options of their own: here they are their text."""
    if isinstance(value, list):
        return [_plain(item) for item in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    fields = cast("dict[str, Any]", value)
    if isinstance(fields.get("content"), str):
        return fields["content"]
    return {name: _plain(item) for name, item in fields.items()}
