"""Where `baton up` finds its model."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.protocol.errors import ModelRefused
from deploy.hub import local_model


def never(model: str) -> str:
    raise AssertionError("nothing to fetch")


def test_a_directory_is_used_as_it_is(tmp_path: Path) -> None:
    for name in ("config.json", "model-00001-of-00001.safetensors", "tokenizer.json"):
        (tmp_path / name).touch()
    assert local_model(str(tmp_path), never) == tmp_path


def test_a_hub_id_is_fetched_once(tmp_path: Path) -> None:
    asked: list[str] = []

    def fetch(model: str) -> str:
        asked.append(model)
        return str(tmp_path)

    assert local_model("owner/name", fetch) == tmp_path
    assert asked == ["owner/name"]


@pytest.mark.parametrize("model", ["./missing", "/missing/model", "missing", "a/b/c"])
def test_what_is_neither_is_refused_by_name(model: str) -> None:
    with pytest.raises(ModelRefused, match=f"--model {model} is neither"):
        local_model(model, never)


def test_an_unreachable_hub_is_said(tmp_path: Path) -> None:
    def fetch(model: str) -> str:
        raise OSError("no route to host\nmore")

    with pytest.raises(ModelRefused, match=r"owner/name cannot be fetched .*\(no route to host\)"):
        local_model("owner/name", fetch)
