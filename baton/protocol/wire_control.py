"""Orders to a node and their answers, to protobuf and back. Used by baton/protocol/wire.py."""

from __future__ import annotations

from typing import Final, cast

from baton.protocol.errors import InvalidRequest
from baton.protocol.events import AdapterList, Controlled, KVFlow
from baton.protocol.messages import ControlAction, ControlNode
from baton.protocol.wire_checks import one_of
from protos import node_pb2

ACTIONS: Final = (
    "reset_prefix_cache", "pause", "resume", "sleep", "wake", "load_adapter", "unload_adapter",
    "inspect",
)  # fmt: skip
TAGS: Final = ("weights", "kv_cache")
MODES: Final = ("refuse", "hold")


def control_to_wire(value: ControlNode) -> node_pb2.Control:
    return node_pb2.Control(
        number=value.number,
        action=value.action,
        name=value.name,
        path=value.path,
        in_place=value.in_place,
        tags=value.tags,
        mode=value.mode,
    )


def control_from_wire(message: node_pb2.Control) -> ControlNode:
    action = cast("ControlAction", one_of(message.action, ACTIONS, "action"))
    if action == "pause":
        one_of(message.mode, MODES, "mode")
    if action in ("load_adapter", "unload_adapter") and not message.name:
        raise InvalidRequest("an adapter without a name", field="name")
    return ControlNode(
        message.number, action, message.name, message.path, message.in_place,
        tuple(one_of(tag, TAGS, "tags") for tag in message.tags), message.mode,
    )  # fmt: skip


def controlled_to_wire(value: Controlled) -> node_pb2.Controlled:
    return node_pb2.Controlled(
        number=value.number,
        code=value.code,
        message=value.message,
        field=value.field or "",
        detail=value.detail,
    )


def controlled_from_wire(message: node_pb2.Controlled) -> Controlled:
    return Controlled(
        message.number, message.code, message.message, message.field or None, message.detail
    )


def flow_to_wire(value: KVFlow) -> node_pb2.KvFlow:
    return node_pb2.KvFlow(
        peer=value.peer,
        lane=value.lane,
        bytes=value.num_bytes,
        transfers=value.transfers,
        faults=value.faults,
        ms_p50=value.ms_p50,
        ms_p99=value.ms_p99,
    )


def flow_from_wire(message: node_pb2.KvFlow) -> KVFlow:
    return KVFlow(
        message.peer, message.lane, message.bytes, message.transfers, message.faults,
        message.ms_p50, message.ms_p99,
    )  # fmt: skip


def adapters_to_wire(value: AdapterList | None) -> node_pb2.AdapterList | None:
    if value is None:
        return None
    return node_pb2.AdapterList(held=value.held, leaving=value.leaving)


def adapters_from_wire(message: node_pb2.NodeStep) -> AdapterList | None:
    """Return the adapters that a step reports; None if they have not changed."""
    if not message.HasField("adapters"):
        return None
    return AdapterList(tuple(message.adapters.held), tuple(message.adapters.leaving))
