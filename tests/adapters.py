"""Tests speak of adapters by name; engines go by id."""

from __future__ import annotations

from collections.abc import Sequence

from baton.engine.state.interface import ModelInfo
from baton.protocol.adapters import ids_named


def id_of(info: ModelInfo, name: str) -> str:
    """The one adapter of that name; "" is none."""
    return ids_named(name, info.adapters)[0] if name else ""


def ids_of(info: ModelInfo, names: Sequence[str]) -> list[str]:
    return [id_of(info, name) for name in names]
