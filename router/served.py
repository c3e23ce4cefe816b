"""The names that clients may ask for: the served model's, and those of its LoRA adapters.

Nodes say in their records which adapters they have; the policy sends a request to nodes that have
the one it asks for.
"""

from __future__ import annotations

from typing import Protocol

from baton.errors import ModelNotFound, Unavailable
from router.openai_replies import Model
from router.services import RouterServices


class ServedModel(Protocol):
    """What `registry.model()` tells."""

    @property
    def name(self) -> str: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...


def served_model(services: RouterServices, asked: str | None) -> ServedModel:
    """The served model. Raises ModelNotFound for a name that is neither its own nor an adapter's,
    Unavailable without a node."""
    model: ServedModel | None = services.registry.model()
    if model is None:
        raise Unavailable("no node has registered yet")
    known = asked is None or asked == model_name(services, model) or adapter_of(services, asked)
    if not known and not services.registry.records():
        raise Unavailable("no node is connected")  # nobody can say which adapters there are
    if not known:
        raise ModelNotFound(f"the model {(asked or '')[:200]!r} does not exist", field="model")
    return model


def model_name(services: RouterServices, model: ServedModel) -> str:
    """As this router calls it."""
    return services.config.served_model_name or model.name


def adapters(services: RouterServices) -> list[str]:
    """Those that some connected node has, by name."""
    return sorted({name for record in services.registry.records() for name in record.adapters})


def adapter_of(services: RouterServices, asked: str | None) -> str:
    """The adapter that a client's `model` names, "" if it is the model itself (or unknown)."""
    model: ServedModel | None = services.registry.model()
    if asked is None or model is None or asked == model_name(services, model):
        return ""
    return asked if asked in adapters(services) else ""


def cards(services: RouterServices, created: int) -> list[Model]:
    """What /v1/models lists: the model, then its adapters, whose parent it is."""
    model: ServedModel | None = services.registry.model()
    if model is None:
        return []
    name = model_name(services, model)
    own = Model(name, created, model.name, model.max_model_len)
    return [own] + [
        Model(adapter, created, adapter, model.max_model_len, parent=name)
        for adapter in adapters(services)
        if adapter != name
    ]
