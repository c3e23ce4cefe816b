"""KV frames: a 48-byte little-endian header and at most 1 MiB of payload. Pure functions.

What control payloads mean is in bodies.py; which frame may follow which is in session.py. Byte by
byte with test vectors: docs/kv_wire_format.md.

The digest covers the first 40 header bytes and the payload and is seeded by the exporter's boot id,
so a frame of another process, another export or another place is always refused. HELLO and ERR are
seeded with 0: either may be sent before both sides agree on a boot id. Lanes carry parcels: one or
more whole frames, joined.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import xxhash

from baton.protocol.errors import InternalError, KVCorrupt

MAGIC: Final = int.from_bytes(b"BKV1", "little")
MAX_PAYLOAD: Final = 1 << 20
HEADER_BYTES: Final = 48
# magic, kind, flags, layer, head0, nheads, tok0, ntok, nbytes, epoch, reserved, export sequence
_DIGESTED: Final = struct.Struct("<IBBHHHIIIIIQ")
_DIGEST: Final = struct.Struct("<Q")
_MAGIC: Final = struct.Struct("<I")
_NUM_BYTES: Final = struct.Struct("<I")
_NUM_BYTES_AT: Final = 20

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
    BLOCKS = 8
    STATE = 9


_KINDS: Final = frozenset(int(kind) for kind in Kind)


@dataclass(frozen=True, slots=True)
class Header:
    """The fields of a frame's header. `layer` to `num_tokens` are 0 except in DATA.

    A DATA frame holds heads [head0, head0 + num_heads) of tokens [token0, token0 + num_tokens). A
    STATE frame has `layer`, and the first byte's index in that layer's recurrent state as `token0`.
    """

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


@dataclass(frozen=True, slots=True)
class Announced:
    """A header that came before its payload: none of its fields is verified yet."""

    header: Header
    num_bytes: int
    digested: bytes
    digest: int
    seed: int

    def verify(self, fragments: Iterable[Buffer]) -> None:
        """Raise KVCorrupt unless the digest is that of this header and `fragments`."""
        if self.digest != _digest(self.digested, fragments, self.seed):
            raise KVCorrupt(f"digest mismatch in a frame of kind {self.header.kind}")


def seed_of(boot_id: str) -> int:
    """Return the digest seed of one exporter process: xxh3_64 of its boot id's ASCII text."""
    return xxhash.xxh3_64_intdigest(boot_id.encode())


def encode(header: Header, fragments: Sequence[Buffer], boot_seed: int) -> bytes:
    """Return one frame; its payload is the fragments in order, copied once.

    Raises InternalError for a payload above 1 MiB or a field that does not fit: the sender's own
    fault.
    """
    num_bytes = sum(len(fragment) for fragment in fragments)
    if num_bytes > MAX_PAYLOAD:
        raise InternalError(
            f"{header.kind.name} payload of {num_bytes} bytes exceeds {MAX_PAYLOAD}"
        )
    digested = _digested(header, num_bytes)
    digest = _digest(digested, fragments, _seed(header.kind, boot_seed))
    return b"".join((digested, _DIGEST.pack(digest), *fragments))


def encode_into(
    buffer: memoryview, header: Header, fragments: Sequence[Buffer], boot_seed: int
) -> memoryview:
    """Do as `encode`, into the start of `buffer`; return the part of `buffer` that is the frame.

    HEADER_BYTES + MAX_PAYLOAD are always enough. The digest reads the copied bytes, not the pool
    again.
    """
    end = HEADER_BYTES
    for fragment in fragments:
        start, end = end, end + len(fragment)
        if end > HEADER_BYTES + MAX_PAYLOAD:
            raise InternalError(f"{header.kind.name} payload exceeds {MAX_PAYLOAD} bytes")
        buffer[start:end] = fragment
    digested = _digested(header, end - HEADER_BYTES)
    digest = _digest(digested, (buffer[HEADER_BYTES:end],), _seed(header.kind, boot_seed))
    buffer[: _DIGESTED.size] = digested
    _DIGEST.pack_into(buffer, _DIGESTED.size, digest)
    return buffer[:end]


def _digested(header: Header, num_bytes: int) -> bytes:
    """Return the header up to its digest. Raises InternalError for a field that does not fit."""
    try:
        return _DIGESTED.pack(
            MAGIC, header.kind, 0, header.layer, header.head0, header.num_heads, header.token0,
            header.num_tokens, num_bytes, header.epoch, 0, header.export_seq,
        )  # fmt: skip
    except struct.error as error:
        raise InternalError(f"frame header out of range: {header}") from error


def payload_bytes(header: Buffer) -> int:
    """Return how many bytes of payload follow these 48.

    Raises KVCorrupt if they do not begin like a frame, for then nobody knows where the next one
    begins.
    """
    (magic,) = _MAGIC.unpack_from(header)
    (num_bytes,) = _NUM_BYTES.unpack_from(header, _NUM_BYTES_AT)
    if magic != MAGIC:
        raise KVCorrupt(f"bad magic {magic:#010x}")
    if num_bytes > MAX_PAYLOAD:
        raise KVCorrupt(f"frame announces a payload of {num_bytes} bytes")
    return num_bytes


def decode(data: Buffer, boot_seed: int) -> Frame:
    """Return the frame that `data` holds, whole; the payload is a view into it.

    Raises KVCorrupt unless length, digest, kind and unused fields are all right.
    """
    view = memoryview(data).cast("B")
    announced = decode_header(view[:HEADER_BYTES], boot_seed)
    if len(view) != HEADER_BYTES + announced.num_bytes:
        raise KVCorrupt(f"frame of {len(view)} bytes, payload of {announced.num_bytes}")
    payload = view[HEADER_BYTES:]
    announced.verify((payload,))
    return Frame(announced.header, payload)


def decode_header(data: Buffer, boot_seed: int) -> Announced:
    """Return what the first 48 bytes of a frame say.

    Raises KVCorrupt for bytes that cannot be a header. The fields can be trusted only after
    `verify` has checked the payload.
    """
    if len(data) != HEADER_BYTES:
        raise KVCorrupt(f"truncated frame of {len(data)} bytes")
    fields = _DIGESTED.unpack_from(data)
    magic, kind, flags, layer, head0, num_heads, token0, num_tokens, num_bytes = fields[:9]
    epoch, reserved, export_seq = fields[9:]
    if magic != MAGIC:
        raise KVCorrupt(f"bad magic {magic:#010x}")
    if num_bytes > MAX_PAYLOAD:
        raise KVCorrupt(f"frame announces a payload of {num_bytes} bytes")
    if kind not in _KINDS or flags or reserved:
        raise KVCorrupt(f"frame of unknown kind {kind}, flags {flags} or reserved {reserved}")
    header = Header(Kind(kind), export_seq, epoch, layer, head0, num_heads, token0, num_tokens)
    (digest,) = _DIGEST.unpack_from(data, _DIGESTED.size)
    digested = bytes(memoryview(data)[: _DIGESTED.size])
    return Announced(header, num_bytes, digested, digest, _seed(kind, boot_seed))


def split(parcel: Buffer) -> Iterator[memoryview]:
    """Yield the frames of a parcel, by the lengths in their headers.

    Bytes at the end that are no whole frame are yielded unchanged: `decode` refuses them.
    """
    view = memoryview(parcel).cast("B")
    while len(view) > HEADER_BYTES:
        end = HEADER_BYTES + min(_NUM_BYTES.unpack_from(view, _NUM_BYTES_AT)[0], MAX_PAYLOAD)
        yield view[:end]
        view = view[end:]
    if view:
        yield view


def _seed(kind: int, boot_seed: int) -> int:
    return 0 if kind in (Kind.HELLO, Kind.ERR) else boot_seed


def _digest(digested: Buffer, fragments: Iterable[Buffer], seed: int) -> int:
    state = xxhash.xxh3_64(digested, seed=seed)
    for fragment in fragments:
        state.update(fragment)
    return state.intdigest()
