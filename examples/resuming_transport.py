"""Streams of the openai SDK (or any httpx client) that survive the death of their router.

OpenAI(base_url=f"{ROUTERS[0]}/v1", http_client=httpx.Client(transport=Resuming(ROUTERS)))
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Iterator, Sequence

import httpx


class Resuming(httpx.BaseTransport):
    def __init__(self, routers: Sequence[str], grace_s: int = 60) -> None:
        self._routers = itertools.cycle(map(httpx.URL, routers))
        self._grace_s = grace_s
        self._http = httpx.HTTPTransport()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.headers.setdefault("x-request-id", uuid.uuid4().hex)
        request.headers["x-baton-resumable"] = str(self._grace_s)
        first = self.send(request)
        stream = Events(self, request, first)
        return httpx.Response(first.status_code, headers=first.headers, stream=stream)

    def close(self) -> None:
        self._http.close()

    def send(self, request: httpx.Request) -> httpx.Response:
        """Ask one router after the other until one answers."""
        give_up = time.monotonic() + self._grace_s
        while True:
            router = next(self._routers)
            request.url = request.url.copy_with(
                scheme=router.scheme, host=router.host, port=router.port
            )
            request.headers["host"] = request.url.netloc.decode()
            try:
                response = self._http.handle_request(request)
                if response.status_code != 503 or time.monotonic() > give_up:
                    return response
                response.close()
            except httpx.TransportError:
                if time.monotonic() > give_up:
                    raise
            time.sleep(0.2)


class Events(httpx.SyncByteStream):
    """Whole events only: what a dying router had begun to say comes again."""

    def __init__(
        self, transport: Resuming, request: httpx.Request, response: httpx.Response
    ) -> None:
        self._transport = transport
        self._request = request
        self._response = response

    def __iter__(self) -> Iterator[bytes]:
        rest = b""
        while True:
            try:
                for piece in self._response.iter_raw():
                    *events, rest = (rest + piece).split(b"\n\n")
                    for event in events:
                        id_ = next((e for e in event.split(b"\n") if e.startswith(b"id: ")), b"")
                        if id_:
                            self._request.headers["last-event-id"] = id_[4:].decode()
                        yield event + b"\n\n"
                yield rest
                return
            except httpx.TransportError:
                rest, self._response = b"", self._transport.send(self._request)

    def close(self) -> None:
        self._response.close()
