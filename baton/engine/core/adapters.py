"""LoRA adapters that are added and removed while an engine runs. Engine thread, between steps.

    add      read() on any thread -> attach(): requests may use it from the next step on
    remove   the node no longer publishes it -> detach() once no request here uses it

Weights are distinguished by id (baton/protocol/adapters.py), so a name's old and new contents can
be in memory together. The ranks of a tensor-parallel model would have to change in step: refused
there.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from baton.engine.core.engine import Engine
from baton.engine.loading.loading import LoadedModel
from baton.engine.models.deterministic import FixedTiles, prove
from baton.engine.models.lora import Adapter, read_adapter
from baton.protocol.adapters import adapter_name
from baton.protocol.errors import InvalidRequest, UnsupportedFeature

MOST: Final = 256  # adapters at once: each takes memory, and a name in every node's record


def read(model: LoadedModel, name: str, path: Path) -> Adapter:
    """Read an adapter's files. Any thread. Raises ModelRefused if it cannot be served exactly."""
    return read_adapter(name, path, model.dtype, model.device)


def model_of(engine: Engine) -> LoadedModel:
    """Return the engine's model. Raises UnsupportedFeature if its adapters cannot change."""
    model = engine.model
    if model is None:
        raise UnsupportedFeature("this engine has no model of its own", field="lora_name")
    if model.ranks is not None:
        raise UnsupportedFeature(
            "adapters of a model split over ranks are given at its start (--lora-modules)",
            field="lora_name",
        )
    return model


def attach(engine: Engine, adapter: Adapter, path: Path) -> None:
    """Serve `adapter`. Raises ModelRefused (then nothing has changed) and InvalidRequest."""
    model, ids = model_of(engine), engine.info.adapters
    if adapter.id in ids:
        return
    if len(ids) >= MOST:
        raise InvalidRequest(f"there are {MOST} adapters already", field="lora_name")
    engine.steps.wait()
    try:
        model.model.add_adapter(adapter)
        if isinstance(model.model, FixedTiles):
            prove(model.model, replace(engine.info, adapters=(adapter.id,)), model.device)
    except BaseException:
        model.model.remove_adapter(adapter.id)
        raise
    others = [entry for entry in engine.config.lora_modules if _name(entry) != adapter.name]
    engine.set_adapters((*ids, adapter.id), (*others, f"{adapter.name}={path}"))


def forget(engine: Engine, name: str) -> None:
    """Leave the adapter out of later loads of the model; its weights stay in memory."""
    kept = [entry for entry in engine.config.lora_modules if _name(entry) != name]
    engine.set_adapters(engine.info.adapters, tuple(kept))


def detach(engine: Engine, id_: str) -> bool:
    """Free the adapter's weights. Return False, and change nothing, while a request here
    uses them.
    """
    if id_ not in engine.info.adapters:
        return True
    if engine.uses_adapter(id_):
        return False
    engine.steps.wait()
    model_of(engine).model.remove_adapter(id_)
    kept = tuple(other for other in engine.info.adapters if other != id_)
    engine.set_adapters(kept, engine.config.lora_modules)
    if not any(adapter_name(other) == adapter_name(id_) for other in kept):
        forget(engine, adapter_name(id_))
    return True


def _name(entry: str) -> str:
    return entry.partition("=")[0]
