"""The model names that clients may use: those of the served models, and of their LoRA adapters.

A node's record lists the node's adapters. The policy sends a request only to nodes of its model
that have its adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from baton.protocol.adapters import adapter_name, ids_named
from baton.protocol.errors import InvalidRequest, ModelNotFound, Unavailable, UnsupportedFeature
from baton.protocol.handles import NodeRecord
from router.api.openai.replies import Model
from router.models import ServedModel
from router.nodes.registry import ReportedModel
from router.services import RouterServices

MOST_NAMES: Final = 20  # names that an error message lists


@dataclass(frozen=True, slots=True)
class ServedCall:
    """The model that one request is for, looked up once. `info`: what its nodes say. `name`: in
    answers. `adapter`: the id of the adapter that the client named, "" for none."""

    model: ServedModel
    info: ReportedModel
    name: str
    adapter: str = ""

    @property
    def shown(self) -> str:
        """The name that the client meant: the adapter's, or the model's."""
        return adapter_name(self.adapter) or self.name


def served_model(
    services: RouterServices, asked: str | None, *, writes: bool = False
) -> ServedCall:
    """Return the model that a client's `model` names, by a name of its own or an adapter's.

    Without a name there must be one model. `writes`: the request wants text.
    Raises ModelNotFound for a name that is neither a model's nor an adapter's; InvalidRequest if
    there is no name and several models; UnsupportedFeature if an encoder should write text;
    Unavailable if no node is there to say."""
    registry = services.registry
    for model in services.models.all:
        info = registry.model(model.key)
        names = model.names(info)
        adapter = ""
        if asked is None:
            if len(services.models.all) > 1:
                raise _unnamed(services)
        elif asked not in names:
            adapter = adapter_of(services, model, asked)
            if not adapter:
                continue
        if info is None:
            raise Unavailable("no node has registered yet")
        if writes and model.encoder is not None:
            raise UnsupportedFeature(
                "the served model is an encoder and writes no text: ask /v1/embeddings, "
                "/v1/rerank, /v1/score or /classify",
                field="model",
            )
        return ServedCall(model, info, names[0], adapter)
    if not registry.records():  # nobody can say which adapters there are
        unknown_yet = all(registry.model(model.key) is None for model in services.models.all)
        raise Unavailable("no node has registered yet" if unknown_yet else "no node is connected")
    raise unknown(asked or "", known_names(services))


def longest_context(services: RouterServices) -> int:
    """Return the longest context of all models, in tokens. Raises Unavailable without nodes."""
    infos = [services.registry.model(model.key) for model in services.models.all]
    found = [info.max_model_len for info in infos if info is not None]
    if not found:
        raise Unavailable("no node has registered yet")
    return max(found)


def unknown(asked: str, names: Sequence[str], field: str = "model") -> ModelNotFound:
    """Return the error for a name that is none of `names`."""
    there = ", ".join(names[:MOST_NAMES])
    return ModelNotFound(
        f"the model {asked[:200]!r} does not exist; there are: {there}", field=field
    )


def model_names(services: RouterServices) -> list[str]:
    """Return the names of all models, in the order of the file."""
    infos = [(model, services.registry.model(model.key)) for model in services.models.all]
    return [name for model, info in infos for name in model.names(info)]


def known_names(services: RouterServices) -> list[str]:
    """Return the names of all models, and those of their adapters."""
    found = [name for model in services.models.all for name in adapters(services, model)]
    return list(dict.fromkeys([*model_names(services), *found]))


def adapters(services: RouterServices, model: ServedModel) -> list[str]:
    """Return the sorted names of the adapters that a connected node of a model offers to new
    requests, if clients may use them."""
    records = services.registry.records(model.key)
    found = {adapter_name(id_) for record in records for id_ in offered(record)}
    return sorted(found if model.adapters is None else found & model.adapters)


def adapter_of(services: RouterServices, model: ServedModel, asked: str) -> str:
    """Return the id of the adapter of a model that a client names, "" for an unknown name.

    While the weights of an adapter are being replaced, its name has several ids. An id that nodes
    of every role have is preferred; among those, the id that most nodes offer.
    """
    records = services.registry.records(model.key)
    found = sorted({id_ for record in records for id_ in ids_named(asked, offered(record))})
    if model.adapters is not None:
        found = [id_ for id_ in found if adapter_name(id_) in model.adapters]
    if len(found) < 2:
        return found[0] if found else ""
    roles = {record.role for record in records}

    def worth(id_: str) -> tuple[bool, int]:
        everywhere = {record.role for record in records if id_ in record.adapters} == roles
        return everywhere, sum(id_ in offered(record) for record in records)

    return max(found, key=worth)


def adapter_named(services: RouterServices, model: ServedModel, name: str) -> str:
    """Return the id of the adapter of a model called `name`; "" for the empty name.

    Raises ModelNotFound if no node offers that adapter."""
    id_ = adapter_of(services, model, name) if name else ""
    if name and not id_:
        raise unknown(name, adapters(services, model), field="adapter")
    return id_


def offered(record: NodeRecord) -> list[str]:
    """Return the ids of the adapters that a node offers to new requests."""
    return [id_ for id_ in record.adapters if id_ not in record.leaving_adapters]


def cards(services: RouterServices, created: int) -> list[Model]:
    """Return the entries of /v1/models: each model that a node has registered, under each of its
    names, then the adapters."""
    own: list[Model] = []
    more: dict[str, Model] = {}
    for model in services.models.all:
        info = services.registry.model(model.key)
        if info is None:
            continue
        names, most = model.names(info), info.max_model_len
        task = msgspec.UNSET if model.encoder is None else model.encoder.task
        own += [Model(name, created, info.name, most, task=task) for name in names]
        for adapter in adapters(services, model):
            more.setdefault(adapter, Model(adapter, created, adapter, most, parent=names[0]))
    taken = {card.id for card in own}
    return own + [card for name, card in more.items() if name not in taken]


def _unnamed(services: RouterServices) -> InvalidRequest:
    there = ", ".join(known_names(services)[:MOST_NAMES])
    return InvalidRequest(f"model is missing: this server has several, {there}", field="model")
