"""Log lines: request ids, no forged lines, refused levels."""

from __future__ import annotations

import io
import json
import logging

import pytest

from baton.protocol.errors import ConfigError
from baton.runtime import log


def logged(form: str) -> io.StringIO:
    """What a router logs in this format."""
    out = io.StringIO()
    log.setup("router", "info", form, stream=out)
    return out


@pytest.fixture
def stream() -> io.StringIO:
    return logged("text")


@pytest.fixture
def json_stream() -> io.StringIO:
    return logged("json")


def test_a_line_carries_process_request_and_message(stream: io.StringIO) -> None:
    with log.request_context("cmpl-7"):
        logging.getLogger("router.request.dispatch").info("finished: %s", "stop")
    logging.getLogger("router.request.dispatch").debug("hidden")
    logging.getLogger("x").info("idle")
    first, second = stream.getvalue().splitlines()
    assert "INFO    router [cmpl-7] router.request.dispatch: finished: stop" in first
    assert "router [-] x: idle" in second


def test_a_request_may_be_named_later(stream: io.StringIO) -> None:
    with log.request_context("drawn"):
        log.bind_request("by-its-body")
        logging.getLogger("x").info("inside")
    logging.getLogger("x").info("outside")
    first, second = stream.getvalue().splitlines()
    assert "[by-its-body] x: inside" in first
    assert "[-] x: outside" in second


def test_a_message_cannot_forge_a_line(stream: io.StringIO) -> None:
    logging.getLogger("x").info("model %s", "a\nERROR fake \x1b[31m")
    assert stream.getvalue().count("\n") == 1
    assert "\\nERROR fake \\x1b[31m" in stream.getvalue()


def test_a_traceback_stays_with_its_line(stream: io.StringIO) -> None:
    try:
        raise ValueError("boom")
    except ValueError:
        logging.getLogger("x").exception("failed")
    first, *rest = stream.getvalue().splitlines()
    assert first.endswith("x: failed")
    assert rest
    assert all(line.startswith("\t") for line in rest)


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ConfigError, match="loud"):
        log.setup("router", "loud")


def test_json_lines(json_stream: io.StringIO) -> None:
    with log.request_context("cmpl-7"):
        logging.getLogger("x").warning("model %s", 'a\n{"level": "forged"} \x1b[31m é')
    logging.getLogger("x").debug("hidden")
    (line,) = json_stream.getvalue().splitlines()
    told = json.loads(line)
    assert told.pop("time") > 0
    assert told == {
        "level": "warning", "process": "router", "request": "cmpl-7", "logger": "x",
        "message": 'model a\n{"level": "forged"} \x1b[31m é',
    }  # fmt: skip


def test_a_traceback_is_part_of_its_json_line(json_stream: io.StringIO) -> None:
    try:
        raise ValueError("boom")
    except ValueError:
        logging.getLogger("x").exception("failed")
    (line,) = json_stream.getvalue().splitlines()
    told = json.loads(line)
    assert told["message"] == "failed"
    assert told["traceback"].splitlines()[-1] == "ValueError: boom"
