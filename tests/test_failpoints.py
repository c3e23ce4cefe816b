"""Failpoints: what may be asked for, that each action happens once, at its passage, with proof."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from baton.protocol.errors import ConfigError, InternalError
from baton.runtime.failpoints import (
    ACTIONS,
    IMAGE_STAGES,
    LOG_VARIABLE,
    STAGES,
    STARTS,
    VARIABLE,
    Failpoints,
    Fault,
    parse,
)

ROOT = Path(__file__).resolve().parents[1]
CODE = ("baton", "decode_node", "kv_transfer", "prefill_node", "router")


def armed(text: str, proof: Path | None = None) -> Failpoints:
    points = Failpoints()
    points.arm({VARIABLE: text} | ({LOG_VARIABLE: str(proof)} if proof else {}))
    return points


def rewrite(plan: Path, text: str) -> None:
    """As a runner does it: readers see the old file or the new one."""
    fresh = plan.with_suffix(".new")
    fresh.write_text(text)
    fresh.replace(plan)


def test_nothing_is_armed_and_nothing_happens() -> None:
    points = Failpoints()
    points.arm({})
    assert not points.armed
    assert not any(points.hit(name) for name in STAGES)


def test_every_stage_is_in_the_code_exactly_once() -> None:
    found: list[str] = []
    for folder in CODE:
        for path in (ROOT / folder).rglob("*.py"):
            found += re.findall(r'FAILPOINTS\.hit\("([^"]+)"\)', path.read_text())
    assert sorted(found) == sorted(STAGES + STARTS)


@pytest.mark.parametrize(
    "text",
    [
        "accepted", "accepted:1", "accepted:1:stop:more", "unheard:1:stop", "accepted:0:stop",
        "accepted:x:stop", "accepted:1:burn", "accepted:1:delay", "accepted:1:delay=x",
        "accepted:1:stop=3", "accepted:1:corrupt", "accepted:1:kill9,unheard:1:stop",
    ],
)  # fmt: skip
def test_what_cannot_be_armed_stops_the_start(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        armed(text)
    assert caught.value.field == "failpoint"


def test_all_actions_are_read() -> None:
    text = "kv.first:2:corrupt, accepted:1:delay=5,p.done:3:kill9,d.step1:1:stop,finishing:1:raise"
    faults = parse(text)
    assert faults[1] == Fault("accepted", 1, "delay", 5)
    assert parse("p.done:*:delay=5") == [Fault("p.done", None, "delay", 5)]
    assert {fault.action for fault in faults} == set(ACTIONS)


def test_a_fault_happens_once_at_its_passage_and_leaves_proof(tmp_path: Path) -> None:
    proof = tmp_path / "fired"
    points = armed("kv.half:2:corrupt,kv.first:1:raise", proof)
    assert [points.hit("kv.half") for _ in range(4)] == [False, True, False, False]
    with pytest.raises(InternalError, match=r"failpoint kv\.first"):
        points.hit("kv.first")
    pid = os.getpid()
    assert proof.read_text() == f"{pid} kv.half 2 corrupt\n{pid} kv.first 1 raise\n"


def test_a_fault_at_each_passage(tmp_path: Path) -> None:
    proof = tmp_path / "fired"
    points = armed("kv.half:*:corrupt", proof)
    assert [points.hit("kv.half") for _ in range(3)] == [True] * 3
    assert not points.hit("kv.first")
    assert [line.split()[2] for line in proof.read_text().splitlines()] == ["1", "2", "3"]


def test_a_delay_holds_up_its_thread() -> None:
    points = armed("accepted:1:delay=30")
    before = time.monotonic()
    assert not points.hit("accepted")
    assert time.monotonic() - before >= 0.03


def test_signals_go_to_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    monkeypatch.setattr(signal, "pthread_kill", lambda ident, number: sent.append((ident, number)))
    points = armed("accepted:1:kill9,logged:1:stop")
    assert not points.hit("accepted")
    assert not points.hit("logged")
    assert sent == [(os.getpid(), signal.SIGKILL), (threading.get_ident(), signal.SIGSTOP)]


def test_a_file_is_read_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plan = tmp_path / "plan"
    points = armed(f"@{plan}")
    assert points.armed
    assert not points.hit("kv.first")
    rewrite(plan, "kv.first:2:corrupt")
    assert [points.hit("kv.first") for _ in range(3)] == [False, True, False]
    rewrite(plan, "kv.first:1:corrupt")
    assert [points.hit("kv.first") for _ in range(2)] == [True, False]
    rewrite(plan, "kv.first:1:corrupt")
    assert points.hit("kv.first"), "the same text, but armed anew"
    rewrite(plan, "unheard:1:stop")
    assert not points.hit("kv.first")
    assert "failpoints are not armed" in caplog.text
    plan.unlink()
    assert not points.hit("kv.first")


def test_a_file_that_cannot_be_armed_stops_the_start(tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    plan.write_text("unheard:1:stop")
    with pytest.raises(ConfigError):
        armed(f"@{plan}")


def test_kill9_is_real(tmp_path: Path) -> None:
    proof = tmp_path / "fired"
    program = "import os\nfrom baton.runtime.failpoints import FAILPOINTS as F\n"
    program += "F.arm(os.environ)\nF.hit('logged')\nF.hit('logged')\nprint('alive')"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, VARIABLE: "logged:2:kill9", LOG_VARIABLE: str(proof)},
        capture_output=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == b""
    assert proof.read_text().endswith(" logged 2 kill9\n")


@pytest.mark.parametrize("module", ["router", "prefill_node"])
def test_a_process_refuses_to_start_with_unknown_names(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, "--model", "nowhere"],
        env={**os.environ, VARIABLE: "unheard:1:kill9"},
        capture_output=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 2
    assert b"no failpoint 'unheard'" in done.stderr


def test_the_documentation_says_where_each_stage_is() -> None:
    rows = re.findall(
        r"^\| `([^`]+)` \| `([^`]+\.py)` `(\w+)`",
        (ROOT / "docs/chaos.md").read_text(),
        re.MULTILINE,
    )
    stages = [*STARTS, *STAGES]
    at = stages.index("d.reserved")
    stages[at:at] = IMAGE_STAGES
    assert [name for name, _, _ in rows] == stages
    for name, path, function in rows:
        before, found, _ = (ROOT / path).read_text().partition(f'FAILPOINTS.hit("{name}")')
        assert found, f"{name} is not in {path}"
        assert re.findall(r"def (\w+)\(", before)[-1] == function
