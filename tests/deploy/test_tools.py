"""tools/: lengths, banned calls, drift of the stubs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import lines, safety, stubs

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
    ],
)
def test_allowed(source: str) -> None:
    assert safety.check_source(HERE, source) == []


def test_only_the_converter_may_load_and_only_weights() -> None:
    converter = Path("baton/engine/convert.py")
    good = "import torch\ntorch.load(x, weights_only=True)"
    assert safety.check_source(converter, good) == []
    assert len(safety.check_source(HERE, good)) == 1
    assert len(safety.check_source(converter, "import torch\ntorch.load(x)")) == 1


def test_drift_names_changed_missing_and_stale_stubs() -> None:
    committed = {"a_pb2.py": "1", "b_pb2.py": "1", "old_pb2.py": "1"}
    fresh = {"a_pb2.py": "1", "b_pb2.py": "2", "new_pb2.py": "1"}
    assert stubs.drift(committed, fresh) == ["b_pb2.py", "new_pb2.py", "old_pb2.py"]
    assert stubs.drift(fresh, dict(fresh)) == []
