"""A running request leaves an engine with its blocks, and goes on in another one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.engine.core.departure import Departure
from baton.engine.core.engine import Engine
from baton.engine.state.interface import Task
from baton.protocol.events import FirstToken
from baton.protocol.kv_spec import BlockLists
from baton.protocol.request import Request
from tests.engine.driving import (
    PROMPT,
    assert_all_free,
    expected,
    run,
    run_samples,
    tokens_of,
)
from tests.fakes import (
    FakeArena,
    FakeRunner,
    expected_beams,
    expected_output,
    fake_engine,
    model_info,
    request,
)


def ask(**params: object) -> Request:
    asked = request(prompt=PROMPT, max_tokens=20)
    return replace(asked, params=replace(asked.params, ignore_eos=True, **params))  # type: ignore[arg-type]


def kv_of(runner: FakeRunner, blocks: BlockLists, count: int) -> list[int]:
    return runner.read(blocks, count)


@pytest.mark.parametrize("steps", [1, 2, 7, 19])
def test_it_leaves_with_all_it_computed_and_goes_on_elsewhere(steps: int) -> None:
    asked = ask()
    source, runner = fake_engine()
    source.add(asked)
    told = [token for _ in range(steps) for event in source.step() for token in event.token_ids]
    departure = source.hand_on("r")
    assert departure is not None
    assert told == expected(asked)[:steps]
    assert departure.num_tokens == len(PROMPT) + steps - 1
    assert departure.first_tokens == (FirstToken(steps - 1, told[-1]),)
    kv = kv_of(runner, departure.blocks, departure.num_tokens)
    assert kv == [*PROMPT, *told[:-1]]
    assert source.hand_on("r") is None, "it is gone"
    assert not source.has_work
    assert not source.abort("r")
    assert source.pool.num_free == source.pool.num_blocks - len(departure.blocks[0].ids), "pinned"
    assert (source.stats.num_handed_on, source.stats.num_aborted) == (1, 0)
    assert source.stats.departures == {"whole": 1}
    assert source.stats.num_left_behind_tokens == 0
    source.unpin(departure.blocks)
    assert_all_free(source)

    target, into = fake_engine(block_size=8)
    again = asked.retried((tuple(told),))
    reservation = target.reserve(again, departure.num_tokens)
    assert reservation is not None
    into.write(reservation.blocks, 0, kv)
    target.add(again, Task.LOCAL, reservation, departure.first_tokens)
    assert told + tokens_of(run(target)["r"]) == expected(asked)
    assert target.stats.num_prompt_tokens == 0
    assert_all_free(target)


def test_what_left_can_be_found_again() -> None:
    """Its full blocks stay in the prefix map when the export is over."""
    engine, _ = fake_engine()
    asked = ask()
    engine.add(asked)
    for _ in range(6):
        engine.step()
    departure = engine.hand_on("r")
    assert departure is not None
    engine.unpin(departure.blocks)
    output = expected(asked)
    engine.add(asked.retried((tuple(output[:6]),)))
    assert tokens_of(run(engine)["r"]) == output[6:]
    assert engine.stats.num_prefix_hit_tokens == 24


def test_an_event_that_was_not_told_yet_travels_with_the_departure() -> None:
    asked = ask()
    token = expected(asked)[0]
    engine, runner = fake_engine()
    reservation = engine.reserve(asked, len(PROMPT))
    assert reservation is not None
    runner.write(reservation.blocks, 0, PROMPT)
    engine.add(asked, Task.LOCAL, reservation, (FirstToken(0, token),))
    departure = engine.hand_on("r")
    assert departure is not None
    assert departure.first_tokens == (FirstToken(0, token),)
    assert departure.num_tokens == len(PROMPT)
    assert not engine.has_work
    engine.unpin(departure.blocks)
    assert_all_free(engine)


def waits(engine: Engine) -> None:
    engine.add(ask())


def waits_with_one_token(engine: Engine) -> None:
    engine.add(replace(ask(), prompt_ids=PROMPT[:1]))


def prefills(engine: Engine) -> None:
    engine.add(ask())
    engine.step()


def decodes(engine: Engine) -> None:
    engine.add(ask())
    for _ in range(12):
        engine.step()


def windowed(**options: object) -> Engine:
    info = model_info()
    layers = tuple(replace(layer, window=8) for layer in info.layers)
    return fake_engine(info=replace(info, layers=layers), **options)[0]  # type: ignore[arg-type]


def runner_of(engine: Engine) -> FakeRunner:
    assert isinstance(engine.arena, FakeArena)
    return engine.arena.runner


@pytest.mark.parametrize(
    ("engine", "state"),
    [
        (fake_engine()[0], waits),
        (fake_engine()[0], waits_with_one_token),
        (fake_engine(max_num_batched_tokens=8, max_num_seqs=4)[0], prefills),
    ],
    ids=["waits", "one token", "prefills"],
)
def test_what_is_not_worth_moving_stays_as_it_is(engine: Engine, state: object) -> None:
    assert callable(state)
    state(engine)
    assert engine.hand_on("r") is None
    assert engine.hand_on("nobody") is None
    assert engine.stats.num_handed_on == 0
    assert engine.stats.departures == {"uncomputed": 1}
    assert engine.abort("r"), "it is still here"
    assert_all_free(engine)


@pytest.mark.parametrize("steps", range(1, 18))
def test_a_window_never_takes_what_a_receiver_needs(steps: int) -> None:
    """At any place of the window's edge within a block."""
    asked = ask()
    engine, target = windowed(), windowed(block_size=8)
    engine.add(asked)
    told = [token for _ in range(steps) for event in engine.step() for token in event.token_ids]
    assert steps < 5 or engine.stats.num_window_freed_blocks > 0
    departure = engine.hand_on("r")
    assert departure is not None
    again = asked.retried((tuple(told),))
    reservation = target.reserve(again, departure.num_tokens)
    assert reservation is not None
    runner_of(target).write(reservation.blocks, 0, again.known_ids[: departure.num_tokens])
    target.add(again, Task.LOCAL, reservation, departure.first_tokens)
    wanted = expected_output(PROMPT, asked.params, window=8)
    assert told + tokens_of(run(target)["r"]) == wanted
    assert target.stats.num_prompt_tokens == 0
    engine.unpin(departure.blocks)
    assert_all_free(engine)
    assert_all_free(target)


# ---- several sequences ----


def resume(asked: Request, departure: Departure, told: dict[int, list[int]]) -> Engine:
    """Another engine with the departure's KV, and what the router knows."""
    count = asked.params.num_outputs
    again = asked.retried(tuple(tuple(told.get(sample, ())) for sample in range(count)))
    target, into = fake_engine(num_blocks=96)
    assert departure.num_tokens <= len(again.known_ids)
    reservation = target.reserve(again, departure.num_tokens)
    assert reservation is not None
    into.write(reservation.blocks, 0, again.known_ids[: departure.num_tokens])
    target.add(again, Task.LOCAL, reservation, departure.first_tokens)
    return target


@pytest.mark.parametrize("steps", [2, 3, 9])
def test_samples_leave_with_what_they_share(steps: int) -> None:
    asked = ask(n=3)
    source, runner = fake_engine(num_blocks=96)
    source.add(asked)
    told: dict[int, list[int]] = {}
    for _ in range(steps):
        for event in source.step():
            told.setdefault(event.sample, []).extend(event.token_ids)
    departure = source.hand_on("r")
    assert departure is not None
    assert departure.num_tokens == len(PROMPT)
    assert source.stats.departures == {"shared": 1}
    beyond = sum(len(ids) - 1 for ids in told.values())  # the last one's KV is not computed yet
    assert source.stats.num_left_behind_tokens == beyond > 0
    assert kv_of(runner, departure.blocks, len(PROMPT)) == list(PROMPT)
    assert [(t.sample, t.position, t.token_id) for t in departure.first_tokens] == [
        (sample, position, token)
        for sample, ids in told.items()
        for position, token in enumerate(ids)
    ]
    source.unpin(departure.blocks)
    assert_all_free(source)
    target = resume(asked, departure, told)
    for (_, sample), events in run_samples(target).items():
        told[sample] += tokens_of(events)
    for sample in range(3):
        assert told[sample] == expected_output(PROMPT, asked.params, sample=sample)
    starts = [chunk.start for batch in runner_of(target).batches for chunk in batch]
    assert min(starts) == len(PROMPT), "the prompt came with its KV"
    assert_all_free(target)


@pytest.mark.parametrize("steps", [2, 3, 9])
def test_a_search_leaves_with_its_prompt_and_begins_again(steps: int) -> None:
    asked = ask(beam_width=4, n=2)
    source, _ = fake_engine(num_blocks=96)
    source.add(asked)
    for _ in range(steps):
        assert source.step() == []
    departure = source.hand_on("r")
    assert departure is not None
    assert departure.num_tokens <= len(PROMPT)
    assert departure.first_tokens == ()
    assert source.stats.departures == {"prompt": 1}
    assert source.stats.num_left_behind_tokens > 0
    source.unpin(departure.blocks)
    assert_all_free(source)
    target = resume(asked, departure, {})
    events = run_samples(target)
    wanted = expected_beams(PROMPT, asked.params)
    assert [events["r", sample][-1].token_ids for sample in range(2)] == wanted
    assert_all_free(target)
