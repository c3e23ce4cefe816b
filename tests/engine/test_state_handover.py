"""State slots of exports and of reservations: who holds one, until when, and who waits for one."""

from __future__ import annotations

from typing import Any

import pytest

from baton.engine.core.engine import Engine
from baton.engine.state.interface import Task
from baton.protocol.errors import InternalError, KVStale
from baton.protocol.events import FirstToken
from baton.protocol.kv_spec import BlockLists
from tests.engine.driving import run, run_samples
from tests.engine.test_state_machine import SeenTokens, engine_with_states
from tests.fakes import FakeHooks, FakeRunner, expected_output, next_token, request

PROMPT = tuple(range(20, 31))


def engine_of(
    num_slots: int, hooks: FakeHooks | None = None, **options: Any
) -> tuple[Engine, FakeRunner, SeenTokens]:
    return engine_with_states((0,), 64, num_slots, max_num_batched_tokens=8, hooks=hooks, **options)


def slot_of(blocks: BlockLists) -> int:
    slot = blocks[0].state_slot
    assert slot is not None
    return slot


def wait_for_slots(engine: Engine) -> None:
    """Step until only a call can let requests go on."""
    while engine.has_work and not engine.stalled:
        engine.step()


def fetched(
    engine: Engine, runner: FakeRunner, seen: SeenTokens, name: str, n: int = 1
) -> list[int] | None:
    """Reserve, write what a transfer writes, add. Return the leader's first token per sample."""
    asked = request(name, PROMPT, max_tokens=6, sampling={"n": n})
    reservation = engine.reserve(asked, len(PROMPT))
    if reservation is None:
        return None
    runner.write(reservation.blocks, reservation.start_token, PROMPT[reservation.start_token :])
    seen.write(slot_of(reservation.blocks), PROMPT)
    tokens = [next_token(PROMPT, asked.params, 0, sample) for sample in range(n)]
    first = [FirstToken(0, token, sample) for sample, token in enumerate(tokens)]
    engine.add(asked, reservation=reservation, first_tokens=first)
    return tokens


def test_the_slot_of_an_export_outlives_its_request() -> None:
    hooks = FakeHooks()
    engine, _, seen = engine_of(2, hooks)
    states = engine.tables.states
    for name in ("a", "b", "c"):
        engine.add(request(name, (*PROMPT, ord(name) - 90)), Task.PREFILL)
    wait_for_slots(engine)
    assert [asked.id for asked, *_ in hooks.admissions] == ["a", "b"]
    assert (states.num_free, states.num_pinned) == (0, 2)
    assert engine.stalled, "c waits for a slot"
    assert engine.short_of_room, "so who has adopted pages gives them back"
    for (asked, blocks, _), name in zip(hooks.admissions, "ab", strict=True):
        assert seen.tokens(slot_of(blocks)) == [*PROMPT, ord(name) - 90] == list(asked.prompt_ids)
    engine.unpin(hooks.admissions[0][1])
    wait_for_slots(engine)
    assert [asked.id for asked, *_ in hooks.admissions] == ["a", "b", "c"]
    assert seen.tokens(slot_of(hooks.admissions[1][1])) == [*PROMPT, ord("b") - 90]
    for _, blocks, _ in hooks.admissions[1:]:
        engine.unpin(blocks)
    engine.check()
    assert (states.num_free, states.num_pinned) == (2, 0)


def test_an_aborted_prompt_leaves_its_slot_to_the_export() -> None:
    """The reader may be in the middle of the state: nobody else gets the slot before unpin()."""
    hooks = FakeHooks()
    engine, *_ = engine_of(1, hooks)
    engine.add(request("a", PROMPT), Task.PREFILL)
    engine.step()
    assert engine.abort("a")
    engine.add(request("b", PROMPT))
    engine.step()
    assert engine.stalled
    engine.check()
    blocks = hooks.admissions[0][1]
    engine.unpin(blocks)
    with pytest.raises(InternalError, match="not pinned"):
        engine.unpin(blocks)
    assert list(run(engine)) == ["b"]


def test_a_reservation_has_a_slot_for_each_sample() -> None:
    engine, runner, seen = engine_of(5)
    states = engine.tables.states
    asked = request("a", PROMPT, sampling={"n": 4})
    first, second = engine.reserve(asked, 11), engine.reserve(request("b", PROMPT), 11)
    assert first is not None
    assert second is not None
    assert slot_of(first.blocks) != slot_of(second.blocks)
    assert states.num_free == 0
    assert engine.reserve(request("c", PROMPT), 11) is None
    engine.cancel(first)
    engine.cancel(first)
    engine.check()
    assert states.num_free == 4
    assert fetched(engine, runner, seen, "d", n=4) is not None
    assert states.num_free == 0, "all four have forked"
    run_samples(engine)
    engine.cancel(second)
    assert states.num_free == 5


def test_samples_fork_from_the_state_that_has_arrived() -> None:
    engine, runner, seen = engine_of(4)
    first = fetched(engine, runner, seen, "a", n=3)
    assert first is not None
    events = run_samples(engine)
    for sample, token in enumerate(first):
        told = [token for event in events["a", sample] for token in event.token_ids]
        params = request("a", PROMPT, max_tokens=6, sampling={"n": 3}).params
        assert told == expected_output(PROMPT, params, sample=sample)
        assert told[0] == token
    assert engine.stats.num_prompt_tokens == 0


def test_a_state_goes_not_back_by_a_token() -> None:
    """Without token 1, the prompt's last token would be computed behind itself."""
    engine, runner, seen = engine_of(2)
    asked = request("a", PROMPT)
    reservation = engine.reserve(asked, len(PROMPT))
    assert reservation is not None
    runner.write(reservation.blocks, 0, PROMPT)
    seen.write(slot_of(reservation.blocks), PROMPT)
    with pytest.raises(KVStale, match="no token is known"):
        engine.add(asked, reservation=reservation)
    engine.check()  # it is held still
    engine.cancel(reservation)
    assert engine.tables.states.num_free == 2


def test_a_request_that_runs_ahead_or_has_samples_leaves_without_its_state() -> None:
    engine, *_ = engine_of(4)
    engine.add(request("one", PROMPT, max_tokens=9))
    engine.add(request("two", PROMPT, max_tokens=9, sampling={"n": 2}))
    for _ in range(6):
        engine.step()
    assert engine.hand_on("two") is None
    assert engine.stats.departures == {"state": 1}
    departure = engine.hand_on("one")
    assert departure is not None
    assert engine.tables.states.num_pinned == 1
    engine.unpin(departure.blocks)
    run_samples(engine)
    assert engine.tables.states.num_free == 4


def test_a_step_that_has_run_ahead_keeps_the_state_here() -> None:
    engine, *_ = engine_of(2, async_scheduling=True)
    engine.add(request("one", PROMPT, max_tokens=20))
    for _ in range(6):
        engine.step()
    assert engine.steps.under_way
    assert engine.hand_on("one") is None
    assert engine.stats.departures == {"state": 1}
    run(engine)
