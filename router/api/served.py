"""The names that clients may ask for: the served model's, and those of its LoRA adapters.

Nodes say in their records which adapters they have; the policy sends a request to nodes that have
the one it asks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from baton.protocol.adapters import adapter_name, ids_named
from baton.protocol.errors import ModelNotFound, Unavailable
from baton.protocol.handles import NodeRecord
from router.api.openai.replies import Model
from router.services import RouterServices

MOST_NAMES: Final = 20  # told of those that there are


class ServedName(Protocol):
    """What `registry.model()` tells."""

    @property
    def name(self) -> str: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...


def served_model(services: RouterServices, asked: str | None) -> tuple[ServedName, str, str]:
    """The served model, what this router calls it, and the id of the adapter that a client's
    `model` names, "" for none.

    Raises ModelNotFound for a name that is neither the model's nor an adapter's, Unavailable
    without a node."""
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


def unknown(asked: str, names: Sequence[str], field: str = "model") -> ModelNotFound:
    """What to tell of a name that is none of `names`."""
    there = ", ".join(names[:MOST_NAMES])
    return ModelNotFound(
        f"the model {asked[:200]!r} does not exist; there are: {there}", field=field
    )


def model_names(services: RouterServices, model: ServedName) -> tuple[str, ...]:
    """What clients may call it; answers say the first."""
    return services.config.served_model_name or (model.name,)


def adapters(services: RouterServices) -> list[str]:
    """Those that some connected node has for new requests, by name."""
    records = services.registry.records()
    return sorted({adapter_name(id_) for record in records for id_ in offered(record)})


def adapter_of(services: RouterServices, asked: str) -> str:
    """The id of the adapter that a client's `model` names, "" if it is unknown.

    While its weights are being replaced a name has several: one that each role has wins, then the
    one that most nodes offer.
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
    """Its id; "" for none. Raises ModelNotFound for one that no node offers."""
    id_ = adapter_of(services, name) if name else ""
    if name and not id_:
        raise unknown(name, adapters(services), field="adapter")
    return id_


def offered(record: NodeRecord) -> list[str]:
    """Ids of the adapters that new requests may have there."""
    return [id_ for id_ in record.adapters if id_ not in record.leaving_adapters]


def cards(services: RouterServices, created: int) -> list[Model]:
    """What /v1/models lists: the model by each of its names, then its adapters."""
    model: ServedName | None = services.registry.model()
    if model is None:
        return []
    names, most = model_names(services, model), model.max_model_len
    own = [Model(name, created, model.name, most) for name in names]
    return own + [
        Model(adapter, created, adapter, most, parent=names[0])
        for adapter in adapters(services)
        if adapter not in names
    ]
