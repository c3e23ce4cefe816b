"""Round trips of everything that routers and nodes exchange, and what is refused on the way in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.protocol import messages, wire, wire_control, wire_sampling, wire_values
from baton.protocol.errors import InvalidRequest
from baton.protocol.events import (
    AdapterList,
    BlockEvent,
    BlockEventKind,
    Controlled,
    HandleReady,
    NodeStep,
    Pooled,
    RequestFailed,
    Subscribed,
    TokenEvent,
    TokenLogprob,
)
from baton.protocol.handles import Endpoint, KVHandle, LaneAddress, NodeLoad, NodeRecord, Role
from baton.protocol.kv_spec import PoolFormat
from baton.protocol.request import FinishReason, Request
from baton.protocol.sampling import GuidedDecoding, SamplingParams
from baton.protocol.wire_sampling import GUIDED_KINDS
from protos import node_pb2


class StoppedClock:
    """A clock whose hand the test moves."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def monotonic(self) -> float:
        return self.now


CLOCK = StoppedClock()
names = st.text("abcdef0123456789-é", min_size=1, max_size=20)
texts = st.text(max_size=20)
tokens = st.integers(0, 2**32 - 1)
token_lists = st.lists(tokens, max_size=8).map(tuple)
counts = st.integers(0, 2**32 - 1)
epochs = st.integers(1, 2**32 - 1)
positive = st.integers(1, 2**31 - 1)
singles = st.floats(-(2.0**90), 0, width=32)


def decimals(low: int, high: int) -> st.SearchStrategy[float]:
    """Numbers as people write them: at most six significant digits."""
    return st.integers(low * 1000, high * 1000).map(lambda n: n / 1000)


guided = st.builds(
    GuidedDecoding,
    kind=st.sampled_from(GUIDED_KINDS),
    grammar=texts,
    backend=texts,
    whitespace=st.none() | texts,
    starts_after=texts,
)


def sampling(
    guided: GuidedDecoding | None, allowed_token_ids: tuple[int, ...], **others: Any
) -> SamplingParams:
    """With one of the two that exclude each other."""
    allowed = () if guided else allowed_token_ids
    return SamplingParams(guided=guided, allowed_token_ids=allowed, **others)


params = st.builds(
    sampling,
    n=st.integers(1, 128),
    best_of=st.none() | st.integers(1, 128),
    beam_width=st.integers(0, 64),
    length_penalty=decimals(-10, 10),
    early_stopping=st.sampled_from(wire_sampling.EARLY_STOPPING),
    temperature=decimals(0, 100),
    top_k=st.integers(-1, 2**31 - 1),
    top_p=st.integers(1, 1000).map(lambda n: n / 1000),
    min_p=decimals(0, 1),
    seed=st.integers(0, 2**64 - 1),
    max_tokens=st.integers(50, 2**31 - 1),
    min_tokens=st.integers(0, 50),
    stop_token_ids=token_lists,
    allowed_token_ids=token_lists,
    ignore_eos=st.booleans(),
    skip_reading_prefix_cache=st.booleans(),
    presence_penalty=decimals(-2, 2),
    frequency_penalty=decimals(-2, 2),
    repetition_penalty=st.integers(1, 100000).map(lambda n: n / 1000),
    logit_bias=st.dictionaries(tokens, decimals(-100, 100), max_size=4).map(
        lambda bias: tuple(sorted(bias.items()))
    ),
    bad_words=st.lists(token_lists, max_size=3).map(tuple),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
    guided=st.none() | guided,
)
requests = st.builds(
    Request,
    id=names,
    prompt_ids=st.lists(tokens, min_size=1, max_size=20).map(tuple),
    params=params,
    output_ids=st.lists(token_lists, min_size=1, max_size=3).map(tuple),
    adapter=texts,
    priority=st.integers(-(2**31), 2**31 - 1),
    tenant_salt=texts,
    deadline=st.none() | st.integers(1, 2**31).map(lambda ms: CLOCK.now + ms / 1000),
    epoch=epochs,
    traceparent=texts,
    resume=st.sampled_from(wire.RESUME),
    ended=st.lists(st.integers(0, 127), max_size=3).map(tuple),
)
formats = st.builds(
    PoolFormat,
    block_size=positive,
    dtype=names,
    tp_size=positive,
    tp_rank=counts,
    codecs=st.lists(names, max_size=3).map(tuple),
)
lanes = st.builds(
    LaneAddress,
    name=names,
    address=texts,
    attributes=st.dictionaries(names, texts, max_size=3).map(lambda d: tuple(sorted(d.items()))),
)
leaf_endpoints = st.builds(
    Endpoint,
    boot_id=names,
    layout_fingerprint=names,
    format=formats,
    lanes=st.lists(lanes, max_size=3).map(tuple),
    protocol_version=counts,
)
endpoints = st.builds(
    replace, leaf_endpoints, ranks=st.lists(leaf_endpoints, max_size=2).map(tuple)
)
handles = st.builds(
    KVHandle,
    boot_id=names,
    export_seq=st.integers(0, 2**64 - 1),
    request_id=names,
    epoch=epochs,
    num_tokens=positive,
    secret=st.binary(min_size=1, max_size=16),
    endpoint=endpoints,
    lease_ms=positive,
    sample=counts,
)
floats = st.floats(0, 1e9)
loads = st.builds(
    NodeLoad,
    running=counts,
    waiting=counts,
    swapped=counts,
    free_blocks=counts,
    total_blocks=counts,
    waiting_tokens=st.integers(0, 2**64 - 1),
    fetching=counts,
    export_bytes=st.integers(0, 2**64 - 1),
    step_seconds=floats,
    prefill_tokens_per_s=floats,
    draining=st.booleans(),
    kv_received_bytes=st.integers(0, 2**64 - 1),
    kv_sent_bytes=st.integers(0, 2**64 - 1),
    kv_adopted_bytes=st.integers(0, 2**64 - 1),
    kv_fetches=st.integers(0, 2**64 - 1),
    kv_fetch_failures=st.integers(0, 2**64 - 1),
    preemptions=st.integers(0, 2**64 - 1),
    prefix_query_tokens=st.integers(0, 2**64 - 1),
    prefix_hit_tokens=st.integers(0, 2**64 - 1),
    pause=st.sampled_from(("", "refuse", "hold")),
    asleep=st.booleans(),
)
records = st.builds(
    NodeRecord,
    node_id=names,
    boot_id=names,
    role=st.sampled_from(Role),
    address=names,
    model=names,
    model_digest=names,
    block_size=positive,
    max_model_len=positive,
    vocab_size=counts,
    endpoint=endpoints,
    load=loads,
    version=texts,
    adapters=st.lists(texts, max_size=3).map(tuple),
    eos_token_ids=token_lists,
    max_num_seqs=counts,
    precision=texts,
    deterministic=st.booleans(),
    leaving_adapters=st.lists(texts, max_size=3).map(tuple),
)
logprob_rows = st.lists(
    st.lists(st.builds(TokenLogprob, tokens, singles, counts), max_size=3).map(tuple), max_size=3
).map(tuple)
token_events = st.builds(
    TokenEvent,
    request_id=names,
    epoch=epochs,
    position=counts,
    token_ids=token_lists,
    sample=counts,
    finish_reason=st.none() | st.sampled_from(FinishReason),
    stop_token_id=st.none() | tokens,
    num_cached_tokens=counts,
    logprobs=logprob_rows,
    prompt_logprobs=logprob_rows,
    preemptions=counts,
)
vectors = st.integers(1, 4).flatmap(lambda n: st.binary(min_size=4 * n, max_size=4 * n))
hashes = st.lists(st.binary(min_size=16, max_size=16), max_size=4).map(tuple)
steps = st.builds(
    NodeStep,
    tokens=st.lists(token_events, max_size=3).map(tuple),
    handles=st.lists(st.builds(HandleReady, names, epochs, handles), max_size=2).map(tuple),
    subscribed=st.lists(st.builds(Subscribed, names, epochs), max_size=2).map(tuple),
    failed=st.lists(
        st.builds(
            RequestFailed,
            request_id=names,
            epoch=counts,
            code=names,
            message=texts,
            retryable=st.booleans(),
            field=st.none() | names,
        ),
        max_size=2,
    ).map(tuple),
    load=st.none() | loads,
    block_events_seq=st.integers(0, 2**64 - 1),
    block_events=st.lists(
        st.builds(BlockEvent, st.sampled_from(BlockEventKind), hashes, st.binary(max_size=16)),
        max_size=3,
    ).map(tuple),
    pooled=st.lists(
        st.builds(Pooled, names, epochs, st.lists(vectors, max_size=3).map(tuple)), max_size=2
    ).map(tuple),
    controlled=st.lists(
        st.builds(Controlled, st.integers(0, 2**64 - 1), texts, texts, st.none() | names),
        max_size=2,
    ).map(tuple),
    adapters=st.none()
    | st.builds(
        AdapterList, st.lists(names, max_size=3).map(tuple), st.lists(names, max_size=3).map(tuple)
    ),
)
SUBMISSIONS = (messages.SubmitPrefill, messages.SubmitDecode, messages.SubmitPool)


@st.composite
def pool_submission(draw: st.DrawFn) -> messages.SubmitPool:
    prompts = draw(st.lists(st.lists(tokens, min_size=1, max_size=4), min_size=1, max_size=4))
    request = replace(draw(requests), prompt_ids=tuple(t for ids in prompts for t in ids))
    value = messages.SubmitPool(
        request,
        tuple(map(len, prompts)),
        draw(st.sampled_from(wire_values.POOL_KINDS)),  # type: ignore[arg-type]
        draw(st.booleans()),
        draw(counts),
        (draw(counts), draw(counts)),
    )
    assert value.prompts == [tuple(ids) for ids in prompts]
    return value


pool_submissions = pool_submission()
router_messages = st.one_of(
    st.builds(messages.SessionHello, names, counts, st.binary(max_size=16)),
    st.builds(messages.SubmitPrefill, requests),
    st.builds(messages.SubmitDecode, requests),
    st.builds(messages.SubmitDecode, requests, handles, st.booleans()),
    st.builds(messages.Prefilled, names, epochs),
    pool_submissions,
    st.builds(messages.AbortRequest, names, epochs),
    st.builds(messages.RenewExport, handles),
    st.builds(messages.ReleaseExport, handles, texts),
    st.builds(messages.DrainNode, names),
    st.builds(messages.Migrate, names, epochs),
    st.builds(messages.StopSample, names, epochs, st.integers(0, 127)),
    st.builds(
        messages.ControlNode,
        number=st.integers(0, 2**64 - 1),
        action=st.sampled_from(wire_control.ACTIONS),
        name=names,
        path=texts,
        in_place=st.booleans(),
        tags=st.lists(st.sampled_from(wire_control.TAGS), max_size=2).map(tuple),
        mode=st.sampled_from(wire_control.MODES),
    ),
)


@given(router_messages)
def test_router_message_round_trip(value: messages.RouterMessage) -> None:
    data = wire.router_message_to_wire(value, CLOCK).SerializeToString()
    back = wire.router_message_from_wire(node_pb2.RouterMessage.FromString(data), CLOCK)
    if isinstance(value, SUBMISSIONS):
        assert isinstance(back, SUBMISSIONS)
        # The deadline is whole milliseconds on the wire.
        assert back.request.deadline == pytest.approx(value.request.deadline, abs=0.0011)
        assert back.request.arrival == CLOCK.now
        back = replace(back, request=replace(back.request, deadline=value.request.deadline))
    assert back == value


@given(records | steps)
def test_node_message_round_trip(value: NodeRecord | NodeStep) -> None:
    data = wire.node_message_to_wire(value).SerializeToString()
    assert wire.node_message_from_wire(node_pb2.NodeMessage.FromString(data)) == value


@given(records, handles)
def test_bytes_for_the_store_round_trip(record: NodeRecord, handle: KVHandle) -> None:
    assert wire.record_from_bytes(wire.record_to_bytes(record)) == record
    assert wire.handle_from_bytes(wire.handle_to_bytes(handle)) == handle


def a_request(**changes: object) -> Request:
    base = Request("r", (1, 2, 3), SamplingParams(seed=7, temperature=0.7))
    return replace(base, **changes)  # type: ignore[arg-type]


def test_a_deadline_moves_with_the_receivers_clock() -> None:
    sender, receiver = StoppedClock(50.0), StoppedClock(9000.0)
    message = wire.request_to_wire(a_request(deadline=52.5), sender)
    assert message.deadline_ms == 2500
    assert wire.request_from_wire(message, receiver).deadline == 9002.5
    no_deadline = wire.request_to_wire(a_request(), sender)
    assert wire.request_from_wire(no_deadline, receiver).deadline is None


def test_a_past_deadline_still_travels_as_a_deadline() -> None:
    message = wire.request_to_wire(a_request(deadline=CLOCK.now - 1), CLOCK)
    assert message.deadline_ms == 1


def test_a_seed_must_be_drawn_before_the_wire() -> None:
    with pytest.raises(InvalidRequest) as caught:
        wire_sampling.sampling_to_wire(SamplingParams())
    assert caught.value.field == "seed"


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("id", lambda m: m.ClearField("id")),
        ("id", lambda m: setattr(m, "id", "x" * 257)),
        ("prompt_ids", lambda m: m.ClearField("prompt_ids")),
        ("output_ids", lambda m: m.ClearField("output_ids")),
        ("params", lambda m: m.ClearField("params")),
        ("epoch", lambda m: m.ClearField("epoch")),
        ("resume", lambda m: setattr(m, "resume", "soon")),
        ("n", lambda m: m.params.ClearField("n")),
        ("early_stopping", lambda m: setattr(m.params, "early_stopping", "perhaps")),
        ("temperature", lambda m: setattr(m.params, "temperature", float("nan"))),
        ("guided", lambda m: setattr(m.params.guided, "kind", "haiku")),
        # A field of a newer version (number 2000): it may change what the request means.
        ("params", lambda m: m.params.MergeFromString(b"\x80\x7d\x01")),
        ("request", lambda m: m.MergeFromString(b"\x80\x7d\x01")),
    ],
)
def test_a_bad_request_is_refused_by_name(field: str, change) -> None:
    message = wire.request_to_wire(a_request(), CLOCK)
    change(message)
    with pytest.raises(InvalidRequest) as caught:
        wire.request_from_wire(message, CLOCK)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("lengths", lambda pool: pool.ClearField("lengths")),
        ("lengths", lambda pool: pool.lengths.append(1)),
        ("lengths", lambda pool: pool.lengths.extend([0])),
        ("kind", lambda pool: setattr(pool, "kind", "max")),
    ],
)
def test_a_bad_pooling_task_is_refused_by_name(field: str, change) -> None:
    message = wire.router_message_to_wire(messages.SubmitPool(a_request(), (1, 2)), CLOCK)
    change(message.submit.pool)
    with pytest.raises(InvalidRequest) as caught:
        wire.router_message_from_wire(message, CLOCK)
    assert caught.value.field == field


def test_a_vector_of_half_a_number_is_refused() -> None:
    step = wire.step_to_wire(NodeStep(pooled=(Pooled("r", 1, (b"12345",)),)))
    with pytest.raises(InvalidRequest, match="float32"):
        wire.step_from_wire(step)


def a_handle() -> KVHandle:
    endpoint = Endpoint("boot", "print", PoolFormat(32, "float32"), (LaneAddress("grpc", "h:1"),))
    return KVHandle("boot", 1, "r", 1, 3, b"secret", endpoint, 10_000)


@pytest.mark.parametrize(
    "name", ["boot_id", "request_id", "epoch", "num_tokens", "secret", "endpoint", "lease_ms"]
)
def test_a_handle_without_a_field_is_refused(name: str) -> None:
    message = wire.handle_to_wire(a_handle())
    message.ClearField(name)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest):
        wire.handle_from_wire(message)


@pytest.mark.parametrize(
    "name", ["node_id", "boot_id", "role", "address", "model", "block_size", "endpoint"]
)
def test_a_record_without_a_field_is_refused(name: str) -> None:
    record = NodeRecord("n", "b", Role.DECODE, "h:1", "m", "d", 32, 64, 9, a_handle().endpoint)
    message = wire.record_to_wire(record)
    message.ClearField(name)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest):
        wire.record_from_wire(message)


@pytest.mark.parametrize("name", ["block_size", "tp_size", "dtype"])
def test_a_pool_format_without_a_field_is_refused(name: str) -> None:
    message = wire.endpoint_to_wire(a_handle().endpoint)
    message.format.ClearField(name)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=name):
        wire.endpoint_from_wire(message)


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(InvalidRequest):
        wire.router_message_from_wire(node_pb2.RouterMessage(), CLOCK)
    with pytest.raises(InvalidRequest):
        wire.node_message_from_wire(node_pb2.NodeMessage())
    submit = node_pb2.Submit(request=wire.request_to_wire(a_request(), CLOCK))
    with pytest.raises(InvalidRequest, match="task"):
        wire.router_message_from_wire(node_pb2.RouterMessage(submit=submit), CLOCK)
    event = node_pb2.TokenEvent(request_id="r", epoch=1, finish_reason="bored")
    with pytest.raises(InvalidRequest, match="finish_reason"):
        wire.token_event_from_wire(event)
    step = node_pb2.NodeStep()
    step.block_events.add().MergeFromString(b"\x08\x09")  # kind 9
    with pytest.raises(InvalidRequest, match="block event"):
        wire.step_from_wire(step)


def test_garbage_from_the_store_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        wire.record_from_bytes(b"\xff\xff\xff")
    with pytest.raises(InvalidRequest):
        wire.handle_from_bytes(b"\xff\xff\xff")


def test_session_mac_depends_on_secret_and_router() -> None:
    mac = messages.session_mac("s", "router-1")
    assert mac == messages.session_mac("s", "router-1")
    assert len({mac, messages.session_mac("t", "router-1"), messages.session_mac("s", "r2")}) == 3


def test_a_routers_proof_travels_with_its_name() -> None:
    (name, given), (proof, mac) = messages.session_metadata("s", "röuter")
    assert (name, given) == (messages.ROUTER_METADATA, "röuter".encode())
    assert name.endswith("-bin"), "gRPC takes other values in ASCII only"
    assert (proof, mac) == (messages.SECRET_METADATA, messages.session_mac("s", "röuter"))
