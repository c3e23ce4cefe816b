"""Converts messages to payload bytes and back: the only module where KV control bodies are
protobuf.

The messages are those of protos/kv.proto.

Unknown, missing or out-of-bounds fields raise KVCorrupt here, so that all other modules see valid
values only. DATA and STATE payloads are raw bytes and pass through unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from google.protobuf.message import DecodeError

from baton.protocol.errors import KVCorrupt
from baton.protocol.events import FirstToken, TokenLogprob
from baton.protocol.kv_spec import DTYPE_BYTES, PoolFormat
from baton.protocol.request import FinishReason
from kv_transfer.protocol.frames import Buffer, Kind
from kv_transfer.protocol.messages import (
    MAC_BYTES,
    NONCE_BYTES,
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
    State,
)
from protos import kv_pb2

MAX_TEXT: Final = 1024  # longest request id or message
MAX_TP: Final = 1024  # largest tensor-parallel group


def kind_of(message: Message) -> Kind:
    return _KINDS[type(message)]


def encode_body(message: Message) -> Buffer:
    """Return the payload of the frame that carries `message`."""
    match message:
        case Data() | State():
            return message.payload
        case Hello():
            return _hello(message).SerializeToString(deterministic=True)
        case Fetch():
            return kv_pb2.Fetch(
                export_seq=message.export_seq,
                secret=message.secret,
                request_id=message.request_id,
                epoch=message.epoch,
                start_token=message.start_token,
                codec=message.codec,
                windowed=message.windowed,
                timeout_ms=message.timeout_ms,
                adopt=message.adopt,
            ).SerializeToString(deterministic=True)
        case SharedBlockTables():
            return kv_pb2.Blocks(
                block_size=message.block_size,
                tables=[kv_pb2.BlockTable(blocks=table) for table in message.tables],
            ).SerializeToString(deterministic=True)
        case End():
            return _end(message).SerializeToString(deterministic=True)
        case Ack():
            return kv_pb2.Ack(
                export_seq=message.export_seq, part=message.part, answer=message.answer
            ).SerializeToString(deterministic=True)
        case Renew():
            return kv_pb2.Renew(
                export_seq=message.export_seq, secret=message.secret, epoch=message.epoch
            ).SerializeToString(deterministic=True)
        case Confirm():
            return kv_pb2.Confirm(
                export_seq=message.export_seq,
                secret=message.secret,
                epoch=message.epoch,
                held=message.held,
            ).SerializeToString(deterministic=True)
        case Failure():
            return kv_pb2.Error(
                code=message.code.value, message=message.message[:MAX_TEXT]
            ).SerializeToString(deterministic=True)


def decode_body(kind: Kind, payload: memoryview) -> Message:
    """Return the message in a frame's payload. Raises KVCorrupt if it is none."""
    if kind is Kind.DATA:
        return Data(payload)
    if kind is Kind.STATE:
        return State(payload)
    try:
        return _DECODERS[kind](bytes(payload))
    except (DecodeError, ValueError) as error:
        raise KVCorrupt(f"bad {kind.name} body: {error}") from error


def _hello(message: Hello) -> kv_pb2.Hello:
    return kv_pb2.Hello(
        protocol_version=message.protocol_version,
        boot_id=message.boot_id,
        layout_fingerprint=message.layout_fingerprint,
        format=kv_pb2.PoolFormat(
            block_size=message.format.block_size,
            dtype=message.format.dtype,
            tp_size=message.format.tp_size,
            tp_rank=message.format.tp_rank,
            codecs=message.format.codecs,
        ),
        nonce=message.nonce,
        mac=message.mac,
    )


def _end(message: End) -> kv_pb2.End:
    return kv_pb2.End(
        num_tokens=message.num_tokens,
        lease_held=message.lease_held,
        num_frames=message.num_frames,
        waited_ms=message.waited_ms,
        lease_ms=message.lease_ms,
        first_tokens=[
            kv_pb2.FirstToken(
                sample=token.sample,
                position=token.position,
                token_id=token.token_id,
                finish_reason=token.finish_reason.value if token.finish_reason else "",
                cumulative_logprob=token.cumulative_logprob,
                drafts=token.drafts,
                logprobs=[
                    kv_pb2.TokenLogprob(token_id=p.token_id, logprob=p.logprob, rank=p.rank)
                    for p in token.logprobs
                ],
            )
            for token in message.first_tokens
        ],
    )


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(what)


def _decode_hello(payload: bytes) -> Hello:
    body = kv_pb2.Hello.FromString(payload)
    _require(len(body.nonce) == NONCE_BYTES, "nonce length")
    _require(len(body.mac) in (0, MAC_BYTES), "mac length")
    _require(0 < len(body.boot_id) <= MAX_TEXT, "boot id length")
    _require(body.format.dtype in DTYPE_BYTES, "unknown dtype")
    _require(body.format.block_size > 0, "block size")
    _require(body.format.tp_rank < body.format.tp_size <= MAX_TP, "tensor-parallel rank")
    _require("raw" in body.format.codecs, "codec raw missing")
    pool_format = PoolFormat(
        block_size=body.format.block_size,
        dtype=body.format.dtype,
        tp_size=body.format.tp_size,
        tp_rank=body.format.tp_rank,
        codecs=tuple(body.format.codecs),
    )
    return Hello(
        body.protocol_version,
        body.boot_id,
        body.layout_fingerprint,
        pool_format,
        body.nonce,
        body.mac,
    )


def _decode_fetch(payload: bytes) -> Fetch:
    body = kv_pb2.Fetch.FromString(payload)
    _require(len(body.secret) <= MAX_TEXT, "secret length")
    _require(len(body.request_id) <= MAX_TEXT, "request id length")
    _require(len(body.codec) <= MAX_TEXT, "codec length")
    return Fetch(
        export_seq=body.export_seq,
        secret=body.secret,
        request_id=body.request_id,
        epoch=body.epoch,
        start_token=body.start_token,
        codec=body.codec,
        windowed=body.windowed,
        timeout_ms=body.timeout_ms,
        adopt=body.adopt,
    )


def _decode_blocks(payload: bytes) -> SharedBlockTables:
    body = kv_pb2.Blocks.FromString(payload)
    _require(body.block_size > 0, "block size")
    return SharedBlockTables(body.block_size, tuple(tuple(table.blocks) for table in body.tables))


def _decode_end(payload: bytes) -> End:
    body = kv_pb2.End.FromString(payload)
    tokens = tuple(
        FirstToken(
            position=token.position,
            token_id=token.token_id,
            sample=token.sample,
            finish_reason=FinishReason(token.finish_reason) if token.finish_reason else None,
            logprobs=tuple(TokenLogprob(p.token_id, p.logprob, p.rank) for p in token.logprobs),
            cumulative_logprob=token.cumulative_logprob,
            drafts=tuple(token.drafts),
        )
        for token in body.first_tokens
    )
    return End(
        body.num_tokens,
        body.lease_held,
        tokens,
        body.num_frames,
        body.waited_ms,
        body.lease_ms,
    )


def _decode_ack(payload: bytes) -> Ack:
    body = kv_pb2.Ack.FromString(payload)
    return Ack(body.export_seq, body.part, body.answer)


def _decode_renew(payload: bytes) -> Renew:
    body = kv_pb2.Renew.FromString(payload)
    return Renew(body.export_seq, body.secret, body.epoch)


def _decode_confirm(payload: bytes) -> Confirm:
    body = kv_pb2.Confirm.FromString(payload)
    return Confirm(body.export_seq, body.secret, body.epoch, body.held)


def _decode_failure(payload: bytes) -> Failure:
    body = kv_pb2.Error.FromString(payload)
    return Failure(FailureCode(body.code), body.message)


_KINDS: Final[dict[type, Kind]] = {
    Hello: Kind.HELLO,
    Fetch: Kind.FETCH,
    Data: Kind.DATA,
    State: Kind.STATE,
    End: Kind.END,
    Failure: Kind.ERR,
    Ack: Kind.ACK,
    Renew: Kind.RENEW,
    Confirm: Kind.CONFIRM,
    SharedBlockTables: Kind.BLOCKS,
}
_DECODERS: Final[dict[Kind, Callable[[bytes], Message]]] = {
    Kind.HELLO: _decode_hello,
    Kind.FETCH: _decode_fetch,
    Kind.END: _decode_end,
    Kind.ERR: _decode_failure,
    Kind.ACK: _decode_ack,
    Kind.RENEW: _decode_renew,
    Kind.CONFIRM: _decode_confirm,
    Kind.BLOCKS: _decode_blocks,
}
