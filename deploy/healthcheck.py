"""Health check of a container: `python -m deploy.healthcheck http URL` or `grpc HOST:PORT`.

Exit status 0 when the server says that it serves, 1 otherwise. Few imports and a short deadline,
because it runs every few seconds. With BATON_TLS_CERT in the environment, as the server beside it
has it, it asks under TLS and shows the server's own certificate.
"""

from __future__ import annotations

import os
import ssl
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

TIMEOUT_S = 3.0


def http_serves(url: str, environ: Mapping[str, str]) -> bool:
    """GET answers 200."""
    context = None
    cert = environ.get("BATON_TLS_CERT")
    try:
        if cert:
            url = url.replace("http://", "https://", 1)
            # This one certificate is expected here, whatever its CA and its name.
            context = ssl.create_default_context(cafile=cert)
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
            context.check_hostname = False
            context.load_cert_chain(cert, environ.get("BATON_TLS_KEY"))
        with urllib.request.urlopen(url, timeout=TIMEOUT_S, context=context) as response:
            return response.status == 200
    except OSError:
        return False


def grpc_serves(address: str, environ: Mapping[str, str]) -> bool:
    """grpc.health.v1 answers SERVING for the server as a whole."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with _channel(address, environ) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)  # its stubs are untyped
        try:
            reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError:
            return False
    return reply.status == health_pb2.HealthCheckResponse.SERVING


def _channel(address: str, environ: Mapping[str, str]) -> Any:
    import grpc

    from baton.tls import TlsFiles

    cert, key, ca = (environ.get(f"BATON_TLS_{name}") for name in ("CERT", "KEY", "CA"))
    tls = TlsFiles.of(cert, key, ca, "tls") if cert else None
    if tls is None:
        return grpc.insecure_channel(address)
    # The certificate names the announced host, and this asks by loopback.
    name = environ.get("BATON_ADVERTISE_HOST") or environ.get("HOSTNAME", "")
    options = [("grpc.ssl_target_name_override", name)]
    return grpc.secure_channel(address, tls.channel_credentials(), options)


CHECKS = {"http": http_serves, "grpc": grpc_serves}


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    if len(arguments) != 2 or arguments[0] not in CHECKS:
        sys.stderr.write("usage: python -m deploy.healthcheck http URL | grpc HOST:PORT\n")
        return 2
    return 0 if CHECKS[arguments[0]](arguments[1], environ) else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:], os.environ))
