"""The table of docs/models.md is what tests/golden/breadth.py found; some of its rows, run anew."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.golden.breadth import IMAGES, REQUIRED, examine, examine_images, wanting
from tests.golden.breadth_table import BEGIN, DOCUMENT, END, Outcome, read_found, row, table

# Of each kind: full attention, a mixture with latents, states in all ways, chosen keys, images.
SAMPLE = (
    "llama", "deepseek_v3", "qwen3_next", "zamba2", "mamba2", "glm_moe_dsa", "gemma3, images",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    yield
    logging.getLogger("transformers").setLevel(logging.WARNING)


def test_the_page_has_what_was_found() -> None:
    found = read_found()
    text = DOCUMENT.read_text(encoding="utf-8")
    written = text[text.index(BEGIN) + len(BEGIN) : text.index(END)]
    assert written.strip() == table([*found.values()])
    assert list(found) == sorted(found)


def test_what_is_missing_or_different_fails_the_run() -> None:
    served = {name: Outcome(name, "identical") for name in (*REQUIRED, "llama")}
    assert wanting(served) == []
    without = {name: each for name, each in served.items() if name != "mamba2"}
    assert wanting(without) == ["mamba2"]
    assert wanting({**served, "llama": Outcome("llama", "different")}) == ["llama"]
    assert wanting({**served, "mamba2": Outcome("mamba2", "refused", "it keeps state")}) == [
        "mamba2"
    ]
    assert {"mamba2", "llama4_text", *IMAGES} <= set(REQUIRED)
    assert wanting(read_found()) == []


@pytest.mark.soak
@pytest.mark.parametrize("name", SAMPLE)
def test_a_row_is_found_again(name: str, tmp_path: Path) -> None:
    known = read_found().get(name)
    if known is None or not known.features:
        pytest.skip("its row is older than the columns of features: run tests.golden.breadth")
    kind = IMAGES.get(name)
    fresh = examine(name, tmp_path) if kind is None else examine_images(name, kind, tmp_path)
    assert row(fresh) == row(known)
    assert fresh.result == "identical"


@pytest.mark.soak
def test_a_refusal_is_found_again(tmp_path: Path) -> None:
    fresh = examine("jamba", tmp_path)
    assert (fresh.result, fresh.detail) == ("refused", read_found()["jamba"].detail)
