"""Arenas in shared files: who may map what, what outlives whom, and pages at home in two pools."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baton.engine.memory.address_range import PAGE_BYTES
from baton.protocol.errors import ConfigError, KVLost, KVRefused
from kv_transfer.lanes import shm_arena
from kv_transfer.lanes.shm_arena import ArenaPlace, ShmArena, sweep
from tests.transfer.stream_bench import descriptors

BOOT_A, BOOT_B = "0a" * 16, "0b" * 16
# The child writes 7s, says its inode, and lives until it is killed.
CHILD = """
import sys, signal
from pathlib import Path
from kv_transfer.lanes.shm_arena import ShmArena
arena = ShmArena(sys.argv[1], 3 * 4096, 4096, Path(sys.argv[2]))
arena.memory().fill_(7)
sys.stdout.write(f"{arena.place.inode}\\n")
sys.stdout.flush()
signal.pause()
"""


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., ShmArena]]:
    made: list[ShmArena] = []

    def arena(boot_id: str = BOOT_A, num_bytes: int = 5 * 4096, page: int = 4096) -> ShmArena:
        made.append(ShmArena(boot_id, num_bytes, page, tmp_path))
        return made[-1]

    yield arena
    for each in made:
        each.close()
    assert [name for name in os.listdir(tmp_path) if name.startswith("baton-")] == []


@pytest.fixture
def child(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], ArenaPlace]]:
    """A process with an arena of 3 pages of 7s, and where that is."""
    command = [sys.executable, "-c", CHILD, BOOT_B, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        inode = int(process.stdout.readline())
        yield process, ArenaPlace(f"baton-{BOOT_B}", inode, 3 * 4096)
        process.kill()


def test_own_memory_is_shared_zeroed_and_private_to_the_user(
    make: Callable[..., ShmArena], tmp_path: Path
) -> None:
    arena = make()
    assert not arena.memory().any()
    arena.memory()[4096:4100] = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
    path = tmp_path / arena.place.name
    assert path.read_bytes()[4096:4100] == b"\1\2\3\4"
    assert path.stat().st_mode & 0o777 == 0o600
    arena.close()
    arena.close()
    assert not path.exists()
    assert arena.memory()[4097] == 2  # whoever holds a tensor holds the memory


def test_foreign_pages_have_ids_in_the_same_range(make: Callable[..., ShmArena]) -> None:
    ours, a, b = make(), make(BOOT_B, 3 * 4096), make("0c" * 16, 2 * 4096)
    for arena, value in ((ours, 1), (a, 2), (b, 3)):
        arena.memory().fill_(value)
    peers = [ours.attach(arena.place) for arena in (a, b)]
    bases = [ours.foreign_base(peer) for peer in peers]
    pages = ours.pages()
    assert [int(pages[base + 1, 5]) for base in bases] == [2, 3]
    assert int(pages[4, 5]) == 1
    assert bases[0] >= 5
    assert bases[1] >= bases[0] + 3
    a.memory()[4096 + 5] = 9  # no copy: a later write shows
    assert int(pages[bases[0] + 1, 5]) == 9


@pytest.mark.parametrize("page_bytes", [24, 4096 + 8, 3 * 4096])
def test_page_ids_are_whole_for_any_page_size(
    make: Callable[..., ShmArena], page_bytes: int
) -> None:
    ours, theirs = make(BOOT_A, 7 * page_bytes, page_bytes), make(BOOT_B, 4 * page_bytes)
    theirs.memory().copy_(torch.arange(4 * page_bytes, dtype=torch.int32).to(torch.uint8))
    peer = ours.attach(theirs.place)
    assert peer.offset % page_bytes == 0 == peer.offset % PAGE_BYTES
    base = ours.foreign_base(peer)
    assert torch.equal(ours.pages()[base : base + 4].flatten(), theirs.memory())


def test_attention_over_own_and_foreign_pages_equals_a_copy(make: Callable[..., ShmArena]) -> None:
    """Two of the sequence's five pages lie at the peer; no byte of them moves."""
    page, heads, dim, tokens = 16, 2, 8, 16 * 5 - 3
    page_bytes = 2 * page * heads * dim * 4
    ours, theirs = make(BOOT_A, 6 * page_bytes, page_bytes), make(BOOT_B, 4 * page_bytes)
    generator = torch.Generator().manual_seed(1)
    for arena in (ours, theirs):
        floats = arena.memory().view(torch.float32)
        floats.copy_(torch.randn(floats.shape, generator=generator))
    base = ours.foreign_base(ours.attach(theirs.place))
    table = [base + 3, base + 1, 4, 0, 2]
    kv = ours.pages().view(torch.float32).view(-1, 2, page, heads, dim)

    def attend(pages: torch.Tensor) -> torch.Tensor:
        k, v = (pages[:, part].flatten(0, 1)[:tokens].transpose(0, 1) for part in (0, 1))
        query = torch.randn(heads, 1, dim, generator=torch.Generator().manual_seed(2))
        return torch.nn.functional.scaled_dot_product_attention(query, k, v)

    own = ours.memory().view(torch.float32).view(-1, 2, page, heads, dim)
    other = theirs.memory().view(torch.float32).view(-1, 2, page, heads, dim)
    copied = torch.stack([other[3], other[1], own[4], own[0], own[2]])
    assert torch.equal(attend(torch.stack([kv[page_id] for page_id in table])), attend(copied))
    assert torch.equal(attend(kv[torch.tensor(table)]), attend(copied))


def test_a_write_to_a_foreign_page_dies_before_it_spoils_anything(tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
from kv_transfer.lanes.shm_arena import ShmArena
ours, theirs = (ShmArena(b * 16, 4096, 4096, Path(sys.argv[1])) for b in ("0a", "0b"))
peer = ours.attach(theirs.place)
assert int(ours.foreign_bytes(peer)[0]) == 0
theirs.close(), ours.close()
ours.foreign_bytes(peer)[0] = 1
"""
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGSEGV


def test_a_killed_owner_takes_nothing_away_and_is_swept(
    make: Callable[..., ShmArena], child: tuple[subprocess.Popen[str], ArenaPlace], tmp_path: Path
) -> None:
    process, place = child
    ours = make()
    peer = ours.attach(place)
    assert ours.reaches(place)
    assert sweep(tmp_path) == 0  # both owners live
    process.kill()
    process.wait()
    assert int(ours.foreign_bytes(peer).sum()) == 7 * 3 * 4096
    assert sweep(tmp_path) == 1
    assert not ours.reaches(place)
    assert int(ours.foreign_bytes(peer)[-1]) == 7  # unlinked, still mapped
    with pytest.raises(KVLost):
        ours.attach(replace(place, name=f"baton-{'0d' * 16}"))
    assert ours.num_attached == 1  # in use: not unmapped
    ours.detach(peer)
    ours.attach(make("0e" * 16).place)
    assert ours.num_attached == 1  # the dead one has made room


def test_the_memory_of_a_dead_peer_is_let_go_once_nobody_uses_it(
    make: Callable[..., ShmArena], child: tuple[subprocess.Popen[str], ArenaPlace]
) -> None:
    process, place = child
    arena = make()
    peer, living = arena.attach(place), arena.attach(make("0c" * 16).place)
    arena.detach(living)
    assert arena.let_go() == 0, "both owners live"
    process.kill()
    process.wait()
    assert arena.let_go() == 0, "its pages are still read"
    arena.detach(peer)
    assert arena.let_go() == 1
    assert arena.num_attached == 1
    sweep(arena.directory)


def test_a_new_arena_sweeps_first(
    make: Callable[..., ShmArena], child: tuple[subprocess.Popen[str], ArenaPlace], tmp_path: Path
) -> None:
    process, place = child
    process.kill()
    process.wait()
    make()
    assert not (tmp_path / place.name).exists()


def test_attaching_twice_maps_once(make: Callable[..., ShmArena]) -> None:
    ours, theirs = make(), make(BOOT_B)
    assert ours.attach(theirs.place) is ours.attach(theirs.place)
    assert ours.num_attached == 1


def test_a_peer_that_tells_another_size_each_time_takes_no_more(
    make: Callable[..., ShmArena],
) -> None:
    """And leaves what is in use where it is."""
    ours, theirs = make(), make(BOOT_B)
    theirs.memory().fill_(7)
    used = ours.attach(theirs.place)
    for less in range(1, 9):
        other = ours.attach(replace(theirs.place, num_bytes=theirs.place.num_bytes - less))
        assert other.offset >= used.offset + used.mapped_bytes
        ours.detach(other)
    assert ours.num_attached == 2
    opened = [each for each in descriptors() if each.endswith(theirs.place.name)]
    assert len(opened) == 3  # the owner's, the first of its guests', and the last one's
    assert ours.attach(theirs.place) is used
    assert bool((ours.foreign_bytes(used) == 7).all())


@pytest.mark.parametrize(
    "name", ["", "../x", "baton-", "/etc/passwd", "baton-0b/../x", "baton-" + "0b" * 16 + ".new"]
)
def test_a_peer_names_a_file_of_the_directory_and_nothing_else(
    make: Callable[..., ShmArena], name: str
) -> None:
    ours, theirs = make(), make(BOOT_B)
    with pytest.raises(KVRefused, match="name"):
        ours.attach(replace(theirs.place, name=name))
    assert not ours.reaches(replace(theirs.place, name=name))


def test_files_that_are_not_what_was_announced(
    make: Callable[..., ShmArena], tmp_path: Path
) -> None:
    ours, theirs = make(), make(BOOT_B)
    path = tmp_path / theirs.place.name
    with pytest.raises(KVRefused, match="another file"):
        ours.attach(replace(theirs.place, inode=theirs.place.inode + 1))
    with pytest.raises(KVRefused, match="shorter"):
        ours.attach(replace(theirs.place, num_bytes=1 << 30))
    path.chmod(0o644)
    with pytest.raises(KVRefused, match="open to other users"):
        ours.attach(theirs.place)
    path.chmod(0o600)
    link = tmp_path / f"baton-{'0c' * 16}"
    link.symlink_to(path)
    with pytest.raises(KVLost):
        ours.attach(replace(theirs.place, name=link.name))
    link.unlink()
    pipe = tmp_path / f"baton-{'0f' * 16}"
    os.mkfifo(pipe, 0o600)
    with pytest.raises(KVRefused, match="regular"):
        ours.attach(ArenaPlace(pipe.name, pipe.stat().st_ino, 4096))
    pipe.unlink()
    ours.attach(theirs.place)


def test_a_directory_that_cannot_hold_it_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot (hold|create)"):
        ShmArena(BOOT_A, 1 << 60, 4096, tmp_path)
    assert os.listdir(tmp_path) == []
    with pytest.raises(ConfigError, match="cannot read"):
        ShmArena(BOOT_A, 4096, 4096, tmp_path / "absent")


def test_a_large_pool_takes_the_rest_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm_arena, "FIRST_BYTES", 1 << 20)
    monkeypatch.setattr(shm_arena, "PIECE_BYTES", 1 << 20)
    size = 5 << 20
    arena = ShmArena(BOOT_A, size, 4096, tmp_path)
    (path,) = tmp_path.iterdir()

    def taken() -> int:
        return path.stat().st_blocks * 512

    assert path.stat().st_size == size + shm_arena.BOARD_BYTES, "peers check it"
    assert taken() < 2 << 20
    arena.memory()[-1] = 7
    asked = iter([False, True])
    arena.take_rest(lambda: next(asked))
    assert 2 << 20 <= taken() < 4 << 20
    arena.take_rest()
    assert taken() >= size
    assert int(arena.memory()[-1]) == 7
    assert not arena.memory()[:-1].any()
    allocate = os.posix_fallocate

    def full(fd: int, start: int, length: int) -> None:
        if start >= 2 << 20:
            raise OSError(28, "No space left on device")
        allocate(fd, start, length)

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match="cannot hold a KV pool"):
        arena.take_rest()
    arena.close()
    arena.take_rest()  # nothing is left to do


def test_addresses_can_run_out(tmp_path: Path) -> None:
    ours = ShmArena(BOOT_A, 4096, 4096, tmp_path, reserved_bytes=2 * 4096)
    theirs = ShmArena(BOOT_B, 3 * 4096, 4096, tmp_path)
    with pytest.raises(KVRefused, match="addresses"):
        ours.attach(theirs.place)
    ours.close()
    theirs.close()
