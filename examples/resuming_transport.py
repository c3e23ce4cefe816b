"""Streams of the openai SDK (or any httpx client) that survive the death of their router.

OpenAI(base_url=f"{ROUTERS[0]}/v1", http_client=httpx.Client(transport=Resuming(ROUTERS)))

Needs nothing but httpx: copy this file. Not for AsyncOpenAI, whose transports are asynchronous.
"""

from __future__ import annotations

import itertools
import math
import time
import uuid
from collections.abc import Iterator, MutableMapping, Sequence

import httpx

PAUSE_S = 0.2  # before a router that did not serve is asked again; doubles each time
LONGEST_PAUSE_S = 5.0


class Resuming(httpx.BaseTransport):
    """`grace_s`: a request is kept so long unread, and routers that do not serve are asked so long.

    `silence_s`: after so long without a word the next router is asked, which tells the same answer.
    """

    def __init__(self, routers: Sequence[str], grace_s: int = 60, silence_s: float = 10.0) -> None:
        self._num_routers = len(routers)
        self._routers = itertools.cycle(map(httpx.URL, routers))
        self._grace_s = grace_s
        self._silence_s = silence_s
        self._http = httpx.HTTPTransport()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.headers.setdefault("x-request-id", uuid.uuid4().hex)
        request.headers["x-baton-resumable"] = str(self._grace_s)
        timeouts = _timeouts(request)
        wait_s = timeouts.get("read")
        patience_s = math.inf if wait_s is None else max(wait_s, self._grace_s)
        silence_s = self._silence_s if wait_s is None else min(wait_s, self._silence_s)
        first = self.send(request, silence_s, patience_s)
        stream = Events(self, request, first, silence_s, patience_s)
        return httpx.Response(first.status_code, headers=first.headers, stream=stream)

    def close(self) -> None:
        self._http.close()

    def send(self, request: httpx.Request, wait_s: float, patience_s: float) -> httpx.Response:
        """Ask one router after the other until one answers, waiting `wait_s` for each.

        One that takes the request and says nothing may be stopped, or its request may have no news:
        the next one is asked, and after a round each gets twice as long, for `patience_s` in all.
        Raises httpx.TransportError.
        """
        due = dict.fromkeys(itertools.islice(self._routers, self._num_routers + 1), 0.0)
        pauses = dict.fromkeys(due, PAUSE_S)
        now, num_silent = time.monotonic(), 0
        impatient, give_up = now + patience_s, now + self._grace_s
        while True:
            router = min(due, key=due.__getitem__)
            time.sleep(max(0.0, due[router] - now))
            _turn(request, router)
            longer_s = wait_s * 2 ** (num_silent // len(due))
            _timeouts(request)["read"] = min(longer_s, max(wait_s, impatient - now))
            pause_s = pauses[router]
            outcome: httpx.Response | httpx.TransportError
            try:
                outcome = self._http.handle_request(request)
                if outcome.status_code != 503:
                    return outcome
                pause_s = max(pause_s, _retry_after_s(outcome))
            except httpx.TransportError as error:
                outcome = error
            now = time.monotonic()
            if isinstance(outcome, httpx.ReadTimeout):
                if now >= impatient:
                    raise outcome
                num_silent += 1
                give_up = now + self._grace_s  # it took the request: it is there, or stopped
            due[router] = now + pause_s
            pauses[router] = min(2 * pauses[router], LONGEST_PAUSE_S)
            if min(due.values()) > give_up:
                if isinstance(outcome, httpx.Response):
                    return outcome
                raise outcome
            if isinstance(outcome, httpx.Response):
                outcome.close()


class Events(httpx.SyncByteStream):
    """Whole events only: what a dying router had begun to say comes again."""

    def __init__(
        self,
        transport: Resuming,
        request: httpx.Request,
        response: httpx.Response,
        silence_s: float,
        patience_s: float,
    ) -> None:
        self._transport = transport
        self._request = request
        self._response = response
        self._silence_s = silence_s
        self._patience_s = patience_s

    def __iter__(self) -> Iterator[bytes]:
        rest = b""
        while True:
            _timeouts(self._request)["read"] = self._silence_s
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
                rest = b""
                self._go_on()

    def close(self) -> None:
        self._response.close()

    def _go_on(self) -> None:
        """Ask again. Raises httpx.TransportError, also for an answer that is no stream."""
        self._response.close()
        self._response = self._transport.send(self._request, self._silence_s, self._patience_s)
        if self._response.status_code != 200:
            # Its body in the middle of a stream would read as the stream's end.
            said = self._response.read().decode(errors="replace")
            self._response.close()
            message = f"the stream cannot go on: {self._response.status_code} {said[:1000]}"
            raise httpx.RemoteProtocolError(message, request=self._request)


def _turn(request: httpx.Request, router: httpx.URL) -> None:
    request.url = request.url.copy_with(scheme=router.scheme, host=router.host, port=router.port)
    request.headers["host"] = request.url.netloc.decode()


def _timeouts(request: httpx.Request) -> MutableMapping[str, float | None]:
    """The timeouts of a request; httpcore reads them when it asks, and when a body begins."""
    return request.extensions.setdefault("timeout", {})


def _retry_after_s(answer: httpx.Response) -> float:
    told = answer.headers.get("retry-after", "")
    return float(told) if told.isdecimal() else 0.0
