"""Why a request failed: any exception as one error of Baton's tree, and what the log says of it."""

from __future__ import annotations

import asyncio
import logging

from baton.protocol.errors import BatonError, DeadlineExceeded, InternalError

log = logging.getLogger(__name__)


def as_baton_error(error: BaseException) -> BatonError:
    """Return `error` as a BatonError; of an exception group, its first exception."""
    error = _first(error)
    if isinstance(error, BatonError):
        return error
    if isinstance(error, TimeoutError | asyncio.TimeoutError):
        return DeadlineExceeded("the request ran into its deadline")
    return InternalError(str(error))


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def log_failure(error: BatonError, cause: BaseException) -> None:
    """Log a failure: the server's fault as an error with traceback, a client's as one info line.

    A DeadlineExceeded that was raised as such is a client's; one made from a TimeoutError is not.
    """
    kept = isinstance(error, DeadlineExceeded) and error is _first(cause)
    if error.http_status >= 500 and not (error.retryable or kept):
        log.error("failed: %s: %s", error.code, error.message, exc_info=cause)
    else:
        log.info("refused: %s: %s", error.code, error.message)
