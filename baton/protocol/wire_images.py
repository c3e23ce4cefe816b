"""Images that encode nodes have read, to protobuf and back: in submissions and in answers.

baton/protocol/wire.py uses this module for requests with such images alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from baton.protocol.errors import InvalidRequest
from baton.protocol.events import Encoded
from baton.protocol.handles import EncodedImage
from baton.protocol.images import DIGEST_BYTES
from baton.protocol.wire_checks import epoch_of, identifier, present
from baton.protocol.wire_values import handle_from_wire, handle_to_bytes
from protos import node_pb2


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
