"""The vocabulary (baton/*.py): errors, request states, hashes, fingerprint, time, Redis names."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.protocol import errors
from baton.protocol.block_hashes import HASH_BYTES, block_hashes, root_hash
from baton.protocol.clock import SystemClock, deadline_from_ms, remaining_ms
from baton.protocol.errors import (
    BatonError,
    IllegalTransition,
    InternalError,
    NodeLost,
    error_from_code,
)
from baton.protocol.handles import NodeLoad
from baton.protocol.kv_spec import DTYPE_BYTES, LayerSpec, layout_fingerprint
from baton.protocol.request import TERMINAL, TRANSITIONS, Request, RequestState, check_transition
from baton.protocol.sampling import SamplingParams
from baton.runtime.redis import keys as redis_keys
from baton.runtime.timing import Timing, channel_options, server_options
from deploy.local import StartFailed
from tests.fakes import FakeClock

ROOT = Path(__file__).resolve().parents[1]

# ---- errors ----

ERRORS = {
    name: value
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, BatonError)
}


class LaneBroken(NodeLost):
    """An error of another module: this one's."""

    code = "lane_broken"


def documented_tree() -> dict[str, tuple[int, str]]:
    """Class name -> (depth, what is said of it), from the docstring of baton/protocol/errors.py."""
    assert errors.__doc__ is not None
    lines = re.findall(r"^([│├└─ ]*)([A-Z]\w+)(.*)$", errors.__doc__, re.MULTILINE)
    return {name: (len(rule) // 4, text) for rule, name, text in lines if name in ERRORS}


@pytest.mark.parametrize("kind", ERRORS.values(), ids=lambda kind: kind.__name__)
def test_every_error_has_a_status_of_http_and_of_grpc(kind: type[BatonError]) -> None:
    assert 400 <= kind.http_status < 600
    assert kind.grpc_code in grpc.StatusCode.__members__
    assert kind.grpc_code != "OK"
    assert not (kind.retryable and kind.http_status < 429), "nobody repeats a client's mistake"


@pytest.mark.parametrize("kind", ERRORS.values(), ids=lambda kind: kind.__name__)
def test_every_error_comes_back_from_its_code(kind: type[BatonError]) -> None:
    back = error_from_code(kind.code, "why", "prompt")
    assert type(back) is (InternalError if kind is BatonError else kind)
    assert (str(back), back.message, back.field) == ("why", "why", "prompt")


def test_no_two_errors_share_a_code() -> None:
    kinds = [kind for kind in ERRORS.values() if kind is not BatonError]
    assert len({kind.code for kind in kinds}) == len(kinds)


@pytest.mark.parametrize("code", [StartFailed.code, LaneBroken.code, "", "from_the_future"])
def test_an_error_derived_elsewhere_or_unknown_comes_back_as_internal(code: str) -> None:
    assert type(error_from_code(code, "why")) is InternalError


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    documented = documented_tree()
    assert documented.keys() == ERRORS.keys()
    for name, (depth, text) in documented.items():
        kind = ERRORS[name]
        assert len(kind.__mro__) - len(BatonError.__mro__) == depth, name
        said = re.match(r" +(\d{3})  (\w+)", text)
        inherited = kind.__mro__[1]
        if said is None:  # the line says only what it means: its parent's numbers hold
            assert kind is BatonError or kind.http_status == inherited.http_status, name
        else:
            assert (kind.http_status, kind.grpc_code) == (int(said[1]), said[2]), name
        assert ("retryable" in text) <= kind.retryable, name


# ---- request ----


def documented_transitions() -> dict[RequestState, frozenset[RequestState]]:
    """The state table of docs/request_life.md."""
    text = (ROOT / "docs" / "request_life.md").read_text()
    rows = re.findall(r"^\| ([A-Z]+) \| (.*) \|$", text, re.MULTILINE)
    return {
        RequestState[state]: frozenset(
            RequestState[word]
            for word in re.findall(r"[A-Z]+", following)
            if word in RequestState.__members__
        )
        for state, following in rows
    }


def test_the_table_in_the_documents_is_the_table() -> None:
    assert documented_transitions() == TRANSITIONS


@pytest.mark.parametrize(("current", "new"), list(product(RequestState, RequestState)))
def test_exactly_the_documented_transitions_are_legal(
    current: RequestState, new: RequestState
) -> None:
    if new in documented_transitions()[current]:
        check_transition(current, new)
    else:
        with pytest.raises(IllegalTransition, match=f"{current} -> {new}"):
            check_transition(current, new)


@pytest.mark.parametrize("state", RequestState)
def test_a_living_request_can_fail_over_fail_or_be_cancelled_and_a_dead_one_stays_dead(
    state: RequestState,
) -> None:
    assert state.terminal == (state in TERMINAL) == (not TRANSITIONS[state])
    if not state.terminal:
        always = {RequestState.QUEUED, RequestState.FAILED, RequestState.CANCELLED}
        assert always <= TRANSITIONS[state]


def test_a_retry_keeps_all_but_epoch_and_output() -> None:
    request = Request("r", (1, 2), SamplingParams(), deadline=5.0, arrival=1.0, epoch=3)
    assert request.known_ids == (1, 2)
    retried = request.retried(((7, 8),))
    assert retried == replace(request, epoch=4, output_ids=((7, 8),))
    assert retried.known_ids == (1, 2, 7, 8)
    assert (request.epoch, request.output_ids) == (3, ((),))
    assert replace(request, arrival=9.0) == request, "when it came is no part of what it is"


def test_samples_share_what_they_have_emitted_alike() -> None:
    asked = Request("r", (1, 2), SamplingParams(n=3))
    assert (asked.live_samples, asked.known_ids) == ((0, 1, 2), (1, 2))
    grown = asked.retried(((7, 8, 9), (7, 8), (7, 5)))
    assert grown.known_ids == (1, 2, 7)
    assert grown.emitted(2) == (7, 5)
    living = replace(grown, ended=(2,))
    assert (living.live_samples, living.known_ids) == ((0, 1), (1, 2, 7, 8))
    assert replace(grown, ended=(0, 1, 2)).known_ids == (1, 2)
    search = Request("r", (1, 2), SamplingParams(n=2, beam_width=4), ((7,), (8,)))
    assert (search.live_samples, search.known_ids) == ((0,), (1, 2)), "it starts anew"


def test_how_many_sequences_a_request_is() -> None:
    def counts(**params: Any) -> tuple[int, int, int]:
        it = SamplingParams(**params)
        return it.num_samples, it.num_outputs, it.width

    assert counts() == (1, 1, 1)
    assert counts(n=2) == (2, 2, 2)
    assert counts(n=2, best_of=5) == (5, 5, 5)
    assert counts(n=2, beam_width=4) == (1, 2, 4)


# ---- block hashes ----

ids = st.lists(st.integers(0, 2), max_size=14)
salts = st.text('a\0,"', max_size=3)


@given(ids, ids, ids, st.integers(1, 4))
def test_blocks_hash_alike_exactly_when_all_tokens_up_to_their_end_are_equal(
    prefix: list[int], left: list[int], right: list[int], block_size: int
) -> None:
    root = root_hash("digest")
    one, two = prefix + left, prefix + right
    ones, twos = (block_hashes(root, tokens, block_size) for tokens in (one, two))
    assert [len(ones), len(twos)] == [len(one) // block_size, len(two) // block_size]
    for index, (a, b) in enumerate(zip(ones, twos, strict=False)):
        end = (index + 1) * block_size
        assert (a == b) == (one[:end] == two[:end])
        assert len(a) == HASH_BYTES
    assert len(set(ones)) == len(ones), "the place of a block is in its hash"


@given(st.tuples(salts, salts, salts, salts), st.tuples(salts, salts, salts, salts))
def test_roots_are_equal_exactly_when_model_tenant_precision_and_adapter_are(
    one: tuple[str, str, str, str], two: tuple[str, str, str, str]
) -> None:
    assert (root_hash(*one) == root_hash(*two)) == (one == two)
    first, second = (block_hashes(root_hash(*each), (1, 2), 2) for each in (one, two))
    assert (first == second) == (one == two)


# ---- KV layout ----

LAYERS = (LayerSpec(2, 64, 64), LayerSpec(2, 64, 64, window=128, kind="sliding"))
FINGERPRINT = "5e19b48ba707789ae441602961f0259df967966eaef571f59c4151b7725796e8"


def test_bytes_of_a_token() -> None:
    assert LayerSpec(8, 128, 128).token_bytes("bfloat16") == 4096
    assert LayerSpec(1, 576, 0, kind="mla").token_bytes("float32") == 2304
    assert {name: LayerSpec(1, 1, 0).token_bytes(name) for name in DTYPE_BYTES} == DTYPE_BYTES
    assert LayerSpec(8, 128, 128).scale_bytes("bfloat16") == 0
    assert LayerSpec(8, 128, 128).scale_bytes("int8") == 2 * 8 * 4, "K's and V's apart"
    assert LayerSpec(1, 576, 0, kind="mla").scale_bytes("int8") == 4


def test_the_fingerprint_of_a_layout_is_the_same_in_every_release() -> None:
    # Nodes of two releases exchange KV when this agrees. A change of it is a change of the
    # protocol: raise PROTOCOL_VERSION.
    assert layout_fingerprint("digest", "rope", LAYERS) == FINGERPRINT


@pytest.mark.parametrize(
    "layers",
    [
        (),
        LAYERS[:1],
        LAYERS[::-1],
        *(
            (LAYERS[0], replace(LAYERS[1], **change))
            for change in (
                {"kv_heads": 4}, {"k_dim": 32}, {"v_dim": 32}, {"window": 0}, {"kind": "full"},
            )
        ),
    ],
)  # fmt: skip
def test_any_other_layer_gives_another_fingerprint(layers: tuple[LayerSpec, ...]) -> None:
    assert layout_fingerprint("digest", "rope", layers) != FINGERPRINT


def test_checkpoint_and_rope_are_in_the_fingerprint() -> None:
    prints = {layout_fingerprint(d, r, LAYERS) for d, r in (("d", "r"), ("x", "r"), ("d", "x"))}
    assert len(prints) == 3


# ---- time ----


def test_the_system_clock_never_goes_back() -> None:
    clock = SystemClock()
    readings = [clock.monotonic() for _ in range(5)]
    assert readings == sorted(readings)


@given(st.floats(-10.0, 1e6), st.floats(0.0, 1e6))
def test_a_deadline_moves_to_another_clock_without_growing(left_s: float, there: float) -> None:
    here, away = FakeClock(50.0), FakeClock(there)
    ms = remaining_ms(here.now + left_s, here)
    assert ms >= 1, "0 would mean no deadline"
    moved = deadline_from_ms(ms, away)
    assert moved is not None
    assert moved - away.now == pytest.approx(max(left_s, 0.001), abs=0.0011)
    assert left_s < 0.001 or moved - away.now <= left_s + 1e-6


def test_no_deadline_travels_as_zero() -> None:
    clock = FakeClock()
    assert remaining_ms(None, clock) == 0
    assert deadline_from_ms(0, clock) is None


def test_a_stopped_peer_is_noticed_within_ping_interval_and_timeout() -> None:
    options = dict(channel_options(Timing(ping_interval_s=0.5, ping_timeout_s=0.25)))
    assert options["grpc.keepalive_time_ms"] == 500
    assert options["grpc.keepalive_timeout_ms"] == options["grpc.http2.ping_timeout_ms"] == 250
    assert options["grpc.keepalive_permit_without_calls"] == 1
    assert options["grpc.http2.max_pings_without_data"] == 0, "unlimited"


def test_a_server_allows_the_pings_of_its_clients() -> None:
    timing = Timing()
    client, server = dict(channel_options(timing)), dict(server_options(timing))
    assert client.items() <= server.items()
    for name in ("min_recv_ping_interval_without_data_ms", "min_ping_interval_without_data_ms"):
        assert 0 < server[f"grpc.http2.{name}"] < client["grpc.keepalive_time_ms"]
    assert server["grpc.so_reuseport"] == 0, "two servers on one port is a mistake, not a choice"


def test_lifetimes_outlast_what_renews_them() -> None:
    timing = Timing()
    assert all(getattr(timing, field.name) > 0 for field in fields(timing))
    assert timing.node_record_s > 2 * timing.heartbeat_s
    assert timing.router_lease_s > 2 * timing.heartbeat_s
    assert timing.kv_lease_s > timing.kv_progress_s
    assert timing.request_s > timing.drain_s


# ---- loads ----


def test_a_load_is_news_if_more_than_counters_moved() -> None:
    values: dict[str, Any] = {spec.name: i for i, spec in enumerate(fields(NodeLoad), 1)}
    told = NodeLoad(**values)
    changed = {name: replace(told, **{name: 2 * value}) for name, value in values.items()}
    assert [name for name, load in changed.items() if not load.is_news_after(told)] == [
        "kv_received_bytes", "kv_sent_bytes", "kv_adopted_bytes", "kv_fetches", "kv_fetch_failures",
        "preemptions", "prefix_query_tokens", "prefix_hit_tokens", "steps", "step_tokens",
        "kv_tail_seconds", "mbu", "mfu", "cached_blocks",
    ], "a new field is either one of these, or in the list beside NodeLoad"  # fmt: skip


@pytest.mark.parametrize(
    ("before", "now", "news"),
    [(0.0, 0.0, False), (0.0, 0.001, True), (0.010, 0.0109, False), (0.010, 0.0091, False),
     (0.010, 0.0112, True), (0.010, 0.0, True)],
)  # fmt: skip
def test_a_mean_of_steps_is_news_if_it_has_moved_by_a_tenth(
    before: float, now: float, news: bool
) -> None:
    told = NodeLoad(step_seconds=before)
    assert NodeLoad(step_seconds=now).is_news_after(told) == news


# ---- names in Redis ----


def test_all_keys_share_one_cluster_slot_and_never_meet() -> None:
    keys = [
        redis_keys.ONLY.leases,
        redis_keys.ONLY.events,
        redis_keys.ONLY.states,
        redis_keys.ONLY.request_key("x"),
        redis_keys.node_key("x"),
        redis_keys.ONLY.log_key("x"),
        redis_keys.ONLY.router_key("x"),
    ]
    assert len(set(keys)) == len(keys)
    assert all(key.startswith(redis_keys.TAG) for key in keys)
    assert redis_keys.node_key("*") == redis_keys.NODE_PATTERN
