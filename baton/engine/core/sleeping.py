"""An engine that sleeps: without its weights and without the memory of its KV, until it wakes.

    fall_asleep()  engine thread, without requests: model and draft are forgotten, the pool's memory
                   goes back to the machine, every cached prefix with it
    reload()       any thread: weights from the checkpoint again, its adapters included
    wake()         engine thread: as before, with nothing cached

The pool's addresses stay, so transfers need not know of it. On a GPU the pool's memory stays as
well: lanes have published its addresses to peers.
"""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass

import torch

from baton.engine.config import EngineConfig
from baton.engine.core.active_model import ActiveModel, NoModel, activate
from baton.engine.core.engine import Engine
from baton.engine.loading.loading import LoadedModel, load_model
from baton.engine.running.speculation import load_draft
from baton.protocol.errors import ConfigError, InternalError, UnsupportedFeature
from baton.runtime import heap

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reloaded:
    model: LoadedModel
    draft: LoadedModel | None


def check(engine: Engine) -> None:
    """Raise UnsupportedFeature for an engine that cannot sleep."""
    if engine.model is None:
        raise UnsupportedFeature("this engine has no model of its own", field="level")
    if engine.model.ranks is not None:
        raise UnsupportedFeature("a model split over ranks cannot sleep yet", field="level")
    if engine.model.lockstep is not None:
        raise UnsupportedFeature("a rank of a data-parallel group cannot sleep yet", field="level")


def fall_asleep(engine: Engine) -> None:
    """Free weights and KV memory. Raises UnsupportedFeature (see check), InternalError while
    anything is under way.
    """
    check(engine)
    if engine.has_work or engine.pool.num_used:
        raise InternalError("an engine with requests cannot sleep")
    device = engine.arena.device
    engine.clear_prefixes()
    engine.use(ActiveModel(NoModel()))
    gc.collect()
    kept = not engine.arena.give_back()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    heap.trim()
    log.info("asleep: the weights are released%s", "" if kept else ", and the KV pool's memory")


def reload(config: EngineConfig) -> Reloaded:
    """Load the weights again. `config`: the engine's present one. Raises the ConfigErrors of
    load_model.
    """
    return Reloaded(load_model(config), load_draft(config))


def wake(engine: Engine, loaded: Reloaded) -> None:
    """Give the engine its model and memory back.

    Raises ConfigError for another model than the one that fell asleep, Unavailable if there is no
    memory for the pool.
    """
    digest = loaded.model.info.digest
    if digest != engine.info.digest:
        raise ConfigError(
            f"the checkpoint has changed: its digest was {engine.info.digest[:16]} and is "
            f"{digest[:16]}; start the node anew",
            field="model",
        )
    engine.arena.take_again()
    engine.use(
        activate(loaded.model, loaded.draft, engine.config, engine.arena, engine.stats.utilization)
    )
    log.info("awake again")
