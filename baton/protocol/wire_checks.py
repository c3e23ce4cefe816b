"""Checks of protobuf messages for baton/protocol/wire.py.

Each raises InvalidRequest with the name of the field.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from baton.protocol.errors import InvalidRequest
from baton.protocol.request import FinishReason

MAX_ID_CHARS: Final = 256
_FINISH_REASONS: Final = tuple(str(reason) for reason in FinishReason)


def required(text: str, name: str) -> str:
    """Return `text`, which must not be empty: proto3 sends a missing string as an empty one."""
    if not text:
        raise InvalidRequest(f"{name} is missing", field=name)
    return text


def identifier(text: str, name: str) -> str:
    if len(required(text, name)) > MAX_ID_CHARS:
        raise InvalidRequest(f"{name} is longer than {MAX_ID_CHARS} characters", field=name)
    return text


def epoch_of(value: int) -> int:
    if value < 1:
        raise InvalidRequest("epoch is missing", field="epoch")
    return value


def present(message: Message, name: str) -> None:
    if not message.HasField(name):
        raise InvalidRequest(f"{name} is missing", field=name)


def one_of(value: str, allowed: Sequence[str], name: str) -> str:
    if value not in allowed:
        raise InvalidRequest(
            f"{name} must be one of {', '.join(allowed)}, got {value!r}", field=name
        )
    return value


def nothing_unknown(message: Message, name: str) -> None:
    """Refuse a message with a field that this process does not know.

    A newer peer's field may change what a request means, so it must not be ignored.
    """
    unknown = UnknownFieldSet(message)
    if len(unknown):
        number = unknown[0].field_number
        raise InvalidRequest(f"{name} has an unknown field (number {number})", field=name)


def finish_reason(text: str) -> FinishReason | None:
    if not text:
        return None
    return FinishReason(one_of(text, _FINISH_REASONS, "finish_reason"))
