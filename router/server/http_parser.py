"""BoundedParser: llhttp between a connection's bytes and uvicorn's protocol, with bounds of ours.

llhttp (httptools) in its strict mode has one reading of a request's framing, or refuses it. It does
not bound what is no body: heads that never end, chunk extensions, trailers, empty lines between
requests, nor how many requests stand in one piece of data. Not here: limits of a whole head
(router/server/http_guard.py, HeadGuard), deadlines (GuardedProtocol there). No library has these
bounds; what they cost is measured there.

The life: HEAD -> BODY -> NOTHING more to read -> HEAD of the next request ... -> refused, once.
"""

from __future__ import annotations

import enum
from typing import Final, cast
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from baton.protocol.errors import Overloaded
from router.api.http.web_errors import raw_error

MAX_FRAMING: Final = 8  # bytes around each byte of a body: five, where every one has its chunk
MAX_PIPELINED: Final = 64  # whole requests that wait behind the one that is being answered
_INVALID: Final = raw_error(400, "invalid HTTP")


class ParserPhase(enum.Enum):
    """What is read of a request."""

    HEAD = enum.auto()
    BODY = enum.auto()
    NOTHING = enum.auto()  # it is whole


class UntilTheEnd(int):
    """uvicorn's count of what is left of a body that ends with its connection: never too few, never
    too many."""

    def __lt__(self, _: object) -> bool:
        return False

    def __ne__(self, _: object) -> bool:
        return False

    def __isub__(self, _: int) -> UntilTheEnd:
        return self

    __hash__ = int.__hash__


class BoundedParser:
    """Takes the place of `protocol.parser`. `most_extra`: bytes of a request beside its body."""

    def __init__(self, protocol: HttpToolsProtocol, most_extra: int) -> None:
        self._protocol = protocol
        self._most_extra = most_extra
        self._extra = 0
        self._body = 0
        self.phase = ParserPhase.HEAD
        self.on_url, self.on_header = protocol.on_url, protocol.on_header
        self._parser = parser = httptools.HttpRequestParser(self)
        # HeadGuard refuses versions, with a status of its own. What a client says after its last
        # request is nobody's business.
        parser.set_dangerous_leniencies(lenient_version=True, lenient_data_after_close=True)
        self.get_method = parser.get_method
        self.get_http_version = parser.get_http_version
        self.should_keep_alive = parser.should_keep_alive
        self.should_upgrade = parser.should_upgrade

    @property
    def is_behind(self) -> bool:
        """Is an earlier request than the one that is read not answered yet?"""
        cycle = cast("RequestResponseCycle | None", self._protocol.cycle)
        if self.phase is ParserPhase.BODY:
            return bool(self._protocol.pipeline)
        return cycle is not None and not cycle.response_complete

    @property
    def may_answer(self) -> bool:
        """Would an answer now be taken for that of the request that is read?"""
        started = self.phase is ParserPhase.BODY and self._protocol.cycle.response_started
        return not (self.is_behind or started)

    def feed_data(self, data: bytes) -> None:
        """The connection's next bytes. Calls the protocol; raises nothing."""
        self._extra += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._protocol.cycle.keep_alive = False  # it is answered as any other, and the last
        except httptools.HttpParserError:
            self._refuse()
        else:
            if self._extra > self._most_extra + MAX_FRAMING * self._body:
                self._refuse()

    def _refuse(self) -> None:
        """Answer what cannot be read, if nobody takes the answer for another's; hang up."""
        protocol = self._protocol
        if self.may_answer:
            protocol.transport.write(_INVALID)
        protocol.transport.close()
        if self.phase is ParserPhase.BODY:
            protocol.cycle.disconnected = True  # whatever its handler says is not sent any more

    # ---- llhttp's ----

    def on_message_begin(self) -> None:
        self.phase = ParserPhase.HEAD
        self._protocol.on_message_begin()

    def on_headers_complete(self) -> None:
        """Raises Overloaded, which ends the connection."""
        protocol = self._protocol
        protocol.on_headers_complete()
        if len(protocol.pipeline) > MAX_PIPELINED:
            raise Overloaded("too many requests without reading the answers")
        # As it was sent: a target of another form is not read as if it were a path.
        path, _, query = protocol.url.partition(b"?")
        scope = protocol.scope
        scope["raw_path"], scope["query_string"] = path, query
        scope["path"] = unquote(path.decode("ascii"))
        if scope["http_version"] == "1.0":  # it knows no chunks
            protocol.cycle.chunked_encoding = False
            protocol.cycle.expected_content_length = UntilTheEnd()
        protocol.headers = []  # the scope has them; trailers are nobody's
        self.phase, self._body = ParserPhase.BODY, 0

    def on_body(self, body: bytes) -> None:
        self._extra -= len(body)
        self._body += len(body)
        self._protocol.on_body(body)

    def on_message_complete(self) -> None:
        self.phase, self._extra = ParserPhase.NOTHING, 0
        self._protocol.on_message_complete()
