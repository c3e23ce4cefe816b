"""NodeConfig: every option of a node that is not the engine's; EngineConfig stands beside it.

Flags, environment and help are generated from it (baton/config.py). `NodeConfig.check` holds the
rules of what may be bound where, and with which secret.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from baton.addresses import is_loopback
from baton.config import option
from baton.cores import parse_cores
from baton.errors import ConfigError
from baton.redis_keys import check_redis_url

WILDCARDS: Final = ("0.0.0.0", "::")
LEVELS: Final = ("debug", "info", "warning", "error")
# Every number a node may be given: (minimum, maximum).
BOUNDS: Final[dict[str, tuple[float, float]]] = {
    "port": (0, 65535),
    "kv_port": (0, 65535),
    "metrics_port": (0, 65535),
    "drain_s": (0, 3600),
    "stall_s": (1, 86_400),
    "max_requests": (1, 1_000_000),
    "max_queued_fetches": (1, 1_000_000),
    "max_ready_fetches": (1, 64),
    "outbox_messages": (16, 1_000_000),
}


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """How one node process meets the rest of the deployment."""

    host: str = option("127.0.0.1", "address to listen on (node service and KV transfer)")
    port: int = option(0, "port of the node service, 0 = any free one")
    kv_port: int = option(0, "port of the KV transfer, 0 = any free one")
    advertise_host: str | None = option(None, "host that others reach this node by (default: host)")
    node_id: str | None = option(None, "name of this node; default: role and a part of the boot id")
    redis_url: str | None = option(
        None, "redis://..., rediss://... or unix://...; none = no registry"
    )
    cpu_cores: str | None = option(None, 'cores of this process, e.g. "0,1" or "4-7"')
    insecure: bool = option(False, "allow a non-loopback bind without TLS")
    metrics_port: int | None = option(None, "port of /metrics for Prometheus (default: none)")
    drain_s: float = option(5.0, "after SIGTERM: wait for running requests for so long, seconds")
    max_requests: int = option(1024, "requests on this node at once; more are refused with 429")
    max_queued_fetches: int = option(256, "decode: hand-overs that wait for blocks at once")
    max_ready_fetches: int = option(4, "decode: KV fetches at once whose bytes are ready")
    stall_s: float = option(60.0, "an engine silent for so long makes the node unhealthy, seconds")
    outbox_messages: int = option(1024, "messages a router may leave unread before it is cut off")
    log_level: str = option("info", "logging threshold", choices=LEVELS)
    secret: str = option("", "secret of the deployment (BATON_SECRET)", secret=True)

    def check(self) -> None:
        """Raise ConfigError, naming the option, for values that no node may start with."""
        for name, (low, high) in BOUNDS.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ConfigError(f"{name} must be between {low} and {high}", field=name)
        if self.cpu_cores is not None:
            parse_cores(self.cpu_cores)
        if self.redis_url:
            check_redis_url(self.redis_url)
        if is_loopback(self.host):
            return
        if not self.secret:
            raise ConfigError(f"listening on {self.host} needs BATON_SECRET", field="secret")
        if not self.insecure:
            raise ConfigError(
                f"listening on {self.host} without TLS needs --insecure", field="insecure"
            )
        if self.host in WILDCARDS and not self.advertise_host:
            raise ConfigError(
                f"listening on {self.host} needs --advertise-host", field="advertise_host"
            )

    @property
    def announced_host(self) -> str:
        """The host in this node's record."""
        return self.advertise_host or self.host


def join_address(host: str, port: int) -> str:
    """HOST:PORT, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
