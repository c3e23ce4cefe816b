"""SECURITY.md: every rule has code and a test, and both exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in (ROOT / "SECURITY.md").read_text().splitlines()
    if re.match(r"\| (R\d|known)", line)
]


def test_all_rules_are_there() -> None:
    numbers = {int(row[0].split()[0][1:]) for row in ROWS if row[0].startswith("R")}
    assert numbers == set(range(1, 20))


@pytest.mark.parametrize("row", ROWS, ids=[row[0][:40] for row in ROWS])
def test_its_code_and_its_test_exist(row: list[str]) -> None:
    _, code, proofs = row
    for place in re.findall(r"`([^`]+)`", code):
        assert (ROOT / place).exists(), place
    found = re.findall(r"`([^`]+)`", proofs)
    assert found
    for place in found:
        file, _, name = place.partition("::")
        tree = ast.parse((ROOT / "tests" / file).read_text())
        names = {
            node.name
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        assert not name or name in names, place
