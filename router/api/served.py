"""The model names that clients may use: the served model's names, and those of its LoRA adapters.

A node's record lists the node's adapters. The policy sends a request only to nodes that have its
adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import msgspec

from baton.protocol.adapters import adapter_name, ids_named
from baton.protocol.errors import ModelNotFound, Unavailable, UnsupportedFeature
from baton.protocol.handles import NodeRecord
from router.api.openai.replies import Model
from router.services import RouterServices

MOST_NAMES: Final = 20  # names that an error message lists


class ServedName(Protocol):
    """What this file needs of the model that `registry.model()` returns."""

    @property
    def name(self) -> str: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...


def served_model(services: RouterServices, asked: str | None) -> tuple[ServedName, str, str]:
    """Return the served model, its name in answers, and the id of the adapter that a client's
    `model` names ("" for none).

    Raises ModelNotFound for a name that is neither the model's nor an adapter's; Unavailable if no
    node is there to say."""
    model: ServedName | None = services.registry.model()
    if model is None:
        raise Unavailable("no node has registered yet")
    names = model_names(services, model)
    if asked is None or asked in names:
        return model, names[0], ""
    adapter = adapter_of(services, asked)
    if adapter:
        return model, names[0], adapter
    if not services.registry.records():
        raise Unavailable("no node is connected")  # nobody can say which adapters there are
    raise unknown(asked, [*names, *adapters(services)])


def refuse_encoder(services: RouterServices) -> None:
    """Raise UnsupportedFeature if the served model is an encoder, which writes no text."""
    if services.encoder is not None:
        message = (
            "the served model is an encoder and writes no text: ask /v1/embeddings, /v1/rerank, "
            "/v1/score or /classify"
        )
        raise UnsupportedFeature(message, field="model")


def unknown(asked: str, names: Sequence[str], field: str = "model") -> ModelNotFound:
    """Return the error for a name that is none of `names`."""
    there = ", ".join(names[:MOST_NAMES])
    return ModelNotFound(
        f"the model {asked[:200]!r} does not exist; there are: {there}", field=field
    )


def model_names(services: RouterServices, model: ServedName) -> tuple[str, ...]:
    """Return the names that clients may use for the model. Answers use the first."""
    return services.config.served_model_name or (model.name,)


def adapters(services: RouterServices) -> list[str]:
    """Return the sorted names of the adapters that a connected node offers to new requests."""
    records = services.registry.records()
    return sorted({adapter_name(id_) for record in records for id_ in offered(record)})


def adapter_of(services: RouterServices, asked: str) -> str:
    """Return the id of the adapter that a client's `model` names, "" for an unknown name.

    While the weights of an adapter are being replaced, its name has several ids. An id that nodes
    of every role have is preferred; among those, the id that most nodes offer.
    """
    records = services.registry.records()
    found = sorted({id_ for record in records for id_ in ids_named(asked, offered(record))})
    if len(found) < 2:
        return found[0] if found else ""
    roles = {record.role for record in records}

    def worth(id_: str) -> tuple[bool, int]:
        everywhere = {record.role for record in records if id_ in record.adapters} == roles
        return everywhere, sum(id_ in offered(record) for record in records)

    return max(found, key=worth)


def adapter_named(services: RouterServices, name: str) -> str:
    """Return the id of the adapter called `name`; "" for the empty name.

    Raises ModelNotFound if no node offers that adapter."""
    id_ = adapter_of(services, name) if name else ""
    if name and not id_:
        raise unknown(name, adapters(services), field="adapter")
    return id_


def offered(record: NodeRecord) -> list[str]:
    """Return the ids of the adapters that a node offers to new requests."""
    return [id_ for id_ in record.adapters if id_ not in record.leaving_adapters]


def cards(services: RouterServices, created: int) -> list[Model]:
    """Return the entries of /v1/models: the model under each of its names, then its adapters."""
    model: ServedName | None = services.registry.model()
    if model is None:
        return []
    names, most = model_names(services, model), model.max_model_len
    task = msgspec.UNSET if services.encoder is None else services.encoder.task
    own = [Model(name, created, model.name, most, task=task) for name in names]
    return own + [
        Model(adapter, created, adapter, most, parent=names[0])
        for adapter in adapters(services)
        if adapter not in names
    ]
