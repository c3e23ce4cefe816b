"""SamplingParams to protobuf and back: for nodes (node.proto) and for gRPC clients (serve.proto).

A field that SamplingParams and a message have under the same name is copied without code of its
own: the message's declaration says what kind of field it is. Only the names in BY_HAND have code
here. TEXT_FIELDS are not copied: they are for callers that turn tokens into text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from operator import attrgetter
from typing import Any, Final, Literal, TypeVar, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from baton.protocol.errors import InvalidRequest
from baton.protocol.sampling import GuidedDecoding, SamplingParams
from baton.protocol.wire_checks import nothing_unknown, one_of
from protos import node_pb2

EARLY_STOPPING: Final = ("false", "true", "never")
GUIDED_KINDS: Final = (
    "json_schema", "json_object", "regex", "ebnf", "choice", "structural_tag", "free",
)  # fmt: skip
TEXT_FIELDS: Final = frozenset({"stop", "include_stop_str_in_output", "skip_special_tokens"})
BY_HAND: Final = frozenset({"logit_bias", "bad_words", "guided"})

M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True)
class _Names:
    """The names of a message's fields that are copied without code of their own.

    `always`: fields without presence, whose absence means zero. `optional`: fields that may be
    absent. `repeated`: lists. `all`: these three together. `values` returns the values of `all`
    from a SamplingParams, in that order.
    """

    always: tuple[str, ...]
    optional: tuple[str, ...]
    repeated: tuple[str, ...]
    all: tuple[str, ...]
    values: Callable[[SamplingParams], tuple[Any, ...]]


@cache
def _names(kind: Descriptor) -> _Names:
    known = {spec.name for spec in fields(SamplingParams)} - BY_HAND - TEXT_FIELDS
    found: dict[str, list[str]] = {"always": [], "optional": [], "repeated": []}
    for spec in kind.fields:
        if spec.name in known:
            found[_presence(spec)].append(spec.name)
    always, optional, repeated = (tuple(names) for names in found.values())
    every = (*always, *optional, *repeated)
    return _Names(always, optional, repeated, every, attrgetter(*every))


def _presence(spec: FieldDescriptor) -> str:
    if spec.is_repeated:
        return "repeated"
    return "optional" if spec.has_presence else "always"


def sampling_message(params: SamplingParams, kind: type[M]) -> M:
    """Return a message of this kind with all fields that it shares with SamplingParams.

    TEXT_FIELDS are left out.
    """
    names = _names(kind.DESCRIPTOR)
    # A zero or empty value needs no field on the wire, unless the field may be absent.
    values = {
        name: value
        for name, value in zip(names.all, names.values(params), strict=True)
        if value or (value is not None and name in names.optional)
    }
    message = kind(**values)
    _write_by_hand(message, params)
    return message


def _write_by_hand(message: Any, params: SamplingParams) -> None:
    """Write the fields BY_HAND into a message."""
    if params.logit_bias:
        message.logit_bias.update(params.logit_bias)
    if params.bad_words:
        message.bad_words.extend(node_pb2.TokenIds(ids=word) for word in params.bad_words)
    if params.guided is not None:
        message.guided.CopyFrom(guided_to_wire(params.guided))


def sampling_fields(message: Any) -> dict[str, Any]:
    """Return keyword arguments for SamplingParams from a message of node.proto or serve.proto.

    Optional fields that are not set are left out, so the defaults of SamplingParams hold. Raises
    InvalidRequest for an unknown value of `early_stopping` or `guided.kind`.
    """
    names = _names(message.DESCRIPTOR)
    given = {name: getattr(message, name) for name in names.always}
    for name in names.optional:
        if message.HasField(name):
            given[name] = getattr(message, name)
    for name in names.repeated:
        given[name] = tuple(getattr(message, name))
    if "best_of" in names.always:
        given["best_of"] = message.best_of or None
    if "early_stopping" in given:
        one_of(given["early_stopping"], EARLY_STOPPING, "early_stopping")
    given["logit_bias"] = tuple(sorted(message.logit_bias.items()))
    given["bad_words"] = tuple(tuple(word.ids) for word in message.bad_words)
    given["guided"] = guided_from_wire(message)
    return given


def write_sampling(message: node_pb2.SamplingParams, params: SamplingParams) -> None:
    """Write the parameters into an empty message for a node.

    Raises InvalidRequest for a seed that nobody has drawn.
    """
    if params.seed is None:
        raise InvalidRequest("the seed must be drawn before a request travels", field="seed")
    message.MergeFromString(_plain_bytes(_plain(params)))
    message.seed = params.seed
    for name, ids in zip(_LISTS, _lists(params), strict=True):
        if ids:
            getattr(message, name).extend(ids)
    _write_by_hand(message, params)


@lru_cache(maxsize=256)  # most requests of an application have the same, but for the seed
def _plain_bytes(values: tuple[Any, ...]) -> bytes:
    """Serialize the values of the fields _PLAIN."""
    given = {
        name: value
        for name, value in zip(_PLAIN, values, strict=True)
        if value or (value is not None and name in _NODES.optional)
    }
    return node_pb2.SamplingParams(**given).SerializeToString()


_NODES: Final = _names(node_pb2.SamplingParams.DESCRIPTOR)
_PLAIN: Final = tuple(name for name in _NODES.always + _NODES.optional if name != "seed")
_LISTS: Final = _NODES.repeated
_plain: Final = attrgetter(*_PLAIN)
_lists: Final = attrgetter(*_LISTS)


def sampling_from_wire(message: node_pb2.SamplingParams) -> SamplingParams:
    """Read the message at a node. Raises InvalidRequest for bad values and for unknown fields."""
    nothing_unknown(message, "params")
    return SamplingParams(**sampling_fields(message))


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
    """Return the grammar of a message with a field `guided`; None if it has none.

    Raises InvalidRequest for an unknown kind.
    """
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
