"""What the console serves: its weight, its modules, nothing inline and nothing from elsewhere."""

from __future__ import annotations

import gzip
import re
import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
STATIC: Final = ROOT / "router" / "console" / "static"
MOST_BYTES: Final = 150_000  # gzipped, of all files
VENDORED: Final = {"preact.js", "preact-hooks.js", "htm.js", "uplot.js", "uplot.css"}
FILES: Final = sorted(path for path in STATIC.iterdir() if path.is_file())
OURS: Final = [path for path in FILES if path.name not in VENDORED]
MAX_LINES: Final = 500


def by_name(path: Path) -> str:
    return path.name


def test_all_of_it_weighs_little() -> None:
    assert sum(len(gzip.compress(path.read_bytes())) for path in FILES) <= MOST_BYTES


def test_vendored_code_has_its_licences() -> None:
    told = (ROOT / "router" / "console" / "THIRD_PARTY.md").read_text()
    assert {path.name for path in FILES} >= VENDORED
    for name in VENDORED:
        assert name in told, name
    assert told.count("Permission is hereby granted") == 2  # preact's and uPlot's
    assert "Apache License 2.0" in told  # htm's


@pytest.mark.parametrize("path", OURS, ids=by_name)
def test_nothing_that_the_policy_forbids(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_LINES
    for banned in ("eval(", "new Function", "innerHTML", "document.write", "http://", "https://"):
        assert banned not in text, banned
    if path.suffix == ".html":
        assert not re.search(r"\sstyle=|\son\w+=|<style|<script>", text)
    assert 'style="' not in text  # in templates styles are objects: set by script, not by HTML


@pytest.mark.parametrize("path", [path for path in FILES if path.suffix == ".js"], ids=by_name)
def test_every_import_is_served(path: Path) -> None:
    for name in re.findall(r"import[^\"';]*from\s*\"([^\"]+)\"", path.read_text()):
        assert name.startswith("./"), name
        assert (STATIC / name).is_file(), name


def test_the_page_names_what_is_there() -> None:
    page = (STATIC / "index.html").read_text()
    named = re.findall(r"(?:src|href)=\"console/([^\"]+)\"", page)
    assert "app.js" in named
    for name in named:
        assert (STATIC / name).is_file(), name


def test_what_the_pages_compute() -> None:
    """tests/console/model.test.mjs; the same functions run in the browser tests."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node on PATH")
    command = [node, "--test", str(Path(__file__).with_name("model.test.mjs"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
