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
# How KV travels (FETCH.codec): as the exporter stores it; int8 with scales; or not in frames at
# all: the fetcher reads the exporter's memory itself, they say when.
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
    """Who speaks. `mac` is empty in a conversation's first HELLO: no challenge is known yet."""

    protocol_version: int
    boot_id: str
    layout_fingerprint: str
    format: PoolFormat
    nonce: bytes
    mac: bytes = b""


@dataclass(frozen=True, slots=True)
class Fetch:
    """Asks for tokens [start_token, end of the export) of all layers; which heads follows from the
    formats in both HELLOs. `windowed`: of a sliding-window layer only the tokens that later ones
    see. `adopt` (codec `direct`): all of it will be read where it lies, for as long as it is
    renewed."""

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
    """Codec `direct`, before any DATA: where the sequence lies, one table per layer group."""

    block_size: int
    tables: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Data:
    """KV bytes; what they are stands in the frame's header. Empty under codec `direct`."""

    payload: memoryview


@dataclass(frozen=True, slots=True)
class End:
    """All has been sent. `waited_ms`: how long the exporter had nothing to send meanwhile.
    `lease_ms`: for a fetcher that adopts, by how much the lease was extended just before."""

    num_tokens: int
    lease_held: bool
    first_tokens: tuple[FirstToken, ...]
    num_frames: int
    waited_ms: int = 0
    lease_ms: int = 0


@dataclass(frozen=True, slots=True)
class Ack:
    """Releases the export. `part`: only as far as this tensor-parallel rank of the fetcher is
    concerned. `answer`: with CONFIRM(not held), when nobody touches the blocks any more."""

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
    """From a holder: is the lease held? From the exporter: it is (also as a sign of life), or,
    after an ACK that wants an answer, no longer."""

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
    Hello | Fetch | SharedBlockTables | Data | End | Ack | Renew | Confirm | Failure
)


def failure_of(error: KVError) -> Failure:
    """The Failure that rebuilds `error` at the peer (KVRefused and unknown ones as PROTOCOL)."""
    for code, cls in _ERRORS.items():
        if isinstance(error, cls) and cls is not KVRefused:
            return Failure(code, error.message)
    return Failure(FailureCode.PROTOCOL, error.message)
