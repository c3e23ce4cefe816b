"""What is remembered of files: never of contents that have changed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from baton.runtime import cache_folder
from baton.runtime.cache_folder import MOST_REMEMBERED, is_local, remembered

MOUNTS = """\
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
23 22 0:20 / /dev/shm rw - tmpfs tmpfs rw
24 22 0:44 / /home/a\\040b rw - nfs4 host:/home rw
25 24 254:1 / /home/a\\040b/disk rw shared:3 - xfs /dev/vdb rw
26 22 0:50 / /hidden rw - ext4 /dev/vdc rw
27 22 0:51 / /hidden rw - fuse.sshfs host: rw
"""


class Reader:
    """Reads files, and counts."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, path: Path) -> str:
        self.calls += 1
        return path.read_text()


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of this test count as old, and its disk as local."""
    monkeypatch.setattr(cache_folder, "SETTLED_S", -60.0)
    monkeypatch.setattr(cache_folder, "is_local", lambda _: True)


@pytest.mark.usefixtures("settled")
def test_a_file_is_read_once_until_it_changes(tmp_path: Path) -> None:
    file, read = tmp_path / "a", Reader()
    file.write_text("old")
    asked = [remembered(file, read, tmp_path / "cache") for _ in range(3)]
    assert (asked, read.calls) == (["old"] * 3, 1)
    before = file.stat()
    while file.stat().st_ctime_ns == before.st_ctime_ns:  # clocks of old kernels tick
        file.write_text("new")  # the same inode, size and, below, time of the last write
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert remembered(file, read, tmp_path / "cache") == "new"
    other = tmp_path / "b"
    other.write_text("xyz")
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(file)
    assert remembered(file, read, tmp_path / "cache") == "xyz"
    assert read.calls == 3


@pytest.mark.usefixtures("settled")
def test_a_link_is_the_file_that_it_names(tmp_path: Path) -> None:
    first, second, link = tmp_path / "1", tmp_path / "2", tmp_path / "link"
    first.write_text("one")
    second.write_text("two")
    link.symlink_to(first)
    read = Reader()
    assert remembered(link, read, tmp_path / "cache") == "one"
    link.unlink()
    link.symlink_to(second)
    assert remembered(link, read, tmp_path / "cache") == "two"
    assert remembered(first, read, tmp_path / "cache") == "one"
    assert read.calls == 2


def test_a_young_file_is_read_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_folder, "is_local", lambda _: True)
    file, read = tmp_path / "a", Reader()
    file.write_text("young")
    for _ in range(2):
        remembered(file, read, tmp_path / "cache")
    assert read.calls == 2


@pytest.mark.usefixtures("settled")
def test_a_file_elsewhere_is_read_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_folder, "is_local", lambda _: False)
    file, read = tmp_path / "a", Reader()
    file.write_text("far")
    for _ in range(2):
        remembered(file, read, tmp_path / "cache")
    assert read.calls == 2


@pytest.mark.usefixtures("settled")
def test_a_file_that_changes_while_it_is_read_is_not_remembered(tmp_path: Path) -> None:
    file, calls = tmp_path / "a", list[str]()
    file.write_text("1")

    def read(path: Path) -> str:
        calls.append(path.read_text())
        if len(calls) == 1:
            path.write_text("22")
        return calls[-1]

    assert remembered(file, read, tmp_path / "cache") == "1"
    assert remembered(file, read, tmp_path / "cache") == "22"


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("kept", ["", "[]", "{", '"a"', '{"other": 3}'])
def test_a_broken_memory_is_written_anew(tmp_path: Path, kept: str) -> None:
    cache, file, read = tmp_path / "cache", tmp_path / "a", Reader()
    cache.mkdir()
    (cache / "known.json").write_text(kept)
    file.write_text("text")
    for _ in range(2):
        assert remembered(file, read, cache) == "text"
    assert read.calls == 1


@pytest.mark.usefixtures("settled")
def test_a_cache_that_cannot_be_written_costs_reading(tmp_path: Path) -> None:
    file, read = tmp_path / "a", Reader()
    file.write_text("text")
    for _ in range(2):
        assert remembered(file, read, file / "no folder") == "text"
    assert read.calls == 2


@pytest.mark.usefixtures("settled")
def test_the_last_ones_are_remembered(tmp_path: Path) -> None:
    file, read = tmp_path / "a", Reader()
    for number in range(MOST_REMEMBERED + 3):
        file.write_text("x" * number)
        remembered(file, read, tmp_path / "cache")
    known = json.loads((tmp_path / "cache" / "known.json").read_text())
    assert len(known) == MOST_REMEMBERED
    assert list(known.values())[-1] == "x" * (MOST_REMEMBERED + 2)


@pytest.mark.parametrize(
    ("path", "local"),
    [
        ("/var/x", True), ("/dev/shm/x", False), ("/home/a b/x", False),
        ("/home/a b/disk/x", True), ("/hidden/x", False), ("/home/a", True),
    ],
)  # fmt: skip
def test_which_disks_are_this_machines_own(tmp_path: Path, path: str, local: bool) -> None:
    (tmp_path / "mountinfo").write_text(MOUNTS)
    assert is_local(Path(path), tmp_path) is local


def test_without_a_list_of_mounts_no_disk_is(tmp_path: Path) -> None:
    assert not is_local(tmp_path, tmp_path / "absent")
