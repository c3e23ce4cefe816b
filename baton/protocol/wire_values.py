"""Values inside node messages, to protobuf and back.

They are tokens, log-probabilities, prompts to pool and their vectors, failures, endpoints,
handles, and images that encode nodes have read.
Every handle holds an endpoint, so converted endpoints are cached in both directions.
baton/protocol/wire.py uses this module and converts the messages around these values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Final, cast

from google.protobuf.message import DecodeError

from baton.protocol.errors import InvalidRequest
from baton.protocol.events import (
    GROUP_NUMBERS,
    Encoded,
    NodeSpan,
    NodeTimings,
    Pooled,
    RequestFailed,
    TokenEvent,
    TokenLogprob,
)
from baton.protocol.handles import EncodedImage, Endpoint, KVHandle, LaneAddress
from baton.protocol.images import DIGEST_BYTES
from baton.protocol.kv_spec import PoolFormat
from baton.protocol.messages import PoolKind, SubmitPool
from baton.protocol.request import Request
from baton.protocol.wire_checks import (
    epoch_of,
    finish_reason,
    identifier,
    one_of,
    present,
    required,
)
from protos import kv_pb2, node_pb2

KEPT: Final = 256  # endpoints in each cache; one per start of a node
POOL_KINDS: Final = ("last", "mean", "yes_no", "classify", "own")


def logprobs_to_wire(rows: Sequence[Sequence[TokenLogprob]]) -> list[node_pb2.TokenLogprobs]:
    return [
        node_pb2.TokenLogprobs(
            top=[
                kv_pb2.TokenLogprob(token_id=t.token_id, logprob=t.logprob, rank=t.rank)
                for t in row
            ]
        )
        for row in rows
    ]


def logprobs_from_wire(
    rows: Sequence[node_pb2.TokenLogprobs],
) -> tuple[tuple[TokenLogprob, ...], ...]:
    return tuple(
        tuple(TokenLogprob(t.token_id, t.logprob, t.rank) for t in row.top) for row in rows
    )


def token_event_to_wire(value: TokenEvent) -> node_pb2.TokenEvent:
    return node_pb2.TokenEvent(
        request_id=value.request_id,
        epoch=value.epoch,
        sample=value.sample,
        position=value.position,
        token_ids=value.token_ids,
        logprobs=logprobs_to_wire(value.logprobs),
        finish_reason=value.finish_reason or "",
        num_cached_tokens=value.num_cached_tokens,
        stop_token_id=value.stop_token_id or 0,
        has_stop_token=value.stop_token_id is not None,
        prompt_logprobs=logprobs_to_wire(value.prompt_logprobs),
        preemptions=value.preemptions,
    )


def token_event_from_wire(message: node_pb2.TokenEvent, has_logprobs: bool = True) -> TokenEvent:
    """Read one event. To look for log-probabilities that are not there is half of the work, so
    `has_logprobs` False leaves it out."""
    logprobs = prompt_logprobs = ()
    if has_logprobs:
        logprobs = logprobs_from_wire(message.logprobs)
        prompt_logprobs = logprobs_from_wire(message.prompt_logprobs)
    return TokenEvent(
        request_id=required(message.request_id, "request_id"),
        epoch=epoch_of(message.epoch),
        position=message.position,
        token_ids=tuple(message.token_ids),
        sample=message.sample,
        finish_reason=finish_reason(message.finish_reason),
        stop_token_id=message.stop_token_id if message.has_stop_token else None,
        num_cached_tokens=message.num_cached_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        preemptions=message.preemptions,
    )


def pool_task_to_wire(value: SubmitPool) -> node_pb2.PoolTask:
    """Build the message of a SubmitPool without its request."""
    yes, no = value.answers
    return node_pb2.PoolTask(
        lengths=value.lengths,
        kind=value.kind,
        normalize=value.normalize,
        dimensions=value.dimensions,
        yes_id=yes,
        no_id=no,
        second_from=value.second_from,
    )


def pool_task_from_wire(request: Request, message: node_pb2.PoolTask) -> SubmitPool:
    lengths = tuple(message.lengths)
    if min(lengths, default=0) < 1 or sum(lengths) != len(request.prompt_ids):
        raise InvalidRequest("lengths do not cut prompt_ids into prompts", field="lengths")
    second_from = tuple(message.second_from)
    if second_from and (
        len(second_from) != len(lengths)
        or any(start > length for start, length in zip(second_from, lengths, strict=True))
    ):
        raise InvalidRequest("second_from must be a place in each prompt", field="second_from")
    return SubmitPool(
        request,
        lengths,
        cast("PoolKind", one_of(message.kind, POOL_KINDS, "kind")),
        message.normalize,
        message.dimensions,
        (message.yes_id, message.no_id),
        second_from,
    )


def pooled_to_wire(value: Pooled) -> node_pb2.Pooled:
    return node_pb2.Pooled(
        request_id=value.request_id, epoch=value.epoch, vectors=list(value.vectors)
    )


def pooled_from_wire(message: node_pb2.Pooled) -> Pooled:
    if any(not vector or len(vector) % 4 for vector in message.vectors):
        raise InvalidRequest("a vector is not made of float32 numbers", field="vectors")
    return Pooled(
        required(message.request_id, "request_id"),
        epoch_of(message.epoch),
        tuple(message.vectors),
    )


def timings_to_wire(value: NodeTimings) -> node_pb2.NodeTimings:
    return node_pb2.NodeTimings(
        request_id=value.request_id,
        epoch=value.epoch,
        age_us=value.age_us,
        spans=[
            node_pb2.NodeSpan(
                name=span.name,
                start_us=span.start_us,
                end_us=span.end_us,
                chunks=span.chunks,
                kv_bytes=span.kv_bytes,
                lane=span.lane,
                layers=span.layers,
            )
            for span in value.spans
        ],
    )


def timings_from_wire(message: node_pb2.NodeTimings) -> NodeTimings:
    spans = tuple(
        NodeSpan(
            required(span.name, "name"),
            span.start_us,
            span.end_us,
            span.chunks,
            span.kv_bytes,
            span.lane,
            tuple(span.layers),
        )
        for span in message.spans
    )
    for span in spans:
        if not span.start_us <= span.end_us <= message.age_us:
            raise InvalidRequest("a span does not lie within the request's time", field="spans")
        if len(span.layers) % GROUP_NUMBERS:
            raise InvalidRequest(f"layers are told by {GROUP_NUMBERS} numbers", field="layers")
    return NodeTimings(
        required(message.request_id, "request_id"), epoch_of(message.epoch), message.age_us, spans
    )


def format_from_wire(message: kv_pb2.PoolFormat) -> PoolFormat:
    if message.block_size < 1 or message.tp_size < 1:
        raise InvalidRequest("block_size and tp_size must be at least 1", field="format")
    return PoolFormat(
        block_size=message.block_size,
        dtype=required(message.dtype, "dtype"),
        tp_size=message.tp_size,
        tp_rank=message.tp_rank,
        codecs=tuple(message.codecs),
    )


def endpoint_to_wire(value: Endpoint) -> kv_pb2.Endpoint:
    return kv_pb2.Endpoint(
        boot_id=value.boot_id,
        protocol_version=value.protocol_version,
        layout_fingerprint=value.layout_fingerprint,
        format=kv_pb2.PoolFormat(**{n: getattr(value.format, n) for n in PoolFormat.__slots__}),
        lanes=[
            kv_pb2.Lane(name=lane.name, address=lane.address, attributes=dict(lane.attributes))
            for lane in value.lanes
        ],
        ranks=[endpoint_to_wire(rank) for rank in value.ranks],
    )


@lru_cache(KEPT)
def endpoint_to_bytes(value: Endpoint) -> bytes:
    """Serialize an endpoint; the bytes are cached."""
    return endpoint_to_wire(value).SerializeToString()


def endpoint_from_wire(message: kv_pb2.Endpoint) -> Endpoint:
    return _endpoint_of(message.SerializeToString(deterministic=True))


@lru_cache(KEPT)
def _endpoint_of(data: bytes) -> Endpoint:
    message = kv_pb2.Endpoint.FromString(data)
    present(message, "format")
    return Endpoint(
        boot_id=identifier(message.boot_id, "boot_id"),
        layout_fingerprint=required(message.layout_fingerprint, "layout_fingerprint"),
        format=format_from_wire(message.format),
        lanes=tuple(
            LaneAddress(
                required(lane.name, "lane"), lane.address, tuple(sorted(lane.attributes.items()))
            )
            for lane in message.lanes
        ),
        protocol_version=message.protocol_version,
        ranks=tuple(endpoint_from_wire(rank) for rank in message.ranks),
    )


def failed_to_wire(value: RequestFailed) -> node_pb2.RequestFailed:
    return node_pb2.RequestFailed(
        request_id=value.request_id,
        epoch=value.epoch,
        code=value.code,
        message=value.message,
        retryable=value.retryable,
        field=value.field or "",
    )


def failed_from_wire(message: node_pb2.RequestFailed) -> RequestFailed:
    return RequestFailed(
        request_id=required(message.request_id, "request_id"),
        epoch=message.epoch,  # 0: the message was refused before its epoch was read
        code=required(message.code, "code"),
        message=message.message,
        retryable=message.retryable,
        field=message.field or None,
    )


# ---- handles ----


def handle_to_wire(value: KVHandle) -> kv_pb2.KVHandle:
    message = kv_pb2.KVHandle()
    message.MergeFromString(handle_to_bytes(value))
    return message


def _write_handle(message: kv_pb2.KVHandle, value: KVHandle) -> None:
    """Write a handle into an empty message."""
    message.boot_id = value.boot_id
    message.export_seq = value.export_seq
    message.request_id = value.request_id
    message.sample = value.sample
    message.epoch = value.epoch
    message.num_tokens = value.num_tokens
    message.secret = value.secret
    message.lease_ms = value.lease_ms
    message.endpoint.MergeFromString(endpoint_to_bytes(value.endpoint))


def handle_from_wire(message: kv_pb2.KVHandle) -> KVHandle:
    identifier(message.boot_id, "boot_id")
    identifier(message.request_id, "request_id")
    epoch_of(message.epoch)
    present(message, "endpoint")
    if message.num_tokens < 1 or message.lease_ms < 1 or not message.secret:
        raise InvalidRequest("a handle needs num_tokens, lease_ms and secret", field="handle")
    return KVHandle(
        boot_id=message.boot_id,
        export_seq=message.export_seq,
        request_id=message.request_id,
        sample=message.sample,
        epoch=message.epoch,
        num_tokens=message.num_tokens,
        secret=message.secret,
        lease_ms=message.lease_ms,
        endpoint=endpoint_from_wire(message.endpoint),
    )


def handle_to_bytes(value: KVHandle) -> bytes:
    """Serialize a handle, once for all messages that carry it. Mutates `value.encoded`."""
    if not value.encoded:
        message = kv_pb2.KVHandle()
        _write_handle(message, value)
        value.encoded.append(message.SerializeToString())
    return value.encoded[0]


def handle_from_bytes(data: bytes) -> KVHandle:
    try:
        return handle_from_wire(kv_pb2.KVHandle.FromString(data))
    except DecodeError as error:
        raise InvalidRequest("not a KV handle", field="handle") from error


# ---- images that encode nodes have read ----


def write_images(message: Any, images: Iterable[EncodedImage]) -> None:
    """Add images to a repeated field of a message."""
    for image in images:
        added = message.add(digest=image.digest, height=image.height, width=image.width)
        added.handle.MergeFromString(handle_to_bytes(image.handle))


def images_from_wire(messages: Iterable[node_pb2.EncodedImage]) -> tuple[EncodedImage, ...]:
    return tuple(map(_image_from_wire, messages))


def _image_from_wire(message: node_pb2.EncodedImage) -> EncodedImage:
    present(message, "handle")
    handle = handle_from_wire(message.handle)
    if len(message.digest) != DIGEST_BYTES:
        raise InvalidRequest(f"a digest has {DIGEST_BYTES} bytes", field="encoded")
    if handle.num_tokens != message.height * message.width:
        raise InvalidRequest("an encoded image has height * width rows", field="encoded")
    return EncodedImage(message.digest, message.height, message.width, handle)


def encoded_to_wire(value: Encoded) -> node_pb2.Encoded:
    message = node_pb2.Encoded(request_id=value.request_id, epoch=value.epoch)
    write_images(message.images, value.images)
    return message


def encoded_from_wire(message: node_pb2.Encoded) -> Encoded:
    identifier(message.request_id, "request_id")
    return Encoded(message.request_id, epoch_of(message.epoch), images_from_wire(message.images))
