"""Values inside node messages, to protobuf and back.

They are log-probabilities, prompts to pool and their vectors, failures, and endpoints. Every handle
holds an endpoint, so converted endpoints are cached in both directions. baton/protocol/wire.py uses
this module and converts the messages around these values.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, cast

from baton.protocol.errors import InvalidRequest
from baton.protocol.events import Pooled, RequestFailed, TokenLogprob
from baton.protocol.handles import Endpoint, LaneAddress
from baton.protocol.kv_spec import PoolFormat
from baton.protocol.messages import PoolKind, SubmitPool
from baton.protocol.request import Request
from baton.protocol.wire_checks import epoch_of, identifier, one_of, present, required
from protos import kv_pb2, node_pb2

KEPT: Final = 256  # endpoints in each cache; one per start of a node
POOL_KINDS: Final = ("last", "mean", "yes_no", "classify")


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
    )


def pool_task_from_wire(request: Request, message: node_pb2.PoolTask) -> SubmitPool:
    lengths = tuple(message.lengths)
    if min(lengths, default=0) < 1 or sum(lengths) != len(request.prompt_ids):
        raise InvalidRequest("lengths do not cut prompt_ids into prompts", field="lengths")
    return SubmitPool(
        request,
        lengths,
        cast("PoolKind", one_of(message.kind, POOL_KINDS, "kind")),
        message.normalize,
        message.dimensions,
        (message.yes_id, message.no_id),
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
def kept_endpoint_to_wire(value: Endpoint) -> kv_pb2.Endpoint:
    """Return the cached message of an endpoint. Copy it into other messages; never change it."""
    return endpoint_to_wire(value)


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
