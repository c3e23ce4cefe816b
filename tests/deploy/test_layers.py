"""The import contracts of pyproject.toml name every module; `lint-imports` then proves them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def contracts() -> list[dict[str, object]]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return settings["tool"]["importlinter"]["contracts"]


def layers() -> list[set[str]]:
    """Of the contract over all, top first."""
    (found,) = [each["layers"] for each in contracts() if "deploy" in each.get("layers", ())]  # type: ignore[operator]
    assert isinstance(found, list)
    return [{name.strip("() ") for name in re.split("[|:]", layer)} for layer in found]


def parts_of(package: str) -> set[str]:
    """What lies in it: modules and packages."""
    inside = (ROOT / package).iterdir()
    stems = {
        path.stem for path in inside if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    return {f"{package}.{stem}" for stem in stems - {"__init__"}}


def test_the_layer_contract_lists_all_of_baton() -> None:
    assert {name for layer in layers() for name in layer} >= parts_of("baton")


def test_the_torch_contract_covers_what_lies_below_the_engine() -> None:
    (sources,) = [each["source_modules"] for each in contracts() if each["type"] == "forbidden"]
    assert isinstance(sources, list)
    order = layers()
    (engine,) = [at for at, layer in enumerate(order) if "baton.engine" in layer]
    below = {name for layer in order[engine + 1 :] for name in layer}
    assert below <= set(sources)
    assert "router" in sources


def test_every_package_is_a_root_package_and_is_installed() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    roots = set(settings["importlinter"]["root_packages"])
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}
    assert roots == packages
    included = settings["setuptools"]["packages"]["find"]["include"]
    assert {pattern.removesuffix("*") for pattern in included} == packages
