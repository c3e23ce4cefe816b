"""tools/: lengths, banned calls, drift of the stubs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools import audit, lines, safety, sbom, stubs

HERE = Path("x.py")


def test_length_of_a_file() -> None:
    assert lines.check_source(HERE, "x = 1\n" * lines.MAX_FILE_LINES) == []
    (excess,) = lines.check_source(HERE, "x = 1\n" * (lines.MAX_FILE_LINES + 1))
    assert str(excess) == "x.py:1: 501 lines (at most 500)"


def test_length_of_a_function() -> None:
    def function(num_lines: int) -> str:
        return "class A:\n  async def f(self):\n" + "    pass\n" * (num_lines - 1)

    assert lines.check_source(HERE, function(lines.MAX_FUNCTION_LINES - 1)) == []
    (excess,) = lines.check_source(HERE, function(lines.MAX_FUNCTION_LINES))
    assert excess.line == 2
    assert "f: 60 lines" in excess.text


@pytest.mark.parametrize(
    ("signature", "count"),
    [
        ("self, a, b, c, d, e, f", 6),
        ("a, b, c, d, e, f, g", 7),
        ("a, /, b, *, c, d", 4),
        ("cls, a, *rest, **named", 3),
        ("", 0),
    ],
)
def test_parameters(signature: str, count: int) -> None:
    found = lines.check_source(HERE, f"def f({signature}): pass")
    assert bool(found) == (count > lines.MAX_PARAMETERS)
    if found:
        assert f"f: {count} parameters" in found[0].text


def test_generated_stubs_are_left_out_and_our_files_are_seen() -> None:
    names = {path.name for path in lines.source_files(Path(__file__).parents[2])}
    assert "node_pb2.py" not in names
    assert {"run", "config.py", "lines.py"} <= names


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import os.path, marshal",
        "eval('1')",
        "exec(code)",
        "import torch\ntorch.load('x')",
        "import torch as t\nt.load('x')",
        "from torch import load as get\nget('x')",
        "import yaml\nyaml.load(text)",
        "import subprocess\nsubprocess.run('ls', shell=True)",
        "AutoModel.from_pretrained('x', trust_remote_code=True)",
        "numpy.load('x', allow_pickle=wanted)",
        "from multiprocessing import Queue",
        "import torch.multiprocessing as mp",
        "import zmq",
        "from multiprocessing.connection import Listener",
        "socket.recv_pyobj()",
        "self.context.socket.send_pyobj(x)",
        "from torch import distributed as dist\ndist.broadcast_object_list(x)",
        "torch.distributed.all_gather_object(x, y)",
        "torch.jit.load('x')",
        "import yaml\nyaml.load_all(text)",
        "import asyncio\nasyncio.create_subprocess_shell('ls')",
        "import os\nos.popen('ls')",
        "from jinja2 import Environment\nEnvironment()",
        "from jinja2 import Template as T\nT(text)",
        "key = hash(tokens)",
        "import hashlib\nhashlib.md5(x)",
        "from hashlib import sha1\nsha1(x)",
        "import random\nsecret = random.randbytes(16)",
        "import random\nself.boot_id = '%x' % random.getrandbits(64)",
        "from random import choice\napi_key: str = ''.join(choice(x) for _ in y)",
        "import random\nHello(nonce=random.randbytes(8))",
        "httpx.get(url, verify=False)",
        "import ssl\nssl._create_unverified_context()",
        "import builtins\ngetattr(builtins, 'eval')('1')",
        "import tempfile\ntempfile.mktemp()",
    ],
)
def test_banned(source: str) -> None:
    assert len(safety.check_source(HERE, source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "model.eval()",
        "import re\nre.compile('x')",
        "import json\njson.load(file)",
        "text = 'eval(1)'  # pickle",
        "AutoModel.from_pretrained('x', trust_remote_code=False)",
        "import yaml\nyaml.safe_load(text)",
        "import random\njitter_s = random.random()",
        "import random\nmin(nodes, key=lambda node: random.random())",
        "import secrets\nsecret = secrets.token_bytes(16)",
        "import hashlib\nhashlib.sha256(x)",
        "def __hash__(self): return 1",
        "httpx.get(url, verify=context)",
        "from jinja2.sandbox import ImmutableSandboxedEnvironment\nImmutableSandboxedEnvironment()",
        "getattr(spec, 'name')",
    ],
)
def test_allowed(source: str) -> None:
    assert safety.check_source(HERE, source) == []


def test_only_the_converter_may_load_and_only_weights() -> None:
    converter = Path("baton/engine/checkpoint/convert.py")
    good = "import torch\ntorch.load(x, weights_only=True)"
    assert safety.check_source(converter, good) == []
    assert len(safety.check_source(HERE, good)) == 1
    assert len(safety.check_source(converter, "import torch\ntorch.load(x)")) == 1


@pytest.mark.parametrize("path", safety.COMPARING)
def test_secrets_are_compared_in_constant_time(path: str) -> None:
    source = (Path(safety.__file__).parents[1] / path).read_text()
    assert safety.check_source(Path(path), source) == []
    weakened = source.replace("compare_digest(", "equal(", 1)
    (finding,) = safety.check_source(Path(path), weakened)
    assert "compare_digest" in finding.text


def test_drift_names_changed_missing_and_stale_stubs() -> None:
    committed = {"a_pb2.py": "1", "b_pb2.py": "1", "old_pb2.py": "1"}
    fresh = {"a_pb2.py": "1", "b_pb2.py": "2", "new_pb2.py": "1"}
    assert stubs.drift(committed, fresh) == ["b_pb2.py", "new_pb2.py", "old_pb2.py"]
    assert stubs.drift(fresh, dict(fresh)) == []


def test_without_a_network_the_audit_says_that_it_is_skipped(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert not audit.reachable(("127.0.0.1", 9), 1.0)
    assert audit.main(online=False) == 0
    assert "audit skipped: pypi.org cannot be reached" in capsys.readouterr().out


@pytest.mark.parametrize(("holes", "status"), [(0, 0), (1, 1)])
def test_an_audit_ends_as_pip_audit_does(
    monkeypatch: pytest.MonkeyPatch, holes: int, status: int
) -> None:
    asked: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        asked.append(command)
        return subprocess.CompletedProcess(command, holes)

    monkeypatch.setattr(audit.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(audit.subprocess, "run", run)
    assert audit.main(online=True) == status
    assert asked == [audit.audit_command()]
    ignoring = audit.audit_command(["CVE-1", "CVE-2"])
    assert ignoring[-4:] == ["--ignore-vuln", "CVE-1", "--ignore-vuln", "CVE-2"]


def test_an_audit_that_cannot_install_its_tool_is_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(audit.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(audit.subprocess, "run", run)
    assert audit.main(online=True) == 0
    assert "could not be installed" in capsys.readouterr().out


def test_a_bill_lists_what_is_installed_beside_this_python(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The program is asked for this environment, not for its own, and its status is the result."""
    program = tmp_path / "bin" / "cyclonedx-py"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\nexit 3\n')
    program.chmod(0o755)
    monkeypatch.setattr(sbom, "installed", lambda: program)
    file = tmp_path / "new" / "bill.json"
    asked = subprocess.run(
        sbom.sbom_command(program, file), capture_output=True, text=True, check=False
    ).stdout.splitlines()
    assert asked[0] == "environment"
    assert asked[-2:] == [str(file), sys.prefix]
    assert sbom.main([str(file)]) == 3
    assert file.parent.is_dir()


def test_a_bill_without_its_tool_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def missing() -> Path:
        raise subprocess.CalledProcessError(1, "pip")

    monkeypatch.setattr(sbom, "installed", missing)
    assert sbom.main([str(tmp_path / "bill.json")]) == 1
    assert "could not be installed" in capsys.readouterr().err
    assert not (tmp_path / "bill.json").exists()
