"""An engine over a real model: put together, its model taken away, and given one again.

assemble()   weights, KV arena, engine
strip()      nothing of the engine refers to weights any more; a step would raise
furnish()    a model that was loaded again (or the first one) runs its steps
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from baton.engine.checkpoint.checkpoint import as_stored
from baton.engine.config import DEFAULT_BLOCK_SIZE, EngineConfig
from baton.engine.core.engine import Engine
from baton.engine.core.grammars import grammars_of
from baton.engine.core.pooling import Pooler
from baton.engine.loading.loading import LoadedModel, load_model
from baton.engine.memory.kv_cache import MakeMemory
from baton.engine.memory.lengths import model_len
from baton.engine.performance.meter import Meter
from baton.engine.running.runner import ModelRunner
from baton.engine.running.sizing import make_pool, size_pool
from baton.engine.running.speculation import load_draft, load_proposer
from baton.engine.state.interface import ChunkResult, EngineHooks, SequenceChunk
from baton.protocol.errors import InternalError


class NoModel:
    """The runner of an engine without a model."""

    def run(
        self, chunks: Sequence[SequenceChunk], on_layer: Callable[[int], None] | None = None
    ) -> list[ChunkResult]:
        """See interface.Runner.run."""
        raise InternalError("the engine has no model in memory")


def assemble(
    make: type[Engine], config: EngineConfig, hooks: EngineHooks | None, memory: MakeMemory | None
) -> Engine:
    """See Engine.load."""
    config = as_stored(config)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    model, draft = load_model(config), load_draft(config)
    info, device = model.info, model.device
    block_size = config.block_size or DEFAULT_BLOCK_SIZE[device.type]
    num_blocks = size_pool(config, model, block_size, model_len(config, info), draft)
    arena = make_pool(model, num_blocks, block_size, memory)
    engine = make(config, NoModel(), arena, info, hooks)
    engine.ranks, engine.grammars = model.ranks, grammars_of(config, info)
    furnish(engine, model, draft)
    return engine


def furnish(engine: Engine, model: LoadedModel, draft: LoadedModel | None) -> None:
    """Run `model` from now on, and let `draft` guess. Engine thread, or before it starts."""
    config = engine.config
    meter = Meter(ModelRunner(model, engine.arena), model)
    meter.tell(engine.stats, config)
    engine.steps.use(meter)
    engine.when_idle = meter.look_again
    engine.pooler = Pooler(model, engine.arena, config.max_num_batched_tokens, config.max_num_seqs)
    # The model of more ranks, and a longest length of the pool's, are the engine's own business.
    proposer = load_proposer(config, replace(engine.info, layers=model.info.layers), draft)
    if proposer is not None:
        engine.set_proposer(proposer)
    engine.model = model
    engine.set_adapters(model.info.adapters, config.lora_modules)


def strip(engine: Engine) -> None:
    """Forget the model and its draft. Only without requests; engine thread."""
    engine.steps.wait()
    engine.steps.use(NoModel())
    engine.when_idle = None
    engine.pooler = None
    engine.set_proposer(None)
    engine.model = None
