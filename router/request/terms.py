"""Terms: what a client asks for beside the body: its key, time limits, priority, a receipt.

The terms are read once from the headers of an HTTP request (or from a gRPC call's metadata, under
the same names) and travel with the request's trace. Numbers out of bounds are refused with an error
that names the header.

    x-slo-ttft-ms, x-slo-tpot-ms   longest time to the first token; mean time per further token
    x-request-timeout-ms           longest time of the whole request, within the server's own limit
    x-request-priority             smaller = sooner; the body's `priority` overrides it
    x-session-id                   the conversation of which this is a turn; without it the body's
                                   `session_id`, `prompt_cache_key` or `user`
    x-baton-receipt                1: the client wants a receipt; or `baton_timing` in the body
    x-baton-resume                 fast or exact: how the request goes on after its node was lost
    x-baton-nodes                  ids of nodes that should serve it (--named-nodes); set by a
                                   gateway that asked an endpoint picker
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, Protocol, cast, get_args

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.types import Scope

from baton.protocol.errors import InvalidRequest
from baton.protocol.request import Request, Resume
from router.nodes.slo import ANY, Slo
from router.request.sessions import session_key
from router.tenants.keys import EVERYBODY, Grant

# Every number that comes in a header: (minimum, maximum).
BOUNDS: Final[dict[str, tuple[float, float]]] = {
    "x-slo-ttft-ms": (1, 3_600_000),
    "x-slo-tpot-ms": (0.01, 3_600_000),
    "x-request-timeout-ms": (1, 86_400_000),
    "x-request-priority": (-(2**31 - 1), 2**31 - 1),
}
MAX_SESSION_CHARS: Final = 256
MOST_NODES: Final = 2  # that a request may name: a prefill and a decode node
GRANT_KEY: Final = "baton.grant"  # where the key guard leaves the Grant in the ASGI scope
ARRIVAL_KEY: Final = "baton.arrival"  # where the HTTP server leaves the time of the first byte
_NUMBER: Final = re.compile(r"[0-9]{1,10}(\.[0-9]{1,6})?")
_INTEGER: Final = re.compile(r"-?[0-9]{1,10}")
_TRACEPARENT: Final = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_YES: Final = frozenset({"1", "true", "yes"})


class BodyTerms(Protocol):
    """The fields of a body that say the same as some of the headers."""

    @property
    def session_id(self) -> str | None: ...
    @property
    def prompt_cache_key(self) -> str | None: ...
    @property
    def user(self) -> str | None: ...
    @property
    def baton_timing(self) -> bool | None: ...
    @property
    def priority(self) -> int | None: ...


class Terms(msgspec.Struct, frozen=True):
    """What a client asks for beside the body.

    `session`: a digest, empty without a session. `timeout_s` None: the server's limit holds.
    `resume` None: the request's own field decides. `arrival`: when the first byte of its head came,
    in seconds of the router's clock; None if no HTTP server of this process has read it.
    """

    grant: Grant = EVERYBODY
    slo: Slo = ANY
    timeout_s: float | None = None
    priority: int | None = None
    session: bytes = b""
    receipt: bool = False
    traceparent: str = ""
    resume: Resume | None = None
    arrival: float | None = None
    nodes: tuple[str, ...] = ()

    def with_body(self, body: BodyTerms, receipts: bool = True) -> Terms:
        """Return the terms with what the body adds. With `receipts` False there is no receipt.

        Raises InvalidRequest that names the body's field.
        """
        session = self.session
        named = (
            ("session_id", body.session_id),
            ("prompt_cache_key", body.prompt_cache_key),
            ("user", body.user),
        )
        for field, value in named:
            if value:
                _check_session(value, field)
                session = session or session_key(self.grant.tenant, value)
        priority = self.priority if body.priority is None else body.priority
        receipt = receipts and (self.receipt or bool(body.baton_timing))
        if (session, priority, receipt) == (self.session, self.priority, self.receipt):
            return self
        return msgspec.structs.replace(self, session=session, priority=priority, receipt=receipt)

    def salt(self, cache_salt: str) -> str:
        """Return the salt of the prompt's block hashes: only prompts with the same salt share KV.

        It contains the tenant's domain if the key's cache is isolated.
        """
        return tenant_salt(self.grant.domain, cache_salt) if self.grant.isolated else cache_salt

    def applied(self, request: Request) -> Request:
        """Return the request with these terms applied: priority, deadline, cache salt, resumption.

        The priority is not more urgent than the key allows. The earlier of the request's deadline
        and the client's time limit holds.
        """
        priority = request.priority if self.priority is None else self.priority
        if self.grant.best_priority is not None:
            priority = max(priority, self.grant.best_priority)
        deadline = request.deadline
        if self.timeout_s is not None:
            own = request.arrival + self.timeout_s
            deadline = own if deadline is None else min(deadline, own)
        salt = self.salt(request.tenant_salt)
        resume = self.resume or request.resume
        if (priority, deadline, salt, resume) == (
            request.priority, request.deadline, request.tenant_salt, request.resume
        ):  # fmt: skip
            return request
        return replace(
            request, priority=priority, deadline=deadline, tenant_salt=salt, resume=resume
        )


STANDARD: Final = Terms()  # for requests without any of these headers


def terms_of(request: HttpRequest) -> Terms:
    """Return the terms of an HTTP request. Raises InvalidRequest that names the header."""
    grant, arrival = grant_of(request.scope), request.scope.get(ARRIVAL_KEY)
    if _SAID_IN.isdisjoint([name for name, _ in request.scope["headers"]]):
        return Terms(grant, arrival=arrival)
    return read_terms(lambda name: request.headers.get(name, ""), grant, arrival)


def grant_of(scope: Scope) -> Grant:
    """Return the grant that the key guard left in the scope; EVERYBODY if there are no keys."""
    grant: Any = scope.get(GRANT_KEY, EVERYBODY)
    assert isinstance(grant, Grant)
    return grant


def read_terms(
    header: Callable[[str], str], grant: Grant = EVERYBODY, arrival: float | None = None
) -> Terms:
    """Return the terms in headers. `header(name)` returns "" for an absent header.

    Raises InvalidRequest that names the header.
    """
    ttft_ms = _number(header, "x-slo-ttft-ms")
    tpot_ms = _number(header, "x-slo-tpot-ms")
    timeout_ms = _number(header, "x-request-timeout-ms")
    priority = _number(header, "x-request-priority", _INTEGER)
    session_id = header("x-session-id").strip()
    _check_session(session_id, "x-session-id")
    traceparent = header("traceparent")
    return Terms(
        grant=grant,
        slo=Slo(_seconds(ttft_ms), _seconds(tpot_ms)) if ttft_ms or tpot_ms else ANY,
        timeout_s=_seconds(timeout_ms),
        priority=None if priority is None else int(priority),
        session=session_key(grant.tenant, session_id),
        receipt=header("x-baton-receipt").strip().lower() in _YES,
        traceparent=traceparent if _TRACEPARENT.fullmatch(traceparent) else "",
        resume=resume_of(header("x-baton-resume").strip().lower(), "x-baton-resume"),
        arrival=arrival,
        nodes=_nodes(header("x-baton-nodes")),
    )


def _nodes(given: str) -> tuple[str, ...]:
    """Return the node ids in a header, at most one of each role."""
    names = tuple(filter(None, (name.strip() for name in given.split(","))))
    if len(names) > MOST_NODES or len(given) > MAX_SESSION_CHARS * MOST_NODES:
        raise InvalidRequest(f"x-baton-nodes: at most {MOST_NODES} node ids", field="x-baton-nodes")
    return names


def _names_read() -> frozenset[bytes]:
    names: list[str] = []

    def absent(name: str) -> str:
        names.append(name)
        return ""

    read_terms(absent)
    return frozenset(name.encode() for name in names)


def resume_of(given: str, field: str) -> Resume | None:
    """Return `given` as a Resume; None if it is empty. Raises InvalidRequest that names `field`."""
    if given and given not in get_args(Resume):
        raise InvalidRequest(f"{field} must be one of {', '.join(get_args(Resume))}", field=field)
    return cast("Resume", given) if given else None


def tenant_salt(tenant: str, cache_salt: str) -> str:
    """Return the cache salt of a tenant. No other tenant gets the same salt by any `cache_salt`."""
    return hashlib.sha256(f"{len(tenant)}:{tenant}{cache_salt}".encode()).hexdigest()


def _number(
    header: Callable[[str], str], name: str, form: re.Pattern[str] = _NUMBER
) -> float | None:
    given = header(name).strip()
    if not given:
        return None
    low, high = BOUNDS[name]
    if not form.fullmatch(given) or not low <= float(given) <= high:
        raise InvalidRequest(f"{name} must be a number from {low:g} to {high:g}", field=name)
    return float(given)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def _check_session(value: str, name: str) -> None:
    if len(value) > MAX_SESSION_CHARS:
        raise InvalidRequest(f"{name}: at most {MAX_SESSION_CHARS} characters", field=name)


_SAID_IN: Final = _names_read()  # the headers that mean anything here
