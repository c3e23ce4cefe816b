"""Round trips of everything that routers and nodes exchange, and what is refused on the way in."""

from __future__ import annotations

from dataclasses import replace
from inspect import signature
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.protocol import messages, wire, wire_sampling, wire_values
from baton.protocol.errors import InvalidRequest
from baton.protocol.events import NodeStep, Pooled, TokenEvent, TokenLogprob
from baton.protocol.handles import Endpoint, KVHandle, LaneAddress, NodeRecord, Role
from baton.protocol.kv_spec import PoolFormat
from baton.protocol.request import Request
from baton.protocol.sampling import SamplingParams
from protos import node_pb2
from tests.wire_strategies import (
    CLOCK,
    DRAWN,
    NOT_DRAWN,
    SUBMISSIONS,
    StoppedClock,
    handles,
    records,
    router_messages,
    steps,
)


@pytest.mark.parametrize("kind", DRAWN, ids=lambda kind: kind.__name__)
def test_every_field_travels_in_these_tests(kind: Any) -> None:
    assert DRAWN[kind] | NOT_DRAWN.get(kind, set()) == set(signature(kind).parameters)


@given(st.lists(router_messages, min_size=1, max_size=4))
def test_a_batch_is_put_together_from_bytes(values: list[messages.RouterMessage]) -> None:
    single = [wire.router_message_to_wire(value, CLOCK) for value in values]
    sizes = [each.ByteSize() for each in single]
    data = wire.router_messages_to_bytes(iter(values), CLOCK, most_bytes=sum(sizes) + 1)
    heard = node_pb2.RouterMessage.FromString(data)
    if len(single) == 1:
        assert heard == single[0]
        return
    assert list(heard.batch.messages) == single
    left = iter(values)
    data = wire.router_messages_to_bytes(left, CLOCK, most_bytes=sizes[0])
    assert node_pb2.RouterMessage.FromString(data) == single[0]
    assert len(list(left)) == len(values) - 1, "the others wait"


def test_a_step_without_log_probabilities_says_so() -> None:
    event, row = TokenEvent("r", 1, 0, (5,)), ((TokenLogprob(5, -0.5, 1),),)
    message = wire.step_to_wire(NodeStep(tokens=(event,)))
    assert message.no_logprobs
    message.no_logprobs = False  # as from a node of an older version
    assert wire.step_from_wire(message).tokens == (event,)
    for told in ({"logprobs": row}, {"prompt_logprobs": row}):
        other = TokenEvent("s", 1, 0, (5,), **told)  # type: ignore[arg-type]
        message = wire.step_to_wire(NodeStep(tokens=(event, other)))
        assert not message.no_logprobs
        assert wire.step_from_wire(message).tokens == (event, other)


def test_a_request_is_serialized_once_but_for_its_deadline() -> None:
    clock = StoppedClock()
    asked = replace(a_request(), deadline=clock.monotonic() + 9)
    first = wire.request_to_wire(asked, clock)
    assert asked.encoded
    assert wire.request_to_wire(asked, clock) == first
    later = replace(asked, deadline=clock.monotonic() + 8, epoch=asked.epoch + 1)
    assert not later.encoded, "what was changed is serialized anew"
    second = wire.request_to_wire(later, clock)
    assert (first.deadline_ms, second.deadline_ms) == (9000, 8000)
    assert (first.epoch, second.epoch) == (asked.epoch, asked.epoch + 1)


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
    assert wire_values.handle_from_bytes(wire_values.handle_to_bytes(handle)) == handle


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
        wire_sampling.write_sampling(node_pb2.SamplingParams(), SamplingParams())
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
    message = wire_values.handle_to_wire(a_handle())
    message.ClearField(name)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest):
        wire_values.handle_from_wire(message)


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
        wire_values.handle_from_bytes(b"\xff\xff\xff")


def test_session_mac_depends_on_secret_and_router() -> None:
    mac = messages.session_mac("s", "router-1")
    assert mac == messages.session_mac("s", "router-1")
    assert len({mac, messages.session_mac("t", "router-1"), messages.session_mac("s", "r2")}) == 3


def test_a_routers_proof_travels_with_its_name() -> None:
    (name, given), (proof, mac) = messages.session_metadata("s", "röuter")
    assert (name, given) == (messages.ROUTER_METADATA, "röuter".encode())
    assert name.endswith("-bin"), "gRPC takes other values in ASCII only"
    assert (proof, mac) == (messages.SECRET_METADATA, messages.session_mac("s", "röuter"))
