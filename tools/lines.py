"""Length check: files, functions and parameter lists stay small enough to read in one go.

`python -m tools.lines` prints each excess and exits 1; `--largest N` lists the biggest files.
Generated stubs are left out. The limits are rule 2 of CONTRIBUTING.md.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60  # a function has fewer
MAX_PARAMETERS = 6
FOLDERS = (
    "baton", "bench", "decode_node", "deploy", "encode_node", "examples", "kv_transfer",
    "prefill_node", "protos", "router", "tests", "tools",
)  # fmt: skip
GENERATED = ("_pb2.py", "_pb2_grpc.py")

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Excess:
    """One thing that is too long."""

    path: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


def source_files(root: Path) -> list[Path]:
    """Our Python files, generated ones left out, in a stable order."""
    files = [root / "run"]
    for folder in FOLDERS:
        files += sorted((root / folder).rglob("*.py"))
    return [file for file in files if file.is_file() and not file.name.endswith(GENERATED)]


def check_source(path: Path, source: str) -> list[Excess]:
    """Everything too long in one file. Raises SyntaxError when it is not Python."""
    found: list[Excess] = []
    num_lines = len(source.splitlines())
    if num_lines > MAX_FILE_LINES:
        found.append(Excess(path, 1, f"{num_lines} lines (at most {MAX_FILE_LINES})"))
    for node in _functions(ast.parse(source, str(path))):
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length >= MAX_FUNCTION_LINES:
            text = f"{node.name}: {length} lines (fewer than {MAX_FUNCTION_LINES})"
            found.append(Excess(path, node.lineno, text))
        count = count_parameters(node)
        if count > MAX_PARAMETERS:
            text = f"{node.name}: {count} parameters (at most {MAX_PARAMETERS}, else a dataclass)"
            found.append(Excess(path, node.lineno, text))
    return found


def count_parameters(node: FunctionNode) -> int:
    """Parameters that a caller passes: without self or cls, *args and **kwargs count one each.

    A Triton kernel has as many as its launch needs: only its own file's functions call it.
    """
    if any(ast.unparse(each) == "triton.jit" for each in node.decorator_list):
        return 0
    arguments = node.args
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
    if names and names[0] in ("self", "cls"):
        names = names[1:]
    extras = sum(each is not None for each in (arguments.vararg, arguments.kwarg))
    return len(names) + len(arguments.kwonlyargs) + extras


def _functions(tree: ast.AST) -> Iterator[FunctionNode]:
    for node in ast.walk(tree):
        if isinstance(node, FunctionNode):
            yield node


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="check the length of files and functions")
    parser.add_argument("--largest", type=int, default=0, metavar="N", help="list the N largest")
    options = parser.parse_args(arguments)
    root = Path(__file__).resolve().parent.parent
    sources = {path.relative_to(root): path.read_text() for path in source_files(root)}
    sizes = {path: len(source.splitlines()) for path, source in sources.items()}
    for path in sorted(sizes, key=lambda each: -sizes[each])[: options.largest]:
        print(f"{sizes[path]:5} {path}")
    excesses = [each for path, source in sources.items() for each in check_source(path, source)]
    for excess in excesses:
        print(excess)
    print(f"{len(sizes)} files, {sum(sizes.values())} lines, {len(excesses)} too long")
    return 1 if excesses else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
