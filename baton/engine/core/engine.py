"""Engine: one model on one device group. step() is plan -> run -> finish, no more.

The life of a request here:
    add(request)                        -> validated; waits for blocks (Task.LOCAL, Task.PREFILL)
    reserve() ... add(reservation=...)  -> its KV was written from elsewhere: counts as computed
    step() ... step()                   -> TokenEvents, the last one with a finish_reason
    or abort(id): no further event      -> either way all its blocks are free within one step
A PREFILL request is pinned for its export and announced to the hooks before its first layer runs;
it leaves after one sampled token, and its pin stays until unpin().
Synchronous and single-threaded (thread.py is the bridge); it knows no network, no Redis, no
protobuf.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from baton.engine.config import EngineConfig
from baton.engine.core.active_model import ActiveModel
from baton.engine.core.announcements import Announcements
from baton.engine.core.arrival import arrive, new_group
from baton.engine.core.departure import Departure, Leaving, departure_of
from baton.engine.core.grammars import guide, refuse_unguided
from baton.engine.core.images import images_of
from baton.engine.core.live_requests import LiveRequests
from baton.engine.core.outputs import Outputs
from baton.engine.core.pooling import Pooler
from baton.engine.core.replay import exact_chunk_of
from baton.engine.core.run_ahead import Flight
from baton.engine.core.scheduler import Scheduler
from baton.engine.core.steps import Steps
from baton.engine.core.validation import EngineBounds, validate
from baton.engine.loading.loading import LoadedModel
from baton.engine.memory.adopted_pages import AdoptedPages
from baton.engine.memory.block_pool import BlockPool
from baton.engine.memory.block_tables import BlockTables
from baton.engine.memory.kv_cache import KVArena
from baton.engine.memory.pins import Pins
from baton.engine.parallel.ranks import Ranks
from baton.engine.running.speculation import Drafter
from baton.engine.state.adoption import Adoption
from baton.engine.state.interface import (
    ChunkResult,
    ModelInfo,
    Reservation,
    Task,
)
from baton.engine.state.sequence import RequestGroup
from baton.engine.state.stats import EngineStats, KVUsage
from baton.guided.cache import GrammarCache
from baton.protocol import block_hashes
from baton.protocol.errors import (
    ContextLengthExceeded,
    InternalError,
    InvalidRequest,
)
from baton.protocol.events import BlockEvent, FirstToken, RequestFailed, TokenEvent
from baton.protocol.handles import NodeLoad
from baton.protocol.kv_spec import BlockLists
from baton.protocol.request import Request

log = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class Engine:
    """One model, made by assembly.py: build_engine() for a real model, assemble() for any parts.

    `config` is resolved (block size, blocks, longest length filled in). `info.max_model_len` is the
    longest that a LOCAL request may become here: the smallest of the model's length, the configured
    one and what the whole pool holds.
    """

    config: EngineConfig
    info: ModelInfo
    arena: KVArena
    stats: EngineStats
    bounds: EngineBounds
    tables: BlockTables
    pins: Pins
    scheduler: Scheduler
    requests: LiveRequests
    adopted: AdoptedPages
    announcements: Announcements
    steps: Steps
    outputs: Outputs
    active: ActiveModel
    grammars: GrammarCache | None = None  # for guided requests
    # The requests that got their first token here in the last step.
    begun: list[RequestGroup] = field(default_factory=list[RequestGroup], init=False)
    _stalled: bool = field(default=False, init=False)

    # ---- its model ----

    @property
    def model(self) -> LoadedModel | None:
        """The model; None over a runner without one, and while the engine sleeps (sleeping.py)."""
        return self.active.model

    @property
    def ranks(self) -> Ranks | None:
        """The other processes that hold shares of the model; None without any."""
        return None if self.model is None else self.model.ranks

    @property
    def pooler(self) -> Pooler | None:
        """The pooler for embeddings and reranking, between steps; None without a model's hidden
        states.
        """
        self.steps.wait()
        return self.active.pooler

    @property
    def when_idle(self) -> Callable[[], None] | None:
        """The function to call once the work has ended; None if there is none."""
        return self.active.when_idle

    @property
    def pool(self) -> BlockPool:
        return self.tables.pool

    def use(self, active: ActiveModel) -> None:
        """Run the steps of this model from now on, and drop every reference to the one before.

        Only while there are no requests.
        """
        self.steps.wait()
        self.steps.use(active.runner)
        self.scheduler.use(Drafter.of(active.proposer, self.config))
        self.active = active
        if active.model is not None:
            self.set_adapters(active.model.info.adapters, self.config.lora_modules)

    def set_adapters(self, ids: tuple[str, ...], modules: tuple[str, ...]) -> None:
        """Let requests use exactly these adapters from now on.

        `modules`: what another load of the model would read, see EngineConfig.lora_modules.
        """
        self.info = replace(self.info, adapters=ids)
        self.config = replace(self.config, lora_modules=modules)
        self.bounds = replace(self.bounds, adapters=ids)

    def uses_adapter(self, id_: str) -> bool:
        """Whether a request here uses the adapter."""
        return self.requests.use_adapter(id_)

    # ---- requests in ----

    def validate(self, request: Request, task: Task = Task.LOCAL) -> None:
        """Refuse a request that this engine cannot serve, before it costs anything.

        Raises InvalidRequest (the field is named), UnsupportedFeature, or ContextLengthExceeded for
        a request that can never fit the model or, with a LOCAL task's output, the pool.
        """
        self._check(request, task)
        if request.images:
            images_of(request, self.model, self.config)

    def _check(self, request: Request, task: Task) -> None:
        validate(request, task, self.bounds)
        refuse_unguided(request, self.grammars)

    def add(
        self,
        request: Request,
        task: Task = Task.LOCAL,
        reservation: Reservation | None = None,
        first_tokens: Sequence[FirstToken] = (),
        adoption: Adoption | None = None,
    ) -> None:
        """Take a request in; its tokens come out of the following steps.

        With `reservation` its tokens count as computed (their KV must be written by now). If the
        reservation is `adopting`, `adoption` has its blocks; from then on the engine ends it.
        `first_tokens` fill the positions that the request's output ids lack, and its first event
        repeats them. Raises the errors of validate(), InvalidRequest for an id that already runs
        here, InternalError for a reservation that is not held, and KVStale for adopted pages that
        may belong to another request by now, or a recurrent state that is not behind the last known
        token but one. After a raise, reservation and adoption still belong
        to the caller.
        """
        self._check(request, task)
        images = images_of(request, self.model, self.config) if request.images else None
        if request.id in self.requests:
            raise InvalidRequest(f"request {request.id} already runs here", field="id")
        if reservation is not None and task is not Task.LOCAL:
            raise InternalError(f"{request.id}: only LOCAL requests continue from reserved blocks")
        self.adopted.receive(adoption, reservation)
        root = self.known_root_hash(request, reservation.precision if reservation else None)
        exact = exact_chunk_of(request, self.config)
        group = new_group(request, task, self.stats.num_requests, root, self.info, exact)
        for sequence in group.sequences:
            sequence.images = images
        guide(group, self.grammars)
        events = arrive(group, first_tokens, self.outputs.end_of)
        if reservation is not None and group.sequences:
            self.scheduler.add_reserved(group, reservation, adoption)
        elif reservation is not None:
            self.cancel(reservation)
            if adoption is not None:
                adoption.end()
        self.requests.add(group, events)
        self._stalled = False
        if not group.sequences:
            return
        if reservation is None:
            self.scheduler.add(group)
        elif group.beams is not None:
            # A search reports nothing for long, so its first event says that its KV arrived.
            self.requests.report([TokenEvent(request.id, request.epoch, 0, ())])
            self.requests.report(self.outputs.begin_search(group))

    @property
    def may_adopt(self) -> bool:
        """Whether reservations can be `adopting`: true if all layers see all tokens."""
        return self.tables.may_adopt

    def reserve(
        self,
        request: Request,
        num_tokens: int,
        precision: str | None = None,
        adopting: bool = False,
    ) -> Reservation | None:
        """Reserve blocks for KV of the first `num_tokens` tokens that comes from elsewhere, and
        slots for the recurrent states of the request's samples; None = no room.

        Takes prefix hits first: tokens [0, start_token) need not be fetched. `precision`: the dtype
        in which the KV was made, if it is not this pool's; then the prefix map keeps it apart from
        all KV with another past. `adopting` (only if may_adopt): full blocks stay in another pool;
        room is taken for what follows them. The caller passes the reservation to add() or cancels
        it. Raises ContextLengthExceeded if it can never fit.
        """
        needed = self.tables.blocks_for_arrival(num_tokens)
        if num_tokens < 1 or needed > self.pool.num_blocks:
            raise ContextLengthExceeded(
                f"{num_tokens} tokens need {needed} KV blocks, the pool has {self.pool.num_blocks}",
                field="prompt",
            )
        anew = request.params.skip_reading_prefix_cache
        if anew or exact_chunk_of(request, self.config) is not None:
            tokens = ()  # no prefix hits: all of its KV is fetched
        else:
            known = request.prompt_ids if self.info.outputs_differ else request.known_ids
            tokens = known[:num_tokens]
        root = self.known_root_hash(request, precision)
        hashes = block_hashes.block_hashes(root, tokens, self.pool.block_size, request.images)
        if adopting and not self.may_adopt:
            raise InternalError("this model's blocks cannot be another pool's")
        return self.scheduler.reserve(request, hashes, num_tokens, precision, adopting)

    def cancel(self, reservation: Reservation) -> None:
        """Free a reservation that was not added. Nobody may write into its blocks any more.
        Idempotent.
        """
        self.scheduler.cancel(reservation)
        self._stalled = False

    def abort(self, request_id: str) -> bool:
        """End a request without a further event; False if it is not here. Hooks may call this as
        well.

        All its blocks are free at once (during a step: at its end). The pin of a PREFILL request
        stays: the reader of the export returns it through unpin(). A reservation must be freed by
        cancel().
        """
        found = self.requests.abort(request_id)
        if found:
            self._stalled = False
        return found

    def stop_sample(self, request_id: str, epoch: int, sample: int) -> None:
        """Compute one sample no further. To end the last sample, call abort() instead.

        It ends without an event before the next step, as soon as no other sample waits to fork from
        it.
        """
        group = self.requests.get(request_id)
        if group is not None and group.request.epoch <= epoch:
            group.stopping.add(sample)

    def hand_on(self, request_id: str) -> Departure | None:
        """Remove a decoding request so that another engine continues it.

        Return what the request takes along. The blocks of its KV stay, pinned once for the export:
        call `unpin` when that is over. Return None and keep the request if this engine has no such
        request, or if its KV cannot be moved. Call this only between steps.
        """
        group = self.requests.get(request_id)
        if group is None:
            return None
        self.steps.wait()
        departure = self._departure_of(group)
        if isinstance(departure, Leaving):
            self.stats.left(departure)
            return None
        self.pin(departure.blocks)
        self.requests.take_out(group)
        self.stats.left(departure.leaving, departure.num_left_behind)
        self.stats.num_handed_on += 1
        self._stalled = False
        return departure

    def _departure_of(self, group: RequestGroup) -> Departure | Leaving:
        if self.scheduler.state_stays(group):
            return Leaving.STATE
        self.adopted.take_over_all(group.leader)
        if any(table.adoption is not None for table in group.leader.tables):
            return Leaving.ADOPTED
        if group.leader.root != self.known_root_hash(group.request):
            return Leaving.PRECISION
        departure = departure_of(group, self.pool.block_size, self.tables.windows)
        return departure or Leaving.UNCOMPUTED

    def pin(self, blocks: BlockLists) -> None:
        """Add a reference to each block that belongs to no request, because an export reads the
        blocks, and keep the state slot that they name.
        """
        self.pins.pin(blocks)

    def unpin(self, blocks: BlockLists) -> None:
        """Undo one pin; full computed blocks stay in the prefix map.

        Raises InternalError for blocks that are not pinned.
        """
        self.pins.unpin(blocks)
        self._stalled = False

    # ---- the heart ----

    def step(self) -> list[TokenEvent]:
        """Run one step: plan, run, finish. Return the new tokens of all requests.

        If it raises, `fail_step()` ends the requests of the step and the engine can go on.
        """
        flight = self.steps.plan()
        results = self.steps.run(flight)
        return self._finish(flight, results)

    def _finish(self, flight: Flight, results: Sequence[ChunkResult]) -> list[TokenEvent]:
        """Return the step's events, after those that needed no computing."""
        plan = flight.plan
        try:
            computed = self.outputs.take(plan, results)
        finally:
            self.requests.step_ended()
        self.steps.count(flight)
        if self.model is not None and self.model.images is not None:
            encoded, reused, fetched = self.model.images.take_counts()
            self.stats.num_encoded_images += encoded
            self.stats.num_reused_images += reused
            self.stats.num_fetched_images += fetched
        self.begun = self.steps.note_begun(plan)
        if self.config.check_invariants:
            self.check()
        events = self.requests.take_events() + computed
        # A preemption may have made room for a waiting request.
        self._stalled = not (plan.rows or events or plan.num_preempted)
        return events

    def fail_step(self) -> list[Request]:
        """After step() raised: end the requests of that step (all, if it raised while planning).

        Their blocks are freed; every other request is kept. Return the requests whose failure is to
        be reported.
        """
        return self.requests.fail_step(self.steps.last_plan)

    def take_failed(self) -> list[RequestFailed]:
        """Return the requests that steps have ended with an error since the last call."""
        return self.requests.take_failed()

    @property
    def has_work(self) -> bool:
        """Whether step() may have something to do."""
        return self.requests.have_events or self.steps.under_way or self.scheduler.has_work

    @property
    def stalled(self) -> bool:
        """True if the last step could do nothing.

        All requests then wait for blocks that only a call (unpin, cancel, abort, add) can free;
        stepping before such a call would be polling.
        """
        return self._stalled

    @property
    def short_of_room(self) -> bool:
        """Whether a request waits for blocks, or for room for its export."""
        return self.has_work and self.scheduler.short_of_room

    def current_load(self) -> NodeLoad:
        """Return the load as the engine sees it; the node adds exports, fetches and draining."""
        return NodeLoad(
            running=self.scheduler.num_running,
            waiting=self.scheduler.num_waiting,
            swapped=self.scheduler.num_swapped,
            # Routers count blocks of tokens; here such a block takes one block per layer group.
            free_blocks=self.pool.num_free // self.tables.num_groups,
            total_blocks=self.pool.num_blocks // self.tables.num_groups,
            cached_blocks=len(self.pool.idle) // self.tables.num_groups,
            waiting_tokens=self.scheduler.num_waiting_tokens,
            step_seconds=self.stats.step_seconds,
            prefill_tokens_per_s=self.stats.prefill_tokens_per_s,
            own_prefill_tokens_per_s=self.stats.own_prefill_tokens_per_s,
        )

    def kv_usage(self) -> KVUsage:
        """Return what blocks and state slots hold for requests right now. Walks all tables."""
        states, checkpoints = self.tables.states, self.tables.checkpoints
        return replace(
            KVUsage.of(self.scheduler.sequences(), self.pool.block_size),
            state_slots=states.num_slots,
            used_state_slots=states.num_slots - states.num_free,
            exported_state_slots=states.num_pinned,
            checkpoint_slots=checkpoints.num_rows,
            used_checkpoint_slots=checkpoints.num_used,
        )

    def take_block_events(self) -> list[BlockEvent]:
        """Return the changes of the prefix map since the last call, in order."""
        events = self.pool.take_events()
        return self.tables.checkpoints.tell(events) if self.tables.states.num_slots else events

    def all_block_events(self) -> list[BlockEvent]:
        """Return the whole prefix map as events, for a listener that starts now."""
        return self.tables.checkpoints.tell(self.pool.snapshot_events())

    def clear_prefixes(self) -> None:
        """Forget all prefixes; what requests hold stays theirs."""
        self.pool.clear_cache()
        self.tables.checkpoints.clear()

    def known_root_hash(self, request: Request, precision: str | None = None) -> bytes:
        """Return the parent of the first block hash of `request`.

        Requests with different roots share no block. `precision`: of the KV, None = this pool's.
        """
        precision = precision or self.info.kv_dtype
        return block_hashes.root_hash(
            self.info.digest, request.tenant_salt, precision, request.adapter
        )

    def check(self) -> None:
        """Prove that every reference to a block has an owner here. Raises InternalError if not."""
        self.tables.checkpoints.check()
        owned = self.scheduler.owned_blocks()
        owned.update(self.pins.counts)
        self.pool.check(owned)
