"""How a worker of pytest ended, in the report of the test that it ran: status, and its stacks.

pytest-xdist says only that it crashed; the stacks would lie thousands of lines before the summary.
"""

from __future__ import annotations

import faulthandler
import os
import subprocess
import tempfile
from pathlib import Path
from typing import IO, Any, Final

import pytest

END_S: Final = 10.0  # from its last word to its end
STACKS: Final = pytest.StashKey[IO[str]]()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Of xdist, in the controller, before the worker starts."""
    descriptor, path = tempfile.mkstemp(prefix="baton-stacks-")
    os.close(descriptor)
    node.workerinput["stacks"] = path


@pytest.hookimpl(trylast=True)  # after pytest's own, which writes to stderr
def pytest_configure(config: pytest.Config) -> None:
    given: dict[str, Any] | None = getattr(config, "workerinput", None)
    if given is not None:
        config.stash[STACKS] = Path(given["stacks"]).open("w")  # noqa: SIM115
        faulthandler.enable(file=config.stash[STACKS])


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str, report: pytest.TestReport, sched: object) -> None:
    """Of xdist, in the controller, when a worker has gone."""
    worker: Any = report.node  # pyright: ignore[reportAttributeAccessIssue]
    process: subprocess.Popen[bytes] = worker.gateway._io.popen
    try:
        ended = f"its exit status was {process.wait(END_S)}"
    except subprocess.TimeoutExpired:
        ended = "its process has not ended"
    stacks = Path(worker.workerinput["stacks"])
    report.longrepr = f"{report.longrepr}; {ended}\n{stacks.read_text()}"
    stacks.unlink()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Of xdist, in the controller, before a crash is handled."""
    if error is None:
        Path(node.workerinput["stacks"]).unlink()
