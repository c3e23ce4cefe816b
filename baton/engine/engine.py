"""Engine: one model on one device group. step() is schedule -> run -> postprocess, no more.

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
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import torch

from baton import block_hashes
from baton.clock import Clock, SystemClock
from baton.engine.adopted_pages import AdoptedPages
from baton.engine.adoption import Adoption
from baton.engine.beam import BeamSearch
from baton.engine.block_pool import BlockPool
from baton.engine.block_tables import BlockTables, as_lists, count_blocks
from baton.engine.config import DEFAULT_BLOCK_SIZE, EngineConfig
from baton.engine.departure import Departure, departure_of
from baton.engine.interface import EngineHooks, ModelInfo, Reservation, Runner, Task
from baton.engine.kv_cache import KVArena, MakeMemory
from baton.engine.outputs import Outputs
from baton.engine.proposer import Proposer
from baton.engine.scheduler import Limits, Scheduler, StepPlan
from baton.engine.sequence import RequestGroup, SequenceState, Table, num_samples
from baton.engine.speculation import Drafter, load_draft, load_proposer
from baton.engine.stats import EngineStats, KVUsage
from baton.engine.swap import Swapper
from baton.engine.validation import Bounds, refuse_handed_over, validate
from baton.errors import (
    ConfigError,
    ContextLengthExceeded,
    InternalError,
    InvalidRequest,
    KVStale,
)
from baton.events import BlockEvent, FirstToken, RequestFailed, TokenEvent, TokenLogprob
from baton.handles import NodeLoad
from baton.kv_spec import BlockLists
from baton.request import Request

if TYPE_CHECKING:  # lazy at run time, see load()
    from baton.engine.pooling import Pooler

log = logging.getLogger(__name__)

TAKEN_BACK: Final = "the exporter may have taken its KV back"


class Engine:
    """Scheduler, pool, arena and runner of one model.

    `config` is resolved (block size, blocks, longest length filled in); `info.max_model_len` is
    what a LOCAL request may reach here: the smallest of the model's, the configured one and the
    whole pool.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        arena: KVArena,
        info: ModelInfo,
        hooks: EngineHooks | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._model_len = _model_len(config, info)
        # A preempted request is computed again from its start, when windows free nothing yet: what
        # one can hold is what all groups of layers can hold of it at once.
        self._num_groups = arena.groups.num_groups
        max_len = min(self._model_len, arena.num_blocks // self._num_groups * arena.block_size)
        if max_len < 1:
            raise ConfigError(
                f"a pool of {arena.num_blocks} KV blocks holds no token: this model's layers need "
                f"{self._num_groups} blocks for each {arena.block_size} tokens",
                field="num_kv_blocks",
            )
        if max_len < self._model_len:
            log.warning(
                "the KV pool of %d blocks of %d tokens (of %d groups of layers each) holds less "
                "than one request of %d tokens: requests are limited to %d",
                arena.num_blocks, arena.block_size, self._num_groups, self._model_len, max_len,
            )  # fmt: skip
        self.info = replace(info, max_model_len=max_len)
        self.config = replace(
            config,
            block_size=arena.block_size,
            num_kv_blocks=arena.num_blocks,
            max_model_len=max_len,
        )
        self.arena = arena
        self.pool = BlockPool(arena.num_blocks, arena.block_size, config.enable_prefix_caching)
        self.stats = EngineStats()
        self.pooler: Pooler | None = None  # for embeddings and reranking; load() makes it
        self._runner = runner
        self._hooks = hooks
        self._clock = clock or SystemClock()
        self._bounds = Bounds(
            max_len, self._model_len, info.vocab_size, config.max_num_seqs, arena.num_blocks,
            arena.block_size, info.adapters, self._num_groups,
        )  # fmt: skip
        self._tables = BlockTables(self.pool, arena, self.stats, arena.groups.windows)
        block_bytes = arena.num_bytes // arena.num_blocks
        swapper = Swapper(
            self._tables, self.stats, self._clock, config.preemption_mode, block_bytes
        )
        limits = Limits(config.max_num_seqs, config.max_num_batched_tokens)
        self._scheduler = Scheduler(self._tables, swapper, limits, self.stats)
        self._scheduler.ask_before_exports(self._may_export)
        self._outputs = Outputs(
            self._scheduler, self.stats, info.eos_token_ids, self._bounds.limit, self._left
        )
        self._by_id: dict[str, RequestGroup] = {}
        self._adopted = AdoptedPages(
            self._tables, self._clock, block_bytes, lambda name: self._by_id[name].leader
        )
        self._failed: list[RequestFailed] = []  # not yet taken
        self._pins: Counter[int] = Counter()
        self._pending: list[TokenEvent] = []  # events that need no computing: the next step's
        self._dropped: list[RequestGroup] = []  # aborted while a step runs: freed at its end
        self._plan: StepPlan | None = None
        self._stepping = False
        self._stalled = False

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        hooks: EngineHooks | None = None,
        memory: MakeMemory | None = None,
    ) -> Engine:
        """The real thing: weights from `config.model`, the KV arena in what memory is left, or in
        `memory` (a pool on the CPU only).

        Raises ConfigError (ModelRefused for a checkpoint that cannot be served).
        """
        # Lazy: the model code pulls in transformers, which engines over other runners never need.
        from baton.engine.loading import load_model
        from baton.engine.memory import size_pool
        from baton.engine.pooling import Pooler
        from baton.engine.runner import ModelRunner

        if config.threads is not None:
            torch.set_num_threads(config.threads)
        model, draft = load_model(config), load_draft(config)
        info, device = model.info, torch.device(model.device)
        block_size = config.block_size or DEFAULT_BLOCK_SIZE[device.type]
        num_blocks = size_pool(config, model, block_size, _model_len(config, info), draft)
        placed = memory if device.type == "cpu" else None
        arena = KVArena(info.layers, num_blocks, block_size, info.kv_dtype, device, placed)
        log.info(
            "KV pool: %d blocks of %d tokens and %d of %d layers each, %.1f MB",
            num_blocks, block_size, arena.groups.num_slots, len(info.layers), arena.num_bytes / 1e6,
        )  # fmt: skip
        engine = cls(config, ModelRunner(model, arena), arena, info, hooks)
        engine.pooler = Pooler(model, arena, config.max_num_batched_tokens, config.max_num_seqs)
        proposer = load_proposer(engine.config, engine.info, draft)
        if proposer is not None:
            engine.set_proposer(proposer)
        return engine

    def set_hooks(self, hooks: EngineHooks | None) -> None:
        """Before the first PREFILL request: hooks are made of this engine's arena, so after it."""
        self._hooks = hooks

    def set_proposer(self, proposer: Proposer) -> None:
        """Speculate: `proposer` guesses up to config.num_speculative_tokens for each decode row.
        Before the first request."""
        self._scheduler.set_drafter(Drafter(proposer, self.config.num_speculative_tokens))

    # ---- requests in ----

    def validate(self, request: Request, task: Task = Task.LOCAL) -> None:
        """Refuse what this engine cannot serve, before it costs anything.

        Raises InvalidRequest (the field is named), UnsupportedFeature, or ContextLengthExceeded for
        a request that can never fit the model or, with a LOCAL task's output, the pool.
        """
        validate(request, task, self._bounds)

    def add(
        self,
        request: Request,
        task: Task = Task.LOCAL,
        reservation: Reservation | None = None,
        first_tokens: Sequence[FirstToken] = (),
        adoption: Adoption | None = None,
    ) -> None:
        """Take a request in; its tokens come out of the following steps.

        With `reservation` its tokens count as computed (their KV must be written by now). One that
        is `adopting` comes with its blocks' `adoption`, which from then on is ended here.
        `first_tokens` fill the positions that the request's output ids lack and are repeated in its
        first event. Raises what validate() raises, InvalidRequest for an id that already runs here,
        and InternalError for a reservation that is not held. After a raise the reservation and the
        adoption are still the caller's; KVStale for adopted pages that may be another's by now.
        """
        self.validate(request, task)
        if request.id in self._by_id:
            raise InvalidRequest(f"request {request.id} already runs here", field="id")
        if reservation is not None and task is not Task.LOCAL:
            raise InternalError(f"{request.id}: only LOCAL requests continue from reserved blocks")
        if reservation is not None:
            refuse_handed_over(request.params)
        self._receive(adoption, reservation)
        precision = None if reservation is None else reservation.precision
        group = self._group(request, task, precision)
        events: list[TokenEvent] = []
        for sequence in list(group.sequences):
            position = sequence.num_outputs
            _fill(sequence, first_tokens)
            reason, stop_token = self._outputs.end_of(sequence, task)
            if reason is not None:
                group.sequences.remove(sequence)
            repeated = tuple(sequence.tokens[sequence.num_prompt + position :])
            if repeated or reason is not None:
                events.append(
                    TokenEvent(
                        request.id, request.epoch, position, repeated, sequence.sample_index,
                        finish_reason=reason, stop_token_id=stop_token,
                        logprobs=_told_of(sequence, position, first_tokens),
                    )
                )  # fmt: skip
        if reservation is not None and group.sequences:
            self._scheduler.add_reserved(group, reservation, adoption)
        elif reservation is not None:
            self.cancel(reservation)
            if adoption is not None:
                adoption.end()
        self.stats.num_requests += 1
        self._stalled = False
        self._pending.extend(events)
        if not group.sequences:
            self.stats.num_finished += 1
            return
        self._by_id[request.id] = group
        if reservation is None:
            self._scheduler.add(group)

    def _group(self, request: Request, task: Task, precision: str | None) -> RequestGroup:
        """All samples of `request` with what is known of each; for beams, the prompt."""
        params, root = request.params, self.known_root_hash(request, precision)
        if params.best_of is not None and params.best_of > params.n and params.logprobs is None:
            # Whoever picks the best ones needs each token's own log probability.
            request = replace(request, params=replace(params, logprobs=0))
        beams = None
        if params.beam_width:
            eos = () if params.ignore_eos else self.info.eos_token_ids
            stop_ids = frozenset((*params.stop_token_ids, *eos))
            beams = BeamSearch(params, stop_ids, self.info.vocab_size)
        outputs = request.output_ids if beams is None else ()
        sequences = [
            SequenceState(
                request,
                root,
                [*request.prompt_ids, *(outputs[sample] if sample < len(outputs) else ())],
                sample,
            )
            for sample in range(1 if beams else num_samples(params))
        ]
        return RequestGroup(request, task, self.stats.num_requests, sequences, beams)

    def _receive(self, adoption: Adoption | None, reservation: Reservation | None) -> None:
        """Copy what of the adopted pages the sequence will write to: the last one unless full.

        Raises KVStale if they may be another's, InternalError if they do not fit the reservation.
        """
        if (adoption is not None) != (reservation is not None and reservation.adopting):
            raise InternalError("adopted pages exactly where they are reserved for")
        if adoption is None or reservation is None:
            return
        num_tokens, size = reservation.num_tokens, self.pool.block_size
        count = self.pool.blocks_for(num_tokens)
        if len(adoption.ids) != count or any(i < self.pool.num_blocks for i in adoption.ids):
            raise InternalError(f"{len(adoption.ids)} adopted pages, not {count} of another pool")
        if num_tokens % size:
            self.arena.copy_block(adoption.ids[-1], reservation.blocks[0].ids[0])
            self.stats.num_copied_blocks += 1
        if not adoption.safe():
            raise KVStale(TAKEN_BACK)
        adoption.since = self._clock.monotonic()

    @property
    def may_adopt(self) -> bool:
        """Whether reservations can be `adopting`: the model's layers all see everything, and its
        pages hold all of their KV."""
        return self._tables.may_adopt and self.info.kv_dtype != "int8"

    def reserve(
        self,
        request: Request,
        num_tokens: int,
        precision: str | None = None,
        adopting: bool = False,
    ) -> Reservation | None:
        """Blocks for KV of the first `num_tokens` tokens that comes from elsewhere; None = no room.

        Takes prefix hits first: [0, start_token) need not be fetched. `precision`: the dtype that
        the KV was made in, if it is not this pool's; then only KV of the same past answers for it,
        and it for none other. `adopting` (only if may_adopt): full blocks stay where they are, in
        another pool; room is taken for what follows them. The caller either passes it to add() or
        cancels it. Raises
        ContextLengthExceeded if it can never fit, UnsupportedFeature for more than one sample.
        """
        refuse_handed_over(request.params)
        needed = self._tables.blocks_for_arrival(num_tokens)
        if num_tokens < 1 or needed > self.pool.num_blocks:
            raise ContextLengthExceeded(
                f"{num_tokens} tokens need {needed} KV blocks, the pool has {self.pool.num_blocks}",
                field="prompt",
            )
        tokens = request.known_ids[:num_tokens]
        root = self.known_root_hash(request, precision)
        hashes = block_hashes.block_hashes(root, tokens, self.pool.block_size)
        if adopting and not self.may_adopt:
            raise InternalError("this model's blocks cannot be another pool's")
        return self._scheduler.reserve(request.id, hashes, num_tokens, precision, adopting)

    def cancel(self, reservation: Reservation) -> None:
        """Free a reservation that was not added, once nobody writes into its blocks. Idempotent."""
        self._scheduler.cancel(reservation)
        self._stalled = False

    def abort(self, request_id: str) -> bool:
        """End a request without a further event; False if it is not here. Also callable from hooks.

        All its blocks are free at once (during a step: at its end). The pin of a PREFILL request
        stays: whoever reads the export returns it through unpin(). Reservations end by cancel()
        alone.
        """
        announced = any(event.request_id == request_id for event in self._pending)
        self._pending = [event for event in self._pending if event.request_id != request_id]
        group = self._by_id.pop(request_id, None)
        if group is None:
            return announced
        self.stats.num_aborted += 1
        self._stalled = False
        group.dropped = True
        if self._stepping:
            self._dropped.append(group)
        else:
            self._scheduler.remove(group)
        return True

    def hand_on(self, request_id: str) -> Departure | None:
        """Take a decoding request out, with its KV, so that another engine goes on with it.

        Its blocks are pinned once, for an export; `unpin` undoes that. None, and nothing changed,
        if it is not here or has no KV worth moving. Between steps only.
        """
        group = self._by_id.get(request_id)
        if group is None:
            return None
        self._adopted.take_over_all(group.leader)
        if any(table.adoption is not None for table in group.leader.tables):
            return None  # what is another pool's is not ours to hand on
        departure = departure_of(group, self.pool.block_size, self._tables.windows)
        if departure is None:
            return None
        if group.leader.root != self.known_root_hash(group.request):
            return None  # KV out of another precision: an export would pass for KV made in ours
        self.pin(departure.blocks)
        self._pending = [event for event in self._pending if event.request_id != request_id]
        del self._by_id[request_id]
        self._scheduler.remove(group)
        self.stats.num_handed_on += 1
        self._stalled = False
        return departure

    # ---- blocks of exports ----

    def pin(self, blocks: BlockLists) -> None:
        """One more reference to each block, independent of requests: an export reads them."""
        for held in blocks:
            self.pool.ref(held.ids)
            self._pins.update(held.ids)

    def unpin(self, blocks: BlockLists) -> None:
        """Undo one pin; full computed blocks stay in the prefix map.

        Raises InternalError if unpinned.
        """
        counts = Counter(block for held in blocks for block in held.ids)
        if counts - self._pins:
            raise InternalError("blocks are unpinned that were not pinned")
        self._pins -= counts
        self._tables.give_back([Table(list(held.ids), held.first) for held in blocks])
        self._stalled = False

    # ---- the heart ----

    def step(self) -> list[TokenEvent]:
        """One step: schedule, run, postprocess. Returns the new tokens of all requests.

        If it raises, `fail_step()` ends the requests of the step and the engine can go on.
        """
        started = self._clock.monotonic()
        self._plan = None
        self._fail_lapsed()
        self._adopted.take_over(self._scheduler.headroom())
        self._stepping = True
        try:
            self._plan = plan = self._scheduler.schedule()
            self._announce(plan)
            if self.config.check_invariants:
                self._scheduler.prove_private(plan)
            results = self._runner.run(plan.chunks, self._on_layer(plan)) if plan.rows else []
            self._fail_lapsed()
            events = self._pending + self._outputs.take(plan, results)
        finally:
            self._end_step()
        if plan.rows:
            self.stats.step_done(self._clock.monotonic() - started, plan.num_prefill_tokens)
        if self.config.check_invariants:
            self.check()
        self._pending = []
        # A preemption may have made room for somebody who waits.
        self._stalled = not (plan.rows or events or plan.num_preempted)
        return events

    def fail_step(self) -> list[Request]:
        """After step() raised: end the requests it was about (all, if it raised while planning).

        Frees their blocks, keeps every other request, and returns those whose failure must be told.
        """
        plan = self._plan
        all_groups = self._by_id.values() if plan is None else (row.group for row in plan.rows)
        doomed = [group for group in dict.fromkeys(all_groups) if not group.dropped]
        present = set(self._scheduler.groups())
        for group in doomed:
            self._by_id.pop(group.request.id, None)
            if group in present:
                self._scheduler.remove(group)
        failed = {group.request.id for group in doomed}
        self._pending = [event for event in self._pending if event.request_id not in failed]
        self.stats.num_failed += len(doomed)
        return [group.request for group in doomed]

    def take_failed(self) -> list[RequestFailed]:
        """Requests that steps have ended by themselves since the last call: their adopted pages
        were no longer kept for them."""
        failed, self._failed = self._failed, []
        return failed

    @property
    def has_work(self) -> bool:
        """Whether step() may have something to do."""
        return bool(self._pending) or self._scheduler.has_work

    @property
    def stalled(self) -> bool:
        """The last step could do nothing: all requests wait for blocks that only a call (unpin,
        cancel, abort, add) can free. Stepping again before such a call would be polling."""
        return self._stalled

    def current_load(self) -> NodeLoad:
        """Load as the engine sees it; exports, fetches and draining are the node's to add."""
        return NodeLoad(
            running=self._scheduler.num_running,
            waiting=self._scheduler.num_waiting,
            swapped=self._scheduler.num_swapped,
            # Routers count blocks of tokens, whatever these take here.
            free_blocks=self.pool.num_free // self._num_groups,
            total_blocks=self.pool.num_blocks // self._num_groups,
            waiting_tokens=self._scheduler.num_waiting_tokens,
            step_seconds=self.stats.step_seconds,
            prefill_tokens_per_s=self.stats.prefill_tokens_per_s,
        )

    def kv_usage(self) -> KVUsage:
        """What the blocks hold for requests right now. Walks all block tables."""
        size = self.pool.block_size
        counts = count_blocks(self._scheduler.sequences())
        filled: dict[int, int] = {}
        for sequence in self._scheduler.sequences():
            for table in sequence.tables:
                for index, block in enumerate(table.blocks, table.num_freed):
                    here = min(size, max(0, sequence.num_computed - index * size))
                    filled[block] = max(here, filled.get(block, 0))
        return KVUsage(
            allocated_blocks=len(counts),
            table_blocks=counts.total(),
            shared_blocks=sum(1 for count in counts.values() if count > 1),
            allocated_slots=len(counts) * size,
            used_slots=sum(filled.values()),
        )

    def take_block_events(self) -> list[BlockEvent]:
        """Prefix-map changes since the last call, in order."""
        return self.pool.take_events()

    def known_root_hash(self, request: Request, precision: str | None = None) -> bytes:
        """Parent of the first block hash of `request`: who does not share it shares no block.
        `precision`: of its KV, None = this pool's."""
        precision = precision or self.info.kv_dtype
        return block_hashes.root_hash(
            self.info.digest, request.tenant_salt, precision, request.adapter
        )

    def check(self) -> None:
        """Prove that every reference to a block has an owner here. Raises InternalError."""
        owned = self._scheduler.owned_blocks()
        owned.update(self._pins)
        self.pool.check(owned)

    # ---- inside a step ----

    def _announce(self, plan: StepPlan) -> None:
        """Tell the hooks of new PREFILL requests, before any layer: the handle leaves at once."""
        if self._hooks is None:
            return
        for group in plan.admitted:
            if group.task is not Task.PREFILL:
                continue
            blocks = as_lists(group.leader.tables)
            self.pin(blocks)
            try:
                self._hooks.admitted(group.request, blocks, len(group.leader.tokens))
            except Exception:
                self.unpin(blocks)  # no export exists that could return it
                raise

    def _may_export(self, num_tokens: int, num_pending: int) -> bool:
        return self._hooks is None or self._hooks.may_admit(num_tokens, num_pending)

    def _on_layer(self, plan: StepPlan) -> Callable[[int], None] | None:
        hooks = self._hooks
        progress = tuple(
            (row.group.request.id, row.chunk.start + len(row.chunk.token_ids))
            for row in plan.rows
            if row.group.task is Task.PREFILL
        )
        if hooks is None or not progress:
            return None
        return lambda layer: hooks.layer_written(layer, progress)

    def _fail_lapsed(self) -> None:
        """End requests whose adopted pages may be another's, and drop what was sampled of them."""
        for request_id in self._adopted.lapsed():
            group = self._by_id.get(request_id)
            if group is None:
                continue  # aborted during this step
            self.abort(request_id)
            self.stats.num_aborted -= 1
            self.stats.num_failed += 1
            error = KVStale(TAKEN_BACK)
            self._failed.append(
                RequestFailed(
                    request_id, group.request.epoch, error.code, error.message, error.retryable
                )
            )

    def _left(self, group: RequestGroup) -> None:
        """Its last event is being told."""
        del self._by_id[group.request.id]
        self.stats.num_finished += 1

    def _end_step(self) -> None:
        self._stepping = False
        for group in self._dropped:
            self._scheduler.remove(group)
        self._dropped = []


def _fill(sequence: SequenceState, first_tokens: Sequence[FirstToken]) -> None:
    """Append the tokens of positions that the sequence lacks; those it has are repetitions."""
    for first in sorted(first_tokens, key=lambda token: token.position):
        if first.sample == sequence.sample_index and first.position == sequence.num_outputs:
            sequence.tokens.append(first.token_id)


def _told_of(
    sequence: SequenceState, position: int, first_tokens: Sequence[FirstToken]
) -> tuple[tuple[TokenLogprob, ...], ...]:
    """END's log-probabilities of a sequence's tokens from `position` on; () if none were told."""
    told = {t.position: t.logprobs for t in first_tokens if t.sample == sequence.sample_index}
    return tuple(filter(None, (told.get(at) for at in range(position, sequence.num_outputs))))


def _model_len(config: EngineConfig, info: ModelInfo) -> int:
    if config.max_model_len is None:
        return info.max_model_len
    if config.max_model_len > info.max_model_len:
        raise ConfigError(
            f"max_model_len {config.max_model_len} exceeds the model's {info.max_model_len}",
            field="max_model_len",
        )
    return config.max_model_len
