"""What a broken or hostile peer may make of a frame. Seeded: the same generator, the same bytes."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import asdict

from kv_transfer.protocol.frames import HEADER_BYTES, Header, Kind, decode, encode

# Field values at which arithmetic goes wrong, if it does.
EDGES = (0, 1, 2, 7, 8, 20, 63, 255, 256, 65_535, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)


def damaged(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """`data` with its digest left behind: flipped, cut, grown, spliced, overwritten or replaced."""
    match rng.randrange(7):
        case 0:
            return flipped(rng, data)
        case 1:
            return data[: rng.randrange(len(data) + 1)]
        case 2:
            return data + rng.randbytes(rng.randrange(1, 80))
        case 3:
            other = rng.choice(others)
            return data[: rng.randrange(len(data) + 1)] + other[rng.randrange(len(other) + 1) :]
        case 4:
            at = rng.randrange(HEADER_BYTES)
            edge = rng.choice(EDGES).to_bytes(4, "little")
            return data[:at] + edge[: rng.choice((1, 2, 4))] + data[at + 4 :]
        case 5:
            return rng.randbytes(rng.randrange(200))
        case _:
            return data + rng.choice(others)


def flipped(rng: random.Random, data: bytes) -> bytes:
    """Some bits the other way round."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        if out:
            out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def resealed(rng: random.Random, data: bytes, seed: int) -> bytes:
    """A frame that says something else, with a digest that fits: what a peer who knows the rules
    and means harm can send. `data` is a valid frame."""
    frame = decode(data, seed)
    header, payload = frame.header, bytes(frame.payload)
    fields = asdict(header)
    for _ in range(rng.choice((0, 1, 1, 2))):
        name = rng.choice(list(fields))
        limit = 16 if name in ("layer", "head0", "num_heads") else 32
        limit = 64 if name == "export_seq" else limit
        fields[name] = rng.choice(EDGES) % (1 << limit)
        if name == "kind":
            fields[name] = rng.choice(list(Kind))
    match rng.randrange(5):
        case 0:
            payload = flipped(rng, payload)
        case 1:
            payload = payload[: rng.randrange(len(payload) + 1)]
        case 2:
            payload += rng.randbytes(rng.randrange(1, 40))
        case 3:
            payload = _edged(rng, payload)
        case _:
            pass
    return encode(Header(**fields), [payload], seed)


def _edged(rng: random.Random, payload: bytes) -> bytes:
    """A varint of the body replaced by one at an edge."""
    at = rng.randrange(len(payload) + 1)
    value, varint = rng.choice((*EDGES, (1 << 64) - 1)), bytearray()
    while value > 0x7F:
        varint.append(value & 0x7F | 0x80)
        value >>= 7
    varint.append(value)
    return payload[:at] + bytes(varint) + payload[at + rng.choice((0, 1, len(varint))) :]


def numbers_changed(rng: random.Random, text: str) -> str:
    """`text` with some of its numbers at an edge, or other characters instead."""
    for _ in range(rng.choice((1, 1, 2))):
        numbers = list(re.finditer(r"\d+", text))
        if not numbers or rng.random() < 0.1:
            at = rng.randrange(len(text) + 1)
            text = text[:at] + rng.choice(("", "-", "[", "]", "1e9", "null", ",")) + text[at + 1 :]
            continue
        number = rng.choice(numbers)
        value = rng.choice((*EDGES, int(number[0]) + 1, int(number[0]) - 1, 1 << 63))
        text = text[: number.start()] + str(value) + text[number.end() :]
    return text


def reordered(rng: random.Random, frames: Sequence[bytes]) -> list[bytes]:
    """One conversation's frames with some lost, repeated, moved or taken from elsewhere."""
    out = list(frames)
    for _ in range(rng.choice((0, 0, 1, 2))):
        if not out:
            break
        at, to = rng.randrange(len(out)), rng.randrange(len(out))
        match rng.randrange(3):
            case 0:
                del out[at]
            case 1:
                out.insert(to, out[at])
            case _:
                out[at], out[to] = out[to], out[at]
    return out
