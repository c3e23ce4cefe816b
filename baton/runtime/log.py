"""Logging of a process: plain lines on stderr, each with its request. Set up in a `__main__`.

Libraries only call `logging.getLogger(__name__)`. They bind a request with `request_context`; every
line logged inside it, also in tasks started there, carries the request's id.
"""

from __future__ import annotations

import json
import logging
import sys
from contextvars import ContextVar, Token
from typing import Final, TextIO

from baton.protocol.errors import ConfigError

LEVELS: Final = ("debug", "info", "warning", "error")
FORMATS: Final = ("text", "json")
MAX_ID_CHARS: Final = 256  # of a client's id; the rest is cut off
_request: ContextVar[str] = ContextVar("baton_request", default="-")


class request_context:
    """Context in which logged lines carry `request_id`."""

    __slots__ = ("_request_id", "_token")

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._token: Token[str] | None = None

    def __enter__(self) -> None:
        self._token = _request.set(self._request_id)

    def __exit__(self, *_: object) -> None:
        assert self._token is not None, "entered"
        _request.reset(self._token)


def bind_request(request_id: str) -> None:
    """Let lines carry this id from now on, until the request_context around the call ends."""
    _request.set(request_id)


class LineFormatter(logging.Formatter):
    """`2026-11-20T22:39:01.123+0000 INFO    prefill-0 [request id] logger: message`.

    One event is one line. A message cannot forge another: line breaks and control characters are
    escaped. A traceback follows on lines that begin with a tab.
    """

    def __init__(self, process_name: str) -> None:
        super().__init__()
        self._process_name = process_name

    def format(self, record: logging.LogRecord) -> str:
        when = self.formatTime(record, "%Y-%m-%dT%H:%M:%S")
        zone = self.formatTime(record, "%z")
        line = (
            f"{when}.{int(record.msecs):03d}{zone} {record.levelname:<7} {self._process_name}"
            f" [{_printable(_request.get()[:MAX_ID_CHARS])}] {record.name}:"
            f" {_printable(record.getMessage())}"
        )
        if record.exc_info:
            trace = self.formatException(record.exc_info)
            line += "".join("\n\t" + _printable(row) for row in trace.splitlines())
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (seconds since 1970), level, process, request, logger and
    message; with an exception also traceback."""

    def __init__(self, process_name: str) -> None:
        super().__init__()
        self._process_name = process_name

    def format(self, record: logging.LogRecord) -> str:
        told = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "process": self._process_name,
            "request": _request.get()[:MAX_ID_CHARS],
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            told["traceback"] = self.formatException(record.exc_info)
        return json.dumps(told)


def setup(
    process_name: str, level: str = "info", form: str = "text", stream: TextIO | None = None
) -> None:
    """Configure the root logger of this process; calling it again replaces the handler.

    `form`: one of FORMATS. Raises ConfigError for an unknown level. Libraries that log much at INFO
    are limited to WARNING.
    """
    if level not in LEVELS:
        raise ConfigError(f"log level {level!r} is none of {', '.join(LEVELS)}", field="log_level")
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    formatter = JsonFormatter if form == "json" else LineFormatter
    handler.setFormatter(formatter(process_name))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    for chatty in ("asyncio", "grpc", "urllib3", "huggingface_hub", "uvicorn.access"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, root.level))


def _printable(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c == "\t" else c.encode("unicode_escape").decode() for c in text
    )


def current_format() -> str:
    """Return the format that `setup` has set, for processes that this one starts."""
    handlers = logging.getLogger().handlers
    is_json = any(isinstance(handler.formatter, JsonFormatter) for handler in handlers)
    return "json" if is_json else "text"
