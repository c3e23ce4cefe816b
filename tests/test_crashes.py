"""A worker of pytest that ends in a test: the report says how it ended, and where."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

KILLED = "import os, signal\ndef test_it(): os.kill(os.getpid(), signal.SIGKILL)\n"
BROKEN = "import ctypes\ndef test_it(): ctypes.string_at(0)\n"


@pytest.mark.parametrize(
    ("test", "told"), [(KILLED, ["status was -9"]), (BROKEN, ["status was -11", "in test_it"])]
)
def test_the_report_says_how_a_worker_ended(tmp_path: Path, test: str, told: list[str]) -> None:
    (tmp_path / "test_it.py").write_text(test)
    options = ["-p", "tests.crashes", "-n", "1", "--rootdir", str(tmp_path), "test_it.py"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=tmp_path,
        env={"PYTHONPATH": str(Path(__file__).parents[1]), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert all(words in done.stdout for words in told), done.stdout
    assert not list(tmp_path.glob("baton-stacks-*"))
