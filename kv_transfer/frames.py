"""KV frames: a 48-byte little-endian header and at most 1 MiB of payload. Pure functions.

Not here: what control payloads mean (bodies.py), which frame may follow which (session.py).
Byte by byte with test vectors: docs/kv_wire_format.md.

The digest covers the first 40 header bytes and the payload and is seeded by the exporter's boot
id, so a frame of another process, another export or another place never passes as this one.
HELLO and ERR are seeded with 0: either may be sent before both sides agree on a boot id.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import xxhash

from baton.errors import InternalError, KVCorrupt

MAGIC: Final = int.from_bytes(b"BKV1", "little")
MAX_PAYLOAD: Final = 1 << 20
HEADER_BYTES: Final = 48
# magic, kind, flags, layer, head0, nheads, tok0, ntok, nbytes, epoch, reserved, export sequence
_DIGESTED: Final = struct.Struct("<IBBHHHIIIIIQ")
_DIGEST: Final = struct.Struct("<Q")

Buffer: TypeAlias = bytes | bytearray | memoryview


class Kind(enum.IntEnum):
    HELLO = 0
    FETCH = 1
    DATA = 2
    END = 3
    ERR = 4
    ACK = 5
    RENEW = 6
    CONFIRM = 7


_KINDS: Final = frozenset(int(kind) for kind in Kind)


@dataclass(frozen=True, slots=True)
class Header:
    """What a frame says of itself. `layer` to `num_tokens` are 0 except in DATA, where the payload
    holds K, then V of heads [head0, head0 + num_heads) of tokens [token0, token0 + num_tokens)."""

    kind: Kind
    export_seq: int = 0
    epoch: int = 0
    layer: int = 0
    head0: int = 0
    num_heads: int = 0
    token0: int = 0
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Frame:
    header: Header
    payload: memoryview


def seed_of(boot_id: str) -> int:
    """The digest seed of one exporter process: xxh3_64 of its boot id's ASCII text."""
    return xxhash.xxh3_64_intdigest(boot_id.encode())


def encode(header: Header, fragments: Sequence[Buffer], boot_seed: int) -> bytes:
    """One frame; the payload is the fragments in order, copied once. Raises InternalError for
    a payload above 1 MiB or a field that does not fit: the sender's own fault."""
    num_bytes = sum(len(fragment) for fragment in fragments)
    if num_bytes > MAX_PAYLOAD:
        raise InternalError(
            f"{header.kind.name} payload of {num_bytes} bytes exceeds {MAX_PAYLOAD}"
        )
    try:
        digested = _DIGESTED.pack(
            MAGIC, header.kind, 0, header.layer, header.head0, header.num_heads, header.token0,
            header.num_tokens, num_bytes, header.epoch, 0, header.export_seq,
        )  # fmt: skip
    except struct.error as error:
        raise InternalError(f"frame header out of range: {header}") from error
    digest = _digest(digested, fragments, _seed(header.kind, boot_seed))
    return b"".join((digested, _DIGEST.pack(digest), *fragments))


def decode(data: Buffer, boot_seed: int) -> Frame:
    """The frame that `data` is, whole; the payload is a view into it.

    Raises KVCorrupt unless length, digest, kind and unused fields are all right.
    """
    view = memoryview(data).cast("B")
    if len(view) < HEADER_BYTES:
        raise KVCorrupt(f"truncated frame of {len(view)} bytes")
    fields = _DIGESTED.unpack_from(view)
    magic, kind, flags, layer, head0, num_heads, token0, num_tokens, num_bytes = fields[:9]
    epoch, reserved, export_seq = fields[9:]
    if magic != MAGIC:
        raise KVCorrupt(f"bad magic {magic:#010x}")
    if num_bytes > MAX_PAYLOAD or len(view) != HEADER_BYTES + num_bytes:
        raise KVCorrupt(f"frame of {len(view)} bytes announces a payload of {num_bytes}")
    payload = view[HEADER_BYTES:]
    (digest,) = _DIGEST.unpack_from(view, _DIGESTED.size)
    if digest != _digest(view[: _DIGESTED.size], (payload,), _seed(kind, boot_seed)):
        raise KVCorrupt(f"digest mismatch in a frame of kind {kind}")
    if kind not in _KINDS or flags or reserved:
        raise KVCorrupt(f"frame of unknown kind {kind}, flags {flags} or reserved {reserved}")
    header = Header(
        Kind(kind), export_seq, epoch, layer, head0, num_heads, token0, num_tokens
    )  # fmt: skip
    return Frame(header, payload)


def _seed(kind: int, boot_seed: int) -> int:
    return 0 if kind in (Kind.HELLO, Kind.ERR) else boot_seed


def _digest(digested: Buffer, fragments: Iterable[Buffer], seed: int) -> int:
    state = xxhash.xxh3_64(digested, seed=seed)
    for fragment in fragments:
        state.update(fragment)
    return state.intdigest()
