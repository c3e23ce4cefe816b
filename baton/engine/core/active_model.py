"""ActiveModel: what an engine's steps need of a model in memory.

It is replaced as a whole: assembly.py gives an engine its first one; sleeping.py takes it away and
later gives the engine another (Engine.use).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.engine.config import EngineConfig
from baton.engine.core.pooling import Pooler
from baton.engine.loading.loading import LoadedModel
from baton.engine.memory.kv_cache import KVArena
from baton.engine.parallel.lockstep import Lockstep
from baton.engine.performance.meter import Meter
from baton.engine.running.head_drafts import make_runner
from baton.engine.running.speculation import load_proposer
from baton.engine.sampling.proposer import Proposer
from baton.engine.state.interface import ChunkResult, Runner, SequenceChunk
from baton.engine.state.work import Utilization
from baton.protocol.errors import InternalError

if TYPE_CHECKING:  # lazy at run time: it takes transformers, which takes seconds
    from baton.engine.encoders.encoder import Encoder
    from baton.engine.vision.encoder import ImageEncoder


class NoModel:
    """The runner of an engine that sleeps: a step raises InternalError."""

    def run(
        self, chunks: Sequence[SequenceChunk], on_layer: Callable[[int], None] | None = None
    ) -> list[ChunkResult]:
        """See interface.Runner.run."""
        raise InternalError("the engine has no model in memory")


@dataclass(frozen=True, slots=True)
class ActiveModel:
    """A model in memory, ready for steps.

    `runner` runs the steps. The other fields are None without a real model: `pooler` is for
    embeddings and reranking, `proposer` for speculation, `when_idle` is called once the work has
    ended. `utilization`: where `runner` counts how much of the machine the steps use. `lockstep`:
    in which the forwards meet those of other ranks. `encoder`: set if the model is one, and
    `image_encoder` if only its vision tower is loaded; then no step runs.
    """

    runner: Runner
    model: LoadedModel | None = None
    pooler: Pooler | None = None
    proposer: Proposer | None = None
    when_idle: Callable[[], None] | None = None
    utilization: Utilization = field(default_factory=Utilization)
    lockstep: Lockstep | None = None
    encoder: Encoder | None = None
    image_encoder: ImageEncoder | None = None


def activate(
    model: LoadedModel,
    draft: LoadedModel | None,
    config: EngineConfig,
    arena: KVArena,
    utilization: Utilization,
) -> ActiveModel:
    """Return the parts that run steps of `model` over `arena`.

    `draft` proposes tokens if the config speculates with a draft model. The machine's limits are
    measured into `utilization` unless they are known. `config` has the arena's block size and
    number of blocks. Raises ConfigError for a draft that does not fit the model.
    """
    runner = make_runner(model, arena, config.num_speculative_tokens)
    meter = Meter(runner, model, config, utilization)
    pooler = None
    if arena.states is None:  # prompts of a pooling job have no state slots
        pooler = Pooler(model, arena, config.max_num_batched_tokens, config.max_num_seqs)
    proposer = load_proposer(config, model.info, draft)
    return ActiveModel(
        meter, model, pooler, proposer, meter.look_again, utilization, model.lockstep
    )
