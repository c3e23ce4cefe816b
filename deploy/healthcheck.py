"""Health check of a container: `python -m deploy.healthcheck http URL` or `grpc HOST:PORT`.

Exit status 0 when the server says that it serves, 1 otherwise. Few imports and a short deadline,
because it runs every few seconds.
"""

from __future__ import annotations

import sys
import urllib.request
from collections.abc import Sequence
from typing import Any

TIMEOUT_S = 3.0


def http_serves(url: str) -> bool:
    """GET answers 200."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
            return response.status == 200
    except OSError:
        return False


def grpc_serves(address: str) -> bool:
    """grpc.health.v1 answers SERVING for the server as a whole."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)  # its stubs are untyped
        try:
            reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError:
            return False
    return reply.status == health_pb2.HealthCheckResponse.SERVING


CHECKS = {"http": http_serves, "grpc": grpc_serves}


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 2 or arguments[0] not in CHECKS:
        sys.stderr.write("usage: python -m deploy.healthcheck http URL | grpc HOST:PORT\n")
        return 2
    return 0 if CHECKS[arguments[0]](arguments[1]) else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
