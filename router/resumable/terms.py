"""The headers by which a client asks for a resumable request or resumes one. Pure.

    x-baton-resumable: SECONDS   let the request run for so long while nobody reads it; 0 = plain
    idempotency-key: KEY         the same key and body are the same request (grace: DEFAULT_GRACE_S)
    last-event-id: ID            go on after this event of a request known by its x-request-id

A request has one or two names, valid for the API key that started it: the `x-request-id` of its
HTTP request, and a name made of its idempotency key.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from baton.protocol.errors import InvalidRequest

GRACE_HEADER: Final = "x-baton-resumable"
IDEMPOTENCY_HEADER: Final = "idempotency-key"
POSITION_HEADER: Final = "last-event-id"
POSITION_QUERY: Final = "starting_after"
SAID_IN: Final = frozenset(
    name.encode() for name in (GRACE_HEADER, IDEMPOTENCY_HEADER, POSITION_HEADER)
)
NAME_HEADER: Final = b"x-baton-request-id"  # in the answer: the name to ask for it again
KEY_PREFIX: Final = "ik-"  # begins a name that is made of an idempotency key
MAX_GRACE_S: Final = 3600
DEFAULT_GRACE_S: Final = 30.0
MAX_KEY_CHARS: Final = 256
_PREFIXES: Final = ("chatcmpl-", "cmpl-", "resp_", "msg_")
EVENT_ID: Final = r"[0-9]{1,9}(\.[0-9]{1,9})?(,[0-9]{1,9}(\.[0-9]{1,9})?){0,255}(;[0-9]{1,3})?"
_VECTOR: Final = re.compile(EVENT_ID)


@dataclass(frozen=True, slots=True)
class Position:
    """What a reader has seen: per choice the whole steps, and the events of the step after them.

    A step is a token, or an end that came without a token; it may have several events. `tail`: the
    events seen after all choices have ended.
    """

    steps: tuple[int, ...] = ()
    events: tuple[int, ...] = ()
    tail: int = 0

    def of(self, choice: int) -> tuple[int, int]:
        return (self.steps[choice], self.events[choice]) if self.steps else (0, 0)


START: Final = Position()


@dataclass(frozen=True, slots=True)
class ResumeTerms:
    """What a client asks for. `key`: the name made of its idempotency key, None without one.
    `after`: the id of the event to go on after, None without one."""

    grace_s: float
    key: str | None
    after: str | None


def read_resume_terms(header: Callable[[str], str]) -> ResumeTerms | None:
    """Return the terms in the headers; None for a plain request.

    `header(name)` returns "" for an absent header. Raises InvalidRequest.
    """
    grace_s = _grace(header(GRACE_HEADER).strip())
    key, after = header(IDEMPOTENCY_HEADER).strip(), header(POSITION_HEADER).strip()
    if len(key) > MAX_KEY_CHARS or not key.isprintable():
        message = f"{IDEMPOTENCY_HEADER}: at most {MAX_KEY_CHARS} printable characters"
        raise InvalidRequest(message, field=IDEMPOTENCY_HEADER)
    if not (grace_s or key or after):
        return None
    name = KEY_PREFIX + hashlib.sha256(key.encode()).hexdigest()[:32] if key else None
    return ResumeTerms(grace_s or DEFAULT_GRACE_S, name, after or None)


def read_position(text: str | None, num_choices: int, field: str) -> Position:
    """Return the position in an event's id. Raises InvalidRequest that names `field`."""
    if not text:
        return START
    if not _VECTOR.fullmatch(text):
        message = f"{field}: the id of an event, like 12 or 12,9"
        raise InvalidRequest(message, field=field)
    vector, _, tail = text.partition(";")
    pairs = [each.partition(".") for each in vector.split(",")]
    if len(pairs) != num_choices:
        message = f"{field}: one position for each of {num_choices} choices"
        raise InvalidRequest(message, field=field)
    steps = tuple(int(step) for step, _, _ in pairs)
    return Position(steps, tuple(int(events or 0) for _, _, events in pairs), int(tail or 0))


def names_meant(asked: str) -> list[str]:
    """Return the names that a client may mean: `asked`, and `asked` without a reply's prefix."""
    stripped = [asked.removeprefix(prefix) for prefix in _PREFIXES if asked.startswith(prefix)]
    return [asked, *stripped[:1]]


def _grace(given: str) -> float:
    if not given:
        return 0.0
    if not (given.isascii() and given.isdigit() and len(given) < 6 and int(given) <= MAX_GRACE_S):
        message = f"{GRACE_HEADER} must be whole seconds from 0 to {MAX_GRACE_S}"
        raise InvalidRequest(message, field=GRACE_HEADER)
    return float(given)
