"""What a node may be told, and what it refuses to start with."""

from __future__ import annotations

import pytest

from baton.node.config import NodeConfig, join_address
from baton.protocol.errors import ConfigError
from baton.runtime.config import load


def test_loopback_needs_nothing() -> None:
    for host in ("127.0.0.1", "localhost", "::1"):
        NodeConfig(host=host).check()


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"host": "10.0.0.7"}, "secret"),
        ({"host": "10.0.0.7", "insecure": True}, "secret"),
        ({"host": "10.0.0.7", "secret": "s"}, "insecure"),
        ({"host": "0.0.0.0", "secret": "s", "insecure": True}, "advertise_host"),
        ({"port": 70_000}, "port"),
        ({"drain_s": -1.0}, "drain_s"),
        ({"outbox_messages": 1}, "outbox_messages"),
        ({"cpu_cores": "one"}, "cpu_cores"),
        ({"pod_name": "../pods/other"}, "pod_name"),
        ({"pod_name": "d-0", "kubernetes_api": "http://10.0.0.1"}, "kubernetes_api"),
        ({"pod_name": "d-0", "kubernetes_api": "https://"}, "kubernetes_api"),
    ],
)
def test_what_no_node_may_start_with(values: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        NodeConfig(**values).check()  # type: ignore[arg-type]
    assert caught.value.field == field


def test_an_open_bind_with_secret_and_consent() -> None:
    config = NodeConfig(host="0.0.0.0", secret="s", insecure=True, advertise_host="node-1")
    config.check()
    assert config.announced_host == "node-1"


def test_the_secret_comes_from_the_environment_only() -> None:
    assert load(NodeConfig, {}, {"BATON_SECRET": "hidden"}).secret == "hidden"


def test_addresses_of_both_families() -> None:
    assert join_address("127.0.0.1", 80) == "127.0.0.1:80"
    assert join_address("::1", 80) == "[::1]:80"
