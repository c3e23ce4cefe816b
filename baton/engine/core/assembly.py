"""Assembly: puts an engine together from complete parts; nothing is set on it afterwards.

load_parts()    weights, KV arena and grammars of a configured model; load_tower_parts(): of its
                vision tower alone
assemble()      scheduler, steps and all that lies around them, over the parts of any runner
build_engine()  both at once

A prefill node calls the first two itself: its engine's hooks export KV of the arena. So the arena
is made first, then the connector over it, then the hooks, then the engine.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch

from baton.engine.checkpoint.checkpoint import as_stored, open_checkpoint
from baton.engine.config import DEFAULT_BLOCK_SIZE, EngineConfig
from baton.engine.core.active_model import ActiveModel, NoModel, activate
from baton.engine.core.announcements import Announcements
from baton.engine.core.engine import Engine
from baton.engine.core.grammars import grammars_of
from baton.engine.core.live_requests import LiveRequests
from baton.engine.core.outputs import Outputs
from baton.engine.core.run_ahead import RunAhead
from baton.engine.core.scheduler import Scheduler
from baton.engine.core.steps import Steps
from baton.engine.core.validation import EngineBounds
from baton.engine.loading.loading import load_model
from baton.engine.memory.adopted_pages import AdoptedPages
from baton.engine.memory.block_pool import BlockPool
from baton.engine.memory.block_tables import BlockTables
from baton.engine.memory.kv_cache import KVArena, MakeMemory, bytes_per_block
from baton.engine.memory.layer_groups import MIN_BLOCKS
from baton.engine.memory.pins import Pins
from baton.engine.memory.state_checkpoints import StateCheckpoints
from baton.engine.memory.state_sizes import sequences_within
from baton.engine.memory.state_slots import StateSlots
from baton.engine.memory.swap import Swapper
from baton.engine.parallel.data_rank import DataRank
from baton.engine.running.sizing import make_pool, size_pool
from baton.engine.running.spare_cores import SpareCores
from baton.engine.running.speculation import Drafter, load_draft
from baton.engine.state.interface import EngineHooks, ModelInfo
from baton.engine.state.place import choose_device
from baton.engine.state.stats import EngineStats
from baton.engine.state.step_plan import StepLimits
from baton.engine.state.work import Utilization
from baton.guided.cache import GrammarCache
from baton.protocol.clock import Clock, SystemClock
from baton.protocol.errors import ConfigError
from baton.text.sentence_files import is_encoder

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What an engine is made of: `active` runs its steps, with KV in `arena`. Guided requests need
    `grammars`. `cores`: of other processes, for steps.
    """

    config: EngineConfig
    active: ActiveModel
    arena: KVArena
    info: ModelInfo
    grammars: GrammarCache | None = None
    cores: SpareCores | None = None


def build_engine(config: EngineConfig, memory: MakeMemory | None = None) -> Engine:
    """Return an engine that exports nothing. Raises the errors of load_parts() and assemble()."""
    return assemble(load_parts(config, memory))


def load_parts(
    config: EngineConfig, memory: MakeMemory | None = None, data: DataRank | None = None
) -> EngineParts:
    """Load the weights of `config.model` and make the KV arena, in `memory` if given (on the CPU
    only). `data`: of a data-parallel group, as whose rank the engine runs.

    The arena's size is what memory is left. Sets the number of torch's threads if the config has
    one. Raises ConfigError (ModelRefused for a checkpoint that cannot be served).
    """
    config = as_stored(config)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if is_encoder(open_checkpoint(config.model).config):
        return _encoder_parts(config, memory)
    model, draft = load_model(config, data=data), load_draft(config)
    info = model.info
    block_size = config.block_size or DEFAULT_BLOCK_SIZE[model.device.type]
    size = size_pool(config, model, block_size, _model_len(config, info), draft)
    arena = make_pool(model, size, block_size, memory)
    config = replace(config, block_size=arena.block_size, num_kv_blocks=arena.num_blocks)
    if size.num_slots:
        most = sequences_within(size.num_slots, speculates=config.speculates)
        config = replace(config, max_num_seqs=most)
    active = activate(model, draft, config, arena, Utilization())
    cores = SpareCores.of(config, model.device)
    return EngineParts(config, active, arena, info, grammars_of(config, info), cores)


def _encoder_parts(config: EngineConfig, memory: MakeMemory | None) -> EngineParts:
    """Load an encoder. It keeps no KV: its pool holds the few bytes that one text of it counts."""
    from baton.engine.encoders.encoder import load_encoder  # lazy: transformers takes seconds

    encoder = load_encoder(config)
    info, device = encoder.info, choose_device(config.device)
    block_size = config.block_size or DEFAULT_BLOCK_SIZE[device.type]
    num_blocks = max(MIN_BLOCKS, -(-info.max_model_len // block_size))
    placed = memory if device.type == "cpu" else None
    arena = KVArena(info.layers, num_blocks, block_size, info.kv_dtype, device, placed)
    config = replace(config, block_size=block_size, num_kv_blocks=num_blocks)
    active = ActiveModel(NoModel(), encoder=encoder)
    return EngineParts(config, active, arena, info)


def load_tower_parts(
    config: EngineConfig, memory: MakeMemory | None = None, data: DataRank | None = None
) -> EngineParts:
    """Load the vision tower of `config.model`, without the language model. The arena holds rows of
    images, as much as `config.image_cache_memory` says; peers do not read it in place, so `memory`
    is not used.

    Raises ConfigError (ModelRefused for a checkpoint that reads no images).
    """
    from baton.engine.loading.tower import load_image_encoder  # lazy: transformers takes seconds

    if data is not None:
        raise ConfigError("an encode node has one rank", field="data_parallel_size")
    config = as_stored(config)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    encoder = load_image_encoder(config)
    info, device = encoder.info, choose_device(config.device)
    block_size = config.block_size or DEFAULT_BLOCK_SIZE[device.type]
    page_bytes = bytes_per_block(info.layers, block_size, info.kv_dtype)
    num_blocks = max(MIN_BLOCKS, config.image_cache_bytes // page_bytes)
    arena = KVArena(info.layers, num_blocks, block_size, info.kv_dtype, device)
    info = replace(info, max_model_len=max(2, min(info.max_model_len, num_blocks * block_size)))
    config = replace(
        config, block_size=block_size, num_kv_blocks=num_blocks, max_model_len=None,
        enable_prefix_caching=True, async_scheduling=False,
    )  # fmt: skip
    return EngineParts(config, ActiveModel(NoModel(), image_encoder=encoder), arena, info)


def assemble(
    parts: EngineParts, hooks: EngineHooks | None = None, clock: Clock | None = None
) -> Engine:
    """Return an engine of `parts`, which nobody else may use from now on.

    It exports its PREFILL requests through `hooks`; None = not at all. Raises ConfigError for a
    pool that holds no token, or a longest length beyond the model's.
    """
    config, active, arena, info = parts.config, parts.active, parts.arena, parts.info
    clock, stats = clock or SystemClock(), EngineStats(utilization=active.utilization)
    bounds = _bounds(config, info, arena)
    pool = BlockPool(arena.num_blocks, arena.block_size, config.enable_prefix_caching)
    states, spacing = StateSlots(arena.states), config.state_checkpoint_spacing
    checkpoints = StateCheckpoints(pool, stats, arena.states, spacing)
    tables = BlockTables(pool, arena, stats, arena.groups.windows, states, checkpoints)
    pins = Pins(tables)
    announcements = Announcements(pins, stats, hooks)
    block_bytes = arena.num_bytes // arena.num_blocks
    scheduler = Scheduler(
        tables,
        Swapper(tables, stats, clock, config.preemption_mode, block_bytes),
        StepLimits(config.max_num_seqs, config.max_num_batched_tokens),
        stats,
        announcements.may_admit,
        Drafter.of(active.proposer, config),
    )
    requests = LiveRequests(scheduler, stats)
    adopted = AdoptedPages(tables, stats, clock, block_bytes, requests.leader)
    ahead = None
    if config.async_scheduling:
        ahead = RunAhead(active.runner, bounds.local_len, parts.cores)
    steps = Steps(
        scheduler, active.runner, announcements, requests, adopted, stats, clock, ahead,
        prove=config.check_invariants, cores=parts.cores,
    )  # fmt: skip
    return Engine(
        config=replace(
            config,
            block_size=arena.block_size,
            num_kv_blocks=arena.num_blocks,
            max_model_len=bounds.local_len,
        ),
        info=replace(info, max_model_len=bounds.local_len),
        arena=arena,
        stats=stats,
        bounds=bounds,
        tables=tables,
        pins=pins,
        scheduler=scheduler,
        requests=requests,
        adopted=adopted,
        announcements=announcements,
        steps=steps,
        outputs=Outputs(scheduler, stats, info.eos_token_ids, bounds.limit, requests.finished),
        active=active,
        grammars=parts.grammars,
    )


def _model_len(config: EngineConfig, info: ModelInfo) -> int:
    """Return the configured longest length, else the model's. Raises ConfigError if it exceeds
    that.
    """
    if config.max_model_len is None:
        return info.max_model_len
    if config.max_model_len > info.max_model_len:
        raise ConfigError(
            f"max_model_len {config.max_model_len} exceeds the model's {info.max_model_len}",
            field="max_model_len",
        )
    return config.max_model_len


def _pool_len(wanted: int, arena: KVArena) -> int:
    """Return `wanted` tokens, or as many as the whole pool holds of one request if that is less.

    A preempted request is computed again from its start, when windows free nothing yet. So the
    limit is what all groups of layers can hold of it at once. Raises ConfigError if that is no
    token.
    """
    num_groups = arena.groups.num_groups
    max_len = min(wanted, arena.num_blocks // num_groups * arena.block_size)
    if max_len < 1:
        raise ConfigError(
            f"a pool of {arena.num_blocks} KV blocks holds no token: this model's layers need "
            f"{num_groups} blocks for each {arena.block_size} tokens",
            field="num_kv_blocks",
        )
    if max_len < wanted:
        log.warning(
            "the KV pool of %d blocks of %d tokens (of %d groups of layers each) holds less "
            "than one request of %d tokens: requests are limited to %d",
            arena.num_blocks, arena.block_size, num_groups, wanted, max_len,
        )  # fmt: skip
    return max_len


def _bounds(config: EngineConfig, info: ModelInfo, arena: KVArena) -> EngineBounds:
    longest = _model_len(config, info)
    return EngineBounds(
        local_len=_pool_len(longest, arena),
        model_len=longest,
        vocab_size=info.vocab_size,
        max_num_seqs=config.max_num_seqs,
        num_blocks=arena.num_blocks,
        block_size=arena.block_size,
        adapters=info.adapters,
        num_groups=arena.groups.num_groups,
        generates=info.generates,
        sees=info.sees,
    )
