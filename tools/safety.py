"""Safety check: what turns data into code, or guards nothing, never appears in Baton.

Code: no pickle (nor what unpickles: torch.load, objects over ZeroMQ, torch.distributed or
multiprocessing), eval, exec, compile, yaml.load, os.system or a shell, templates outside Jinja's
sandbox; `trust_remote_code` is never true. Secrets and keys: no `random` for a secret, no `hash()`
(of None it was a constant, CVE-2025-25183), no MD5 or SHA-1, no TLS that verifies nothing. Found by
reading the syntax tree, so comments and strings do not matter. `python -m tools.safety` prints each
finding and exits 1. Not here: packages with known holes (tools/audit.py).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.lines import source_files

BANNED_MODULES = frozenset(
    {
        "cPickle", "cloudpickle", "dill", "joblib", "jsonpickle", "marshal", "multiprocessing",
        "pickle", "shelve", "telnetlib", "torch.multiprocessing", "xmlrpc", "zmq",
    }
)  # fmt: skip
BANNED_CALLS = frozenset(
    {
        "builtins.eval", "builtins.exec", "eval", "exec", "compile", "__import__",
        "os.popen", "os.system", "subprocess.getoutput", "subprocess.getstatusoutput",
        "torch.load", "torch.serialization.load", "torch.package.PackageImporter",
        "yaml.full_load", "yaml.full_load_all", "yaml.load", "yaml.load_all", "yaml.unsafe_load",
        "asyncio.create_subprocess_shell", "code.interact", "hash", "builtins.hash",
        "hashlib.md5", "hashlib.sha1", "jinja2.Environment", "jinja2.Template",
        "jinja2.nativetypes.NativeEnvironment", "logging.config.listen", "numpy.core.multiarray",
        "runpy.run_module", "runpy.run_path", "ssl._create_unverified_context", "tempfile.mktemp",
        "torch.hub.load", "torch.jit.load", "types.CodeType", "types.FunctionType",
    }
)  # fmt: skip
# Whatever they are called on: they unpickle what a peer has sent.
BANNED_METHODS = frozenset(
    {
        "all_gather_object", "broadcast_object_list", "gather_object", "recv_object_list",
        "recv_pyobj", "scatter_object_list", "send_object_list", "send_pyobj",
    }
)  # fmt: skip
# Names that a `random` number must not be bound to.
SECRET_WORDS = ("boot_id", "key", "mac", "nonce", "password", "salt", "secret", "token_hex")
# `baton convert` alone, in its own process, with weights_only (docs/models.md).
ALLOWED = {
    "baton/engine/checkpoint/convert.py": frozenset({"torch.load"}),
    # The forward of an installed class of transformers with two names bound anew.
    "baton/engine/models/recurrent.py": frozenset({"types.FunctionType"}),
    # Models in processes of their own, to be killed; what they answer is numbers.
    "tests/golden/breadth.py": frozenset({"multiprocessing"}),
    # Nodes that are killed, forked from a server that has imported all; they get words and a pipe.
    "tests/system/forked.py": frozenset({"multiprocessing"}),
}
# Where a secret, a key or a proof is compared: by hmac.compare_digest, so many times. `==` tells by
# its time how far it got, and no test could see it.
COMPARING = {
    "baton/node/metrics_server.py": 1,
    "baton/protocol/messages.py": 1,
    "kv_transfer/exports.py": 2,
    "kv_transfer/protocol/identity.py": 1,
    "router/tenants/keys.py": 1,
    "router/api/resumable/grpc.py": 1,
    "router/api/resumable/http.py": 1,
    "router/resumable/runs.py": 1,
}
BANNED_TRUE = frozenset({"allow_pickle", "shell", "trust_remote_code"})
BANNED_FALSE = frozenset({"verify"})  # of httpx and its like


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
            line = node.lineno if isinstance(node, ast.expr | ast.stmt | ast.keyword) else 1
            found.append(Finding(path, line, text))
    wanted = COMPARING.get(path.as_posix(), 0)
    if wanted and (compared := _num_comparisons(tree, aliases)) < wanted:
        text = f"hmac.compare_digest is called {compared} times, not {wanted}"
        found.append(Finding(path, 1, text))
    return found


def _num_comparisons(tree: ast.AST, aliases: dict[str, str]) -> int:
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return sum(_dotted(call.func, aliases) == "hmac.compare_digest" for call in calls)


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
            banned = BANNED_MODULES & {module, module.split(".")[0]}
            if banned and module not in allowed:
                yield f"import of {module}: it turns data into code"
    elif isinstance(node, ast.Assign | ast.AnnAssign | ast.keyword):
        yield from _weak_secret(node, aliases)
    elif isinstance(node, ast.Call):
        yield from _banned_call(node, aliases, allowed)


def _banned_call(node: ast.Call, aliases: dict[str, str], allowed: frozenset[str]) -> Iterator[str]:
    name = _dotted(node.func, aliases)
    if name in allowed:
        if name.startswith("torch.") and not _keyword_is_true(node, "weights_only"):
            yield f"call of {name} without weights_only=True"
    elif name in BANNED_CALLS or _last(node.func) in BANNED_METHODS:
        yield f"call of {name or _last(node.func)}"
    elif name == "getattr" and _is_banned_name(node):
        yield "a banned call by its name"
    for keyword in node.keywords:
        value = keyword.value
        if keyword.arg in BANNED_TRUE and not _is_constant_false(value):
            yield f"{keyword.arg} must not be set"
        elif keyword.arg in BANNED_FALSE and _is_constant_false(value):
            yield f"{keyword.arg} must not be off"


def _weak_secret(
    node: ast.Assign | ast.AnnAssign | ast.keyword, aliases: dict[str, str]
) -> Iterator[str]:
    """`nonce = random...`, in any of its spellings: a secret comes from `secrets`."""
    if isinstance(node, ast.keyword):
        names = [node.arg or ""] if node.arg != "key" else []  # that one is for sorting
    else:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = [_last(target) for target in targets]
    if node.value is None or not any(word in name for name in names for word in SECRET_WORDS):
        return
    for each in ast.walk(node.value):
        if isinstance(each, ast.Call):
            called = _dotted(each.func, aliases)
            if called.startswith("random.") and not called.startswith("random.SystemRandom"):
                yield f"{called} for {names[0]}: secrets come from `secrets`"


def _is_banned_name(call: ast.Call) -> bool:
    """`getattr(builtins, "eval")`."""
    return any(
        isinstance(each, ast.Constant) and each.value in ("eval", "exec", "__import__")
        for each in call.args
    )


def _last(node: ast.expr) -> str:
    """The name at the end of `a.b.c`, whatever `a` is; "" for anything else."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


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
