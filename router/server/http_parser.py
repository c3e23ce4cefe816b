"""BoundedParser: parses a connection's bytes with llhttp for uvicorn's protocol, within bounds.

llhttp (httptools) in its strict mode refuses ambiguous framing. But it does not limit the bytes
outside of bodies (heads that never end, chunk extensions, trailers, empty lines between requests),
nor how many requests arrive without waiting for answers. BoundedParser limits both. Not here:
limits of a complete head (HeadGuard in router/server/http_guard.py) and deadlines (GuardedProtocol
there).

The life: HEAD -> BODY -> NOTHING left to read -> HEAD of the next request ...; a refusal ends it.
"""

from __future__ import annotations

import enum
from typing import Final, cast
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from baton.protocol.clock import SystemClock
from baton.protocol.errors import Overloaded
from router.api.http.web_errors import raw_error
from router.request.terms import ARRIVAL_KEY

# Most framing bytes per byte of a body. Chunks of one byte each need five.
MAX_FRAMING: Final = 8
MAX_PIPELINED: Final = 64  # complete requests that wait while an earlier one is answered
_INVALID: Final = raw_error(400, "invalid HTTP")


class ParserPhase(enum.Enum):
    """The part of a request that the parser reads next."""

    HEAD = enum.auto()
    BODY = enum.auto()
    NOTHING = enum.auto()  # the request is complete


class UntilTheEnd(int):
    """Stands for uvicorn's count of bytes left in an answer that ends with its connection: uvicorn
    then finds the body neither too long nor too short."""

    def __lt__(self, _: object) -> bool:
        return False

    def __ne__(self, _: object) -> bool:
        return False

    def __isub__(self, _: int) -> UntilTheEnd:
        return self

    __hash__ = int.__hash__


class BoundedParser:
    """Takes the place of `protocol.parser`. `most_extra`: the bytes that a request may have outside
    its body, beside MAX_FRAMING per byte of the body."""

    def __init__(self, protocol: HttpToolsProtocol, most_extra: int) -> None:
        self._protocol = protocol
        self._most_extra = most_extra
        self._extra = 0
        self._body = 0
        self.phase = ParserPhase.HEAD
        self.on_url, self.on_header = protocol.on_url, protocol.on_header
        self._parser = parser = httptools.HttpRequestParser(self)
        # Lenient about versions: HeadGuard refuses them with status 505. Lenient about data after
        # `connection: close`: it is ignored.
        parser.set_dangerous_leniencies(lenient_version=True, lenient_data_after_close=True)
        self.get_method = parser.get_method
        self.get_http_version = parser.get_http_version
        self.should_keep_alive = parser.should_keep_alive
        self.should_upgrade = parser.should_upgrade

    @property
    def is_behind(self) -> bool:
        """Whether a request before the one being read has not been answered yet."""
        cycle = cast("RequestResponseCycle | None", self._protocol.cycle)
        if self.phase is ParserPhase.BODY:
            return bool(self._protocol.pipeline)
        return cycle is not None and not cycle.response_complete

    @property
    def may_answer(self) -> bool:
        """Whether the client would take bytes sent now for the answer to the request being read."""
        started = self.phase is ParserPhase.BODY and self._protocol.cycle.response_started
        return not (self.is_behind or started)

    def feed_data(self, data: bytes) -> None:
        """Parse the connection's next bytes and call the protocol. Raises nothing."""
        self._extra += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # The request is answered as any other; it is the last of its connection.
            self._protocol.cycle.keep_alive = False
        except httptools.HttpParserError:
            self._refuse()
        else:
            if self._extra > self._most_extra + MAX_FRAMING * self._body:
                self._refuse()

    def _refuse(self) -> None:
        """Close the connection. Send 400 before, if the client cannot take it for the answer to
        another request."""
        protocol = self._protocol
        if self.may_answer:
            protocol.transport.write(_INVALID)
        protocol.transport.close()
        if self.phase is ParserPhase.BODY:
            protocol.cycle.disconnected = True  # nothing that its handler sends goes out any more

    # ---- callbacks of llhttp ----

    def on_message_begin(self) -> None:
        """Begin a request at the first byte of its head: its time counts from now on."""
        self.phase = ParserPhase.HEAD
        self._protocol.on_message_begin()
        scope = cast("dict[str, object]", self._protocol.scope)
        scope[ARRIVAL_KEY] = SystemClock.monotonic()

    def on_headers_complete(self) -> None:
        """Begin the request. Raises Overloaded for more than MAX_PIPELINED; that ends the
        connection."""
        protocol = self._protocol
        protocol.on_headers_complete()
        if len(protocol.pipeline) > MAX_PIPELINED:
            raise Overloaded("too many requests without reading the answers")
        # The target as the client sent it. uvicorn would take a full URL for its path alone.
        path, _, query = protocol.url.partition(b"?")
        scope = protocol.scope
        scope["raw_path"], scope["query_string"] = path, query
        scope["path"] = unquote(path.decode("ascii"))
        if scope["http_version"] == "1.0":  # HTTP/1.0 has no chunked encoding
            protocol.cycle.chunked_encoding = False
            protocol.cycle.expected_content_length = UntilTheEnd()
        protocol.headers = []  # the scope keeps the old list; trailers go into a list nobody reads
        self.phase, self._body = ParserPhase.BODY, 0

    def on_body(self, body: bytes) -> None:
        self._extra -= len(body)
        self._body += len(body)
        self._protocol.on_body(body)

    def on_message_complete(self) -> None:
        self.phase, self._extra = ParserPhase.NOTHING, 0
        self._protocol.on_message_complete()
