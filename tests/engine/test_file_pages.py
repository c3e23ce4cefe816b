"""Files on a disk as memory: what a file system offers, and the pages that its files get."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.engine.memory import file_pages
from baton.engine.memory.file_pages import maps_large


def test_memory_has_small_pages_and_nothing_is_left(tmp_path: Path) -> None:
    """Whatever the kernel does with this folder, the trial leaves no file there."""
    assert isinstance(maps_large(tmp_path), bool)
    assert not list(tmp_path.iterdir())
    with pytest.raises(OSError, match="No such file"):
        maps_large(tmp_path / "absent")


def test_the_kernel_says_how_a_file_is_mapped(tmp_path: Path) -> None:
    (tmp_path / "smaps").write_text(
        "7f0000000000-7f0000200000 r--s 00000000 00:1b 5 /a\nRss: 2048 kB\n"
        "FilePmdMapped:         0 kB\n"
        "7f0000200000-7f0000600000 r--s 00000000 00:1b 6 /b\nRss: 4096 kB\n"
        "FilePmdMapped:      4096 kB\n"
    )
    assert file_pages._large_bytes(0x7F0000000000, tmp_path) == 0
    assert file_pages._large_bytes(0x7F0000200000, tmp_path) == 4 << 20
    assert file_pages._large_bytes(0x1000, tmp_path) == 0
