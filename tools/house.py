"""The shape of the house in figures: `python -m tools.house`.

Big folders, class names that several modules use, and small modules that one other module imports:
each makes a reader open more than he must. tests/deploy/test_house.py holds ceilings over them;
`--list` names what is counted. Our packages only, without generated stubs.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

PACKAGES: Final = (
    "baton", "bench", "decode_node", "deploy", "encode_node", "kv_transfer", "prefill_node",
    "router",
)  # fmt: skip
MAX_FILES: Final = 20  # of a folder, __init__.py and __main__.py left out
SMALL_LINES: Final = 60  # a small module has fewer
ENTRIES: Final = ("__init__.py", "__main__.py")


@dataclass(frozen=True, slots=True)
class House:
    """`lines` by package; `big`: folder -> files, those with more than MAX_FILES; `shared`: class
    name -> modules, where there are several; `small`: module -> its one importer."""

    lines: dict[str, int] = field(default_factory=dict[str, int])
    big: dict[str, int] = field(default_factory=dict[str, int])
    shared: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    small: dict[str, str] = field(default_factory=dict[str, str])


def read(root: Path) -> dict[str, str]:
    """Path from the root -> source, of all our modules."""
    files = [file for package in PACKAGES for file in sorted((root / package).rglob("*.py"))]
    return {str(file.relative_to(root)): file.read_text() for file in files}


def figures(sources: Mapping[str, str]) -> House:
    """Pure. `sources`: path -> source."""
    house, folders = House(), Counter[str]()
    classes: defaultdict[str, list[str]] = defaultdict(list)
    importers: defaultdict[str, set[str]] = defaultdict(set)
    modules = {_module(path): path for path in sources}
    for path, source in sources.items():
        package = path.partition("/")[0]
        house.lines[package] = house.lines.get(package, 0) + len(source.splitlines())
        if not path.endswith(ENTRIES):
            folders[str(Path(path).parent)] += 1
        tree = ast.parse(source, path)
        for name in _imported(tree):
            for module in (name, name.rpartition(".")[0]):
                if module in modules and modules[module] != path:
                    importers[module].add(_module(path))
                    break
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(_module(path))
    house.big.update({folder: count for folder, count in folders.items() if count > MAX_FILES})
    house.shared.update({name: found for name, found in classes.items() if len(found) > 1})
    for module, path in modules.items():
        is_small = len(sources[path].splitlines()) < SMALL_LINES and not path.endswith(ENTRIES)
        if is_small and len(importers[module]) == 1:
            house.small[module] = next(iter(importers[module]))
    return house


def _module(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _imported(tree: ast.Module) -> list[str]:
    """Full names: `from a.b import c` may mean the module a.b.c, or a name in a.b."""
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.house")
    parser.add_argument("--list", action="store_true", help="name what is counted")
    listed = parser.parse_args(arguments).list
    house = figures(read(Path(__file__).resolve().parents[1]))
    for package, count in house.lines.items():
        print(f"{package:14} {count:7} lines")
    rows: tuple[tuple[str, Mapping[str, object]], ...] = (
        (f"folders of more than {MAX_FILES} files", house.big),
        ("class names in several modules", house.shared),
        (f"modules under {SMALL_LINES} lines with one importer", house.small),
    )
    for title, found in rows:
        print(f"{len(found):4} {title}")
        if listed:
            for name, detail in sorted(found.items()):
                print(f"       {name}: {detail}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
