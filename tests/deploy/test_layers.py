"""The import contracts of pyproject.toml name every module; `lint-imports` then proves them."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NOT_VOCABULARY = {"__init__", "async_llm", "llm", "llm_inputs", "llm_outputs"}


def contracts() -> list[dict[str, object]]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return settings["tool"]["importlinter"]["contracts"]


def vocabulary() -> set[str]:
    stems = {path.stem for path in (ROOT / "baton").glob("*.py")}
    return {f"baton.{stem}" for stem in stems - NOT_VOCABULARY}


def test_the_layer_contract_lists_the_whole_vocabulary() -> None:
    (layers,) = [each["layers"] for each in contracts() if each["type"] == "layers"]
    assert isinstance(layers, list)
    listed = {name.strip("() ") for name in layers[-2].split(":")}
    assert listed == vocabulary()


def test_the_torch_contract_covers_the_whole_vocabulary() -> None:
    (sources,) = [each["source_modules"] for each in contracts() if each["type"] == "forbidden"]
    assert isinstance(sources, list)
    assert {name for name in sources if name.startswith("baton.")} == vocabulary()
    assert "router" in sources


def test_every_package_is_a_root_package_and_is_installed() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    roots = set(settings["importlinter"]["root_packages"])
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}
    assert roots == packages
    included = settings["setuptools"]["packages"]["find"]["include"]
    assert {pattern.removesuffix("*") for pattern in included} == packages
