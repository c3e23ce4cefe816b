"""bench/idle.py: what it reads of a process, and the table of its rounds."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import idle


def process(folder: Path, command: str, *ran_ns: int) -> int:
    """Write what the kernel would tell of process 7, by thread; return 7."""
    for thread, nanoseconds in enumerate(ran_ns):
        place = folder / "7" / "task" / str(thread)
        place.mkdir(parents=True)
        (place / "schedstat").write_text(f"{nanoseconds} 5 3\n")
    (folder / "7" / "cmdline").write_text(command)
    return 7


def test_the_time_of_all_threads_counts(tmp_path: Path) -> None:
    number = process(tmp_path, "", 100, 20)
    (tmp_path / "7" / "task" / "9").mkdir()  # a thread that has just ended
    assert idle.cpu_ns(number, tmp_path) == 120


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("/usr/bin/redis-server\0unixsocket:/tmp/redis.sock", "redis"),
        ("python\0-m\0prefill_node\0--model\0router", "prefill"),
        ("python\0-m\0router\0--model\0m", "router"),
        ("python\0-m\0deploy\0up", "launcher"),
        ("/bin/other\0", "other"),
    ],
)
def test_processes_are_named_by_their_command(tmp_path: Path, command: str, name: str) -> None:
    assert idle.name_of(process(tmp_path, command, 0), tmp_path) == name


def test_the_table_has_the_least_and_the_most_of_the_rounds() -> None:
    rounds = [{"router": 0.5, "redis": 0.1}, {"router": 0.25, "redis": 0.2}]
    assert idle.table(rounds).splitlines()[2:] == [
        "| router | 0.25-0.50 |",
        "| redis | 0.10-0.20 |",
    ]
