"""bench/memory.py: mappings by kind, the table of processes, and what it compares them with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench import memory

SMAPS = """\
5587a000-5587b000 r-xp 00000000 fe:00 77                        /opt/my env/bin/python3.11
Size:                  8 kB
Pss:                2000 kB
Pss_Dirty:             0 kB
7f00-7f10 r--s 00000000 00:19 5      /dev/shm/baton-weights-0/4dff.weights
Pss:              700000 kB
7f10-7f20 rw-s 00000000 00:19 6                          /dev/shm/baton-3458da54
Pss:               30000 kB
7f20-7f30 r--p 00000000 fe:00 7                          /lib/libtorch_cpu.so
Pss:               10000 kB
7f30-7f40 r--p 00000000 fe:00 8                          /models/m/model.safetensors
Pss:                4000 kB
7f40-7f50 rw-p 00000000 00:00 0
Pss:              100000 kB
7f50-7f60 rw-p 00000000 00:00 0                          [heap]
Pss:               50000 kB
VmFlags: rd wr mr mw me ac sd
"""


def test_what_is_mapped_has_a_kind() -> None:
    kib = {"PSS": 896, "weights": 700, "KV": 30, "libraries": 12, "files": 4, "own": 150}
    wanted = {kind: each * 1.024 for kind, each in kib.items()}
    assert memory.by_kind(list(memory.mapped(SMAPS))) == pytest.approx(wanted)


def test_the_largest_mappings_come_first() -> None:
    lines = memory.largest({"decode": list(memory.mapped(SMAPS))}, 2).splitlines()
    assert lines[0].split() == [
        "decode", "716.8", "MB", "weights", "/dev/shm/baton-weights-0/4dff.weights"
    ]  # fmt: skip
    assert lines[1].split() == ["decode", "102.4", "MB", "own", "7f40-7f50"]


def test_nodes_are_compared_with_one_copy() -> None:
    row = memory.by_kind(list(memory.mapped(SMAPS)))
    lines = memory.table({"router": row, "prefill": row, "decode": row}, 1400.0).splitlines()
    assert lines[-3].startswith("| all | 2,752.5 |")
    assert "hold 1,835 MB, 1.26 times one copy of the weights (1,400 MB)" in lines[-1]
    assert "the KV in use (61.4)" in lines[-1]


def test_one_copy_is_the_smaller_of_checkpoint_and_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(40_960))
    assert memory.one_copy_mb(set(), tmp_path) == pytest.approx(0.040960)
    packed = tmp_path / "x.weights"
    packed.write_bytes(b"1" * 20_480)
    assert memory.one_copy_mb({packed}, tmp_path) == packed.stat().st_blocks * 512 / 1e6


def test_living_processes_are_read() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        found = memory.read(os.getpid())
        child.communicate(b"\n")
    pss = [memory.by_kind(maps)["PSS"] for maps in found.values()]
    assert len(found) >= 2  # this process, and the child
    assert all(each >= 0 for each in pss)
    assert pss[0] > 1
