"""Exact requests: the same shapes each time, so that a resumed one computes the same bits."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.engine.config import USUAL_CHUNK, EngineConfig
from baton.engine.core.assembly import build_engine
from baton.engine.core.engine import Engine
from baton.engine.core.replay import exact_chunk_of, precision_of
from baton.engine.state.interface import SequenceChunk, Task
from baton.protocol.events import FirstToken
from baton.protocol.request import Request, Resume
from baton.protocol.sampling import SamplingParams
from tests.engine.driving import PROMPT, assert_all_free, expected, run, run_samples, tokens_of
from tests.engine.test_fan_out import check, prefill
from tests.fakes import (
    FakeRunner,
    ScriptedProposer,
    expected_beams,
    expected_output,
    fake_engine,
    request,
)
from tests.system.references import prompts
from tests.tiny_models import make_wide_model


def exact(name: str = "r", prompt: Sequence[int] = PROMPT, **changes: object) -> Request:
    return request(name, prompt, resume="exact", **{"max_tokens": 20, **changes})  # type: ignore[arg-type]


def rows_of(runner: FakeRunner, name: str = "r", sample: int = 0) -> list[SequenceChunk]:
    chunks = [chunk for batch in runner.batches for chunk in batch]
    return [c for c in chunks if c.request_id == name and c.sample_index == sample]


def shapes_of(runner: FakeRunner, name: str = "r") -> list[tuple[int, int]]:
    """(first token, tokens) of each row, each place once: what makes the bits."""
    return sorted({(chunk.start, len(chunk.token_ids)) for chunk in rows_of(runner, name)})


# ---- shapes ----


@pytest.mark.parametrize("known", [0, 1, 2, 7, 19])
def test_what_was_emitted_is_replayed_token_by_token(known: int) -> None:
    asked = exact()
    whole, first = fake_engine(max_num_batched_tokens=20, max_num_seqs=4)
    whole.add(asked)
    assert tokens_of(run(whole)["r"]) == expected(asked)
    assert shapes_of(first)[:3] == [(0, 8), (8, 8), (16, 3)], "half of what 4 rows leave"
    engine, runner = fake_engine(max_num_batched_tokens=20, max_num_seqs=4)
    engine.add(asked.retried((tuple(expected(asked)[:known]),)))
    events = run(engine)["r"]
    assert events[0].position == known
    assert tokens_of(events) == expected(asked)[known:], "what is known is not told again"
    assert shapes_of(runner) == shapes_of(first)
    drawn = [chunk.position for chunk in rows_of(runner) if chunk.sample is not None]
    assert drawn == list(range(known, 20)), "a replayed row samples nothing"
    assert engine.stats.num_replayed_tokens == max(0, known - 1)
    assert engine.stats.num_prompt_tokens == len(PROMPT)
    assert engine.stats.num_prefill_chunks == 3
    assert_all_free(engine)


def test_shapes_depend_on_no_mate_no_draft_and_no_cache() -> None:
    engine, runner = fake_engine(
        num_blocks=200, max_num_batched_tokens=28, max_num_seqs=8, proposer=ScriptedProposer()
    )
    engine.add(exact("alone"))
    run(engine)
    asked = [exact("r")] + [request(f"m{i}", (*PROMPT, *range(i)), max_tokens=30) for i in range(9)]
    for one in asked[1:4]:
        engine.add(one)
    told = {event.request_id: [event] for event in engine.step()}
    for one in (*asked[:1], *asked[4:]):
        engine.add(one)
    events = run(engine)
    for one in asked:
        assert tokens_of([*told.get(one.id, ()), *events[one.id]]) == expected(one)
    assert shapes_of(runner, "r") == shapes_of(runner, "alone")
    assert not any(chunk.num_drafts for chunk in rows_of(runner, "r"))
    assert engine.stats.num_accepted_tokens > 0
    assert engine.stats.num_prefix_hit_tokens > 0, "of the mates"
    assert_all_free(engine)


@pytest.mark.parametrize("budget", [4, 5, 7, 13])
def test_small_steps_starve_nobody(budget: int) -> None:
    engine, runner = fake_engine(
        num_blocks=200, max_num_batched_tokens=budget, max_num_seqs=4, proposer=ScriptedProposer()
    )
    asked = [exact(f"e{i}") if i % 2 else request(f"f{i}", PROMPT, max_tokens=20) for i in range(8)]
    for one in asked:
        engine.add(one)
    events = run(engine)
    for one in asked:
        assert tokens_of(events[one.id]) == expected(one)
    assert shapes_of(runner, "e1") == shapes_of(runner, "e7")


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_preempted_one_is_computed_in_the_same_shapes(mode: str) -> None:
    engine, runner = fake_engine(num_blocks=14, preemption_mode=mode)
    asked = [exact(name, max_tokens=24) for name in "abc"]
    for one in asked:
        engine.add(one)
    events = run(engine)
    for one in asked:
        assert tokens_of(events[one.id]) == expected(one)
        assert shapes_of(runner, one.id) == shapes_of(runner, "a")
    assert engine.stats.num_preemptions > 0
    assert (engine.stats.num_replayed_tokens > 0) == (mode == "recompute")
    assert engine.stats.num_swapped_in_blocks == engine.stats.num_swapped_out_blocks, "own bytes"
    assert_all_free(engine)


def test_where_every_shape_gives_the_same_bits_it_is_like_any_other() -> None:
    config = EngineConfig("m")
    assert exact_chunk_of(exact(), config) == USUAL_CHUNK
    assert exact_chunk_of(exact(), replace(config, exact_chunk_tokens=32)) == 32
    assert exact_chunk_of(exact(), replace(config, deterministic=True)) is None
    assert exact_chunk_of(request(), config) is None
    assert exact_chunk_of(exact(), replace(config, max_num_batched_tokens=64)) == 1


def test_nodes_of_small_and_large_steps_compute_it_in_one_way() -> None:
    def shapes(step_tokens: int, **more: Any) -> list[tuple[int, int]]:
        engine, runner = fake_engine(max_num_batched_tokens=step_tokens, max_num_seqs=4, **more)
        engine.add(exact())
        run(engine)
        return shapes_of(runner)

    assert shapes(40) != shapes(20), "half of what 4 rows leave"
    assert shapes(40, exact_chunk_tokens=8) == shapes(20, exact_chunk_tokens=8)


def test_nodes_of_other_chunks_tell_another_precision() -> None:
    info, config = fake_engine()[0].info, EngineConfig("m")
    assert precision_of(info, config) == info.precision
    small = replace(config, exact_chunk_tokens=32)
    assert precision_of(info, small) == f"{info.precision}, exact chunks of 32"
    assert precision_of(info, replace(small, deterministic=True)) == info.precision


# ---- between nodes ----


@pytest.mark.parametrize("known", [0, 1, 5, 19])
def test_the_prompt_alone_is_exported_and_the_rest_replayed(known: int) -> None:
    asked = exact()
    again = asked.retried((tuple(expected(asked)[:known]),))
    offer = prefill(again)
    assert offer.num_tokens == len(PROMPT)
    assert [event.token_ids for event in offer.events] == [() if known else (expected(asked)[0],)]
    assert offer.first == (() if known else (FirstToken(0, expected(asked)[0]),))
    engine, runner = fake_engine()
    engine.add(request("other", PROMPT))  # its blocks can be found, and are not taken
    run(engine)
    reservation = engine.reserve(again, offer.num_tokens)
    assert reservation is not None
    assert reservation.start_token == 0
    runner.write(reservation.blocks, 0, PROMPT)
    engine.add(again, Task.LOCAL, reservation, offer.first)
    assert tokens_of(run(engine)["r"]) == expected(asked)[known:]
    assert [len(chunk.token_ids) for chunk in rows_of(runner)] == [1] * 19
    assert engine.stats.num_replayed_tokens == max(0, known - 1)
    assert_all_free(engine)


@pytest.mark.parametrize("lengths", [(0, 0, 0), (1, 3, 1), (7, 2, 0), (4, 4, 4)])
def test_each_sample_is_replayed_from_where_it_parts(lengths: tuple[int, ...]) -> None:
    asked = exact(sampling={"n": 3})
    whole = [expected_output(PROMPT, asked.params, sample=sample) for sample in range(3)]
    again = asked.retried(tuple(tuple(ids[:k]) for ids, k in zip(whole, lengths, strict=True)))
    offer = prefill(again)
    assert offer.num_tokens == len(PROMPT), "whatever the samples share"
    assert [first.sample for first in offer.first] == [s for s in range(3) if not lengths[s]]
    engine, runner = fake_engine()
    reservation = engine.reserve(again, offer.num_tokens)
    assert reservation is not None
    runner.write(reservation.blocks, 0, PROMPT)
    engine.add(again, Task.LOCAL, reservation, offer.first)
    check(run_samples(engine), again)
    assert {len(chunk.token_ids) for chunk in rows_of(runner)} == {1}
    assert engine.stats.num_replayed_tokens == sum(max(0, k - 1) for k in lengths)
    assert_all_free(engine)


def test_a_search_begins_again() -> None:
    asked = exact(sampling={"beam_width": 3, "n": 2})
    engine, _ = fake_engine(num_blocks=40, preemption_mode="recompute")
    for name in "ab":
        engine.add(replace(asked, id=name))
    events = run_samples(engine)
    for name in "ab":
        found = [events[name, sample][-1].token_ids for sample in range(2)]
        assert found == expected_beams(PROMPT, asked.params)
    assert_all_free(engine)


def test_one_that_moved_with_its_kv_computes_one_row_at_a_time() -> None:
    asked = exact()
    source, runner = fake_engine()
    source.add(asked)
    told = [token for _ in range(9) for event in source.step() for token in event.token_ids]
    departure = source.hand_on("r")
    assert departure is not None
    assert departure.num_tokens == len(PROMPT) + 8
    kv = runner.read(departure.blocks, departure.num_tokens)
    source.unpin(departure.blocks)
    target, into = fake_engine(block_size=8)
    again = asked.retried((tuple(told),))
    reservation = target.reserve(again, departure.num_tokens)
    assert reservation is not None
    into.write(reservation.blocks, 0, kv)
    target.add(again, Task.LOCAL, reservation, departure.first_tokens)
    assert told + tokens_of(run(target)["r"]) == expected(asked)
    assert target.stats.num_replayed_tokens == 0
    assert_all_free(target)


# ---- bits ----


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough that bfloat16 kernels choose by shape, and streams part."""
    return make_wide_model(tmp_path_factory.mktemp("model"), num_hidden_layers=6)


def load(model: Path, dtype: str) -> Engine:
    """`dtype` may begin with "deterministic "."""
    flag, _, name = dtype.rpartition(" ")
    options: dict[str, Any] = {"dtype": name, "deterministic": bool(flag)}
    return build_engine(EngineConfig(str(model), threads=1, num_kv_blocks=120, **options))


def streams(engine: Engine, asked: Sequence[Request]) -> list[list[int]]:
    """All at once."""
    for one in asked:
        engine.add(one)
    events = run(engine)
    return [[*one.output_ids[0], *tokens_of(events[one.id])] for one in asked]


def some_requests(resume: Resume) -> list[Request]:
    lengths = [37, 130, 513, 90, 64, 33, 1, 200]
    params = SamplingParams(temperature=0.8, max_tokens=50, ignore_eos=True)
    return [
        Request(str(seed), prompt, replace(params, seed=seed), resume=resume)
        for seed, prompt in enumerate(prompts(lengths, seed=5))
    ]


def skip_unless_rows_stand_alone(model: Path) -> None:
    """Kernels may also choose by the number of rows in a step: then exact resumes are bit-identical
    only as long as the same requests run beside them, or with --deterministic."""
    asked = some_requests("exact")[:3]
    together = streams(load(model, "bfloat16"), asked)
    engine = load(model, "bfloat16")
    if [streams(engine, [one])[0] for one in asked] != together:
        pytest.skip("on this machine a row's bits depend on how many rows share its step")


@pytest.mark.parametrize(
    ("dtype", "resume", "least"),
    [
        ("bfloat16", "exact", 8),
        ("bfloat16", "fast", 0),
        ("float32", "fast", 8),
        ("deterministic bfloat16", "exact", 8),
    ],
)
def test_8_streams_resumed_at_random_positions(
    model: Path, dtype: str, resume: Resume, least: int
) -> None:
    """In another engine: exact ones go on as if nothing had been; fast ones keep what they said."""
    replays = resume == "exact" and dtype == "bfloat16"
    if replays:
        skip_unless_rows_stand_alone(model)
    draw = random.Random(7)
    asked = some_requests(resume)
    whole = streams(load(model, dtype), asked)
    deaths = [draw.randrange(1, 49) for _ in asked]
    known = [tuple(ids[:death]) for ids, death in zip(whole, deaths, strict=True)]
    engine = load(model, dtype)
    again = streams(engine, [one.retried((k,)) for one, k in zip(asked, known, strict=True)])
    assert [tuple(ids[: len(k)]) for ids, k in zip(again, known, strict=True)] == known
    assert sum(one == other for one, other in zip(again, whole, strict=True)) >= least
    assert engine.stats.num_replayed_tokens == (sum(deaths) - 8 if replays else 0)
    assert_all_free(engine)
