"""Dataclasses to protobuf and back, for everything that routers and nodes send to each other.

Only this package and the service files see protobuf messages. `x_to_wire` builds the message,
`x_from_wire` the dataclass. An unknown kind or a missing required field raises InvalidRequest and
never becomes a default. Messages carry deadlines as remaining milliseconds. Not here: KV frames
(kv_transfer/) and the public API (router/api/grpc/inference.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, fields
from typing import Any, Final, cast

from google.protobuf.message import DecodeError

from baton.protocol import messages
from baton.protocol.clock import Clock, deadline_from_ms, remaining_ms
from baton.protocol.errors import InvalidRequest
from baton.protocol.events import (
    BlockEvent,
    BlockEventKind,
    HandleReady,
    NodeStep,
    Subscribed,
)
from baton.protocol.handles import NodeLoad, NodeRecord, Role
from baton.protocol.images import ImageInput, check_images
from baton.protocol.request import Request, Resume
from baton.protocol.wire_checks import (
    epoch_of,
    identifier,
    nothing_unknown,
    one_of,
    present,
    required,
)
from baton.protocol.wire_control import (
    adapters_from_wire,
    adapters_to_wire,
    control_from_wire,
    control_to_wire,
    controlled_from_wire,
    controlled_to_wire,
    flow_from_wire,
    flow_to_wire,
)
from baton.protocol.wire_sampling import sampling_from_wire, write_sampling
from baton.protocol.wire_values import (
    encoded_from_wire,
    encoded_to_wire,
    endpoint_from_wire,
    endpoint_to_wire,
    failed_from_wire,
    failed_to_wire,
    handle_from_wire,
    handle_to_bytes,
    handle_to_wire,
    images_from_wire,
    pool_task_from_wire,
    pool_task_to_wire,
    pooled_from_wire,
    pooled_to_wire,
    timings_from_wire,
    timings_to_wire,
    token_event_from_wire,
    token_event_to_wire,
    write_images,
)
from protos import node_pb2

RESUME: Final = ("fast", "exact")
# What begins a field of messages on the wire (its number, and that its length follows).
_BATCH: Final = bytes([node_pb2.RouterMessage.BATCH_FIELD_NUMBER << 3 | 2])
_ONE: Final = bytes([node_pb2.RouterBatch.MESSAGES_FIELD_NUMBER << 3 | 2])

_ROLES: Final = {
    Role.PREFILL: node_pb2.ROLE_PREFILL,
    Role.DECODE: node_pb2.ROLE_DECODE,
    Role.ENCODE: node_pb2.ROLE_ENCODE,
}
_ROLE_OF: Final = {number: role for role, number in _ROLES.items()}
_BLOCK_KINDS: Final = {
    BlockEventKind.STORED: node_pb2.BlockEvent.STORED,
    BlockEventKind.EVICTED: node_pb2.BlockEvent.EVICTED,
    BlockEventKind.CLEARED: node_pb2.BlockEvent.CLEARED,
}
_BLOCK_KIND_OF: Final = {number: kind for kind, number in _BLOCK_KINDS.items()}
_LOAD: Final = tuple(spec.name for spec in fields(NodeLoad))
_PLAIN_RECORD: Final = (
    "node_id", "boot_id", "address", "model", "model_digest", "block_size", "max_model_len",
    "vocab_size", "version", "adapters", "eos_token_ids", "max_num_seqs",
    "precision", "deterministic", "leaving_adapters", "group", "rank", "encodes",
    "needs_rows",
)  # fmt: skip


def request_to_wire(request: Request, clock: Clock) -> node_pb2.Request:
    message = node_pb2.Request()
    _write_request(message, request, clock)
    return message


def _write_request(message: node_pb2.Request, request: Request, clock: Clock) -> None:
    """Write a request into an empty message. Mutates `request.encoded`.

    The messages of a request are written in place: protobuf copies a message that is given to
    another message's constructor by serializing and parsing it, at every level.
    """
    if request.encoded:
        message.MergeFromString(request.encoded[0])
    else:
        _write_fields(message, request)
        request.encoded.append(message.SerializeToString())
    message.deadline_ms = remaining_ms(request.deadline, clock)


def _write_fields(message: node_pb2.Request, request: Request) -> None:
    """Write all of a request but its deadline."""
    message.id = request.id
    message.prompt_ids.extend(request.prompt_ids)
    for ids in request.output_ids:
        message.output_ids.add().ids.extend(ids)
    write_sampling(message.params, request.params)
    message.adapter = request.adapter
    message.priority = request.priority
    message.tenant_salt = request.tenant_salt
    message.epoch = request.epoch
    message.traceparent = request.traceparent
    message.resume = request.resume
    message.ended.extend(request.ended)
    for image in request.images:
        message.images.add(
            digest=image.digest, start=image.start, num_tokens=image.num_tokens, data=image.data
        )


def request_from_wire(message: node_pb2.Request, clock: Clock) -> Request:
    """Rebuild a request. `deadline` and `arrival` are converted to the clock of this process."""
    nothing_unknown(message, "request")
    present(message, "params")
    if not message.prompt_ids:
        raise InvalidRequest("prompt_ids is empty", field="prompt_ids")
    if not message.output_ids:
        raise InvalidRequest("output_ids is missing (one list per sample)", field="output_ids")
    return Request(
        id=identifier(message.id, "id"),
        prompt_ids=tuple(message.prompt_ids),
        params=sampling_from_wire(message.params),
        output_ids=tuple(tuple(sample.ids) for sample in message.output_ids),
        adapter=message.adapter,
        priority=message.priority,
        tenant_salt=message.tenant_salt,
        deadline=deadline_from_ms(message.deadline_ms, clock),
        epoch=epoch_of(message.epoch),
        traceparent=message.traceparent,
        resume=cast("Resume", one_of(message.resume, RESUME, "resume")),
        arrival=clock.monotonic(),
        ended=tuple(message.ended),
        images=_images_from_wire(message) if message.images else (),
    )


def _images_from_wire(message: node_pb2.Request) -> tuple[ImageInput, ...]:
    images = tuple(
        ImageInput(image.digest, image.start, image.num_tokens, image.data)
        for image in message.images
    )
    check_images(images, len(message.prompt_ids))
    return images


# ---- node record and load ----


def load_to_wire(value: NodeLoad) -> node_pb2.Load:
    """Build the message of a load. Some steps send one, and asdict would take 100 us."""
    return node_pb2.Load(**{name: getattr(value, name) for name in _LOAD})


def load_from_wire(message: node_pb2.Load) -> NodeLoad:
    return NodeLoad(**{name: getattr(message, name) for name in _LOAD})


def record_to_wire(value: NodeRecord) -> node_pb2.NodeRecord:
    plain = {name: getattr(value, name) for name in _PLAIN_RECORD}
    return node_pb2.NodeRecord(
        **plain,
        role=_ROLES[value.role],
        endpoint=endpoint_to_wire(value.endpoint),
        load=load_to_wire(value.load),
    )


def record_from_wire(message: node_pb2.NodeRecord) -> NodeRecord:
    for name in ("node_id", "boot_id", "address", "model", "model_digest"):
        identifier(getattr(message, name), name)
    present(message, "endpoint")
    if message.role not in _ROLE_OF:
        raise InvalidRequest(f"unknown role {message.role}", field="role")
    if message.block_size < 1 or message.max_model_len < 1:
        raise InvalidRequest("block_size and max_model_len must be at least 1", field="block_size")
    values = {name: getattr(message, name) for name in _PLAIN_RECORD}
    values["adapters"] = tuple(message.adapters)
    values["leaving_adapters"] = tuple(message.leaving_adapters)
    values["eos_token_ids"] = tuple(message.eos_token_ids)
    return NodeRecord(
        **values,
        role=_ROLE_OF[message.role],
        endpoint=endpoint_from_wire(message.endpoint),
        load=load_from_wire(message.load),
    )


def record_to_bytes(value: NodeRecord) -> bytes:
    """Serialize a record for the node's key in Redis."""
    return record_to_wire(value).SerializeToString()


def record_from_bytes(data: bytes) -> NodeRecord:
    try:
        return record_from_wire(node_pb2.NodeRecord.FromString(data))
    except DecodeError as error:
        raise InvalidRequest("not a node record", field="record") from error


# ---- router -> node ----


def router_message_to_wire(value: messages.RouterMessage, clock: Clock) -> node_pb2.RouterMessage:
    match value:
        case messages.SessionHello():
            return node_pb2.RouterMessage(hello=node_pb2.SessionHello(**asdict(value)))
        case (
            messages.SubmitPrefill()
            | messages.SubmitDecode()
            | messages.SubmitPool()
            | messages.SubmitEncode()
        ):
            message = node_pb2.RouterMessage()
            _write_submit(message.submit, value, clock)
            return message
        case messages.Prefilled():
            prefilled = node_pb2.Prefilled(request_id=value.request_id, epoch=value.epoch)
            return node_pb2.RouterMessage(prefilled=prefilled)
        case messages.AbortRequest():
            return node_pb2.RouterMessage(abort=node_pb2.Abort(**asdict(value)))
        case messages.RenewExport():
            renew = node_pb2.RenewExport(handle=handle_to_wire(value.handle))
            return node_pb2.RouterMessage(renew=renew)
        case messages.ReleaseExport():
            release = node_pb2.ReleaseExport(handle=handle_to_wire(value.handle), why=value.why)
            return node_pb2.RouterMessage(release=release)
        case messages.DrainNode():
            return node_pb2.RouterMessage(drain=node_pb2.Drain(mode=value.mode))
        case messages.Migrate():
            return node_pb2.RouterMessage(migrate=node_pb2.Migrate(**asdict(value)))
        case messages.StopSample():
            return node_pb2.RouterMessage(stop_sample=node_pb2.StopSample(**asdict(value)))
        case messages.ControlNode():
            return node_pb2.RouterMessage(control=control_to_wire(value))


def router_messages_to_bytes(
    values: Iterable[messages.RouterMessage], clock: Clock, most_bytes: int
) -> bytes:
    """Take messages from `values` and serialize them as one RouterMessage, several as a batch.

    At least one is taken; none is taken after the batch has `most_bytes`. The batch is put together
    from the serialized messages, which need no copy of each other then.
    """
    found: list[bytes] = []
    size = 0
    for value in values:
        found.append(router_message_to_wire(value, clock).SerializeToString())
        size += len(found[-1])
        if size >= most_bytes:
            break
    if len(found) == 1:
        return found[0]
    batch = b"".join([part for each in found for part in (_ONE, _varint(len(each)), each)])
    return _BATCH + _varint(len(batch)) + batch


def _varint(value: int) -> bytes:
    """Return protobuf's form of a number: seven bits per byte, the lowest ones first."""
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def router_message_from_wire(
    message: node_pb2.RouterMessage, clock: Clock
) -> messages.RouterMessage:
    match message.WhichOneof("kind"):
        case "hello":
            hello = message.hello
            return messages.SessionHello(
                identifier(hello.router_id, "router_id"), hello.protocol_version, hello.nonce
            )
        case "submit":
            return _submit_from_wire(message.submit, clock)
        case "prefilled":
            return messages.Prefilled(*_named(message.prefilled))
        case "abort":
            return messages.AbortRequest(*_named(message.abort))
        case "renew":
            present(message.renew, "handle")
            return messages.RenewExport(handle_from_wire(message.renew.handle))
        case "release":
            present(message.release, "handle")
            return messages.ReleaseExport(
                handle_from_wire(message.release.handle), message.release.why
            )
        case "drain":
            return messages.DrainNode(required(message.drain.mode, "mode"))
        case "migrate":
            return messages.Migrate(*_named(message.migrate))
        case "stop_sample":
            return messages.StopSample(*_named(message.stop_sample), message.stop_sample.sample)
        case "control":
            return control_from_wire(message.control)
        case _:
            raise InvalidRequest("a router message without a known kind", field="kind")


def _named(message: Any) -> tuple[str, int]:
    """Return (request id, epoch) of a message about one request."""
    return identifier(message.request_id, "request_id"), epoch_of(message.epoch)


def _write_submit(message: node_pb2.Submit, value: messages.Submission, clock: Clock) -> None:
    """Write a submission into an empty message."""
    _write_request(message.request, value.request, clock)
    if isinstance(value, messages.SubmitPrefill | messages.SubmitDecode) and value.encoded:
        write_images(message.encoded, value.encoded)
    match value:
        case messages.SubmitPrefill():
            message.prefill.SetInParent()
        case messages.SubmitDecode():
            message.decode.prefilling = value.prefilling
            message.decode.SetInParent()
            if value.handle is not None:
                message.decode.handle.MergeFromString(handle_to_bytes(value.handle))
        case messages.SubmitPool():
            message.pool.CopyFrom(pool_task_to_wire(value))
        case messages.SubmitEncode():
            message.encode.SetInParent()


def _submit_from_wire(message: node_pb2.Submit, clock: Clock) -> messages.Submission:
    present(message, "request")
    request = request_from_wire(message.request, clock)
    encoded = images_from_wire(message.encoded) if message.encoded else ()
    match message.WhichOneof("task"):
        case "prefill":
            return messages.SubmitPrefill(request, encoded)
        case "decode" if message.decode.HasField("handle"):
            handle = handle_from_wire(message.decode.handle)
            return messages.SubmitDecode(request, handle, message.decode.prefilling, encoded)
        case "decode":
            return messages.SubmitDecode(request, encoded=encoded)
        case "encode":
            return messages.SubmitEncode(request)
        case "pool":
            return pool_task_from_wire(request, message.pool)
        case _:
            raise InvalidRequest("submit without a known task", field="task")


# ---- node -> router ----


def _handle_ready_from_wire(message: node_pb2.HandleReady) -> HandleReady:
    present(message, "handle")
    return HandleReady(*_named(message), handle_from_wire(message.handle))


def _block_event_from_wire(message: node_pb2.BlockEvent) -> BlockEvent:
    if message.kind not in _BLOCK_KIND_OF:
        raise InvalidRequest(f"unknown kind {message.kind} of a block event", field="block_events")
    kind, hashes = _BLOCK_KIND_OF[message.kind], tuple(message.hashes)
    return BlockEvent(kind, hashes, message.parent, message.states)


def step_to_wire(value: NodeStep) -> node_pb2.NodeStep:
    return node_pb2.NodeStep(
        tokens=[token_event_to_wire(event) for event in value.tokens],
        handles=[
            node_pb2.HandleReady(
                request_id=ready.request_id, epoch=ready.epoch, handle=handle_to_wire(ready.handle)
            )
            for ready in value.handles
        ],
        subscribed=[
            node_pb2.Subscribed(request_id=item.request_id, epoch=item.epoch)
            for item in value.subscribed
        ],
        failed=[failed_to_wire(item) for item in value.failed],
        load=None if value.load is None else load_to_wire(value.load),
        block_events_seq=value.block_events_seq,
        block_events=[
            node_pb2.BlockEvent(
                kind=_BLOCK_KINDS[event.kind],
                hashes=event.hashes,
                parent=event.parent,
                states=event.states,
            )
            for event in value.block_events
        ],
        last=value.last,
        pooled=[pooled_to_wire(pooled) for pooled in value.pooled],
        controlled=map(controlled_to_wire, value.controlled),
        adapters=adapters_to_wire(value.adapters),
        flows=map(flow_to_wire, value.flows),
        timings=map(timings_to_wire, value.timings),
        encoded=map(encoded_to_wire, value.encoded),
        no_logprobs=not any(event.logprobs or event.prompt_logprobs for event in value.tokens),
    )


def step_from_wire(message: node_pb2.NodeStep) -> NodeStep:
    has_logprobs = not message.no_logprobs
    return NodeStep(
        tokens=tuple([token_event_from_wire(event, has_logprobs) for event in message.tokens]),
        handles=tuple(map(_handle_ready_from_wire, message.handles)),
        subscribed=tuple([Subscribed(*_named(item)) for item in message.subscribed]),
        failed=tuple(map(failed_from_wire, message.failed)),
        load=load_from_wire(message.load) if message.HasField("load") else None,
        block_events_seq=message.block_events_seq,
        block_events=tuple(map(_block_event_from_wire, message.block_events)),
        last=message.last,
        pooled=tuple(map(pooled_from_wire, message.pooled)),
        controlled=tuple(map(controlled_from_wire, message.controlled)),
        adapters=adapters_from_wire(message),
        flows=tuple(map(flow_from_wire, message.flows)),
        timings=tuple(map(timings_from_wire, message.timings)),
        encoded=tuple(map(encoded_from_wire, message.encoded)),
    )


def node_message_to_wire(value: NodeRecord | NodeStep) -> node_pb2.NodeMessage:
    if isinstance(value, NodeRecord):
        return node_pb2.NodeMessage(hello=record_to_wire(value))
    return node_pb2.NodeMessage(step=step_to_wire(value))


def node_message_from_wire(message: node_pb2.NodeMessage) -> NodeRecord | NodeStep:
    match message.WhichOneof("kind"):
        case "hello":
            return record_from_wire(message.hello)
        case "step":
            return step_from_wire(message.step)
        case _:
            raise InvalidRequest("a node message without a known kind", field="kind")
