"""NodeConfig: every option of a node except the engine's, which are in EngineConfig.

Flags, environment and help are generated from it (baton/runtime/config.py). `NodeConfig.check` says
which addresses may be bound, and when a secret or TLS is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from baton.node.kubernetes.deletion_cost import Pod
from baton.protocol.errors import ConfigError
from baton.runtime.addresses import is_loopback
from baton.runtime.config import option
from baton.runtime.cores import parse_cores
from baton.runtime.log import FORMATS, LEVELS
from baton.runtime.redis.urls import check_redis_url
from baton.runtime.rotation.deployment_secret import (
    SECRET_FILE_HELP,
    Secrets,
    check_secret,
    secrets_of,
)
from baton.runtime.tls import TlsFiles
from baton.runtime.tracing.sender import PROTOCOLS, check_endpoint

WILDCARDS: Final = ("0.0.0.0", "::")
CODECS: Final = ("raw", "int8", "auto")  # kv_transfer/links.py
# The bounds of every number among the options: (minimum, maximum).
BOUNDS: Final[dict[str, tuple[float, float]]] = {
    "port": (0, 65535),
    "kv_port": (0, 65535),
    "kv_stream_port": (0, 65532),
    "metrics_port": (0, 65535),
    "health_port": (0, 65535),
    "drain_s": (0, 3600),
    "stall_s": (1, 86_400),
    "max_requests": (1, 1_000_000),
    "max_queued_fetches": (1, 1_000_000),
    "max_ready_fetches": (1, 64),
    "outbox_messages": (16, 1_000_000),
}


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """How one node process connects to the rest of the deployment."""

    host: str = option("127.0.0.1", "address to listen on (node service and KV transfer)")
    port: int = option(0, "port of the node service, 0 = any free one")
    kv_port: int = option(0, "port of the KV transfer by grpc, 0 = any free one")
    kv_stream_port: int = option(
        0, "port of the KV transfer by stream; shm, nixl and dist have the next three; 0 = any"
    )
    kv_lanes: str = option(
        "stream,grpc", "KV lanes, best first; auto: shm,stream,grpc, without shm if it has no room"
    )
    kv_unix_dir: str | None = option(
        None, "directory for KV sockets between nodes of one host (default: a private one)"
    )
    kv_shm_dir: str = option("/dev/shm", "directory of shared KV pools, for --kv-lanes shm")
    kv_adopt: bool = option(
        True, "decode: by lane shm, read full KV blocks where the prefill node has them"
    )
    kv_nixl_devices: str = option("lo", "network devices of the lane nixl, comma-separated")
    tls_cert: str | None = option(
        None, "PEM certificate chain of this node, for sessions, KV transfer and metrics"
    )
    tls_key: str | None = option(None, "PEM key of --tls-cert")
    tls_ca: str | None = option(None, "PEM certificate of the CA that signed all nodes', routers'")
    kv_tls_cert: str | None = option(None, "for KV transfer instead of --tls-cert")
    kv_tls_key: str | None = option(None, "PEM key of --kv-tls-cert")
    kv_tls_ca: str | None = option(None, "for KV transfer instead of --tls-ca")
    kv_wire_codec: str = option(
        "raw", "how KV is fetched: as stored, quantised, or so behind slow links", choices=CODECS
    )
    kv_export_memory: str | None = option(
        None, "most KV that waits here to be fetched, e.g. 4GiB (default: what the pool holds)"
    )
    advertise_host: str | None = option(None, "host that others reach this node by (default: host)")
    node_id: str | None = option(None, "name of this node; default: role and a part of the boot id")
    redis_url: str | None = option(
        None,
        "redis://, rediss://, unix://, redis+sentinel:// or redis+cluster:// (docs/redis.md);"
        " none = no registry",
    )
    pod_name: str | None = option(
        None, "name of this node's pod: keeps its pod-deletion-cost in Kubernetes (default: off)"
    )
    kubernetes_api: str = option(
        "https://kubernetes.default.svc", "URL of the API server, for --pod-name"
    )
    service_account: str = option(
        "/var/run/secrets/kubernetes.io/serviceaccount",
        "directory with token, ca.crt and namespace, for --pod-name",
    )
    cpu_cores: str | None = option(None, 'cores of this process, e.g. "0,1" or "4-7"')
    insecure: bool = option(False, "allow a non-loopback bind without TLS")
    metrics_port: int | None = option(None, "port of /metrics for Prometheus (default: none)")
    profiling: bool = option(
        False, "POST /debug/profile?seconds= on the metrics port: a trace of the engine's steps"
    )
    health_port: int | None = option(
        None, "port of /livez, /readyz and /startupz, plain HTTP, open to all (default: none)"
    )
    drain_s: float = option(5.0, "after SIGTERM: wait for running requests for so long, seconds")
    max_requests: int = option(1024, "requests on this node at once; more are refused with 429")
    max_queued_fetches: int = option(256, "decode: hand-overs that wait for blocks at once")
    max_ready_fetches: int = option(4, "decode: KV fetches at once whose bytes are ready")
    stall_s: float = option(60.0, "an engine silent for so long makes the node unhealthy, seconds")
    outbox_messages: int = option(1024, "messages a router may leave unread before it is cut off")
    log_level: str = option("info", "logging threshold", choices=LEVELS)
    log_format: str = option("text", "lines of the log: plain text or JSON", choices=FORMATS)
    otlp_traces_endpoint: str | None = option(
        None, "URL of an OpenTelemetry collector that gets a trace of each request (default: none)"
    )
    otlp_traces_protocol: str | None = option(
        None, "how (default: OTEL_EXPORTER_OTLP_TRACES_PROTOCOL, else grpc)", choices=PROTOCOLS
    )
    secret: str = option("", "secret of the deployment (BATON_SECRET)", secret=True)
    secret_file: str | None = option(None, SECRET_FILE_HELP)

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
        if self.pod is not None:
            self.pod.check()
        check_endpoint(self.otlp_traces_endpoint)
        encrypted = self.tls is not None  # KV transfer is then encrypted as well
        check_secret(self.secret, self.secret_file)
        _ = self.kv_tls  # raises ConfigError if a file is missing
        if is_loopback(self.host):
            return
        if not self.guarded:
            text = f"listening on {self.host} needs BATON_SECRET or --secret-file"
            raise ConfigError(text, field="secret")
        if not encrypted and not self.insecure:
            text = f"listening on {self.host} without TLS (--tls-cert) needs --insecure"
            raise ConfigError(text, field="insecure")
        if self.host in WILDCARDS and not self.advertise_host:
            raise ConfigError(
                f"listening on {self.host} needs --advertise-host", field="advertise_host"
            )

    @property
    def tls(self) -> TlsFiles | None:
        """The TLS files of sessions and metrics, always mutual; None without TLS.

        Raises ConfigError if a file is missing.
        """
        return TlsFiles.of(self.tls_cert, self.tls_key, self.tls_ca, "tls")

    @property
    def kv_tls(self) -> TlsFiles | None:
        """The TLS files of KV transfer: its own, else `tls`. Raises ConfigError if a file is
        missing.
        """
        own = TlsFiles.of(self.kv_tls_cert, self.kv_tls_key, self.kv_tls_ca, "kv_tls")
        return own or self.tls

    @property
    def pod(self) -> Pod | None:
        """This node's pod, if its deletion cost is kept."""
        if self.pod_name is None:
            return None
        return Pod(self.pod_name, self.kubernetes_api, Path(self.service_account))

    @property
    def guarded(self) -> bool:
        """Whether the deployment has a secret; without one a node listens on loopback only."""
        return bool(self.secret or self.secret_file)

    @property
    def secrets(self) -> Secrets:
        """The deployment's secrets. Raises ConfigError if the file cannot be used."""
        return secrets_of(self.secret, self.secret_file)

    @property
    def announced_host(self) -> str:
        """The host in this node's record."""
        return self.advertise_host or self.host


def join_address(host: str, port: int) -> str:
    """Return HOST:PORT, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
