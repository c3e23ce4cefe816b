"""Engine over FakeRunner: right tokens under chunks, hits and preemption;
every life ends once, and frees all.

FakeRunner reads each history back through the block table, so a wrong table is a wrong token.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.engine.state.interface import Task
from baton.protocol.block_hashes import block_hashes
from baton.protocol.errors import (
    ConfigError,
    ContextLengthExceeded,
    InternalError,
    InvalidRequest,
    UnsupportedFeature,
)
from baton.protocol.events import BlockEventKind
from baton.protocol.request import FinishReason, Request
from baton.protocol.sampling import GuidedDecoding, SamplingParams
from tests.block_lists import held
from tests.engine.driving import PROMPT, assert_all_free, expected, run, tokens_of
from tests.fakes import (
    EOS_ID,
    NUM_LAYERS,
    VOCAB_SIZE,
    FakeHooks,
    expected_output,
    fake_engine,
    model_info,
    request,
)

# ---- tokens ----


def test_tokens_and_the_end_by_length() -> None:
    engine, _ = fake_engine()
    asked = request(prompt=PROMPT, max_tokens=7)
    engine.add(asked)
    (events,) = run(engine).values()
    assert tokens_of(events) == expected(asked)
    assert [event.position for event in events] == list(range(7))
    assert [event.finish_reason for event in events] == [None] * 6 + [FinishReason.LENGTH]
    assert_all_free(engine)


@pytest.mark.parametrize("budget", [4, 5, 7, 70])
def test_chunked_equals_unchunked(budget: int) -> None:
    engine, runner = fake_engine(max_num_seqs=4, max_num_batched_tokens=budget)
    requests = [request(f"r{i}", PROMPT[i:], seed=i, max_tokens=9) for i in range(4)]
    for asked in requests:
        engine.add(asked)
    events = run(engine)
    for asked in requests:
        assert tokens_of(events[asked.id]) == expected(asked)
    assert max(sum(len(c.token_ids) for c in batch) for batch in runner.batches) <= budget
    assert engine.stats.num_chunked_prompts == (4 if budget < 70 else 0)
    assert (engine.stats.num_prefill_chunks > 8) == (budget < 70)
    assert_all_free(engine)


def test_preemption_keeps_outputs() -> None:
    engine, _ = fake_engine(num_blocks=9, max_num_seqs=4)
    requests = [request(f"r{i}", PROMPT[: 5 + i], seed=i, max_tokens=20) for i in range(3)]
    for asked in requests:
        engine.add(asked)
    events = run(engine)
    assert engine.stats.num_preemptions > 0
    for asked in requests:
        assert tokens_of(events[asked.id]) == expected(asked)
    assert_all_free(engine)


def test_prefix_hits_keep_outputs_and_are_told() -> None:
    engine, runner = fake_engine()
    first, second = request("a", PROMPT, seed=1), request("b", PROMPT, seed=2)
    engine.add(first)
    run(engine)
    engine.add(second)
    events = run(engine)["b"]
    assert tokens_of(events) == expected(second)
    assert {event.num_cached_tokens for event in events} == {16}
    assert engine.stats.num_prefix_hit_tokens == 16
    assert engine.stats.prefix_hit_rate == 16 / 38
    assert sum(len(c.token_ids) for batch in runner.batches for c in batch) < 2 * (19 + 7)


@pytest.mark.parametrize(("salt", "hits"), [("other", 0), ("", 16)])
def test_a_tenants_salt_hides_its_prefixes(salt: str, hits: int) -> None:
    engine, _ = fake_engine()
    engine.add(request("a", PROMPT))
    run(engine)
    engine.add(request("b", PROMPT, tenant_salt=salt))
    run(engine)
    assert engine.stats.num_prefix_hit_tokens == hits


def test_without_prefix_caching_there_are_no_hits() -> None:
    engine, _ = fake_engine(enable_prefix_caching=False)
    for name in ("a", "b"):
        engine.add(request(name, PROMPT))
        run(engine)
    assert engine.stats.num_prefix_hit_tokens == 0
    assert engine.take_block_events() == []


def test_block_events_carry_the_hashes_that_a_router_computes() -> None:
    engine, _ = fake_engine()
    asked = request(prompt=PROMPT, max_tokens=1)
    engine.add(asked)
    run(engine)
    (event,) = engine.take_block_events()
    assert event.kind is BlockEventKind.STORED
    assert event.parent == b""
    assert list(event.hashes) == block_hashes(engine.known_root_hash(asked), PROMPT, 4)


# ---- how a request ends ----


def find_seed(prompt: tuple[int, ...], wanted: int, position: int) -> int:
    """A seed under which the fake model says `wanted` first at `position`."""
    for seed in range(100_000):
        params = SamplingParams(seed=seed, max_tokens=position + 1, ignore_eos=True)
        output = expected_output(prompt, params)
        if output[position] == wanted and wanted not in output[:position]:
            return seed
    raise AssertionError("no such seed")


def test_end_of_sequence_is_emitted_and_named() -> None:
    engine, _ = fake_engine()
    seed = find_seed(PROMPT, EOS_ID, 2)
    engine.add(request(prompt=PROMPT, seed=seed, ignore_eos=False))
    (events,) = run(engine).values()
    last = events[-1]
    assert (last.position, last.token_ids, last.stop_token_id) == (2, (EOS_ID,), EOS_ID)
    assert last.finish_reason is FinishReason.STOP
    engine.add(request(prompt=PROMPT, seed=seed, ignore_eos=True))
    (events,) = run(engine).values()
    assert len(events) == 8


def test_stop_token_ids_end_a_request_even_with_ignore_eos() -> None:
    engine, _ = fake_engine()
    asked = request(prompt=PROMPT)
    stop = expected(asked)[3]
    asked = replace(asked, params=replace(asked.params, stop_token_ids=(stop,)))
    engine.add(asked)
    (events,) = run(engine).values()
    assert events[-1].finish_reason is FinishReason.STOP
    assert events[-1].stop_token_id == stop
    assert tokens_of(events) == expected(asked)


def test_abort_frees_all_and_is_silent() -> None:
    engine, _ = fake_engine()
    engine.add(request("a", PROMPT))
    engine.add(request("b", PROMPT))
    engine.step()
    assert engine.abort("a")
    assert not engine.abort("a")
    assert not engine.abort("never seen")
    engine.check()
    assert run(engine).keys() == {"b"}
    assert engine.stats.num_aborted == 1
    assert_all_free(engine)


def test_abort_in_the_middle_of_a_step_takes_effect_at_its_end() -> None:
    engine, runner = fake_engine()
    engine.add(request("a", PROMPT))
    engine.add(request("b", PROMPT))
    used: list[int] = []

    def abort() -> None:
        assert engine.abort("a")
        assert not engine.abort("a")
        used.append(engine.pool.num_used)

    runner.during = abort
    events = engine.step()
    assert [event.request_id for event in events] == ["b"]
    assert engine.pool.num_used < used[0]
    run(engine)
    assert_all_free(engine)


def test_an_id_may_come_back_once_it_is_gone() -> None:
    engine, _ = fake_engine()
    engine.add(request("a", PROMPT))
    with pytest.raises(InvalidRequest, match="already runs") as error:
        engine.add(request("a", PROMPT))
    assert error.value.field == "id"
    engine.abort("a")
    engine.add(request("a", PROMPT, epoch=2))
    assert {event.epoch for event in run(engine)["a"]} == {2}


def test_a_prompt_is_computed_anew_where_its_client_says_so() -> None:
    engine, _ = fake_engine()
    first = request("a", PROMPT, seed=1)
    anew = request("b", PROMPT, seed=2, sampling={"skip_reading_prefix_cache": True})
    last = request("c", PROMPT, seed=3)
    cached: list[set[int]] = []
    for asked in (first, anew, last):
        engine.add(asked)
        events = run(engine)[asked.id]
        assert tokens_of(events) == expected(asked)
        cached.append({event.num_cached_tokens for event in events})
    assert cached == [{0}, {0}, {16}], "what it leaves is there for others"
    starts = [engine.reserve(asked, len(PROMPT)) for asked in (anew, last)]
    assert [found is not None and found.start_token for found in starts] == [0, 16]
    for reservation in starts:
        assert reservation is not None
        engine.cancel(reservation)
    assert_all_free(engine)


# ---- prefill tasks ----


def test_prefill_is_pinned_and_announced_before_its_first_layer() -> None:
    hooks = FakeHooks()
    engine, runner = fake_engine(hooks=hooks, max_num_seqs=2, max_num_batched_tokens=8)
    asked = request("p", PROMPT)
    engine.add(asked, Task.PREFILL)
    assert engine.step() == []
    ((told, blocks, num_tokens),) = hooks.admissions
    assert (told, num_tokens, blocks[0].end) == (asked, 19, 5)
    assert hooks.layers == [(layer, (("p", 8),)) for layer in range(NUM_LAYERS)]
    (events,) = run(engine).values()
    assert [upto for layer, ((_, upto),) in hooks.layers if layer == 0] == [8, 16, 19]
    assert tokens_of(events) == expected(asked)[:1]
    assert events[0].finish_reason is None, "token 1 does not end the request"
    assert engine.pool.num_used == 5, "the export's pin stays"
    assert runner.read(blocks, 19) == list(PROMPT)
    engine.unpin(blocks)
    assert_all_free(engine)
    # A second try is nearly free.
    engine.add(request("p", PROMPT, epoch=2), Task.PREFILL)
    (event,) = engine.step()
    assert (event.num_cached_tokens, event.epoch) == (16, 2)
    assert hooks.layers[-1] == (NUM_LAYERS - 1, (("p", 19),))


def test_prefill_that_really_ends_says_so() -> None:
    engine, _ = fake_engine(hooks=FakeHooks())
    engine.add(request("one", PROMPT, max_tokens=1), Task.PREFILL)
    seed = find_seed(PROMPT, EOS_ID, 0)
    engine.add(request("eos", PROMPT, seed=seed, ignore_eos=False), Task.PREFILL)
    events = run(engine)
    assert events["one"][0].finish_reason is FinishReason.LENGTH
    assert events["eos"][0].finish_reason is FinishReason.STOP


def test_prefill_of_a_retry_goes_on_at_its_position() -> None:
    engine, _ = fake_engine(hooks=FakeHooks())
    asked = request(prompt=PROMPT)
    outputs = expected(asked)
    engine.add(asked.retried((tuple(outputs[:3]),)), Task.PREFILL)
    (events,) = run(engine).values()
    assert (events[0].position, events[0].token_ids) == (3, (outputs[3],))
    assert (events[0].epoch, events[0].finish_reason) == (2, None)


def test_abort_of_a_prefill_leaves_the_pin_to_the_export() -> None:
    hooks = FakeHooks()
    engine, _ = fake_engine(hooks=hooks, max_num_seqs=2, max_num_batched_tokens=8)
    engine.add(request("p", PROMPT), Task.PREFILL)
    engine.step()
    aborted: list[bool] = []
    hooks.during_layer = lambda: aborted.append(engine.abort("p"))
    assert engine.step() == []
    assert aborted == [True, False]
    assert not engine.has_work
    ((_, blocks, _),) = hooks.admissions
    assert engine.pool.num_used == blocks[0].end
    engine.unpin(blocks)
    assert_all_free(engine)


def test_a_prefill_waits_for_pinned_blocks_and_says_that_it_is_stalled() -> None:
    hooks = FakeHooks()
    engine, _ = fake_engine(num_blocks=8, hooks=hooks)
    engine.add(request("p1", PROMPT), Task.PREFILL)
    engine.add(request("p2", PROMPT[::-1]), Task.PREFILL)
    assert [event.request_id for event in engine.step()] == ["p1"]
    assert engine.step() == []
    assert engine.has_work
    assert engine.stalled
    engine.unpin(hooks.admissions[0][1])
    assert not engine.stalled
    assert [event.request_id for event in engine.step()] == ["p2"]


def test_a_step_that_only_preempts_is_no_stall() -> None:
    # The preempted one leaves its only slot to a request that holds its blocks already.
    engine, runner = fake_engine(num_blocks=4, max_num_seqs=1, preemption_mode="recompute")
    engine.add(request("r", PROMPT[:4], max_tokens=12))
    engine.step()
    ready = request("d", tuple(reversed(PROMPT[:8])), max_tokens=2)
    reservation = engine.reserve(ready, 8)
    assert reservation is not None
    runner.write(reservation.blocks, 0, ready.prompt_ids)
    engine.add(ready, reservation=reservation)
    events = engine.step()
    while not engine.stats.num_preemptions:
        events = engine.step()
    assert events == []
    assert not engine.stalled
    assert run(engine).keys() == {"r", "d"}
    assert_all_free(engine)


def test_local_requests_are_neither_pinned_nor_announced() -> None:
    hooks = FakeHooks()
    engine, _ = fake_engine(hooks=hooks)
    engine.add(request(prompt=PROMPT))
    run(engine)
    assert hooks.admissions == []
    assert hooks.layers == []
    assert_all_free(engine)


# ---- refusals ----


@pytest.mark.parametrize(
    ("asked", "error", "field"),
    [
        (request(prompt=()), InvalidRequest, "prompt"),
        (request(prompt=(VOCAB_SIZE,)), InvalidRequest, "prompt"),
        (request(prompt=(-1,)), InvalidRequest, "prompt"),
        (request(outputs=(VOCAB_SIZE,)), InvalidRequest, "prompt"),
        (request(adapter="lora"), UnsupportedFeature, "adapter"),
        (request(sampling={"n": 3, "best_of": 2}), InvalidRequest, "best_of"),
        (request(sampling={"beam_width": 2, "n": 3}), InvalidRequest, "n"),
        (request(sampling={"n": 65}), InvalidRequest, "n"),
        (
            request(sampling={"beam_width": 64, "n": 2}, max_tokens=90),
            ContextLengthExceeded,
            "max_tokens",
        ),
        (request(sampling={"guided": GuidedDecoding("regex", "a")}), UnsupportedFeature, "guided"),
        (request(params=SamplingParams()), InvalidRequest, "seed"),
        (request(prompt=(5,) * 256), ContextLengthExceeded, "prompt"),
        (request(prompt=(5,) * 250), ContextLengthExceeded, "max_tokens"),
    ],
)
def test_what_cannot_be_served_is_refused_by_field(
    asked: Request, error: type[InvalidRequest], field: str
) -> None:
    engine, _ = fake_engine(num_blocks=80)
    with pytest.raises(error) as raised:
        engine.add(asked)
    assert raised.value.field == field
    assert not engine.has_work


def test_a_request_larger_than_the_pool_is_refused() -> None:
    engine, _ = fake_engine(num_blocks=5)
    assert engine.info.max_model_len == 20
    with pytest.raises(ContextLengthExceeded) as raised:
        engine.validate(request(prompt=PROMPT, max_tokens=2))
    assert raised.value.field == "max_tokens"
    # A prefill's output lives elsewhere: only its prompt must fit.
    engine.validate(request(prompt=PROMPT, max_tokens=100), Task.PREFILL)
    with pytest.raises(ContextLengthExceeded, match="need 6 KV blocks"):
        engine.validate(request(prompt=(5,) * 21, max_tokens=2), Task.PREFILL)
    engine.add(request(prompt=PROMPT, max_tokens=1))
    assert len(run(engine)["r"]) == 1


def test_the_resolved_config() -> None:
    engine, _ = fake_engine(num_blocks=16, max_model_len=40)
    config = engine.config
    assert (config.block_size, config.num_kv_blocks, config.max_model_len) == (4, 16, 40)
    assert engine.info.max_model_len == 40
    with pytest.raises(ConfigError, match="exceeds the model's 256"):
        fake_engine(max_model_len=257)


# ---- steps that fail, load, time ----


def test_a_step_that_raises_fails_its_requests_and_no_others() -> None:
    engine, runner = fake_engine(max_num_seqs=2, max_num_batched_tokens=8)
    runner.fail_for.add("bad")
    engine.add(request("bad", PROMPT))
    engine.add(request("good", PROMPT))
    with pytest.raises(RuntimeError):
        engine.step()
    assert [asked.id for asked in engine.fail_step()] == ["bad"]
    engine.check()
    assert run(engine).keys() == {"good"}
    assert engine.stats.num_failed == 1
    assert_all_free(engine)


def test_hooks_that_raise_fail_the_step_and_leave_no_pin() -> None:
    hooks = FakeHooks(error=RuntimeError("no more exports"))
    engine, _ = fake_engine(hooks=hooks)
    engine.add(request("p", PROMPT), Task.PREFILL)
    with pytest.raises(RuntimeError):
        engine.step()
    assert [asked.id for asked in engine.fail_step()] == ["p"]
    assert_all_free(engine)


def test_a_request_aborted_in_a_failing_step_is_not_failed_too() -> None:
    hooks = FakeHooks()
    engine, runner = fake_engine(hooks=hooks)
    engine.add(request("p", PROMPT), Task.PREFILL)
    engine.add(request("q", PROMPT), Task.PREFILL)

    def abort_and_break() -> None:
        engine.abort("p")
        raise RuntimeError("in the middle")

    runner.during = abort_and_break
    with pytest.raises(RuntimeError):
        engine.step()
    assert [asked.id for asked in engine.fail_step()] == ["q"]
    for _, blocks, _ in hooks.admissions:
        engine.unpin(blocks)
    assert_all_free(engine)


def test_load_and_moving_means() -> None:
    engine, runner = fake_engine(max_num_seqs=2, max_num_batched_tokens=8)
    runner.seconds_per_step = 0.5
    for name in ("a", "b", "c"):
        engine.add(request(name, PROMPT, max_tokens=2))
    load = engine.current_load()
    assert (load.running, load.waiting, load.waiting_tokens) == (0, 3, 57)
    assert (load.free_blocks, load.total_blocks) == (64, 64)
    engine.step()
    load = engine.current_load()
    assert (load.running, load.waiting, load.waiting_tokens) == (1, 2, 49)
    assert load.free_blocks == 59
    assert (load.step_seconds, load.prefill_tokens_per_s) == (0.5, 16.0)
    run(engine)
    stats = engine.stats.copy()
    assert (stats.num_requests, stats.num_finished, stats.num_generated_tokens) == (3, 3, 6)
    assert stats.num_steps == len(runner.batches)
    assert stats.step_seconds == pytest.approx(0.5)


def test_unpin_of_what_is_not_pinned_is_a_bug_that_is_told() -> None:
    engine, _ = fake_engine()
    with pytest.raises(InternalError, match="not pinned"):
        engine.unpin(held([0]))
    assert model_info().max_model_len == engine.info.max_model_len


def test_exports_without_room_make_a_prefill_wait_and_nobody_overtakes() -> None:
    hooks = FakeHooks(most_tokens=30)
    engine, _ = fake_engine(hooks=hooks)
    engine.add(request("a", PROMPT), Task.PREFILL)
    engine.add(request("b", PROMPT[:12]), Task.PREFILL)
    engine.add(request("c", PROMPT[:4], max_tokens=2))
    assert [event.request_id for event in engine.step()] == ["a"]
    assert engine.stats.num_export_refusals == 1
    for _ in range(3):
        assert engine.step() == []
    assert engine.stalled, "only an unpin can help"
    ((_, blocks, num_tokens),) = hooks.admissions
    hooks.num_tokens -= num_tokens
    engine.unpin(blocks)
    assert not engine.stalled
    assert {event.request_id for event in engine.step()} == {"b", "c"}
    run(engine)
    engine.unpin(hooks.admissions[1][1])
    assert_all_free(engine)
