"""Every interval of the protocols in one table (seconds).

All are configurable: components take a `Timing`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MAX_STREAMS: Final = 1024  # concurrent calls on one connection; further calls wait at the caller


@dataclass(frozen=True, slots=True)
class Timing:
    heartbeat_s: float = 1.0  # node record and load refresh
    node_record_s: float = 3.0  # lifetime of a node record without heartbeat
    router_lease_s: float = 5.0  # lifetime of a router's lease of its requests, without renewal
    kv_lease_s: float = 10.0  # lifetime of an export without renewal
    kv_progress_s: float = 5.0  # a fetch without a frame for so long raises KVTimeout
    connect_s: float = 3.0  # opening a session or a lane
    ping_interval_s: float = 1.0  # gRPC keepalive
    ping_timeout_s: float = 1.0  # a stopped peer is noticed about 0.1 s after this time
    stall_s: float = 60.0  # a node that has work and sends nothing for so long is taken to hang
    drain_s: float = 5.0
    request_s: float = 600.0  # default deadline of a request

    @property
    def kv_alive_s(self) -> float:
        """Seconds after which an exporter without frames to send says that it is alive.

        It is at most one, and small enough that it does so several times before its fetcher gives
        up.
        """
        return min(1.0, self.kv_progress_s / 3)


# Between clients and routers. A client may be far away or busy, so pings are rarer than between
# Baton's own processes, and answers to them may take longer.
CLIENT_TIMING: Final = Timing(ping_interval_s=10.0, ping_timeout_s=10.0)


def channel_options(timing: Timing) -> list[tuple[str, int]]:
    """Return gRPC channel options that notice a stopped peer after about 1.1 s.

    gRPC's keepalive without its ping timeout would take 60 s.
    """
    return [
        ("grpc.keepalive_time_ms", int(timing.ping_interval_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(timing.ping_timeout_s * 1000)),
        ("grpc.http2.ping_timeout_ms", int(timing.ping_timeout_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_receive_message_length", 64 << 20),
        ("grpc.max_send_message_length", 64 << 20),
    ]


def server_options(timing: Timing) -> list[tuple[str, int]]:
    """Return gRPC server options that allow the pings of `channel_options` and limit metadata."""
    return [
        *channel_options(timing),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", int(timing.ping_interval_s * 500)),
        ("grpc.http2.min_ping_interval_without_data_ms", int(timing.ping_interval_s * 500)),
        ("grpc.max_metadata_size", 8192),
        ("grpc.absolute_max_metadata_size", 8192),  # else some metadata of up to 16 KiB is accepted
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.so_reuseport", 0),
    ]
