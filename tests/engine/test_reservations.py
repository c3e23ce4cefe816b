"""Reservations: KV that comes from elsewhere.

Written into FakeRunner as a transfer would write it.
"""

from __future__ import annotations

import pytest

from baton.engine.core.engine import Engine
from baton.engine.state.interface import Task
from baton.protocol.errors import ContextLengthExceeded, InternalError
from baton.protocol.events import FirstToken, TokenEvent, TokenLogprob
from baton.protocol.kv_spec import LayerSpec
from baton.protocol.request import FinishReason, Request
from tests.engine.driving import PROMPT, assert_all_free, expected, run, tokens_of
from tests.fakes import EOS_ID, fake_engine, model_info, next_token, request


def hand_over(
    asked: Request, num_tokens: int, first: tuple[FirstToken, ...]
) -> tuple[Engine, list[TokenEvent], list[int]]:
    """Reserve on a fresh engine, write the KV as a transfer would, add;
    events and computed starts."""
    engine, runner = fake_engine()
    reservation = engine.reserve(asked, num_tokens)
    assert reservation is not None
    source = [*asked.known_ids, *(token.token_id for token in first)]
    runner.write(reservation.blocks, 0, source[:num_tokens])
    engine.add(asked, reservation=reservation, first_tokens=first)
    events = run(engine)[asked.id]
    starts = [chunk.start for batch in runner.batches for chunk in batch]
    return engine, events, starts


def test_a_hand_over_continues_with_token_two_and_repeats_token_one() -> None:
    asked = request(prompt=PROMPT)
    output = expected(asked)
    engine, events, starts = hand_over(asked, 19, (FirstToken(0, output[0]),))
    assert (events[0].position, events[0].token_ids) == (0, (output[0],))
    assert tokens_of(events) == output
    assert starts[0] == 19, "nothing of the prompt is computed"
    assert engine.stats.num_prompt_tokens == 0
    assert engine.stats.num_prefill_chunks == 0
    assert_all_free(engine)


def test_a_hand_over_repeats_what_was_told_of_token_one() -> None:
    asked = request(prompt=PROMPT)
    output = expected(asked)
    told = (TokenLogprob(output[0], -0.25, 1), TokenLogprob(5, -2.0, 2))
    _, events, _ = hand_over(asked, 19, (FirstToken(0, output[0], logprobs=told),))
    assert (events[0].token_ids, events[0].logprobs) == ((output[0],), (told,))


def test_first_tokens_fill_only_what_the_outputs_lack() -> None:
    asked = request(prompt=PROMPT)
    output = expected(asked)
    retried = asked.retried((tuple(output[:2]),))
    # The export was made under epoch 1 (prompt only); the router has seen two tokens since.
    _, events, starts = hand_over(retried, 19, (FirstToken(0, 96),))
    assert tokens_of(events) == output[2:]
    assert events[0].position == 2
    assert starts[0] == 19


def test_a_hand_over_without_first_tokens_recomputes_the_last_one() -> None:
    asked = request(prompt=PROMPT)
    _, events, starts = hand_over(asked, 19, ())
    assert tokens_of(events) == expected(asked)
    assert starts[0] == 18


def test_a_first_token_that_ends_the_request_needs_no_step_of_the_model() -> None:
    asked = request(prompt=PROMPT, max_tokens=1)
    engine, events, starts = hand_over(asked, 19, (FirstToken(0, 7),))
    assert events == [TokenEvent("r", 1, 0, (7,), finish_reason=FinishReason.LENGTH)]
    assert starts == []
    assert_all_free(engine)


def test_a_retry_that_had_ended_ends_again_without_a_token() -> None:
    engine, _ = fake_engine()
    engine.add(request("len", PROMPT, max_tokens=2, outputs=(5, 6)))
    engine.add(request("eos", PROMPT, ignore_eos=False, outputs=(5, EOS_ID)))
    events = run(engine)
    assert events["len"] == [TokenEvent("len", 1, 2, (), finish_reason=FinishReason.LENGTH)]
    assert events["eos"] == [
        TokenEvent("eos", 1, 2, (), finish_reason=FinishReason.STOP, stop_token_id=EOS_ID)
    ]
    engine.add(request("late", PROMPT, max_tokens=2, outputs=(5, 6)))
    assert engine.abort("late"), "its end was not told yet"
    assert engine.step() == []


def test_a_reservation_takes_prefix_hits_first() -> None:
    engine, runner = fake_engine()
    engine.add(request("a", PROMPT))
    run(engine)
    asked = request("b", PROMPT, seed=3)
    reservation = engine.reserve(asked, 19)
    assert reservation is not None
    assert reservation.start_token == 16
    runner.write(reservation.blocks, 16, PROMPT[16:])
    output = expected(asked)
    engine.add(asked, reservation=reservation, first_tokens=(FirstToken(0, output[0]),))
    assert tokens_of(run(engine)["b"]) == output
    assert_all_free(engine)


def test_handed_over_requests_survive_preemption() -> None:
    engine, runner = fake_engine(num_blocks=10)
    requests = [request(f"r{i}", PROMPT[: 7 + i], seed=i, max_tokens=16) for i in range(3)]
    for asked in requests:
        size = len(asked.prompt_ids)
        reservation = engine.reserve(asked, size)
        assert reservation is not None
        runner.write(reservation.blocks, 0, asked.prompt_ids)
        first = FirstToken(0, next_token(asked.prompt_ids, asked.params, 0))
        engine.add(asked, reservation=reservation, first_tokens=(first,))
    events = run(engine)
    assert engine.stats.num_preemptions > 0
    for asked in requests:
        assert tokens_of(events[asked.id]) == expected(asked)
    assert_all_free(engine)


def test_cancelled_reservations_leave_nothing_findable() -> None:
    engine, _ = fake_engine(num_blocks=5)
    asked = request(prompt=PROMPT, max_tokens=1)
    reservation = engine.reserve(asked, 19)
    assert reservation is not None
    assert engine.reserve(asked, 19) is None, "no room"
    assert not engine.abort(asked.id), "a fetch may still write: only cancel ends a reservation"
    engine.cancel(reservation)
    engine.cancel(reservation)
    again = engine.reserve(asked, 19)
    assert again is not None
    assert again.start_token == 0
    engine.cancel(again)
    assert_all_free(engine)
    with pytest.raises(InternalError, match="not held"):
        engine.add(asked, reservation=again)
    with pytest.raises(ContextLengthExceeded):
        engine.reserve(asked, 21)
    with pytest.raises(InternalError, match="only LOCAL"):
        engine.add(asked, Task.PREFILL, reservation=again)


def test_cancelling_twice_leaves_an_equal_reservation_alone() -> None:
    engine, _ = fake_engine()
    asked = request(prompt=PROMPT[:8])
    engine.add(asked)
    run(engine)
    again = request("again", prompt=PROMPT[:8])
    one, other = engine.reserve(again, 8), engine.reserve(again, 8)
    assert one is not None
    assert other is not None
    assert one.blocks == other.blocks, "both are prefix hits throughout"
    engine.cancel(one)
    engine.cancel(one)
    engine.add(again, reservation=other)
    assert tokens_of(run(engine)["again"]) == expected(again)
    assert_all_free(engine)


def test_kv_of_another_precision_answers_for_its_own_kind_alone() -> None:
    engine, runner = fake_engine()
    asked = request("a", PROMPT, max_tokens=4)
    rounded = engine.reserve(asked, 19, precision="int8")
    assert rounded is not None
    assert rounded.precision == "int8"
    runner.write(rounded.blocks, 0, PROMPT)
    engine.add(asked, reservation=rounded)
    assert tokens_of(run(engine)["a"]) == expected(asked)
    # The exact KV of the same prompt is not known here: nothing hits, for arrivals and for prompts.
    exact = engine.reserve(asked, 19)
    assert exact is not None
    assert exact.start_token == 0
    engine.cancel(exact)
    again = engine.reserve(asked, 19, precision="int8")
    assert again is not None
    assert again.start_token == 16
    engine.cancel(again)
    before = engine.stats.num_prefix_hit_tokens
    engine.add(request("b", PROMPT, max_tokens=4))
    assert tokens_of(run(engine)["b"]) == expected(asked)
    assert engine.stats.num_prefix_hit_tokens == before
    # And the pool's own precision by name is no other one.
    named = engine.reserve(asked, 19, precision=engine.info.kv_dtype)
    assert named is not None
    assert named.start_token == 16
    engine.cancel(named)
    assert_all_free(engine)


def test_an_arrival_in_windowed_groups_takes_what_can_be_seen() -> None:
    layers = (LayerSpec(1, 2, 2), LayerSpec(1, 2, 2, window=5))
    engine, runner = fake_engine(info=model_info(layers=layers))
    asked = request("a", PROMPT, max_tokens=9)
    reservation = engine.reserve(asked, 19)
    assert reservation is not None
    full, sliding = reservation.blocks
    # Token 16, the first of the last block, sees 12 .. 16.
    assert (full.first, len(full.ids), sliding.first, len(sliding.ids)) == (0, 5, 3, 2)
    runner.write(reservation.blocks, 0, PROMPT)
    engine.add(asked, reservation=reservation)
    assert tokens_of(run(engine)["a"]) == expected(asked)
    assert engine.stats.num_window_freed_blocks > 0
    assert_all_free(engine)
