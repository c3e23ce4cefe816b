"""Values inside node messages <-> protobuf: log-probabilities, prompts to pool and their vectors.

Used by baton/wire.py, which has the messages around them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, cast

from baton.errors import InvalidRequest
from baton.events import Pooled, TokenLogprob
from baton.messages import PoolKind, SubmitPool
from baton.request import Request
from baton.wire_checks import epoch_of, one_of, required
from protos import kv_pb2, node_pb2

POOL_KINDS: Final = ("last", "mean", "yes_no")


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
    """All of a SubmitPool but its request."""
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
