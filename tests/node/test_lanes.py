"""--kv-lanes and what belongs to it: names, order, TLS files."""

from __future__ import annotations

import os
import resource
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from baton.engine.memory.kv_cache import KVArena
from baton.node import lanes as node_lanes
from baton.node.config import NodeConfig
from baton.node.lanes import MAKERS, LaneSettings, PoolPlace, make_lanes, parse_lanes
from baton.protocol.errors import ConfigError
from baton.protocol.kv_spec import LayerSpec
from baton.runtime.config import AUTO
from baton.runtime.timing import Timing
from kv_transfer.lanes import shm_arena
from kv_transfer.lanes.dist import DistSettings
from kv_transfer.lanes.grpc_stream import GrpcLane
from kv_transfer.lanes.stream import StreamLane, StreamLaneOptions
from kv_transfer.protocol.base import Lane
from tests.transfer.certificates import make_files

TIMING = Timing()
WAIT_S = 60.0


def test_the_default_is_every_node_s_best() -> None:
    names = parse_lanes(NodeConfig().kv_lanes)
    assert names[-2:] == ("stream", "grpc")
    assert set(names) <= set(MAKERS)


def test_order_and_restriction() -> None:
    assert parse_lanes("grpc") == ("grpc",)
    assert parse_lanes(" grpc , stream ") == ("grpc", "stream")
    lanes = make_lanes(("grpc", "stream"), LaneSettings(TIMING))
    assert [type(lane) for lane in lanes] == [GrpcLane, StreamLane]
    assert [lane.name for lane in lanes] == ["grpc", "stream"]


@pytest.mark.parametrize("text", ["", ",", "pigeon", "stream,pigeon", "grpc,grpc"])
def test_what_is_no_list_of_lanes(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_lanes(text)
    assert caught.value.field == "kv_lanes"


def pool_at(place: PoolPlace) -> KVArena:
    return KVArena((LayerSpec(2, 8, 8),), 8, 8, "bfloat16", memory=place.memory)


def test_auto_takes_shared_memory_where_there_is_room(tmp_path: Path) -> None:
    names = parse_lanes(AUTO)
    assert names == ("shm", "stream", "grpc")
    place = PoolPlace(names, tmp_path, optional=True)
    arena = pool_at(place)
    assert place.shared is not None
    assert arena.layer(0)[0].data_ptr() == place.shared.address
    assert place.usable(names) == names
    place.close()


@pytest.mark.parametrize("why", ["no directory", "a full one", "little memory"])
def test_auto_does_without_it_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    directory = tmp_path / "missing" if why == "no directory" else tmp_path
    one_pool = pool_at(PoolPlace((), tmp_path)).num_bytes
    usage = shutil.disk_usage(tmp_path)._replace(free=2 * one_pool - 1)
    if why == "a full one":
        monkeypatch.setattr(node_lanes.shutil, "disk_usage", lambda _: usage)
    elif why == "little memory":
        monkeypatch.setattr(node_lanes.HostMemory, "available", lambda _: 2 * one_pool - 1)
    names = parse_lanes(AUTO)
    place = PoolPlace(names, directory, optional=True)
    arena = pool_at(place)
    assert arena.num_bytes == one_pool
    assert place.shared is None
    assert place.usable(names) == ("stream", "grpc")
    assert not list(tmp_path.iterdir()), "no file is left"
    with pytest.raises(ConfigError):  # who asks for it by name is told
        pool_at(PoolPlace(("shm",), tmp_path / "missing"))


@contextmanager
def few_addresses() -> Iterator[None]:
    """As after `ulimit -v`: 16 GiB more than this process has by now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (16 << 30), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_few_addresses_cost_the_lane_and_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = parse_lanes(AUTO)
    place = PoolPlace(names, tmp_path, optional=True)
    with few_addresses(), caplog.at_level("INFO"):
        pool_at(place)
    assert place.usable(names) == ("stream", "grpc")
    [line] = caplog.messages
    assert line.startswith("no KV lane shm")
    assert "ulimit -v" in line
    assert not list(tmp_path.iterdir()), "no file is left"
    with few_addresses(), pytest.raises(ConfigError, match="ulimit -v"):  # asked for by name
        pool_at(PoolPlace(("shm",), tmp_path))
    assert not list(tmp_path.iterdir())


def test_the_pool_of_a_killed_node_takes_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It starts again, in a directory that its old pool had filled."""
    left = tmp_path / f"baton-{'0a' * 16}"
    left.touch(0o600)
    empty = shutil.disk_usage(tmp_path)
    full = empty._replace(free=0)
    monkeypatch.setattr(node_lanes.shutil, "disk_usage", lambda _: full if left.exists() else empty)
    place = PoolPlace(parse_lanes(AUTO), tmp_path, optional=True)
    pool_at(place)
    assert place.shared is not None
    assert not left.exists()
    place.close()


@pytest.mark.parametrize("room", [True, False])
def test_a_thread_takes_the_pools_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: bool
) -> None:
    """After a while; without room the node ends. A pool that is given back takes no more."""
    monkeypatch.setattr(node_lanes, "TAKE_AFTER_S", 0.0)
    monkeypatch.setattr(shm_arena, "FIRST_BYTES", 4096)
    place, lost = PoolPlace(("shm",), tmp_path), threading.Event()
    place.take(lost.set)  # there is no pool yet
    pool_at(place)
    (path,) = tmp_path.iterdir()
    before = path.stat().st_blocks
    if not room:
        refuse = OSError(28, "No space left on device")
        monkeypatch.setattr(os, "posix_fallocate", mock.Mock(side_effect=refuse))
    taken, take = threading.Event(), shm_arena.ShmArena.take_rest

    def take_rest(arena: shm_arena.ShmArena, stop: Callable[[], bool]) -> None:
        take(arena, stop)
        taken.set()

    monkeypatch.setattr(shm_arena.ShmArena, "take_rest", take_rest)
    place.take(lost.set)
    if room:
        assert taken.wait(WAIT_S)
        assert path.stat().st_blocks * 512 >= path.stat().st_size > before * 512
        assert not lost.is_set()
    else:
        assert lost.wait(WAIT_S)
    place.stop_taking()
    place.stop_taking()
    place.close()


def test_all_lanes_of_a_node_meet_others_in_one_directory(tmp_path: Path) -> None:
    """Containers share one: pools, sockets of lane `stream`, sockets for the frames of `shm`. Who
    has another one of that name, on another host, is not tempted by shm."""

    def opened(directory: Path) -> tuple[PoolPlace, list[Lane]]:
        place = PoolPlace(("shm", "stream"), directory)
        arena = pool_at(place)
        settings = LaneSettings(TIMING, unix_dir=directory, pool=arena, shared=place.shared)
        return place, make_lanes(("shm", "stream"), settings)

    (tmp_path / "elsewhere").mkdir()
    p, d = opened(tmp_path), opened(tmp_path)
    far = opened(tmp_path / "elsewhere")
    addresses = [lane.start("0a" * 16, lambda name, peer: iter(())) for lane in p[1]]
    try:
        assert len(list(tmp_path.rglob("*.sock"))) == 2
        assert [lane.reaches(at) for lane, at in zip(d[1], addresses, strict=True)] == [True, True]
        assert not far[1][0].reaches(addresses[0])
    finally:
        for place, lanes in (p, d, far):
            for lane in lanes:
                lane.stop()
            place.close()
    assert not list(tmp_path.rglob("*.sock"))


@pytest.mark.parametrize(("given", "taken"), [(7000, [7000, 7001, 7002, 7003]), (0, [0] * 4)])
def test_every_lane_has_a_port_of_its_own(
    given: int, taken: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A firewall opens these: none is drawn at the start."""
    ports: list[int] = []

    def listens(_: Timing, options: StreamLaneOptions | DistSettings) -> Lane:
        ports.append(options.port)
        return GrpcLane(TIMING)

    monkeypatch.setattr(node_lanes, "StreamLane", listens)
    monkeypatch.setattr("kv_transfer.lanes.dist.DistLane", listens)
    names = ("stream", "shm", "nixl", "dist")
    place = PoolPlace(names, tmp_path)
    arena = pool_at(place)
    try:
        make_lanes(names, LaneSettings(TIMING, stream_port=given, pool=arena, shared=place.shared))
    finally:
        place.close()
    assert ports == taken
    NodeConfig(kv_stream_port=65532).check()
    with pytest.raises(ConfigError) as caught:
        NodeConfig(kv_stream_port=65533).check()
    assert caught.value.field == "kv_stream_port"


def test_settings_of_a_configuration(tmp_path: Path) -> None:
    config = NodeConfig(
        host="127.0.0.1",
        kv_port=1,
        kv_stream_port=2,
        kv_unix_dir="/run/kv",
        kv_tls_cert="c",
        kv_tls_key="k",
        kv_tls_ca="a",
    )
    config.check()
    settings = LaneSettings.of(config, TIMING)
    assert (settings.port, settings.stream_port, settings.unix_dir) == (1, 2, Path("/run/kv"))
    assert settings.tls is not None
    assert (settings.tls.cert, settings.tls.key, settings.tls.ca) == (
        Path("c"),
        Path("k"),
        Path("a"),
    )
    assert LaneSettings.of(NodeConfig(), TIMING).tls is None


def test_tls_files_reach_both_lanes(tmp_path: Path) -> None:
    files = make_files(tmp_path)
    lanes = make_lanes(("stream", "grpc"), LaneSettings(TIMING, tls=files))
    try:
        for lane in lanes:
            address = lane.start("0a" * 16, lambda name, peer: iter(()))
            assert "tls" in dict(address.attributes)
    finally:
        for lane in lanes:
            lane.stop()


def test_unusable_tls_files_stop_the_start(tmp_path: Path) -> None:
    missing = LaneSettings.of(
        NodeConfig(kv_tls_cert="/no/c", kv_tls_key="/no/k", kv_tls_ca="/no/a"), TIMING
    )
    for name in ("stream", "grpc"):
        with pytest.raises(ConfigError) as caught:
            make_lanes((name,), missing)
        assert caught.value.field == "kv_tls_ca"


@pytest.mark.parametrize("given", [("cert",), ("cert", "key"), ("ca",), ("key", "ca")])
def test_tls_needs_all_three_files(given: tuple[str, ...]) -> None:
    values = {f"kv_tls_{name}": "x.pem" for name in given}
    with pytest.raises(ConfigError) as caught:
        NodeConfig(**values).check()  # type: ignore[arg-type]
    assert caught.value.field is not None
    assert caught.value.field.removeprefix("kv_tls_") not in given
