"""What the log says of failures: ours with their traceback, clients' own as one quiet line."""

from __future__ import annotations

import logging

import pytest

from baton.protocol.errors import (
    BatonError,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    Unavailable,
)
from router.request.failures import as_baton_error, log_failure

LATE = DeadlineExceeded("the request's deadline has passed")


@pytest.mark.parametrize(
    ("cause", "level"),
    [
        (LATE, logging.INFO),
        (ExceptionGroup("several prompts", [LATE]), logging.INFO),
        (TimeoutError(), logging.ERROR),  # nobody had kept the deadline
        (InvalidRequest("no"), logging.INFO),
        (Unavailable("no node"), logging.INFO),
        (InternalError("a bug"), logging.ERROR),
        (ValueError("a bug"), logging.ERROR),
    ],
)
def test_only_our_own_faults_are_errors_with_a_traceback(
    cause: Exception, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    error: BatonError = as_baton_error(cause)
    log_failure(error, cause)
    [record] = caplog.records
    assert record.levelno == level
    assert bool(record.exc_info) == (level == logging.ERROR)
    assert error.code in record.getMessage()
