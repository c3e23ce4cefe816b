"""RequestStore: what must survive a process. The protocol, its records and its answers.

Implementations: store/memory_store.py (tests, laptops) and store/redis_store.py; both pass
tests/router/test_store_contract.py. Nobody but store/guard.py talks to a store while it serves.

Fences, the same in both: a write carries the request's epoch and its writer's name. It is refused
when the record has a newer epoch or another owner, and a state moves only as
baton.protocol.request.TRANSITIONS says. Every write is idempotent: repeating one whose answer was
lost changes nothing and succeeds.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from baton.protocol.errors import StoreUnavailable
from baton.protocol.request import RequestState
from router.store.documents import Documents

TERMINAL_TTL_S: Final = 600.0  # how long a terminal record and its log may still be read
SWEEP_LIMIT: Final = 256  # expired requests that one sweep handles
LOGGED: Final = "logged_tokens"  # field of a terminal record: tokens in its log, over all samples
MAX_TRIES: Final = 10  # leases of one request that may run out: it may be what kills its routers
END_MARK: Final = "!"
ALIAS: Final = "alias"  # field of a claim: another id, which finds the request as well
NO_FIELDS: Final[Mapping[str, str]] = {}


class WriteStatus(enum.StrEnum):
    OK = "ok"
    GONE = "gone"  # no such record
    FENCED = "fenced"  # a newer epoch or another owner
    ILLEGAL = "illegal"  # not in TRANSITIONS
    GAP = "gap"  # an append beyond the end of the log, or an end that wants more of it


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request as stored. `owner` is a router id, "" for nobody; `fields` are free text.

    `age_s`: since its first claim; `idle_s`: since somebody last followed it through another router
    than its own, None if nobody did. Both by the store's clock.
    """

    id: str
    state: RequestState
    epoch: int
    owner: str
    tries: int = 0
    fields: Mapping[str, str] = field(default_factory=dict[str, str])
    age_s: float = field(default=0.0, compare=False)
    idle_s: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Move:
    """One transition. `epoch` is the writer's; a move to QUEUED (failover) adds one to it.

    `catch_up`: the writer skipped moves while the store was away, so the stored state may be an
    older one; then any non-terminal state may move on (the fences still hold).
    `min_tokens`, `min_ends`: tokens, and ends of samples, that the log must have for an end: a
    store that died may have forgotten the last of what it confirmed. `kept`: an end that may still
    be read; else record and log are gone at once, and the id is free.
    """

    request_id: str
    epoch: int
    state: RequestState
    fields: Mapping[str, str] = field(default_factory=dict[str, str])
    catch_up: bool = False
    min_tokens: int = 0
    min_ends: int = 0
    kept: bool = True


@dataclass(frozen=True, slots=True)
class LogEntry:
    """Tokens of one sample; `position` is the absolute output index of the first.

    `more`: what else is known of them (store/log_details.py), kept with them. One that
    begins with END_MARK ends its sample: it is kept once, even without a new token.
    """

    request_id: str
    epoch: int
    position: int
    token_ids: tuple[int, ...]
    sample: int = 0
    more: str = ""


@dataclass(frozen=True, slots=True)
class Swept:
    """A request whose owner's lease ran out, and what became of it."""

    request_id: str
    state: RequestState
    epoch: int


OnAnswer = Callable[[WriteStatus | StoreUnavailable], None]
Claimed = Callable[[int | StoreUnavailable | None], None]


class RequestStore(Protocol):
    """One router's view of the store; its name is given at construction.

    All methods but `stop` raise StoreUnavailable.
    """

    @property
    def name(self) -> str:
        """ "redis" or "memory"."""
        ...

    @property
    def documents(self) -> Documents:
        """What clients may ask for again, beside requests."""
        ...

    async def start(self) -> None:
        """Connect. Called once; raises StoreUnavailable when nobody answers."""
        ...

    async def stop(self) -> None: ...

    async def claim(
        self, request_id: str, fields: Mapping[str, str] = NO_FIELDS
    ) -> RequestRecord | None:
        """Own a request: a new one becomes QUEUED at epoch 1, an ownerless one is adopted.

        None: the id belongs to somebody else, or is in use already, or its ALIAS is.
        """
        ...

    def post_claim(self, request_id: str, fields: Mapping[str, str], on_answer: Claimed) -> None:
        """`claim` without waiting: it takes effect before the next call for its request.

        Raises nothing; `on_answer` gets the epoch, or None, at once or later, once.
        """
        ...

    async def move(self, move: Move) -> WriteStatus:
        """To a non-terminal state; renews the lease."""
        ...

    def post(self, move: Move, on_answer: OnAnswer) -> None:
        """`move` without waiting: it takes effect before the next call for its request (but for
        appends), alone or joined with the moves that follow.

        Raises nothing; `on_answer` gets the answer at once or later, once.
        """
        ...

    async def finish(self, move: Move) -> WriteStatus:
        """To a terminal state; ends the lease and starts the record's and the log's TTL.

        In the same call the log is counted, into the field LOGGED: once, however often it is asked.
        """
        ...

    async def append(self, entries: Sequence[LogEntry]) -> list[WriteStatus]:
        """Append to the logs of several requests in one call; one status per entry, in order.

        Tokens that the log already has are skipped, so a repeated or overlapping entry is OK.
        """
        ...

    async def beat(self, held: Collection[str]) -> list[str]:
        """This router lives: renew the leases of `held` requests, revive those not yet swept.

        Returns the ids that it does not own any more.
        """
        ...

    async def sweep(self, limit: int = SWEEP_LIMIT) -> list[Swept]:
        """End leases that ran out: epoch + 1, then ownerless QUEUED if resumable, else CANCELLED.

        What is ownerless has a lease too: whoever swept it may die before anybody has adopted it.
        After MAX_TRIES it is CANCELLED.
        Does nothing within two lease times of this router's own (re)connection: after an outage
        everybody's lease looks expired.
        """
        ...

    async def read(self, request_id: str) -> RequestRecord | None:
        """The request of that id, or of that alias: then its record has another id."""
        ...

    async def read_log(self, request_id: str) -> list[LogEntry]:
        """What has been appended, in order."""
        ...

    async def tail(
        self, request_id: str, cursor: str, timeout_s: float
    ) -> tuple[list[LogEntry], str]:
        """What was appended after `cursor` ("" = from the start), and the new cursor.

        Waits for an entry for `timeout_s` at most (0 = not at all), and not above the store's own
        time limit.
        """
        ...

    async def follow(self, request_id: str) -> None:
        """Somebody reads this request through this router: its `idle_s` begins anew."""
        ...

    async def release(self, request_ids: Collection[str]) -> None:
        """This router gives requests up, in any state: their leases run out now."""
        ...

    async def counts(self) -> dict[RequestState, int]:
        """Requests by state: now in it (non-terminal), or ever (terminal); 0 may be absent."""
        ...
