"""Safety check: calls that turn data into code never appear in Baton.

No pickle (nor modules that unpickle), eval, exec, compile, torch.load, yaml.load, os.system or a
shell; `trust_remote_code` is never true. Found by reading the syntax tree, so comments and strings
do not matter. `python -m tools.safety` prints each finding and exits 1.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.lines import source_files

BANNED_MODULES = frozenset({"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"})
BANNED_CALLS = frozenset(
    {
        "builtins.eval", "builtins.exec", "eval", "exec", "compile", "__import__",
        "os.popen", "os.system", "subprocess.getoutput", "subprocess.getstatusoutput",
        "torch.load", "torch.serialization.load", "torch.package.PackageImporter",
        "yaml.full_load", "yaml.load", "yaml.unsafe_load",
    }
)  # fmt: skip
# `baton convert` alone, in its own process, with weights_only (docs/models.md).
ALLOWED = {
    "baton/engine/convert.py": frozenset({"torch.load"}),
}
BANNED_TRUE = frozenset({"allow_pickle", "shell", "trust_remote_code"})


@dataclass(frozen=True, slots=True)
class Finding:
    """One banned use."""

    path: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


def check_source(path: Path, source: str) -> list[Finding]:
    """All banned uses in one file."""
    tree = ast.parse(source)
    aliases = dict(_aliases(tree))
    allowed = ALLOWED.get(path.as_posix(), frozenset[str]())
    found: list[Finding] = []
    for node in ast.walk(tree):
        for text in _banned(node, aliases, allowed):
            line = node.lineno if isinstance(node, ast.expr | ast.stmt) else 1
            found.append(Finding(path, line, text))
    return found


def _aliases(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Local name -> the full name it was imported as, so that a renamed import is still seen."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                if each.asname:
                    yield each.asname, each.name
        elif isinstance(node, ast.ImportFrom) and node.module:
            for each in node.names:
                yield each.asname or each.name, f"{node.module}.{each.name}"


def _banned(node: ast.AST, aliases: dict[str, str], allowed: frozenset[str]) -> Iterator[str]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        for module in _imported_modules(node):
            if module.split(".")[0] in BANNED_MODULES:
                yield f"import of {module}: it turns data into code"
    elif isinstance(node, ast.Call):
        name = _dotted(node.func, aliases)
        if name in allowed:
            if not _keyword_is_true(node, "weights_only"):
                yield f"call of {name} without weights_only=True"
        elif name in BANNED_CALLS:
            yield f"call of {name}"
        for keyword in node.keywords:
            value = keyword.value
            if keyword.arg in BANNED_TRUE and not _is_constant_false(value):
                yield f"{keyword.arg} must not be set"


def _imported_modules(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    return [each.name for each in node.names]


def _dotted(node: ast.expr, aliases: dict[str, str]) -> str:
    """`a.b.c` as text with the first name resolved through the imports; "" for anything else."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        base = _dotted(node.value, aliases)
        return f"{base}.{node.attr}" if base else ""
    return ""


def _keyword_is_true(call: ast.Call, name: str) -> bool:
    return any(
        each.arg == name and isinstance(each.value, ast.Constant) and each.value.value is True
        for each in call.keywords
    )


def _is_constant_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and not node.value


def main() -> int:
    root = Path(__file__).resolve().parent.parent
    files = source_files(root)
    found = [
        each for path in files for each in check_source(path.relative_to(root), path.read_text())
    ]
    for finding in found:
        print(finding)
    print(f"{len(files)} files, {len(found)} banned uses")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
