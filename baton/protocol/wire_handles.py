"""KV handles and what carries them, to protobuf and back: submissions' and nodes' encoded images.

baton/protocol/wire.py uses this module and converts the messages around these values.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from google.protobuf.message import DecodeError

from baton.protocol.errors import InvalidRequest
from baton.protocol.events import Encoded
from baton.protocol.handles import EncodedImage, KVHandle
from baton.protocol.images import DIGEST_BYTES
from baton.protocol.wire_checks import epoch_of, identifier, present
from baton.protocol.wire_values import endpoint_from_wire, endpoint_to_bytes
from protos import kv_pb2, node_pb2


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
