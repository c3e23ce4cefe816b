"""Events that the session machines (session.py) receive, and actions that they return. Plain
values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from baton.protocol.events import FirstToken
from kv_transfer.protocol.base import KVSpan, Payload, Remote, StateSpan
from kv_transfer.protocol.frames import Header
from kv_transfer.protocol.messages import Confirm, Failure, Fetch, Message, Renew


@dataclass(frozen=True, slots=True)
class Arrived:
    """A frame of the peer has come, its digest verified and its body decoded."""

    header: Header
    message: Message


@dataclass(frozen=True, slots=True)
class Landed:
    """A DATA frame's payload already lies where `FetcherSession.expect` said, and is verified."""

    header: Header
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Closed:
    """The peer is gone or has sent its last frame."""


@dataclass(frozen=True, slots=True)
class Start:
    """Fetcher: the wire is ready, fresh or kept from an earlier conversation."""


@dataclass(frozen=True, slots=True)
class Opened:
    """Exporter: the export that FETCH named exists and is held. `tables`: the blocks in which it
    lies.
    """

    num_tokens: int
    tables: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Refused:
    """Exporter: the export does not exist, or may not be read (any more)."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class Progress:
    """Exporter: tokens [0, upto[layer]) are published.

    `first_tokens`: None until the prefill is complete. `waited_ms`: the total time without anything
    to send.
    """

    upto: tuple[int, ...]
    first_tokens: tuple[FirstToken, ...] | None
    waited_ms: int = 0


@dataclass(frozen=True, slots=True)
class Idle:
    """Exporter: there has been nothing to send for a while, but the lease is held."""


@dataclass(frozen=True, slots=True)
class LeaseHeld:
    """Exporter: the lease has just been verified, or extended by `lease_ms` from now."""

    lease_ms: int = 0


@dataclass(frozen=True, slots=True)
class Send:
    message: Message


@dataclass(frozen=True, slots=True)
class SendData:
    """Read `span` from the export and send it as one DATA frame with a payload of `dtype`."""

    span: KVSpan
    dtype: str


@dataclass(frozen=True, slots=True)
class SendState:
    """Read `span` from the export and send it as one STATE frame."""

    span: StateSpan


@dataclass(frozen=True, slots=True)
class Announce:
    """Verify the lease and send DATA without payload: the fetcher may now read `span` itself."""

    span: KVSpan


@dataclass(frozen=True, slots=True)
class Open:
    """Look the export up; answer with Opened or Refused."""

    fetch: Fetch


@dataclass(frozen=True, slots=True)
class Check:
    """Verify the lease, or extend it (RENEW, or `adopting`); answer with LeaseHeld or Refused.

    `message` None: check the export that is open.
    """

    message: Renew | Confirm | None
    adopting: bool = False


@dataclass(frozen=True, slots=True)
class Release:
    """Release the export.

    `rank` of `ranks`: release it only for this rank of the fetcher's group. `wait`: return when
    nobody touches the blocks any more.
    """

    export_seq: int
    epoch: int
    rank: int = 0
    ranks: frozenset[int] = frozenset((0,))
    wait: bool = False


@dataclass(frozen=True, slots=True)
class Write:
    """Write `payload` as tokens and heads of `span` into the destination blocks."""

    span: KVSpan
    payload: Payload


@dataclass(frozen=True, slots=True)
class WriteState:
    """Write `data` as `span` of the destination's recurrent state."""

    span: StateSpan
    data: memoryview


@dataclass(frozen=True, slots=True)
class Pull:
    """Read `span` out of the exporter's memory into the destination blocks."""

    span: KVSpan
    source: Remote


@dataclass(frozen=True, slots=True)
class Settle:
    """Wait until all pulled bytes have landed: the lease is checked after the last read."""


ExporterEvent: TypeAlias = Arrived | Opened | Refused | Progress | Idle | LeaseHeld | Closed
ExporterAction: TypeAlias = Send | SendData | SendState | Announce | Open | Check | Release
FetcherEvent: TypeAlias = Start | Arrived | Landed | Closed
FetcherAction: TypeAlias = Send | Write | WriteState | Pull | Settle
