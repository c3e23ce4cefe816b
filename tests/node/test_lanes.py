"""--kv-lanes and what belongs to it: names, order, TLS files."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.errors import ConfigError
from baton.node.config import NodeConfig
from baton.node.lanes import MAKERS, LaneSettings, make_lanes, parse_lanes
from baton.timing import Timing
from kv_transfer.grpc_stream import GrpcLane
from kv_transfer.stream import StreamLane
from tests.transfer.certificates import make_files

TIMING = Timing()


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
