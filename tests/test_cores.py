"""Lists of cores, and what a process may bind itself to."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from baton.protocol.errors import ConfigError
from baton.runtime.cores import live_threads, parse_cores, pin_process, quota_cores


@pytest.mark.parametrize(
    ("text", "cores"), [("0", (0,)), ("1,0", (0, 1)), ("0, 4-6", (0, 4, 5, 6)), ("2-2", (2,))]
)
def test_cores_are_lists_and_ranges(text: str, cores: tuple[int, ...]) -> None:
    assert parse_cores(text) == cores


@pytest.mark.parametrize("text", ["", "a", "3-1", "-1", "1,,2", "0-"])
def test_bad_core_lists_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_cores(text)


def test_cores_that_this_process_may_not_use_are_named() -> None:
    mine = os.sched_getaffinity(0)
    with pytest.raises(ConfigError, match=str(max(mine) + 1000)):
        pin_process((max(mine) + 1000,))
    assert os.sched_getaffinity(0) == mine


def test_a_process_may_bind_itself_to_its_own_cores() -> None:
    mine = os.sched_getaffinity(0)
    try:
        pin_process((min(mine),))
        assert os.sched_getaffinity(0) == {min(mine)}
    finally:
        os.sched_setaffinity(0, mine)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "250000 100000"}, 2),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({"cpu.max": "nonsense"}, None),
        ({}, None),
    ],
)
def test_a_containers_share_of_the_cores(
    files: dict[str, str], cores: int | None, tmp_path: Path
) -> None:
    """Control groups of version 2, then of version 1."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert quota_cores(tmp_path) == cores


def test_live_threads_are_those_of_python() -> None:
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    found = live_threads()
    end.set()
    thread.join()
    assert found[0] == threading.get_native_id()
    assert thread.native_id in found
    assert thread.native_id not in live_threads()


def test_a_live_thread_has_its_own_id_after_a_fork() -> None:
    """Python's own note of the main thread's id is that before the fork."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, str(live_threads()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        assert pipe.read() == str([child])
    os.waitpid(child, 0)
