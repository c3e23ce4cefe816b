"""Any order of add, fork, beam, draft, reserve, adopt, step, swap, preempt, stop, hand on, abort,
cancel, pin and failing steps, on a pool that is far too small.

What must hold after every rule: free + used == total, every reference has an owner, host copies are
those of the swapped requests and no more blocks than the pool has; no row writes where others read;
no event after an end; positions without gap; tokens as one engine with endless memory would say
them; adopted pages are given back exactly once, and their owner writes something else there at
once. At the end: every sample and every request ended exactly once, and every block is free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.engine.memory.adopted_pages import TAKE_OVER_AFTER_S
from baton.engine.memory.layer_groups import group_layers
from baton.engine.state.adoption import Adoption
from baton.engine.state.beam import BeamSearch
from baton.engine.state.interface import Reservation, Task
from baton.protocol.errors import ContextLengthExceeded, InvalidRequest
from baton.protocol.events import FirstToken
from baton.protocol.kv_spec import BlockLists, LayerSpec
from baton.protocol.request import Request
from tests.fakes import (
    EOS_ID,
    VOCAB_SIZE,
    FakeHooks,
    ScriptedProposer,
    candidates,
    expected_beams,
    expected_output,
    fake_engine,
    model_info,
    next_token,
    request,
)

# Few different tokens and prefixes of one text: prefix hits are frequent.
TEXT = (11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23)
# What the layers see; 0 = all. Equal ones share blocks, unequal ones are groups with tables of
# their own, and three of one kind beside one of another are three groups.
WINDOWS = ((0, 0), (0, 0), (3, 3), (8,), (0, 3), (8, 0, 5), (0, 6, 6, 6), (4, 9))


@dataclass
class Life:
    """What a listener knows of one request: per sample, what it must say and what it said."""

    request: Request
    task: Task
    expected: list[list[int]]
    seen: list[list[int]]
    open: set[int]  # samples that have not ended
    stopped: set[int] = field(default_factory=set[int])  # that nobody wants: they may go on a while
    end: str | None = None


class EngineMachine(RuleBasedStateMachine):
    goes_back = True  # the last token of a hand-over can be computed once more

    def bring_state(self, blocks: BlockLists, tokens: Sequence[int]) -> None:
        """Write the recurrent state behind `tokens`, as a transfer does."""

    def prove_state(self, blocks: BlockLists, tokens: Sequence[int]) -> None:
        """The recurrent state that is handed over is that behind `tokens`."""

    @initialize(
        num_blocks=st.sampled_from((6, 9, 14, 60)),
        step=st.tuples(st.integers(1, 4), st.integers(0, 12)),
        options=st.fixed_dictionaries(
            {
                "enable_prefix_caching": st.booleans(),
                "preemption_mode": st.sampled_from(("auto", "swap", "recompute")),
                "num_speculative_tokens": st.integers(1, 5),
                "async_scheduling": st.booleans(),
            }
        ),
        windows=st.sampled_from(WINDOWS),
        most_exported=st.sampled_from((None, None, 20)),
        odds=st.tuples(st.sampled_from((None, 0, 3, 10)), st.booleans(), st.booleans()),
    )
    def start(
        self,
        num_blocks: int,
        step: tuple[int, int],
        options: dict[str, object],
        windows: tuple[int, ...],
        most_exported: int | None,
        odds: tuple[int | None, bool, bool],
    ) -> None:
        """`step`: sequences, and tokens beyond. `windows`: one layer each. `odds`: of ten drafts
        so many are wrong (None: no drafts); whether time passes; whether steps ahead run late."""
        (max_num_seqs, extra), (spoilt, ticks, late) = step, odds
        self.hooks = FakeHooks(most_tokens=most_exported)
        layers = tuple(LayerSpec(1, 2, 2, window=window) for window in windows)
        num_groups = group_layers(layers, "float32").num_groups
        proposer = None
        if spoilt is not None:  # with a window all are wrong: the proposer knows of none
            proposer = ScriptedProposer(
                lambda ask, index: (len(ask.history) * 7 + index) % 10 < spoilt
            )
        self.engine, self.runner = fake_engine(
            num_blocks=num_blocks * num_groups,
            block_size=4,
            hooks=self.hooks,
            info=model_info(layers=layers),
            proposer=proposer,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + extra,
            **options,
        )
        self.window = self.runner.window
        self.runner.late = late
        self.runner.seconds_per_step = self.runner.seconds_per_copied_block = float(ticks)
        self.lives: dict[str, Life] = {}
        self.reserved: list[tuple[Request, Reservation]] = []
        self.unpinned = 0  # of hooks.admissions, in order
        self.adopted: dict[str, Adoption] = {}
        self.wanted = False  # the owner of adopted pages is short of them
        self.given_back: Counter[str] = Counter()
        self.lapsed: set[str] = set()

    # ---- requests in ----

    def draw(
        self, data: st.DataObject, prefix: str, sampling: dict[str, object] | None = None
    ) -> Request:
        length = data.draw(st.sampled_from((1, 3, 4, 5, 8, 9, 12, 13)))
        asked = request(
            f"{prefix}{len(self.lives) + len(self.reserved)}-{len(self.runner.batches)}",
            TEXT[:length],
            max_tokens=min(24 - length, data.draw(st.sampled_from((1, 2, 5, 9, 16)))),
            seed=data.draw(st.integers(0, 2)),
            ignore_eos=data.draw(st.booleans()),
            priority=data.draw(st.integers(0, 1)),
            resume=data.draw(st.sampled_from(("fast", "exact"))),
            sampling={"skip_reading_prefix_cache": data.draw(st.booleans()), **(sampling or {})},
        )
        known = 0 if asked.params.beam_width else data.draw(st.integers(0, 2))
        outputs = tuple(tuple(output[:known]) for output in self.outputs(asked))
        return asked.retried(outputs) if known else asked

    def outputs(self, asked: Request) -> list[list[int]]:
        """What each sample must say."""
        params = asked.params
        if params.beam_width:
            beams = expected_beams(asked.prompt_ids, params, window=self.window)
            return [list(tokens) for tokens in beams]
        return [
            expected_output(asked.prompt_ids, params, sample=sample, window=self.window)
            for sample in range(params.num_samples)
        ]

    def first_tokens(self, asked: Request) -> tuple[FirstToken, ...]:
        """What END would carry of them."""
        params = asked.params
        seen = asked.prompt_ids[-self.window :] if self.window else asked.prompt_ids
        if not params.beam_width:
            return tuple(
                FirstToken(0, next_token(seen, params, 0, sample), sample)
                for sample in range(params.num_samples)
            )
        stops = frozenset(() if params.ignore_eos else (EOS_ID,))
        count = BeamSearch(params, stops, VOCAB_SIZE).num_candidates
        return tuple(
            FirstToken(0, each.token_id, rank, cumulative_logprob=each.logprob)
            for rank, each in enumerate(candidates(seen, count))
        )

    def born(self, asked: Request, task: Task) -> None:
        assert asked.id not in self.lives
        outputs = self.outputs(asked)
        known = [*map(list, asked.output_ids), *([] for _ in outputs)]
        self.lives[asked.id] = Life(
            asked, task, outputs, known[: len(outputs)], set(range(len(outputs))) - {*asked.ended}
        )

    @rule(data=st.data(), task=st.sampled_from(Task))
    def add(self, data: st.DataObject, task: Task) -> None:
        asked = self.draw(data, "r")
        if asked.id not in self.lives:
            self.engine.add(asked, task)
            self.born(asked, task)

    def draw_several(self, data: st.DataObject, prefix: str) -> Request:
        count = data.draw(st.integers(2, 4))
        kind = data.draw(st.sampled_from(("n", "best_of", "beam_width")))
        return self.draw(data, prefix, {kind: count})

    @rule(data=st.data(), task=st.sampled_from(Task))
    def add_several(self, data: st.DataObject, task: Task) -> None:
        """Parallel samples or beams."""
        asked = self.draw_several(data, "s")
        if asked.id in self.lives:
            return
        if task is Task.PREFILL:
            asked = self.without_ended(asked)
        if not asked.live_samples:
            return
        try:
            self.engine.add(asked, task)
        except (InvalidRequest, ContextLengthExceeded):
            return  # more than this engine can promise to bring to its end
        self.born(asked, task)

    def without_ended(self, asked: Request) -> Request:
        """As routers ask: who has ended is named."""
        outputs = self.outputs(asked)
        live = range(asked.params.num_samples)
        ended = tuple(s for s in live if list(asked.emitted(s)) == outputs[s])
        return replace(asked, ended=ended)

    @rule(data=st.data(), several=st.booleans())
    def reserve(self, data: st.DataObject, several: bool) -> None:
        asked = self.draw_several(data, "f") if several else self.draw(data, "d")
        reservation = self.engine.reserve(asked, len(asked.prompt_ids))
        if reservation is not None:
            self.reserved.append((asked, reservation))

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), with_first=st.booleans())
    def arrive(self, data: st.DataObject, with_first: bool) -> None:
        index = data.draw(st.integers(0, len(self.reserved) - 1))
        asked, reservation = self.reserved.pop(index)
        start = reservation.start_token
        self.runner.write(reservation.blocks, start, asked.prompt_ids[start:])
        known = self.runner.read(reservation.blocks, len(asked.prompt_ids))
        assert known == list(asked.prompt_ids[-len(known) :])
        self.bring_state(reservation.blocks, asked.prompt_ids)
        first = self.first_tokens(asked) if with_first or not self.goes_back else ()
        if asked.id in self.lives:
            self.engine.cancel(reservation)
            return
        try:
            self.engine.add(asked, reservation=reservation, first_tokens=first)
        except (InvalidRequest, ContextLengthExceeded):
            self.engine.cancel(reservation)
            return
        self.born(asked, Task.LOCAL)

    @precondition(lambda self: self.engine.may_adopt)
    @rule(data=st.data(), with_first=st.booleans())
    def adopt(self, data: st.DataObject, with_first: bool) -> None:
        """A hand-over whose full pages stay in another pool, behind the own one."""
        asked = self.draw(data, "a")
        count = len(asked.prompt_ids)
        if asked.id in self.lives:
            return
        reservation = self.engine.reserve(asked, count, adopting=True)
        if reservation is None:
            return
        memory, size = self.runner.memory, self.runner.block_size
        first = len(memory) // size
        num_pages = -(-count // size)
        memory.extend((0, token) for token in asked.prompt_ids)
        memory.extend([None] * (num_pages * size - count))

        def release() -> None:
            self.given_back[asked.id] += 1
            memory[first * size : (first + num_pages) * size] = [(0, 96)] * (num_pages * size)

        pages = range(first, first + num_pages)
        safe, wanted = lambda: asked.id not in self.lapsed, lambda: self.wanted
        adoption = Adoption(asked.id, pages, release, safe, wanted)
        self.bring_state(reservation.blocks, asked.prompt_ids)
        told = self.first_tokens(asked) if with_first or not self.goes_back else ()
        self.adopted[asked.id] = adoption
        self.engine.add(asked, reservation=reservation, first_tokens=told, adoption=adoption)
        self.born(asked, Task.LOCAL)

    @precondition(lambda self: self.adopted)
    @rule(data=st.data(), during=st.booleans())
    def lapse(self, data: st.DataObject, during: bool) -> None:
        """A promise ends, before a step or in its middle."""
        name = data.draw(st.sampled_from(sorted(self.adopted)))
        held = self.adopted[name] in self.engine.tables.adoptions
        if during:
            self.runner.during = lambda: self.lapsed.add(name)
        else:
            self.lapsed.add(name)
        self.step()
        self.runner.during = None
        if held and name in self.lapsed and self.given_back[name] == 0:
            raise AssertionError("pages are held past the promise")

    @precondition(lambda self: self.adopted)
    @rule()
    def recall(self) -> None:
        self.wanted = not self.wanted

    @rule()
    def time_passes(self) -> None:
        assert self.runner.clock is not None
        self.runner.clock.advance(TAKE_OVER_AFTER_S)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.reserved) - 1))
        _, reservation = self.reserved.pop(index)
        self.engine.cancel(reservation)
        self.engine.cancel(reservation)

    @rule(data=st.data())
    def refuse_too_large(self, data: st.DataObject) -> None:
        tokens = self.engine.info.max_model_len + data.draw(st.integers(0, 3))
        try:
            self.engine.add(request("large", (5,) * tokens))
        except ContextLengthExceeded:
            return
        raise AssertionError("a request that can never fit was taken")

    # ---- requests out ----

    @rule()
    def step(self) -> None:
        offered: set[str] = set()
        for event in self.engine.step():
            life = self.lives[event.request_id]
            assert life.end is None, "an event after the end"
            assert event.epoch == life.request.epoch
            if life.task is Task.PREFILL:
                offered.add(event.request_id)
                if not event.token_ids and event.finish_reason is None:
                    several = life.request.params.width > 1 or life.request.resume == "exact"
                    assert several, "a search, or nobody lacks token 1"
                    continue
            seen, expected = life.seen[event.sample], life.expected[event.sample]
            assert event.sample in life.open, "an event after the end of its sample"
            assert event.position == len(seen), "a gap"
            seen.extend(event.token_ids)
            assert seen == expected[: len(seen)], "a wrong token"
            if event.finish_reason is not None:
                assert seen == expected
                life.open.remove(event.sample)
                life.end = None if life.open else "finished"
            elif life.task is Task.PREFILL:
                assert len(event.token_ids) == 1
        for name in offered:
            self.lives[name].end = self.lives[name].end or "handed over"
        self.abandon()
        self.note_failed()

    def abandon(self) -> None:
        """What a node does when only stopped samples are left."""
        for life in self.lives.values():
            if life.end is None and life.stopped and life.open <= life.stopped:
                self.engine.abort(life.request.id)
                life.end = "stopped"

    def note_failed(self) -> None:
        for failed in self.engine.take_failed():
            assert failed.request_id in self.lapsed
            life = self.lives[failed.request_id]
            assert life.end is None
            life.end = "lapsed"

    @rule(count=st.integers(2, 12))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    @rule(data=st.data())
    def stop_sample(self, data: st.DataObject) -> None:
        living = [
            (life, sample)
            for life in self.lives.values()
            if life.end is None and life.task is Task.LOCAL and not life.request.params.beam_width
            for sample in life.open
            if len(life.expected) > 1
        ]
        if living:
            life, sample = data.draw(st.sampled_from(living))
            life.stopped.add(sample)
            self.engine.stop_sample(life.request.id, life.request.epoch, sample)
            self.abandon()

    @precondition(lambda self: self.lives)
    @rule(data=st.data())
    def hand_on(self, data: st.DataObject) -> None:
        """It leaves with what its sequences share, if that is worth it."""
        life = self.lives[data.draw(st.sampled_from(sorted(self.lives)))]
        departure = self.engine.hand_on(life.request.id)
        if departure is None:
            return
        assert life.end is None
        life.end = "moved"
        count = departure.num_tokens
        told = {sample: [*life.seen[sample]] for sample in life.open - life.stopped}
        for first in sorted(departure.first_tokens, key=lambda token: token.position):
            if first.sample in told and first.position == len(told[first.sample]):
                told[first.sample].append(first.token_id)
        known = self.runner.read(departure.blocks, count, max(0, count - (self.window or count)))
        for sample, ids in told.items():
            assert ids == life.expected[sample][: len(ids)]
            whole = [*life.request.prompt_ids, *ids][:count]
            assert known == whole[len(whole) - len(known) :]
            self.prove_state(departure.blocks, whole)
        self.engine.unpin(departure.blocks)

    @precondition(lambda self: self.lives)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        life = self.lives[data.draw(st.sampled_from(sorted(self.lives)))]
        assert self.engine.abort(life.request.id) == (life.end is None)
        life.end = life.end or "aborted"

    @precondition(lambda self: self.lives)
    @rule(data=st.data())
    def abort_in_the_middle_of_a_step(self, data: st.DataObject) -> None:
        life = self.lives[data.draw(st.sampled_from(sorted(self.lives)))]

        def abort() -> None:
            if life.end is None and self.engine.abort(life.request.id):
                life.end = "aborted"

        self.runner.during = abort
        self.step()
        self.runner.during = None

    @precondition(lambda self: self.lives)
    @rule(data=st.data())
    def failing_step(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.lives)))
        self.runner.fail_for = {name}
        try:
            self.step()
            while self.engine.steps.under_way:  # what fails ahead is told when its turn has come
                self.step()
        except RuntimeError:
            self.note_failed()
            failed = [asked.id for asked in self.engine.fail_step()]
            assert name in failed
            for other in failed:
                assert self.lives[other].end is None
                self.lives[other].end = "failed"
        self.runner.fail_for = set()

    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        """Room is short at any moment, for anybody that may be preempted."""
        scheduler = self.engine.scheduler
        victims = [group for group in scheduler._running if group.task is Task.LOCAL]
        if victims:
            self.engine.steps.wait()  # as give_way() is never called beside a step
            scheduler._preempt(data.draw(st.sampled_from(victims)))

    @precondition(lambda self: self.unpinned < len(self.hooks.admissions))
    @rule()
    def release_export(self) -> None:
        asked, blocks, num_tokens = self.hooks.admissions[self.unpinned]
        self.hooks.num_tokens -= num_tokens
        if self.lives[asked.id].end == "handed over":
            known = self.runner.read(blocks, num_tokens)
            whole = asked.known_ids if asked.resume == "fast" else asked.prompt_ids
            assert num_tokens == len(whole)
            assert known == list(whole[-len(known) :])
            assert len(known) == min(num_tokens, self.window or num_tokens)
            self.prove_state(blocks, whole)
        self.unpinned += 1
        self.engine.unpin(blocks)

    @invariant()
    def accounts_balance(self) -> None:
        self.engine.check()
        pool = self.engine.pool
        assert pool.num_free + pool.num_used == pool.num_blocks
        for name, adoption in self.adopted.items():
            held = adoption in self.engine.tables.adoptions
            assert self.given_back[name] == int(not held) == int(adoption.ended)

    def teardown(self) -> None:
        if not self.__dict__.get("lives"):
            return
        while self.reserved:
            self.engine.cancel(self.reserved.pop()[1])
        for _ in range(2000):
            while self.unpinned < len(self.hooks.admissions):
                self.release_export()
            if not self.engine.has_work:
                break
            self.step()
            assert not self.engine.stalled
        assert not self.engine.has_work, "somebody starves"
        while self.unpinned < len(self.hooks.admissions):
            self.release_export()
        assert [life for life in self.lives.values() if life.end is None] == []
        assert self.engine.pool.num_free == self.engine.pool.num_blocks
        self.engine.check()


EngineMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestEngineMachine = EngineMachine.TestCase
