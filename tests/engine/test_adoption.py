"""Adopted pages: full blocks of a hand-over that stay in another node's pool.

FakeRunner's memory is longer than the own pool, and what lies behind is the other's: a table that
names the wrong page, or a page read after it was given back, shows up as a wrong token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch

from baton.engine.core.engine import Engine
from baton.engine.memory.adopted_pages import GIVE_WAY_AFTER_S, TAKE_OVER_AFTER_S
from baton.engine.memory.kv_cache import KVArena
from baton.engine.state.adoption import Adoption
from baton.engine.state.interface import Reservation
from baton.protocol.errors import InternalError, KVStale
from baton.protocol.events import FirstToken
from baton.protocol.kv_spec import LayerSpec
from baton.protocol.request import Request
from tests.block_lists import held
from tests.engine.driving import PROMPT, assert_all_free, expected, run, tokens_of
from tests.fakes import FakeRunner, fake_engine, model_info, request

SIZE = 4  # tokens of a block


@dataclass
class Lender:
    """Another node's pool, behind the own one of `runner`; what it lends and gets back."""

    engine: Engine
    runner: FakeRunner
    safe: bool = True
    wanted: bool = False
    released: list[str] = field(default_factory=list)
    lent: dict[str, range] = field(default_factory=dict)

    def prefill(self, asked: Request, num_tokens: int) -> range:
        """Pages of the request's first tokens; their ids."""
        first = len(self.runner.memory) // SIZE
        ids = range(first, first + -(-num_tokens // SIZE))
        self.runner.memory.extend([None] * (len(ids) * SIZE))
        self.runner.write(held(ids), 0, asked.known_ids[:num_tokens])
        self.lent[asked.id] = ids
        return ids

    def adoption(self, asked: Request, num_tokens: int) -> Adoption:
        def release() -> None:
            self.released.append(asked.id)
            for page in self.lent[asked.id]:  # the lender takes it for somebody else at once
                self.runner.memory[page * SIZE : (page + 1) * SIZE] = [(0, 96)] * SIZE

        ids = self.prefill(asked, num_tokens)
        return Adoption(asked.id, ids, release, lambda: self.safe, lambda: self.wanted)

    def reserve(self, asked: Request, num_tokens: int) -> Reservation:
        reservation = self.engine.reserve(asked, num_tokens, adopting=True)
        assert reservation is not None
        return reservation

    def hand_over(self, asked: Request, *, first: bool = True) -> Adoption:
        num_tokens = len(asked.prompt_ids)
        reservation = self.reserve(asked, num_tokens)
        adoption = self.adoption(asked, num_tokens)
        told = (FirstToken(0, expected(asked)[0]),) if first else ()
        self.engine.add(asked, reservation=reservation, first_tokens=told, adoption=adoption)
        self.engine.check()
        return adoption


def lender(num_blocks: int = 64, **options: Any) -> Lender:
    engine, runner = fake_engine(num_blocks=num_blocks, block_size=SIZE, **options)
    return Lender(engine, runner)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 16, 19])
@pytest.mark.parametrize("first", [True, False])
def test_pages_are_read_where_they_lie(length: int, first: bool) -> None:
    """Any remainder in the last page, none included; also when the last token is recomputed."""
    peer = lender()
    asked = request(prompt=PROMPT[:length])
    peer.hand_over(asked, first=first)
    tokens = tokens_of(run(peer.engine)["r"])
    assert tokens == expected(asked)
    # Without a first token the last one is computed again: in a page of one's own.
    whole = length // SIZE
    recomputed = not first and length % SIZE == 0
    assert peer.engine.stats.num_adopted_blocks == whole
    start = length - SIZE if recomputed else length - (not first)
    assert peer.runner.batches[0][0].start == start
    assert peer.engine.stats.num_copied_blocks == (length % SIZE > 0)
    assert peer.released == ["r"]
    assert_all_free(peer.engine)


def test_a_reservation_to_adopt_takes_one_block() -> None:
    peer = lender()
    reservation = peer.reserve(request(prompt=PROMPT), 19)
    assert peer.engine.pool.num_used == 1
    assert (reservation.start_token, reservation.blocks[0].first) == (16, 4)
    peer.engine.cancel(reservation)
    assert_all_free(peer.engine)


def test_own_prefix_hits_come_before_adopted_pages() -> None:
    peer = lender()
    peer.engine.add(request("a", PROMPT[:9]))
    run(peer.engine)
    asked = request("b", PROMPT, seed=3)
    peer.hand_over(asked)
    assert peer.engine.stats.num_adopted_blocks == 2
    assert tokens_of(run(peer.engine)["b"]) == expected(asked)
    assert peer.released == ["b"]
    assert_all_free(peer.engine)


def test_nothing_is_held_where_all_is_here_already() -> None:
    peer = lender()
    peer.engine.add(request("a", PROMPT))
    run(peer.engine)
    asked = request("b", PROMPT, seed=3)
    peer.hand_over(asked)
    assert peer.released == ["b"]
    assert peer.engine.stats.num_adopted_blocks == 0
    assert tokens_of(run(peer.engine)["b"]) == expected(asked)


def test_adopted_pages_are_offered_to_nobody() -> None:
    peer = lender()
    asked = request(prompt=PROMPT, max_tokens=16)
    peer.hand_over(asked)
    run(peer.engine)
    assert peer.engine.pool.num_cached == 0
    assert peer.engine.take_block_events() == []


def test_two_requests_may_share_a_page_of_the_lender() -> None:
    peer = lender()
    one, two = request("one", PROMPT, seed=1), request("two", PROMPT, seed=2, max_tokens=3)
    ids = peer.prefill(one, 19)
    for asked in (one, two):
        reservation = peer.reserve(asked, 19)
        adoption = Adoption(asked.id, ids, partial(peer.released.append, asked.id), lambda: True)
        first = FirstToken(0, expected(asked)[0])
        peer.engine.add(asked, reservation=reservation, first_tokens=(first,), adoption=adoption)
    events = run(peer.engine)
    for asked in (one, two):
        assert tokens_of(events[asked.id]) == expected(asked)
    assert peer.released == ["two", "one"]
    assert_all_free(peer.engine)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preemption_gives_the_pages_back(mode: str) -> None:
    peer = lender(preemption_mode=mode)
    asked = request(prompt=PROMPT)
    peer.hand_over(asked)
    seen = peer.engine.step()
    scheduler = peer.engine.scheduler
    scheduler._preempt(scheduler._running[0])
    assert peer.released == ["r"]
    peer.engine.check()
    assert tokens_of(seen + run(peer.engine)["r"]) == expected(asked)
    assert peer.engine.stats.num_swap_outs == (mode == "swap")
    assert_all_free(peer.engine)


def test_a_copy_of_pages_that_may_be_anothers_is_not_kept() -> None:
    peer = lender(preemption_mode="swap")
    asked = request(prompt=PROMPT)
    peer.hand_over(asked)
    seen = peer.engine.step()
    peer.safe = False
    scheduler = peer.engine.scheduler
    scheduler._preempt(scheduler._running[0])
    assert peer.engine.stats.num_swap_outs == 0
    assert tokens_of(seen + run(peer.engine)["r"]) == expected(asked)
    assert peer.engine.take_failed() == []


def test_abort_and_an_end_at_once_give_the_pages_back_once() -> None:
    peer = lender()
    peer.hand_over(request("a", PROMPT))
    assert peer.engine.abort("a")
    peer.hand_over(request("b", PROMPT, max_tokens=1))
    run(peer.engine)
    assert peer.released == ["a", "b"]
    assert_all_free(peer.engine)


def test_pages_are_taken_exactly_where_they_are_reserved_for() -> None:
    peer = lender()
    asked = request(prompt=PROMPT)
    plain = peer.engine.reserve(asked, 19)
    assert plain is not None
    adoption = peer.adoption(asked, 19)
    with pytest.raises(InternalError):
        peer.engine.add(asked, reservation=plain, adoption=adoption)
    reservation = peer.reserve(asked, 19)
    few = Adoption("r", adoption.ids[:-1], adoption.end, adoption.safe)
    own = Adoption("r", range(5), adoption.end, adoption.safe)
    for wrong in (None, few, own):
        with pytest.raises(InternalError):
            peer.engine.add(asked, reservation=reservation, adoption=wrong)
    peer.engine.cancel(plain)
    peer.engine.cancel(reservation)
    assert peer.released == []
    assert_all_free(peer.engine)


# ---- the fence ----


def test_pages_that_lapsed_on_their_way_are_not_taken() -> None:
    peer = lender()
    asked = request(prompt=PROMPT)
    reservation, adoption = peer.reserve(asked, 19), peer.adoption(asked, 19)
    peer.safe = False
    with pytest.raises(KVStale):
        peer.engine.add(asked, reservation=reservation, adoption=adoption)
    peer.engine.cancel(reservation)
    adoption.end()
    adoption.end()
    assert peer.released == ["r"]
    assert_all_free(peer.engine)


def test_a_request_past_its_promise_is_failed_before_it_reads() -> None:
    peer = lender()
    other = request("other", PROMPT[:5])
    peer.hand_over(request("late", PROMPT, epoch=3))
    peer.engine.add(other)
    peer.engine.step()
    peer.safe = False
    steps = len(peer.runner.batches)
    events = peer.engine.step()
    assert {chunk.request_id for chunk in peer.runner.batches[steps]} == {"other"}
    assert {event.request_id for event in events} == {"other"}
    (failed,) = peer.engine.take_failed()
    assert (failed.request_id, failed.epoch) == ("late", 3)
    assert (failed.code, failed.retryable) == ("kv_stale", True)
    assert peer.engine.take_failed() == []
    assert peer.released == ["late"]
    run(peer.engine)
    assert_all_free(peer.engine)


def test_what_a_step_sampled_across_the_end_of_the_promise_is_dropped() -> None:
    peer = lender()
    other = request("other", PROMPT[:5])
    peer.hand_over(request("late", PROMPT))
    peer.engine.add(other)
    seen = [event for event in peer.engine.step() if event.request_id == "other"]

    def sleep() -> None:
        peer.safe = False

    peer.runner.during = sleep
    events = peer.engine.step()
    assert {event.request_id for event in events} == {"other"}
    assert [failed.request_id for failed in peer.engine.take_failed()] == ["late"]
    assert peer.released == ["late"]
    assert tokens_of(seen + events + run(peer.engine)["other"]) == expected(other)
    assert_all_free(peer.engine)


# ---- copies later ----


def test_what_is_read_for_long_is_copied_and_given_back() -> None:
    peer = lender()
    asked = request(prompt=PROMPT)
    peer.hand_over(asked)
    seen = peer.engine.step()
    assert peer.engine.stats.num_taken_over_blocks == 0
    assert peer.runner.clock is not None
    peer.runner.clock.advance(TAKE_OVER_AFTER_S)
    seen += peer.engine.step()
    assert peer.engine.stats.num_taken_over_blocks == 4
    assert peer.released == ["r"]
    peer.safe = False  # is of no interest any more
    assert tokens_of(seen + run(peer.engine)["r"]) == expected(asked)
    assert_all_free(peer.engine)
    # What was copied, and what was computed behind it, is found like any other prefix.
    again = request("again", PROMPT, seed=3)
    peer.engine.add(again)
    assert tokens_of(run(peer.engine)["again"]) == expected(again)
    assert peer.engine.stats.num_prefix_hit_tokens == 16


def test_copies_are_made_a_few_at_a_time_and_not_into_the_last_room() -> None:
    peer = lender(num_blocks=8)
    asked = request(prompt=PROMPT, max_tokens=12)
    peer.hand_over(asked)
    seen = peer.engine.step()
    peer.engine.adopted._limit = 1
    assert peer.runner.clock is not None
    peer.runner.clock.advance(TAKE_OVER_AFTER_S)
    copies: list[int] = []
    for _ in range(5):
        seen += peer.engine.step()
        copies.append(peer.engine.stats.num_taken_over_blocks)
    assert copies == [1, 2, 3, 4, 4]
    assert tokens_of(seen + run(peer.engine)["r"]) == expected(asked)
    assert peer.released == ["r"]
    full = lender(num_blocks=8)
    full.hand_over(asked)
    blocks = full.engine.pool.allocate(6)
    assert blocks is not None
    full.engine.adopted.take_over(1)
    assert full.engine.stats.num_taken_over_blocks == 0
    full.engine.pool.unref(blocks)


def test_what_its_owner_wants_back_is_copied_at_once() -> None:
    peer = lender()
    asked = request(prompt=PROMPT)
    peer.hand_over(asked)
    seen = peer.engine.step()
    peer.wanted = True
    seen += peer.engine.step()
    assert peer.engine.stats.num_taken_over_blocks == 4
    assert peer.released == ["r"]
    assert tokens_of(seen + run(peer.engine)["r"]) == expected(asked)
    assert_all_free(peer.engine)


def test_what_is_wanted_no_more_stays_where_it_is() -> None:
    peer = lender(num_blocks=8)
    peer.hand_over(request(prompt=PROMPT))
    blocks = peer.engine.pool.allocate(6)
    assert blocks is not None
    peer.wanted = True
    peer.engine.adopted.take_over(1)
    assert peer.runner.clock is not None
    peer.runner.clock.advance(GIVE_WAY_AFTER_S + 0.1)
    assert peer.engine.adopted.take_over(1) == ["r"]
    peer.wanted = False
    assert peer.engine.adopted.take_over(1) == []
    peer.wanted = True
    assert peer.engine.adopted.take_over(1) == [], "it is counted anew"
    peer.engine.pool.unref(blocks)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_who_finds_no_room_for_what_is_wanted_back_gives_way(mode: str) -> None:
    peer = lender(num_blocks=7, preemption_mode=mode)
    other, asked = request("other", PROMPT[:15], max_tokens=8), request(prompt=PROMPT, max_tokens=8)
    peer.engine.add(other)
    seen = peer.engine.step()
    peer.hand_over(asked)
    seen += peer.engine.step()
    peer.wanted = True
    seen += peer.engine.step()
    assert peer.released == []
    assert peer.runner.clock is not None
    peer.runner.clock.advance(GIVE_WAY_AFTER_S + 0.1)
    seen += peer.engine.step()
    assert peer.released == ["r"]
    assert peer.engine.stats.num_preemptions == 1
    peer.wanted = False
    events = run(peer.engine)
    for each in (other, asked):
        own = [event for event in seen if event.request_id == each.id]
        assert tokens_of(own + events[each.id]) == expected(each)
    assert peer.engine.take_failed() == []
    assert_all_free(peer.engine)


def test_an_engine_says_whether_somebody_waits_for_room() -> None:
    peer = lender(num_blocks=8)
    one, two = request("one", PROMPT, max_tokens=4), request("two", PROMPT[::-1], max_tokens=4)
    peer.engine.add(one)
    peer.engine.step()
    assert not peer.engine.short_of_room
    peer.engine.add(two)
    peer.engine.step()
    assert peer.engine.short_of_room
    run(peer.engine)
    assert not peer.engine.short_of_room


def test_a_request_that_leaves_takes_its_pages_along() -> None:
    peer = lender()
    asked = request(prompt=PROMPT)
    peer.hand_over(asked)
    peer.engine.step()
    departure = peer.engine.hand_on("r")
    assert departure is not None
    assert peer.released == ["r"]
    known = [*PROMPT, *expected(asked)]
    assert peer.runner.read(departure.blocks, departure.num_tokens) == known[: departure.num_tokens]
    peer.engine.unpin(departure.blocks)
    assert_all_free(peer.engine)


def test_only_layers_that_see_everything_adopt() -> None:
    windowed = model_info(layers=(LayerSpec(1, 2, 2), LayerSpec(1, 2, 2, window=8)))
    peer = lender(info=windowed)
    assert not peer.engine.may_adopt
    with pytest.raises(InternalError):
        peer.engine.reserve(request(prompt=PROMPT), 19, adopting=True)
    assert lender().engine.may_adopt


# ---- the arena ----


def tensors_of(arena: KVArena, layer: int) -> list[torch.Tensor]:
    scales = arena.scales(layer) if arena.dtype == "int8" else ()
    return [*arena.layer(layer), *scales]


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_views_of_layers_reach_beyond_the_own_pages(dtype: str) -> None:
    """int8: with their scales, which lie in the page."""
    layers = (LayerSpec(2, 8, 8), LayerSpec(2, 8, 8))
    peer = KVArena(layers, 3, 4, dtype)
    for layer in range(2):
        for part in tensors_of(peer, layer):
            part.copy_(torch.randint(-100, 100, part.shape))
    made: list[torch.Tensor] = []

    def memory(num_bytes: int, page_bytes: int) -> torch.Tensor:
        assert num_bytes == 2 * page_bytes
        made.append(torch.zeros(5 * page_bytes + 64, dtype=torch.uint8))
        made[0][num_bytes : 5 * page_bytes] = torch.frombuffer(peer.buffer(), dtype=torch.uint8)
        return made[0]

    arena = KVArena(layers, 2, 4, dtype, memory=memory)
    for layer in range(2):
        for mine, theirs in zip(tensors_of(arena, layer), tensors_of(peer, layer), strict=True):
            assert len(mine) == 5
            assert torch.equal(mine[2:], theirs)
    assert (arena.num_blocks, len(arena.buffer())) == (2, 2 * arena.page_bytes)
    arena.copy_block(4, 1)
    kept = arena.read_blocks([3]).words
    arena.write_blocks(arena.read_blocks([3]), [0], [0])
    for mine, theirs in zip(tensors_of(arena, 1), tensors_of(peer, 1), strict=True):
        assert torch.equal(mine[:2], theirs[[1, 2]])
    assert kept.shape[0] == 1
    with pytest.raises(IndexError):
        arena.clear_block(2)
    with pytest.raises(IndexError):
        arena.copy_block(0, 3)
