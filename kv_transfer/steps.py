"""Events that the session machines (session.py) receive and actions that they return: values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from baton.events import FirstToken
from kv_transfer.frames import Header
from kv_transfer.messages import Confirm, Failure, Fetch, Message, Renew


@dataclass(frozen=True, slots=True)
class Arrived:
    """A frame of the peer, its digest verified and its body decoded."""

    header: Header
    message: Message


@dataclass(frozen=True, slots=True)
class Closed:
    """The peer is gone or has said its last word."""


@dataclass(frozen=True, slots=True)
class Start:
    """Fetcher: the wire is open."""


@dataclass(frozen=True, slots=True)
class Opened:
    """Exporter: the export that FETCH named exists and is held."""

    num_tokens: int


@dataclass(frozen=True, slots=True)
class Refused:
    """Exporter: the export is not, or no longer, to be had."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class Progress:
    """Exporter: tokens [0, upto[layer]) are published; `first_tokens` once prefill is complete."""

    upto: tuple[int, ...]
    first_tokens: tuple[FirstToken, ...] | None


@dataclass(frozen=True, slots=True)
class Idle:
    """Exporter: nothing was published for a while, but the lease is held."""


@dataclass(frozen=True, slots=True)
class LeaseHeld:
    """Exporter: the lease has just been verified (or renewed)."""


@dataclass(frozen=True, slots=True)
class Send:
    message: Message


@dataclass(frozen=True, slots=True)
class SendData:
    """Read tokens [start, end) of `layer` from the export and send them as one DATA frame."""

    layer: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Open:
    """Look the export up; answer with Opened or Refused."""

    fetch: Fetch


@dataclass(frozen=True, slots=True)
class Check:
    """Verify (RENEW: extend) the lease; answer with LeaseHeld or Refused. None: the open one."""

    message: Renew | Confirm | None


@dataclass(frozen=True, slots=True)
class Release:
    export_seq: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Write:
    """Write K and V of tokens [start, end) of `layer` into the destination blocks."""

    layer: int
    start: int
    end: int
    payload: memoryview


@dataclass(frozen=True, slots=True)
class Finish:
    """We say no more; what was sent must still arrive."""


ExporterEvent: TypeAlias = Arrived | Opened | Refused | Progress | Idle | LeaseHeld | Closed
ExporterAction: TypeAlias = Send | SendData | Open | Check | Release
FetcherEvent: TypeAlias = Start | Arrived | Closed
FetcherAction: TypeAlias = Send | Write | Finish
