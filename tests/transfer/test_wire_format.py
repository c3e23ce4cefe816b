"""docs/kv_wire_format.md is the wire: its vectors are computed again, its tables compared."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest
import torch
import xxhash

from baton.protocol.errors import KVCorrupt
from baton.protocol.events import FirstToken, TokenLogprob
from baton.protocol.kv_spec import DTYPE_BYTES, PoolFormat
from baton.protocol.request import FinishReason
from baton.runtime.rotation.deployment_secret import fixed
from kv_transfer.pool.codec import pack, quantise
from kv_transfer.protocol.bodies import decode_body, encode_body, kind_of
from kv_transfer.protocol.frames import (
    HEADER_BYTES,
    MAX_PAYLOAD,
    Header,
    Kind,
    decode,
    encode,
    seed_of,
)
from kv_transfer.protocol.identity import Identity, Side, prove
from kv_transfer.protocol.messages import (
    DIRECT,
    INT8,
    Ack,
    Confirm,
    End,
    Failure,
    FailureCode,
    Fetch,
    Message,
    Renew,
    SharedBlockTables,
)
from kv_transfer.protocol.session import header_of

DOCUMENT = Path(__file__).parents[2] / "docs" / "kv_wire_format.md"
BOOT_P, BOOT_D = "000102030405060708090a0b0c0d0e0f", "f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff"
SEED = seed_of(BOOT_P)
FORMAT = PoolFormat(16, "bfloat16")
P = Identity(BOOT_P, "layout", FORMAT, fixed("secret"))
D = Identity(BOOT_D, "layout", PoolFormat(32, "bfloat16"), fixed("secret"))
NONCE_P, NONCE_D, KEY = b"P" * 16, b"D" * 16, b"K" * 16
# 2 tokens of 1 head and 4 numbers, K then V, then their scales
NUMBERS = torch.tensor([[1.0, -2.0, 0.5, 0.0], [0.25, 0.125, -0.0625, 0.1]])[:, None]
INT8_ROW = pack([quantise(NUMBERS), quantise(-NUMBERS)])
FIRST = FirstToken(5, 42, 0, FinishReason.STOP, (TokenLogprob(42, -0.25, 1),))


def control(message: Message) -> bytes:
    return encode(header_of(kind_of(message), 7, 2), [encode_body(message)], SEED)


def vectors() -> dict[str, bytes]:
    """Every frame of one conversation, named as in the document."""
    data = Header(Kind.DATA, 7, 2, layer=1, head0=0, num_heads=1, token0=16, num_tokens=2)
    return {
        "HELLO, fetcher's challenge": control(D.hello(Side.FETCHER, NONCE_D, None)),
        "HELLO, exporter's answer": control(P.hello(Side.EXPORTER, NONCE_P, NONCE_D)),
        "HELLO, fetcher's answer": control(D.hello(Side.FETCHER, NONCE_D, NONCE_P)),
        "FETCH": control(Fetch(7, KEY, "r1", 2, start_token=16, timeout_ms=5000)),
        "FETCH, of visible windows in int8": control(
            Fetch(7, KEY, "r1", 2, codec=INT8, windowed=True)
        ),
        "FETCH, to adopt": control(
            Fetch(7, KEY, "r1", 2, start_token=18, codec=DIRECT, timeout_ms=5000, adopt=True)
        ),
        "BLOCKS": control(SharedBlockTables(16, ((3, 300),))),
        "DATA": encode(data, [b"K0K1", b"V0V1"], SEED),
        "DATA, to be read by the fetcher": encode(data, [], SEED),
        "STATE": encode(Header(Kind.STATE, 7, 2, layer=2), [b"CONV", b"MATRICES"], SEED),
        "DATA, int8": encode(data, INT8_ROW, SEED),
        "CONFIRM": control(Confirm(7, b"", 2, held=True)),
        "END": control(End(18, True, (FIRST,), 1, waited_ms=40)),
        "END, to one that adopts": control(End(18, True, (), 0, lease_ms=10_000)),
        "ACK": control(Ack(7)),
        "ACK, of one rank": control(Ack(7, part=True)),
        "ACK, that wants an answer": control(Ack(7, answer=True)),
        "CONFIRM, released": control(Confirm(7, b"", 2, held=False)),
        "RENEW": control(Renew(7, KEY, 2)),
        "ERR": control(Failure(FailureCode.STALE, "no export 7")),
    }


def documented() -> dict[str, bytes]:
    text = DOCUMENT.read_text()
    found = re.findall(r"^### (.+)\n```\n([0-9a-f\n]+)```$", text, re.MULTILINE)
    return {name: bytes.fromhex(body.replace("\n", "")) for name, body in found}


def test_the_documented_vectors_are_what_we_send() -> None:
    assert documented() == vectors()


@pytest.mark.parametrize("name", vectors())
def test_the_documented_vectors_are_what_we_accept(name: str) -> None:
    data = documented()[name]
    frame = decode(data, SEED)
    assert frame.header.kind.name == name.partition(",")[0]
    if frame.header.kind not in (Kind.DATA, Kind.STATE):
        message = decode_body(frame.header.kind, frame.payload)
        assert control(message) == data
    with pytest.raises(KVCorrupt):
        decode(data[:-1] + bytes((data[-1] ^ 1,)), SEED)


def test_a_reader_of_the_document_alone_builds_the_same_data_frame() -> None:
    """The layout and the digest, written out from the tables without our encoder."""
    seed = xxhash.xxh3_64_intdigest(BOOT_P.encode("ascii"))
    digested = struct.pack("<4sBBHHHIIIIIQ", b"BKV1", 2, 0, 1, 0, 1, 16, 2, 8, 2, 0, 7)
    digest = xxhash.xxh3_64_intdigest(digested + b"K0K1V0V1", seed=seed)
    assert digested + struct.pack("<Q", digest) + b"K0K1V0V1" == documented()["DATA"]


def test_a_reader_of_the_document_alone_dequantises() -> None:
    """int8 K and V of 2 tokens, 1 head of 4 numbers each, then 2 + 2 scales."""
    payload = documented()["DATA, int8"][HEADER_BYTES:]
    numbers = struct.unpack("<16b", payload[:16])
    scales = struct.unpack("<4f", payload[16:])
    exact = [value for sign in (1, -1) for row in NUMBERS[:, 0].tolist() for value in
             [sign * x for x in row]]  # fmt: skip
    for i, (number, value) in enumerate(zip(numbers, exact, strict=True)):
        largest = max(map(abs, exact[i // 4 * 4 : i // 4 * 4 + 4]))
        assert abs(number * scales[i // 4] - value) <= largest / 254 * (1 + 1e-6)


def test_the_documented_proofs() -> None:
    text = DOCUMENT.read_text()
    assert prove("secret", Side.EXPORTER, NONCE_D, BOOT_P, "layout").hex() in text
    assert prove("secret", Side.FETCHER, NONCE_P, BOOT_D, "layout").hex() in text
    assert f"{SEED:#018x}" in text


def test_the_documented_tables() -> None:
    text = DOCUMENT.read_text()
    for kind in Kind:
        assert f"| {kind.value} | {kind.name} |" in text
    for code in FailureCode:
        raised = type(Failure(code, "why").error()).__name__
        assert f"| `{code.value}` | {raised} |" in text
    for dtype in DTYPE_BYTES:
        assert f"`{dtype}`" in text
    assert f"{HEADER_BYTES} bytes" in text
    assert f"{MAX_PAYLOAD:,} bytes" in text
