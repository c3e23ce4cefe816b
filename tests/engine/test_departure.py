"""A running request leaves an engine with its blocks, and goes on in another one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.engine.engine import Engine
from baton.engine.interface import Task
from baton.events import FirstToken
from baton.kv_spec import BlockLists
from baton.request import Request
from tests.engine.driving import PROMPT, assert_all_free, expected, run, tokens_of
from tests.fakes import FakeRunner, fake_engine, model_info, request


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


def prefills(engine: Engine) -> None:
    engine.add(ask())
    engine.step()


def decodes(engine: Engine) -> None:
    engine.add(ask())
    for _ in range(12):
        engine.step()


def samples(engine: Engine) -> None:
    engine.add(ask(n=2))
    engine.step()
    engine.step()


def searches(engine: Engine) -> None:
    engine.add(ask(beam_width=2, n=2))
    engine.step()
    engine.step()


def windowed() -> Engine:
    info = model_info()
    layers = tuple(replace(layer, window=8) for layer in info.layers)
    return fake_engine(info=replace(info, layers=layers))[0]


def decodes_past_its_window(engine: Engine) -> None:
    engine.add(ask())
    while not (engine.stats.num_window_freed_blocks and _on_a_border(engine)):
        engine.step()


def _on_a_border(engine: Engine) -> bool:
    """The window has just left a block that whoever computes the last token again would see."""
    computed = engine.stats.num_prompt_tokens + engine.stats.num_generated_tokens - 1
    return (computed - 8 + 1) % engine.pool.block_size == 0


@pytest.mark.parametrize(
    ("engine", "state"),
    [
        (fake_engine()[0], waits),
        (fake_engine(max_num_batched_tokens=8, max_num_seqs=4)[0], prefills),
        (fake_engine()[0], samples),
        (fake_engine()[0], searches),
        (windowed(), decodes_past_its_window),
    ],
    ids=["waits", "prefills", "samples", "searches", "window"],
)
def test_what_is_not_worth_moving_stays_as_it_is(engine: Engine, state: object) -> None:
    assert callable(state)
    state(engine)
    assert engine.hand_on("r") is None
    assert engine.hand_on("nobody") is None
    assert engine.stats.num_handed_on == 0
    assert engine.abort("r"), "it is still here"
    assert_all_free(engine)
