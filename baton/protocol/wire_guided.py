"""GuidedDecoding <-> protobuf: the same message for nodes (wire.py) and for gRPC clients."""

from __future__ import annotations

from typing import Any, Final, Literal, cast

from baton.protocol.sampling import GuidedDecoding
from baton.protocol.wire_checks import one_of
from protos import node_pb2

GUIDED_KINDS: Final = (
    "json_schema", "json_object", "regex", "ebnf", "choice", "structural_tag", "free",
)  # fmt: skip


def guided_to_wire(guided: GuidedDecoding) -> node_pb2.GuidedDecoding:
    return node_pb2.GuidedDecoding(
        kind=guided.kind,
        grammar=guided.grammar,
        backend=guided.backend,
        whitespace=guided.whitespace,
        starts_after=guided.starts_after,
        most_thought=guided.most_thought,
        thought_start=guided.thought_start,
    )


def guided_from_wire(message: Any) -> GuidedDecoding | None:
    """What a message with a field `guided` says. Raises InvalidRequest for an unknown kind."""
    if not message.HasField("guided"):
        return None
    guided: node_pb2.GuidedDecoding = message.guided
    return GuidedDecoding(
        kind=cast("Literal['regex']", one_of(guided.kind, GUIDED_KINDS, "guided")),
        grammar=guided.grammar,
        backend=guided.backend,
        whitespace=guided.whitespace if guided.HasField("whitespace") else None,
        starts_after=guided.starts_after,
        most_thought=guided.most_thought if guided.HasField("most_thought") else None,
        thought_start=guided.thought_start,
    )
