"""A node's /metrics endpoint, on threads of its own. What it shows: baton/node/metrics.py.

Beyond loopback it wants `Authorization: Bearer TOKEN`, a token made of the deployment's secret that
does not reveal the secret (`metrics_token`), and is encrypted like the rest of the node.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from prometheus_client import CollectorRegistry, make_wsgi_app

from baton.protocol.errors import ConfigError
from baton.runtime.tls import TlsFiles
from baton.runtime.wsgi_server import RunningServer


def metrics_token(secret: str) -> str:
    """`printf metrics | openssl dgst -sha256 -hmac "$BATON_SECRET"`."""
    return hmac.new(secret.encode(), b"metrics", hashlib.sha256).hexdigest()


@dataclass(frozen=True, slots=True)
class MetricsPlace:
    """Where to listen; `token` "": open to all that reach it."""

    host: str
    port: int
    token: str = ""
    tls: TlsFiles | None = None


def _guarded(app: WSGIApplication, token: str) -> WSGIApplication:
    """`app` for those who present the token; "" = for all."""
    expected = hashlib.sha256(f"Bearer {token}".encode()).digest()

    def guarded(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        given = str(environ.get("HTTP_AUTHORIZATION", "")).encode("latin-1", "replace")
        if token and not hmac.compare_digest(hashlib.sha256(given).digest(), expected):
            start_response("401 Unauthorized", [("WWW-Authenticate", "Bearer")])
            return [b""]
        return app(environ, start_response)

    return guarded


def start_metrics(registry: CollectorRegistry, place: MetricsPlace) -> RunningServer:
    """Raises ConfigError if the port cannot be bound or the TLS files cannot be used."""
    context = None if place.tls is None else place.tls.server_context()
    app = _guarded(make_wsgi_app(registry), place.token)
    try:
        return RunningServer.start(app, place.host, place.port, context)
    except OSError as error:
        raise ConfigError(
            f"cannot bind the metrics port {place.host}:{place.port}: {error}",
            field="metrics_port",
        ) from error
