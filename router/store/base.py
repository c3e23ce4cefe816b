"""RequestStore: keeps what must survive a process. The protocol, its records and its answers.

Implementations: store/memory_store.py (tests, laptops) and store/redis_store.py; both pass
tests/router/test_store_contract.py. Only store/guard.py calls a store while the router serves.

Both have the same fences: a write carries the request's epoch and its writer's name. The write is
refused when the record has a newer epoch or another owner. A state changes only as
baton.protocol.request.TRANSITIONS allows. Every write is idempotent: if its answer was lost, it may
be repeated, which changes nothing and succeeds.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import msgspec

from baton.protocol.errors import StoreUnavailable
from baton.protocol.request import RequestState
from router.store.documents import Documents

TERMINAL_TTL_S: Final = 600.0  # how long a terminal record and its log may still be read
SWEEP_LIMIT: Final = 256  # expired requests that one sweep handles
LOGGED: Final = "logged_tokens"  # field of a terminal record: tokens in its log, over all samples
MAX_TRIES: Final = 10  # a request is ended when so many leases ran out: it may kill its routers
END_MARK: Final = "!"
ALIAS: Final = "alias"  # field of a claim: another id, which finds the request as well
NO_FIELDS: Final[Mapping[str, str]] = {}


class WriteStatus(enum.StrEnum):
    OK = "ok"
    GONE = "gone"  # no such record
    FENCED = "fenced"  # a newer epoch or another owner
    ILLEGAL = "illegal"  # not in TRANSITIONS
    GAP = "gap"  # an append beyond the end of the log, or an end before the log has all tokens


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request as stored. `owner` is a router id, "" if no router owns it; `fields`: free text.

    `tries`: how often its lease ran out. `age_s`: seconds since its first claim. `idle_s`: seconds
    since a client last read it through another router than its owner, None if none did. Both by the
    store's clock.
    """

    id: str
    state: RequestState
    epoch: int
    owner: str
    tries: int = 0
    fields: Mapping[str, str] = field(default_factory=dict[str, str])
    age_s: float = field(default=0.0, compare=False)
    idle_s: float | None = field(default=None, compare=False)


class LogEntry(msgspec.Struct, frozen=True):
    """Tokens of one sample; `position` is the output index of the first within the sample.

    `more`: details of these tokens as text (store/log_details.py). An entry whose `more` begins
    with END_MARK ends its sample. Such an entry is kept once, even without a new token.
    """

    request_id: str
    epoch: int
    position: int
    token_ids: tuple[int, ...]
    sample: int = 0
    more: str = ""


class Move(msgspec.Struct, frozen=True):
    """One transition. `epoch` is the writer's; a move to QUEUED (failover) adds one to it.

    `catch_up`: the writer skipped moves while the store was away, so the stored state may be an
    older one; then any non-terminal state may move on (the fences still hold).
    `min_tokens`, `min_ends`: how many tokens and ends of samples the log must have for a terminal
    state to be accepted. A store that died may have lost the last writes that it confirmed. `kept`:
    record and log can be read for TERMINAL_TTL_S after the end; if not `kept`, both are deleted at
    once, and the id is free. `entries`: are appended to the log before a terminal state is written;
    if one is refused, that is the answer.
    """

    request_id: str
    epoch: int
    state: RequestState
    fields: Mapping[str, str] = NO_FIELDS
    catch_up: bool = False
    min_tokens: int = 0
    min_ends: int = 0
    kept: bool = True
    entries: Sequence[LogEntry] = ()


@dataclass(frozen=True, slots=True)
class Swept:
    """A request whose lease ran out, with the state and the epoch that the sweep gave it."""

    request_id: str
    state: RequestState
    epoch: int


OnAnswer = Callable[[WriteStatus | StoreUnavailable], None]
OnAppended = Callable[[Sequence[LogEntry], Sequence[WriteStatus] | StoreUnavailable], None]
Claimed = Callable[[int | StoreUnavailable | None], None]


class RequestStore(Protocol):
    """One router's view of the store. The router's name is given at construction.

    All methods but `stop` raise StoreUnavailable.
    """

    @property
    def name(self) -> str:
        """ "redis" or "memory"."""
        ...

    @property
    def documents(self) -> Documents:
        """The store of documents: what clients may ask for again, beside requests."""
        ...

    async def start(self) -> None:
        """Connect. Called once. Raises StoreUnavailable when the server does not answer."""
        ...

    async def stop(self) -> None: ...

    async def claim(
        self, request_id: str, fields: Mapping[str, str] = NO_FIELDS
    ) -> RequestRecord | None:
        """Become the owner of a request and return its record.

        A new request becomes QUEUED at epoch 1; an ownerless QUEUED one is adopted. Returns None,
        and changes nothing, if the id belongs to another router, or if the id or its ALIAS is in
        use.
        """
        ...

    def post_claim(self, request_id: str, fields: Mapping[str, str], on_answer: Claimed) -> None:
        """Claim without waiting. The claim takes effect before the next call for its request.

        Raises nothing. `on_answer` is called once, at once or later, with the epoch, None (see
        `claim`) or the error.
        """
        ...

    async def move(self, move: Move) -> WriteStatus:
        """Move a request to a non-terminal state, and renew its lease."""
        ...

    def post(self, move: Move, on_answer: OnAnswer) -> None:
        """Move without waiting. The move takes effect before the next call for its request, except
        appends; it may be joined with moves that follow.

        Raises nothing. `on_answer` is called once, at once or later, with the answer or the error.
        """
        ...

    async def finish(self, move: Move) -> WriteStatus:
        """Move a request to a terminal state, end its lease, and start the TTL of record and log.

        The same call writes the number of logged tokens into the field LOGGED.
        """
        ...

    async def append(self, entries: Sequence[LogEntry], *, safe: bool = False) -> list[WriteStatus]:
        """Append to the logs of several requests in one call; one status per entry, in order.

        Tokens that the log already has are skipped, so a repeated or overlapping entry is OK.
        `safe`: answer when replicas of the server have them, too, as the store is configured.
        """
        ...

    def post_append(self, entries: Sequence[LogEntry], on_answer: OnAppended) -> None:
        """Append without waiting. It takes effect before the next call for its requests, unless it
        had to be sent again: because its keys were just moving, or the connection was lost.

        Raises nothing. `on_answer` is called once for each part of the entries, at once or later,
        with that part, and one status per entry or the error.
        """
        ...

    async def beat(self, held: Collection[str]) -> list[str]:
        """Renew the leases of the `held` requests, also of those that ran out and were not swept.

        Returns the ids of those requests that this router does not own any more.
        """
        ...

    async def sweep(self, limit: int = SWEEP_LIMIT) -> list[Swept]:
        """Take the requests whose leases ran out from their owners; return what became of them.

        Each gets the next epoch. A resumable one becomes QUEUED without an owner; it gets a new
        lease, because its next owner may never come. After MAX_TRIES leases, and if it is not
        resumable, it becomes CANCELLED.
        Does nothing within two lease times of this router's own (re)connection, because after an
        outage all leases look expired.
        """
        ...

    async def read(self, request_id: str) -> RequestRecord | None:
        """Return the record of the request with this id or alias; None if there is none.

        If `request_id` is an alias, the record has another id.
        """
        ...

    async def read_log(self, request_id: str) -> list[LogEntry]:
        """Return the entries of a request's log, in order."""
        ...

    async def tail(
        self, request_id: str, cursor: str, timeout_s: float
    ) -> tuple[list[LogEntry], str]:
        """Return the entries after `cursor` ("" = from the start), and the new cursor.

        If there are none, wait for new ones: for `timeout_s` (0 = do not wait) or the store's own
        time limit, whichever is shorter. If none arrive in that time, the list is empty.
        """
        ...

    async def follow(self, request_id: str) -> None:
        """Note that a client reads this request through this router: set its `idle_s` to 0."""
        ...

    async def release(self, request_ids: Collection[str]) -> None:
        """Give this router's requests up: end their leases now, so that they can be swept."""
        ...

    async def counts(self) -> dict[RequestState, int]:
        """Return how many requests are in each non-terminal state now, and how many have ever
        reached each terminal state. States without requests may be absent."""
        ...
