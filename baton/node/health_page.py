"""A node's GET /health, beside its /metrics: 200 while its own engine gets on, else 503.

Answered on the metrics server's threads, so it answers even if the node's event loop hangs. Not
here: grpc.health.v1 (baton/node/service.py), which also says that a node drains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from baton.node.progress import Progress


def with_health(app: WSGIApplication, progress: Progress) -> WSGIApplication:
    """`app` behind /health."""

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ["PATH_INFO"] != "/health":
            return app(environ, start_response)
        return _health(progress.stalled, start_response)

    return answer


def _health(stalled: bool, start_response: Callable[..., object]) -> list[bytes]:
    status = "503 Service Unavailable" if stalled else "200 OK"
    body = b'{"status":"stalled"}' if stalled else b'{"status":"ok"}'
    start_response(
        status, [("content-type", "application/json"), ("content-length", str(len(body)))]
    )
    return [body]
