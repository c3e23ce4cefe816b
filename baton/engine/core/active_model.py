"""ActiveModel: what an engine's steps need of a model in memory.

It comes and goes as a whole: assembly.py gives an engine its first one, sleeping.py takes it away
and gives it another one (Engine.use).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.engine.config import EngineConfig
from baton.engine.core.pooling import Pooler
from baton.engine.loading.loading import LoadedModel
from baton.engine.memory.kv_cache import KVArena
from baton.engine.performance.meter import Meter
from baton.engine.running.runner import ModelRunner
from baton.engine.running.speculation import load_proposer
from baton.engine.sampling.proposer import Proposer
from baton.engine.state.interface import ChunkResult, Runner, SequenceChunk
from baton.engine.state.work import Utilization
from baton.protocol.errors import InternalError


class NoModel:
    """The runner of an engine that sleeps: a step raises InternalError."""

    def run(
        self, chunks: Sequence[SequenceChunk], on_layer: Callable[[int], None] | None = None
    ) -> list[ChunkResult]:
        """See interface.Runner.run."""
        raise InternalError("the engine has no model in memory")


@dataclass(frozen=True, slots=True)
class ActiveModel:
    """`runner` runs the steps. The rest belongs to a real model: `pooler` for embeddings and
    reranking, `proposer` if it speculates, `when_idle` to be called once the work has ended.
    `utilization`: where `runner` counts what steps need of the machine."""

    runner: Runner
    model: LoadedModel | None = None
    pooler: Pooler | None = None
    proposer: Proposer | None = None
    when_idle: Callable[[], None] | None = None
    utilization: Utilization = field(default_factory=Utilization)


def activate(
    model: LoadedModel,
    draft: LoadedModel | None,
    config: EngineConfig,
    arena: KVArena,
    utilization: Utilization,
) -> ActiveModel:
    """Steps of `model` over `arena`; `draft` guesses if the config speculates with one.

    Measures the machine's limits into `utilization` if nobody knows them. `config` names the
    arena's block size and number. Raises ConfigError for a draft that does not fit the model.
    """
    meter = Meter(ModelRunner(model, arena), model, config, utilization)
    pooler = Pooler(model, arena, config.max_num_batched_tokens, config.max_num_seqs)
    proposer = load_proposer(config, model.info, draft)
    return ActiveModel(meter, model, pooler, proposer, meter.look_again, utilization)
