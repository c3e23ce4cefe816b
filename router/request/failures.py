"""Why a request failed: any exception as one error of Baton's tree, and what the log says of it."""

from __future__ import annotations

import asyncio
import logging

from baton.protocol.errors import BatonError, DeadlineExceeded, InternalError

log = logging.getLogger(__name__)


def as_baton_error(error: BaseException) -> BatonError:
    """The one error of Baton's tree that stands for `error`; of a group, its first."""
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
    """Faults of ours with their traceback, clients' own as one quiet line. A deadline is theirs,
    unless it was us who did not keep it (a TimeoutError)."""
    kept = isinstance(error, DeadlineExceeded) and error is _first(cause)
    if error.http_status >= 500 and not (error.retryable or kept):
        log.error("failed: %s: %s", error.code, error.message, exc_info=cause)
    else:
        log.info("refused: %s: %s", error.code, error.message)
