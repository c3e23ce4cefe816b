"""The root `run` script: which torch it takes, when it calls pip, and its task table."""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, without running it."""
    loader = importlib.machinery.SourceFileLoader("run_script", str(ROOT / "run"))
    spec = importlib.util.spec_from_loader("run_script", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "run_script", module)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("find_links", "gpu", "index", "kind"),
    [
        (True, True, True, "local-cpu"),
        (True, False, False, "local-cpu"),
        (False, True, True, "cuda"),
        (False, True, False, "cuda"),
        (False, False, True, "cpu-index"),
        (False, False, False, "default"),
    ],
)
def test_choice_of_torch(
    run: ModuleType, find_links: bool, gpu: bool, index: bool, kind: str
) -> None:
    choice = run.choose_torch(find_links, gpu, index)
    assert choice.kind == kind
    assert choice.arguments[0] == f"torch=={run.TORCH_VERSION}"
    assert ("--index-url" in choice.arguments) == (kind == "cpu-index")
    assert ("several GB" in choice.reason) == (kind in ("cuda", "default"))


def test_the_index_is_not_probed_when_the_find_links_answer(
    run: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never() -> bool:
        raise AssertionError("not needed")

    monkeypatch.setattr(run, "pip_find_links", lambda: ["/wheels"])
    monkeypatch.setattr(run, "find_links_hold_cpu_torch", lambda links: links == ["/wheels"])
    monkeypatch.setattr(run, "has_gpu", never)
    monkeypatch.setattr(run, "cpu_index_reachable", never)
    assert run.detect_torch().kind == "local-cpu"


def test_find_links_hold_a_wheel_for_this_python(run: ModuleType, tmp_path: Path) -> None:
    assert not run.find_links_hold_cpu_torch([str(tmp_path), "https://example.org/wheels"])
    (tmp_path / f"torch-{run.TORCH_VERSION}+cpu-cp39-cp39-linux_x86_64.whl").touch()
    assert not run.find_links_hold_cpu_torch([str(tmp_path)])
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    (tmp_path / f"torch-{run.TORCH_VERSION}+cpu-{tag}-{tag}-linux_x86_64.whl").touch()
    assert run.find_links_hold_cpu_torch([f"file://{tmp_path}"])


def installer(run: ModuleType, monkeypatch: pytest.MonkeyPatch, root: Path) -> list[list[str]]:
    """Let `ensure_installed` work below `root`; returns the list that pip calls are written to."""
    python = root / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    (root / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    calls: list[list[str]] = []
    monkeypatch.setattr(run, "ROOT", root)
    monkeypatch.setattr(run, "PYTHON", python)
    monkeypatch.setattr(run, "STAMP", root / ".venv" / "baton-installed")
    monkeypatch.setattr(run, "make_venv", lambda: None)
    monkeypatch.setattr(run, "detect_torch", lambda: run.choose_torch(False, False, True))
    monkeypatch.setattr(run, "pip_install", lambda what, arguments: calls.append([*arguments]))
    monkeypatch.setattr(run, "pip_check", lambda: calls.append(["check"]))
    monkeypatch.setattr(run, "in_background", contextlib.nullcontext)
    return calls


def test_what_runs_in_the_background_is_silent_and_may_fail(
    run: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with run.in_background(["/bin/sh", "-c", f"echo heard; echo done > {tmp_path}/file; exit 1"]):
        pass
    assert (tmp_path / "file").read_text() == "done\n"
    assert capfd.readouterr() == ("", "")


def test_the_kernels_of_this_machine_are_compiled_without_any_package(run: ModuleType) -> None:
    command = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r});"]
    command[-1] += f"from {run.KERNELS[1]} import __main__ as it; it.main(['build', '--help'])"
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert run.KERNELS[3] in said


def test_the_stamp_skips_pip(
    run: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls = installer(run, monkeypatch, tmp_path)
    run.ensure_installed(())
    assert [call[0] for call in calls] == [f"torch=={run.TORCH_VERSION}", "-e", "check"]
    calls.clear()
    run.ensure_installed(())
    assert calls == []
    run.ensure_installed(("test",))
    assert [call[0] for call in calls] == ["-e", "check"]
    assert any(each.startswith("pytest") for each in calls[0])
    calls.clear()
    run.ensure_installed(("dev",))  # resolved together with what is there
    assert any(each.startswith("pytest") for each in calls[0])
    assert any(each.startswith("grpcio-tools") for each in calls[0])
    calls.clear()
    run.ensure_installed(("test",))
    run.ensure_installed(())
    assert calls == []
    with (tmp_path / "pyproject.toml").open("a") as file:
        file.write("\n# changed\n")
    run.ensure_installed(())
    assert [call[0] for call in calls] == [f"torch=={run.TORCH_VERSION}", "-e", "check"]


def test_a_failed_installation_leaves_no_stamp(
    run: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installer(run, monkeypatch, tmp_path)

    def broken(what: str, arguments: list[str]) -> None:
        raise SystemExit(1)

    monkeypatch.setattr(run, "pip_install", broken)
    with pytest.raises(SystemExit):
        run.ensure_installed(())
    assert not run.STAMP.exists()


def test_versions_that_do_not_fit_leave_no_stamp(
    run: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    check = run.pip_check
    installer(run, monkeypatch, tmp_path)
    monkeypatch.setattr(run, "pip_check", check)
    run.PYTHON.write_text("#!/bin/sh\necho grpcio-reflection requires protobuf\nexit 1\n")
    run.PYTHON.chmod(0o755)
    with pytest.raises(SystemExit):
        run.ensure_installed(())
    assert "grpcio-reflection requires protobuf" in capsys.readouterr().err
    assert not run.STAMP.exists()


def test_a_missing_ensurepip_gives_the_command_to_type(
    run: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(run, "PYTHON", tmp_path / "python")
    monkeypatch.setattr(run.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        run.make_venv()
    assert "sudo apt install python3." in capsys.readouterr().err


def test_groups_of_every_task_exist(run: ModuleType) -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    assert {group for task in run.TASKS.values() for group in task.groups} <= groups.keys()
    tasks = {"setup", "up", "chat", "status", "test", "coverage", "check", "bench", "proto", "fmt"}
    tasks |= {"audit", "pictures", "sbom"}
    assert set(run.TASKS) == {*tasks, "clients"}


def test_coverage_measures_files_and_runs_tests_that_exist(run: ModuleType) -> None:
    assert all((ROOT / name).exists() for name in run.COVERING_TESTS)
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["coverage"]
    assert settings["report"]["fail_under"] == 100
    for pattern in settings["report"]["include"]:
        assert list(ROOT.glob(pattern)), pattern
        assert pattern.partition("/")[0] in settings["run"]["source"], pattern


def test_unknown_task_lists_the_known_ones(
    run: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main(["tset"]) == 2
    assert "test" in capsys.readouterr().err


def test_a_failing_command_does_not_hide_the_others(
    run: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = [("first", ["sh", "-c", "echo why; exit 1"]), ("second", ["true"])]
    assert run.run_all(commands) == 1
    shown = capsys.readouterr()
    assert shown.out == "why\n"
    assert "first: FAILED" in shown.err
    assert "second: ok" in shown.err


def test_two_commands_at_once_are_told_in_their_order(
    run: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The first ends only once the second has begun."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    commands = [("first", ["cat", str(fifo)]), ("second", ["sh", "-c", f"echo met > {fifo}"])]
    assert run.run_all(commands, at_once=2) == 0
    shown = capsys.readouterr()
    assert shown.out == "met\n"
    assert shown.err.index("first: ok") < shown.err.index("second: ok")


def test_tasks_keep_what_python_compiles(run: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    assert "PYTHONDONTWRITEBYTECODE" not in run.task_environment()
