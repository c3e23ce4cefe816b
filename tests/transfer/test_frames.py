"""Frames and bodies: what is encoded is decoded, what is damaged is refused, nothing crashes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.protocol.errors import InternalError, KVCorrupt, KVRefused
from baton.protocol.events import FirstToken, TokenLogprob
from baton.protocol.kv_spec import PoolFormat
from baton.protocol.request import FinishReason
from kv_transfer.protocol.bodies import decode_body, encode_body, kind_of
from kv_transfer.protocol.frames import (
    HEADER_BYTES,
    MAX_PAYLOAD,
    Header,
    Kind,
    decode,
    decode_header,
    encode,
    encode_into,
    seed_of,
    split,
)
from kv_transfer.protocol.messages import (
    Ack,
    Confirm,
    Data,
    End,
    Failure,
    FailureCode,
    Fetch,
    Hello,
    Message,
    Renew,
    SharedBlockTables,
    failure_of,
)

SEED = seed_of("ab" * 16)
U8, U16, U32, U64 = (st.integers(0, 2**bits - 1) for bits in (8, 16, 32, 64))
HEADERS = st.builds(
    Header,
    kind=st.sampled_from(Kind),
    export_seq=U64,
    epoch=U32,
    layer=U16,
    head0=U16,
    num_heads=U16,
    token0=U32,
    num_tokens=U32,
)
TEXT = st.text(max_size=40)
FORMATS = st.builds(
    PoolFormat,
    block_size=st.integers(1, 4096),
    dtype=st.sampled_from(["float32", "bfloat16", "float16", "int8", "fp8"]),
    tp_size=st.integers(64, 128),
    tp_rank=st.integers(0, 63),
    codecs=st.sampled_from([("raw",), ("raw", "int8")]),
)
FLOAT32 = st.floats(width=32, allow_nan=False)
FIRST_TOKENS = st.builds(
    FirstToken,
    position=U32,
    token_id=U32,
    sample=U32,
    finish_reason=st.sampled_from([None, *FinishReason]),
    logprobs=st.lists(st.builds(TokenLogprob, U32, FLOAT32, U32), max_size=3).map(tuple),
    cumulative_logprob=st.floats(allow_nan=False),
)
SECRETS = st.binary(max_size=32)
MESSAGES: st.SearchStrategy[Message] = st.one_of(
    st.builds(
        Hello,
        protocol_version=U32,
        boot_id=st.text(min_size=1, max_size=40),
        layout_fingerprint=TEXT,
        format=FORMATS,
        nonce=st.binary(min_size=16, max_size=16),
        mac=st.sampled_from([b"", b"m" * 32]),
    ),
    st.builds(
        Fetch,
        export_seq=U64,
        secret=SECRETS,
        request_id=TEXT,
        epoch=U32,
        start_token=U32,
        codec=TEXT,
        windowed=st.booleans(),
        timeout_ms=U32,
    ),
    st.builds(End, U32, st.booleans(), st.lists(FIRST_TOKENS, max_size=3).map(tuple), U64, U32),
    st.builds(Ack, U64, st.booleans(), st.booleans()),
    st.builds(
        SharedBlockTables,
        st.integers(1, 4096),
        st.lists(st.lists(U32, max_size=5).map(tuple), max_size=3).map(tuple),
    ),
    st.builds(Renew, U64, SECRETS, U32),
    st.builds(Confirm, U64, SECRETS, U32, st.booleans()),
    st.builds(Failure, st.sampled_from(FailureCode), TEXT),
    st.builds(Data, st.binary(max_size=64).map(memoryview)),
)


@given(HEADERS, st.lists(st.binary(max_size=100), max_size=4), U64)
def test_a_frame_comes_back_whole(header: Header, parts: list[bytes], seed: int) -> None:
    data = encode(header, [memoryview(part) for part in parts], seed)
    frame = decode(data, seed)
    assert frame.header == header
    assert bytes(frame.payload) == b"".join(parts)
    assert len(data) == HEADER_BYTES + sum(map(len, parts))


@given(HEADERS, st.binary(max_size=60), st.data())
def test_any_flipped_bit_is_noticed(header: Header, payload: bytes, data: st.DataObject) -> None:
    frame = bytearray(encode(header, [payload], SEED))
    bit = data.draw(st.integers(0, 8 * len(frame) - 1))
    frame[bit // 8] ^= 1 << bit % 8
    with pytest.raises(KVCorrupt):
        decode(frame, SEED)


def test_every_single_bit_of_one_frame() -> None:
    header = Header(Kind.DATA, 7, 1, 2, 0, 8, 16, 4)
    whole = encode(header, [bytes(range(64))], SEED)
    for bit in range(8 * len(whole)):
        frame = bytearray(whole)
        frame[bit // 8] ^= 1 << bit % 8
        with pytest.raises(KVCorrupt):
            decode(frame, SEED)


@given(HEADERS, st.binary(max_size=60), st.integers(0, 107), st.binary(max_size=8))
def test_other_lengths_are_refused(header: Header, payload: bytes, cut: int, more: bytes) -> None:
    frame = encode(header, [payload], SEED)
    if cut < len(frame):
        with pytest.raises(KVCorrupt):
            decode(frame[:cut], SEED)
    if more:
        with pytest.raises(KVCorrupt):
            decode(frame + more, SEED)


@given(st.binary(max_size=200))
def test_garbage_never_passes_or_crashes(data: bytes) -> None:
    with pytest.raises(KVCorrupt):
        decode(data, SEED)


@pytest.mark.parametrize("kind", Kind)
def test_the_boot_id_seeds_the_digest(kind: Kind) -> None:
    """Another process' frame is refused, except those that may precede knowing each other."""
    frame = encode(Header(kind, 1), [b"x"], SEED)
    other = seed_of("cd" * 16)
    if kind in (Kind.HELLO, Kind.ERR):
        assert decode(frame, other).header.kind is kind
    else:
        with pytest.raises(KVCorrupt, match="digest"):
            decode(frame, other)


def test_authentic_frames_of_another_version_are_refused() -> None:
    """Right digest, but a kind, flag or reserved field that this version does not know."""
    import struct

    import xxhash

    for offset, fmt, value in ((4, "<B", 10), (5, "<B", 1), (28, "<I", 1)):
        frame = bytearray(encode(Header(Kind.ACK, 1), [b"x"], SEED))
        struct.pack_into(fmt, frame, offset, value)
        digest = xxhash.xxh3_64_intdigest(bytes(frame[:40] + frame[48:]), seed=SEED)
        struct.pack_into("<Q", frame, 40, digest)
        with pytest.raises(KVCorrupt, match="unknown"):
            decode(frame, SEED)


def test_what_does_not_fit_is_our_own_fault() -> None:
    biggest = bytes(MAX_PAYLOAD)
    assert len(decode(encode(Header(Kind.DATA), [biggest], SEED), SEED).payload) == MAX_PAYLOAD
    with pytest.raises(InternalError, match="exceeds"):
        encode(Header(Kind.DATA), [biggest, b"x"], SEED)
    with pytest.raises(InternalError, match="range"):
        encode(Header(Kind.DATA, layer=2**16), [], SEED)
    with pytest.raises(InternalError, match="range"):
        encode(Header(Kind.DATA, epoch=-1), [], SEED)


@given(MESSAGES)
def test_a_message_comes_back_whole(message: Message) -> None:
    assert decode_body(kind_of(message), memoryview(encode_body(message))) == message


@given(st.sampled_from(Kind), st.binary(max_size=120))
def test_garbage_bodies_are_messages_or_corrupt(kind: Kind, payload: bytes) -> None:
    try:
        message = decode_body(kind, memoryview(payload))
    except KVCorrupt:
        return
    assert kind_of(message) is kind


@pytest.mark.parametrize(
    "hello",
    [
        Hello(1, "", "f", PoolFormat(8, "float32"), b"n" * 16),
        Hello(1, "b", "f", PoolFormat(0, "float32"), b"n" * 16),
        Hello(1, "b", "f", PoolFormat(8, "float64"), b"n" * 16),
        Hello(1, "b", "f", PoolFormat(8, "float32", 2, 2), b"n" * 16),
        Hello(1, "b", "f", PoolFormat(8, "float32", 2000, 2), b"n" * 16),
        Hello(1, "b", "f", PoolFormat(8, "float32", codecs=()), b"n" * 16),
        Hello(1, "b", "f", PoolFormat(8, "float32"), b"n" * 15),
        Hello(1, "b", "f", PoolFormat(8, "float32"), b"n" * 16, b"m" * 31),
    ],
)
def test_a_hello_out_of_bounds(hello: Hello) -> None:
    with pytest.raises(KVCorrupt, match="HELLO"):
        decode_body(Kind.HELLO, memoryview(encode_body(hello)))


def test_an_oversized_secret() -> None:
    with pytest.raises(KVCorrupt, match="FETCH"):
        decode_body(Kind.FETCH, memoryview(encode_body(Fetch(1, b"s" * 2000, "r", 1))))


@pytest.mark.parametrize("code", FailureCode)
def test_failures_cross_the_wire_as_the_same_error(code: FailureCode) -> None:
    error = Failure(code, "why").error()
    back = failure_of(error)
    assert type(back.error()) is type(error)
    assert back.message == "why"
    assert back.code == code or isinstance(error, KVRefused)


@given(st.lists(st.tuples(HEADERS, st.binary(max_size=60)), max_size=4), st.binary(max_size=50))
def test_a_parcel_is_cut_where_its_frames_end(
    frames: list[tuple[Header, bytes]], rest: bytes
) -> None:
    encoded = [encode(header, [payload], SEED) for header, payload in frames]
    cut = [bytes(frame) for frame in split(b"".join(encoded))]
    assert cut == encoded
    # Whatever follows is handed on as it is, and refused by decode.
    assert b"".join(split(b"".join(encoded) + rest)) == b"".join(encoded) + rest


@given(HEADERS, st.binary(min_size=1, max_size=60))
def test_a_header_that_comes_first_is_proven_by_its_payload(header: Header, payload: bytes) -> None:
    frame = encode(header, [payload], SEED)
    announced = decode_header(frame[:HEADER_BYTES], SEED)
    assert (announced.header, announced.num_bytes) == (header, len(payload))
    announced.verify([payload[:1], payload[1:]])
    with pytest.raises(KVCorrupt, match="digest"):
        announced.verify([payload[:-1], bytes((payload[-1] ^ 1,))])
    buffer = memoryview(bytearray(HEADER_BYTES + MAX_PAYLOAD))
    assert encode_into(buffer, header, [payload], SEED) == frame
