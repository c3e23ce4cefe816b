"""`baton kernels build`: libraries made where there is a compiler, found where there is none.

The compiler here is a script that writes its output file.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from baton.engine.kernels.cpu import __main__ as command
from baton.engine.kernels.cpu import build, library
from baton.engine.kernels.cpu.build import INSTRUCTION_SETS, CannotBuild, InstructionSet
from baton.runtime.cache_folder import cache_folder

ANY = InstructionSet("any", "Any", (), (), ())
NAMES = [each.name for each in INSTRUCTION_SETS]
Compiler = Callable[[str], Path]


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Compiler:
    """The only compiler there is: one that ends as the shell words say."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(build.BUILT, raising=False)
    monkeypatch.setattr(command.platform, "machine", lambda: "x86_64")

    def make(words: str) -> Path:
        script = tmp_path / "cxx"
        script.write_text(f"#!/bin/sh\nfor out; do :; done\n{words}\n")
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))
        return script

    return make


def no_compiler(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(folder))


def test_every_set_is_built_whatever_this_processor_has(
    compiler: Compiler, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compiler('echo "$@" >"$out"')
    folder = tmp_path / "image"
    assert command.main(["build", "--dir", str(folder)]) == 0
    made = sorted(path.name for path in folder.iterdir())
    assert [name.split("-")[2] for name in made] == sorted(NAMES)
    text = (folder / made[0]).read_text()
    assert "-mamx-tile" in text
    told = capsys.readouterr().out
    for name in NAMES:
        assert any(line.startswith(name) and "built" in line for line in told.splitlines())
    compiler("exit 1")  # nothing is compiled twice
    assert command.main(["build", "--dir", str(folder)]) == 0
    assert capsys.readouterr().out.count("was there") == len(NAMES)


@pytest.mark.parametrize(
    ("lacks", "made"), [((), "avx512bf16"), (("avx512_bf16",), "avx512"), (("fma",), None)]
)
def test_here_only_what_nodes_on_this_processor_take_is_built(
    compiler: Compiler,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lacks: tuple[str, ...],
    made: str | None,
) -> None:
    compiler('echo >"$out"')
    monkeypatch.setattr(command, "missing", set(lacks).intersection)
    monkeypatch.setattr(command, "is_slow", lambda each: False)
    folder = tmp_path / "image"
    folder.mkdir()
    assert command.main(["build", "--here", "--dir", str(folder)]) == 0
    assert [path.name.split("-")[2] for path in folder.iterdir()] == ([made] if made else [])


def test_they_are_found_where_there_is_no_compiler(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler('echo >"$out"')
    monkeypatch.setenv(build.BUILT, str(tmp_path / "image"))
    built = build.compiled(ANY, tmp_path / "image")
    no_compiler(monkeypatch, tmp_path)
    assert build.library_path(ANY) == built
    monkeypatch.setattr(build, "_FLAGS", ("-O0",))  # of other sources or flags: not these
    with pytest.raises(CannotBuild, match="compiler"):
        build.library_path(ANY)


def test_a_library_is_made_in_the_users_cache_and_found_there(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler('echo >"$out"')
    monkeypatch.setenv(build.BUILT, str(tmp_path / "empty"))
    made = build.library_path(ANY)
    assert made.parent == tmp_path / "cache" / "baton" / "kernels"
    no_compiler(monkeypatch, tmp_path)
    assert build.library_path(ANY) == made


def test_those_who_start_together_compile_once(compiler: Compiler, tmp_path: Path) -> None:
    compiler(f'echo >>"{tmp_path}/runs"; echo >"$out"')
    start = threading.Barrier(4)

    def begin(_: int) -> Path:
        start.wait()
        return build.compiled(ANY, tmp_path / "cache")

    with ThreadPoolExecutor(4) as pool:
        [made] = set(pool.map(begin, range(4)))
    assert made.exists()
    runs = (tmp_path / "runs").read_text()
    assert len(runs) == len(build.UNITS) + 1  # each unit, and what links them


def test_one_core_compiles_one_unit_at_a_time(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = tmp_path / "busy"
    compiler(f'mkdir "{busy}" || exit 1; sleep 0.1; rmdir "{busy}"; echo >"$out"')
    monkeypatch.setattr(build.os, "sched_getaffinity", lambda _: {0})
    assert build.compiled(ANY, tmp_path / "cache").exists()


def test_the_command_builds_for_the_image_or_the_user(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler('echo >"$out"')
    assert command.main(["build"]) == 0
    assert len(list((tmp_path / "cache" / "baton" / "kernels").iterdir())) == len(NAMES)
    monkeypatch.setenv(build.BUILT, str(tmp_path / "image"))
    assert command.main(["build"]) == 0
    assert len(list((tmp_path / "image").iterdir())) == len(NAMES)


def test_what_cannot_be_built_is_said(
    compiler: Compiler,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    compiler('case "$*" in *amx*) echo no such flag >&2; exit 1;; esac; echo >"$out"')
    assert command.main(["build"]) == 1
    (line,) = [each for each in capsys.readouterr().out.splitlines() if each.startswith("amx")]
    assert "no such flag" in line
    no_compiler(monkeypatch, tmp_path)
    assert command.main(["build", "--dir", str(tmp_path / "image")]) == 1
    assert "no C++ compiler" in capsys.readouterr().out
    monkeypatch.setattr(command.platform, "machine", lambda: "aarch64")
    assert command.main(["build"]) == 0
    assert "none for aarch64" in capsys.readouterr().out


def test_without_a_home_that_can_be_written_torch_serves(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler('echo >"$out"')
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    monkeypatch.setattr(library, "INSTRUCTION_SETS", [ANY])
    found, told = library.choose(None)
    assert found is None
    assert "Not a directory" in told
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    assert library.choose(None) == (None, "torch's own serve, because Any: nobody knows")
    with pytest.raises(OSError, match="nobody knows"):
        cache_folder("kernels")


def no_home() -> Path:
    raise RuntimeError("nobody knows")
