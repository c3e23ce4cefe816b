"""Control messages of a KV conversation as frozen values. How they become bytes: bodies.py."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from baton.protocol.errors import KVCorrupt, KVError, KVLost, KVRefused, KVStale, KVTimeout
from baton.protocol.events import FirstToken
from baton.protocol.kv_spec import PoolFormat

NONCE_BYTES: Final = 16
MAC_BYTES: Final = 32
SECRET_BYTES: Final = 16
# How KV travels (FETCH.codec). raw: as the exporter stores it. int8: with scales. direct: the
# fetcher reads the exporter's memory itself, and frames only say when.
RAW: Final = "raw"
INT8: Final = "int8"
DIRECT: Final = "direct"


class FailureCode(enum.StrEnum):
    STALE = "stale"
    LOST = "lost"
    TIMEOUT = "timeout"
    CORRUPT = "corrupt"
    AUTH = "auth"
    LAYOUT = "layout"
    PROTOCOL = "protocol"


_ERRORS: Final[dict[FailureCode, type[KVError]]] = {
    FailureCode.STALE: KVStale,
    FailureCode.LOST: KVLost,
    FailureCode.TIMEOUT: KVTimeout,
    FailureCode.CORRUPT: KVCorrupt,
    FailureCode.AUTH: KVRefused,
    FailureCode.LAYOUT: KVRefused,
    FailureCode.PROTOCOL: KVRefused,
}


@dataclass(frozen=True, slots=True)
class Hello:
    """Who the sender is. `mac` is empty in a conversation's first HELLO: no challenge is
    known yet.
    """

    protocol_version: int
    boot_id: str
    layout_fingerprint: str
    format: PoolFormat
    nonce: bytes
    mac: bytes = b""


@dataclass(frozen=True, slots=True)
class Fetch:
    """Asks for tokens [start_token, end of the export) of all layers.

    Which heads are sent follows from the formats in both HELLOs. `windowed`: of a sliding-window
    layer send only the tokens that later ones see. `adopt` (codec `direct`): the fetcher will read
    all pages where they lie, for as long as it renews the lease.
    """

    export_seq: int
    secret: bytes = field(repr=False)
    request_id: str
    epoch: int
    start_token: int = 0
    codec: str = RAW
    windowed: bool = False
    timeout_ms: int = 0
    adopt: bool = False


@dataclass(frozen=True, slots=True)
class SharedBlockTables:
    """Sent under codec `direct` before any DATA: the sequence's blocks, one table per layer
    group.
    """

    block_size: int
    tables: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Data:
    """KV bytes; the frame's header says which. Empty under codec `direct`."""

    payload: memoryview


@dataclass(frozen=True, slots=True)
class State:
    """Bytes of a layer's recurrent state behind the last token of the export, as it is stored; the
    frame's header says which. No codec changes them.
    """

    payload: memoryview


@dataclass(frozen=True, slots=True)
class End:
    """Everything has been sent.

    `waited_ms`: how long the exporter had nothing to send meanwhile. `lease_ms`: by how much the
    lease was extended just before, for a fetcher that adopts.
    """

    num_tokens: int
    lease_held: bool
    first_tokens: tuple[FirstToken, ...]
    num_frames: int
    waited_ms: int = 0
    lease_ms: int = 0


@dataclass(frozen=True, slots=True)
class Ack:
    """Releases the export.

    `part`: release it only for this tensor-parallel rank of the fetcher. `answer`: reply with
    CONFIRM(not held) when nobody touches the blocks any more.
    """

    export_seq: int
    part: bool = False
    answer: bool = False


@dataclass(frozen=True, slots=True)
class Renew:
    export_seq: int
    secret: bytes = field(repr=False)
    epoch: int


@dataclass(frozen=True, slots=True)
class Confirm:
    """From a fetcher: asks if the lease is held.

    From the exporter: the lease is held (also sent as a sign of life); or, after an ACK that wants
    an answer, it is not held any more.
    """

    export_seq: int
    secret: bytes = field(repr=False)
    epoch: int
    held: bool = False


@dataclass(frozen=True, slots=True)
class Failure:
    """An error that crosses the wire: why the conversation ends."""

    code: FailureCode
    message: str

    def error(self) -> KVError:
        return _ERRORS[self.code](self.message)


Message: TypeAlias = (
    Hello | Fetch | SharedBlockTables | Data | State | End | Ack | Renew | Confirm | Failure
)


def failure_of(error: KVError) -> Failure:
    """Return the Failure that rebuilds `error` at the peer (KVRefused and unknown errors as
    PROTOCOL).
    """
    for code, cls in _ERRORS.items():
        if isinstance(error, cls) and cls is not KVRefused:
            return Failure(code, error.message)
    return Failure(FailureCode.PROTOCOL, error.message)
