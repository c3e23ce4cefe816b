"""A node's /metrics endpoint, on threads of its own. Its values: baton/node/metrics.py. Beside it
/debug/profile, if that is asked for (baton/node/profiling.py).

Whatever format a scraper prefers, it gets Prometheus' plain text: in OpenMetrics, which Prometheus
2 prefers, prometheus-client writes the colon of vLLM's names as an underscore.
Beyond loopback it requires `Authorization: Bearer TOKEN` (`metrics_token`); the token is derived
from the deployment's secret and does not reveal it; while there are two secrets, each has one. It
uses TLS if the node does.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from prometheus_client import CollectorRegistry, make_wsgi_app

from baton.protocol.errors import ConfigError
from baton.runtime.rotation.deployment_secret import Secrets
from baton.runtime.tls import TlsFiles
from baton.runtime.wsgi_server import RunningServer


def metrics_token(secret: str) -> str:
    """Return the token, as `printf metrics | openssl dgst -sha256 -hmac "$BATON_SECRET"`
    prints it.
    """
    return hmac.new(secret.encode(), b"metrics", hashlib.sha256).hexdigest()


def metrics_tokens(secrets: Secrets) -> Callable[[], Sequence[str]]:
    """Return the token of each secret of the deployment, as they are now."""
    return lambda: [metrics_token(secret) for secret in secrets()]


@dataclass(frozen=True, slots=True)
class MetricsPlace:
    """Where to listen. `tokens`: those that are accepted now; None opens the endpoint to everybody
    who can reach the port.
    """

    host: str
    port: int
    tokens: Callable[[], Sequence[str]] | None = None
    tls: TlsFiles | None = None


def _guarded(app: WSGIApplication, tokens: Callable[[], Sequence[str]]) -> WSGIApplication:
    """Return `app` behind a check of the token."""

    def accepted(given: bytes) -> bool:
        digest = hashlib.sha256(given).digest()
        expected = [hashlib.sha256(f"Bearer {token}".encode()).digest() for token in tokens()]
        return any(hmac.compare_digest(digest, each) for each in expected)

    def guarded(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        given = str(environ.get("HTTP_AUTHORIZATION", "")).encode("latin-1", "replace")
        if not accepted(given):
            start_response("401 Unauthorized", [("WWW-Authenticate", "Bearer")])
            return [b""]
        return app(environ, start_response)

    return guarded


def _plain(app: WSGIApplication) -> WSGIApplication:
    """Return `app` for scrapers that are not asked which format they prefer."""

    def plain(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        return app({**environ, "HTTP_ACCEPT": ""}, start_response)

    return plain


def _with_debug(app: WSGIApplication, profiler: WSGIApplication | None) -> WSGIApplication:
    """Return `app` with /debug/profile beside it. prometheus_client answers any path itself."""

    def routed(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = str(environ.get("PATH_INFO", ""))
        if not path.startswith("/debug/"):
            return app(environ, start_response)
        if profiler is not None and path == "/debug/profile":
            return profiler(environ, start_response)
        start_response("404 Not Found", [("Content-Type", "text/plain")])
        return [b"no such route; --profiling serves POST /debug/profile"]

    return routed


def start_metrics(
    registry: CollectorRegistry, place: MetricsPlace, profiler: WSGIApplication | None = None
) -> RunningServer:
    """Start the endpoint. `profiler`: serves /debug/profile; None: there is none.

    Raises ConfigError if the port cannot be bound or the TLS files are unusable.
    """
    context = None if place.tls is None else place.tls.server_context()
    app = _with_debug(_plain(make_wsgi_app(registry)), profiler)
    if place.tokens is not None:
        app = _guarded(app, place.tokens)
    try:
        return RunningServer.start(app, place.host, place.port, context)
    except OSError as error:
        raise ConfigError(
            f"cannot bind the metrics port {place.host}:{place.port}: {error}",
            field="metrics_port",
        ) from error
