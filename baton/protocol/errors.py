"""The one error tree: each class knows its HTTP status,
gRPC code, wire code, and whether a retry elsewhere may help.

BatonError
├── InvalidRequest            400  INVALID_ARGUMENT     the client's fault; `field` names it
│   ├── ContextLengthExceeded 400  INVALID_ARGUMENT     beyond what the model or the pool holds
│   ├── UnsupportedFeature    400  INVALID_ARGUMENT     valid elsewhere, not served here
│   ├── TooLarge              413  INVALID_ARGUMENT     more bytes than there is room for
│   ├── KeyReused             422  INVALID_ARGUMENT     an idempotency key with another body
│   ├── RequestNotFound       404  NOT_FOUND            no such request, or another key's
│   └── ModelNotFound         404  NOT_FOUND
├── Unauthenticated           401  UNAUTHENTICATED
├── Overloaded                429  RESOURCE_EXHAUSTED   a queue is full; Retry-After
├── Unavailable               503  UNAVAILABLE          no node or no store that could serve this
├── DeadlineExceeded          504  DEADLINE_EXCEEDED
├── Cancelled                 499  CANCELLED            the client went away
├── NodeLost                  503  UNAVAILABLE          a session broke (retryable)
├── GivenBack                 503  UNAVAILABLE          asked to, its node gave it back without KV
├── RowsLost                  503  UNAVAILABLE          an encoded image did not come (retryable)
├── KVError                   503  UNAVAILABLE          hand-over failed (retryable)
│   ├── KVStale               export or epoch no longer valid
│   ├── KVLost                exporter died or the connection broke
│   ├── KVCorrupt             a digest did not match
│   ├── KVTimeout             no progress within the deadline
│   └── KVRefused             secret, protocol, layout or dtype differ: never between these two
├── IllegalTransition         500  INTERNAL             a request state machine was misused (ours)
├── StoreUnavailable          503  UNAVAILABLE          Redis away, full or read-only
├── Fenced                    500  ABORTED              a newer epoch owns this request
├── ConfigError               500  FAILED_PRECONDITION  stops the start
│   └── ModelRefused          a checkpoint that cannot be served, by name, with the way out
└── InternalError             500  INTERNAL             anything else; opaque to clients
"""

from __future__ import annotations

from typing import ClassVar


class BatonError(Exception):
    """Base of all errors of Baton.

    `field`: the request field at fault; None if no field is. `retry_after_s`: whole seconds after
    which another try may succeed; None if nobody knows.
    """

    http_status: ClassVar[int] = 500
    grpc_code: ClassVar[str] = "INTERNAL"
    code: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False

    def __init__(
        self, message: str, *, field: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s


class InvalidRequest(BatonError):
    http_status = 400
    grpc_code = "INVALID_ARGUMENT"
    code = "invalid_request"


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class UnsupportedFeature(InvalidRequest):
    code = "unsupported_feature"


class KeyReused(InvalidRequest):
    http_status = 422
    code = "idempotency_key_reused"


class RequestNotFound(InvalidRequest):
    http_status = 404
    grpc_code = "NOT_FOUND"
    code = "request_not_found"


class TooLarge(InvalidRequest):
    """The request has more bytes than there is room for."""

    http_status = 413
    code = "request_too_large"


class ModelNotFound(InvalidRequest):
    http_status = 404
    grpc_code = "NOT_FOUND"
    code = "model_not_found"


class Unauthenticated(BatonError):
    http_status = 401
    grpc_code = "UNAUTHENTICATED"
    code = "unauthenticated"


class Overloaded(BatonError):
    http_status = 429
    grpc_code = "RESOURCE_EXHAUSTED"
    code = "overloaded"
    retryable = True


class Unavailable(BatonError):
    http_status = 503
    grpc_code = "UNAVAILABLE"
    code = "unavailable"
    retryable = True


class DeadlineExceeded(BatonError):
    http_status = 504
    grpc_code = "DEADLINE_EXCEEDED"
    code = "deadline_exceeded"


class Cancelled(BatonError):
    http_status = 499
    grpc_code = "CANCELLED"
    code = "cancelled"


class NodeLost(BatonError):
    http_status = 503
    grpc_code = "UNAVAILABLE"
    code = "node_lost"
    retryable = True


class GivenBack(BatonError):
    http_status = 503
    grpc_code = "UNAVAILABLE"
    code = "given_back"
    retryable = True


class RowsLost(BatonError):
    http_status = 503
    grpc_code = "UNAVAILABLE"
    code = "rows_lost"
    retryable = True


class KVError(BatonError):
    http_status = 503
    grpc_code = "UNAVAILABLE"
    code = "kv_error"
    retryable = True


class KVStale(KVError):
    code = "kv_stale"


class KVLost(KVError):
    code = "kv_lost"


class KVCorrupt(KVError):
    code = "kv_corrupt"
    lane: str = ""  # the lane over which it came, once that is known


class KVTimeout(KVError):
    code = "kv_timeout"


class KVRefused(KVError):
    code = "kv_refused"


class IllegalTransition(BatonError):
    code = "illegal_transition"


class StoreUnavailable(BatonError):
    http_status = 503
    grpc_code = "UNAVAILABLE"
    code = "store_unavailable"
    retryable = True


class Fenced(BatonError):
    grpc_code = "ABORTED"
    code = "fenced"


class ConfigError(BatonError):
    grpc_code = "FAILED_PRECONDITION"
    code = "config"


class ModelRefused(ConfigError):
    code = "model_refused"


class InternalError(BatonError):
    code = "internal"


def _tree(base: type[BatonError]) -> list[type[BatonError]]:
    """Return this file's classes below `base`; errors that other modules derive are never sent."""
    below = [sub for sub in base.__subclasses__() if sub.__module__ == __name__]
    return [base, *(c for sub in below for c in _tree(sub))]


def error_from_code(code: str, message: str, field: str | None = None) -> BatonError:
    """Rebuild an error that another process sent; an unknown code becomes InternalError."""
    by_code = {c.code: c for c in _tree(BatonError) if c is not BatonError}
    return by_code.get(code, InternalError)(message, field=field)
