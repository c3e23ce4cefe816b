"""A step too long for one message leaves as several that say the same."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from baton.node.service import router_messages
from baton.node.session import RouterSession
from baton.node.step_parts import MESSAGE_BYTES, in_parts
from baton.protocol import wire
from baton.protocol.clock import SystemClock
from baton.protocol.events import (
    BlockEvent,
    BlockEventKind,
    NodeStep,
    RequestFailed,
    Subscribed,
    TokenEvent,
    TokenLogprob,
)
from baton.protocol.handles import NodeLoad
from baton.protocol.messages import AbortRequest
from baton.runtime.timing import Timing, server_options
from protos import node_pb2
from router.nodes.prefix_index import PrefixIndex

GRPC_LIMIT = dict(server_options(Timing()))["grpc.max_receive_message_length"]
LOGPROB = TokenLogprob(2**31, -1234.5678, 2**31)


def stored(count: int, start: int = 0, size: int = 32) -> BlockEvent:
    hashes = tuple(i.to_bytes(size, "big") for i in range(start, start + count))
    return BlockEvent(BlockEventKind.STORED, hashes, b"p" * 32)


def tokens(request_id: str, rows: int, width: int = 1) -> TokenEvent:
    return TokenEvent(request_id, 1, 0, (5,), prompt_logprobs=((LOGPROB,) * width,) * rows)


steps = st.builds(
    NodeStep,
    tokens=st.lists(
        st.builds(tokens, st.sampled_from("abc"), st.integers(0, 9), st.integers(1, 3)), max_size=5
    ).map(tuple),
    subscribed=st.lists(st.just(Subscribed("s", 1)), max_size=2).map(tuple),
    failed=st.lists(
        st.builds(RequestFailed, st.just("f"), st.just(1), st.just("x"), st.text(), st.booleans()),
        max_size=2,
    ).map(tuple),
    load=st.sampled_from([None, NodeLoad(running=3)]),
    block_events=st.lists(st.builds(stored, st.integers(0, 40)), max_size=3).map(tuple),
    last=st.booleans(),
)


def hashes_of(step: NodeStep) -> list[bytes]:
    return [each for event in step.block_events for each in event.hashes]


@given(step=steps, limit=st.sampled_from([1, 600, 1500, 1 << 20]))
def test_the_parts_say_what_the_whole_says_in_its_order(step: NodeStep, limit: int) -> None:
    parts = in_parts(step, limit)
    for name in ("tokens", "subscribed", "failed", "handles"):
        assert tuple(e for part in parts for e in getattr(part, name)) == getattr(step, name)
    assert [h for part in parts for h in hashes_of(part)] == hashes_of(step)
    assert [part.load for part in parts if part.load] == [step.load] * bool(step.load)
    assert [part.last for part in parts] == [False] * (len(parts) - 1) + [step.last]
    for part in parts:
        things = len(part.tokens) + len(part.subscribed) + len(part.failed) + len(hashes_of(part))
        if things > 1:  # what is alone cannot be cut
            assert wire.step_to_wire(part).ByteSize() <= limit


def test_a_step_beyond_grpcs_limit_passes_as_messages_below_it() -> None:
    snapshot = BlockEvent(BlockEventKind.STORED, (b"h" * 1024,) * 66_000)
    step = NodeStep(tokens=(tokens("a", 200, 21),), block_events=(snapshot,))
    assert wire.step_to_wire(step).ByteSize() > GRPC_LIMIT
    parts = in_parts(step)
    assert len(parts) > 1
    assert max(wire.step_to_wire(part).ByteSize() for part in parts) < GRPC_LIMIT
    assert MESSAGE_BYTES <= GRPC_LIMIT // 2


def test_the_prompts_of_one_step_are_told_one_after_the_other() -> None:
    told = tuple(tokens(name, 1000, 21) for name in "abcd")
    one = wire.token_event_to_wire(told[0]).ByteSize()
    parts = in_parts(NodeStep(tokens=told), limit=2 * one)
    assert [len(part.tokens) for part in parts if part.tokens] in ([1] * 4, [2, 2])


def test_an_ordinary_step_stays_one_message() -> None:
    step = NodeStep(tokens=tuple(TokenEvent(f"r{i}", 1, i, (i,)) for i in range(512)))
    assert in_parts(step) == (step,)


def test_a_long_snapshot_is_numbered_through_its_parts() -> None:
    async def scenario() -> None:
        session = RouterSession("router", 1000)
        big = stored(40_000, 0, 1024)
        session.send(NodeStep(block_events=(big, stored(3)), load=NodeLoad(running=1)))
        session.send(NodeStep(block_events=(stored(1, 10),)))
        index = PrefixIndex()
        read = [await session.next() for _ in range(session.unread)]
        assert len(read) > 2
        for step in read:
            assert wire.step_to_wire(step).ByteSize() <= MESSAGE_BYTES
            index.apply(step.block_events_seq, step.block_events)
        assert index.gaps == 0
        assert len(index.hashes) == 40_004
        assert session.last_load == NodeLoad(running=1)

    asyncio.run(scenario())


def test_a_cut_event_goes_on_where_the_one_before_ended() -> None:
    whole = stored(100)
    parts = in_parts(NodeStep(block_events=(whole,)), limit=1200)
    events = [event for part in parts for event in part.block_events]
    assert len(events) > 1
    assert [event.parent for event in events] == [
        whole.parent, *(event.hashes[-1] for event in events[:-1])
    ]  # fmt: skip
    cleared = BlockEvent(BlockEventKind.CLEARED)
    assert in_parts(NodeStep(block_events=(whole, cleared)), 1200)[-1].block_events[-1] == cleared
    assert in_parts(replace(NodeStep(), last=True), 1)[-1].last


def test_a_batch_of_router_messages_is_read_in_order() -> None:
    clock = SystemClock()
    said = [AbortRequest(name, 1) for name in "abc"]
    single = [wire.router_message_to_wire(message, clock) for message in said]
    batch = node_pb2.RouterMessage(batch=node_pb2.RouterBatch(messages=single))
    heard = [wire.router_message_from_wire(one, clock) for one in router_messages(batch)]
    assert heard == said
    (alone,) = router_messages(single[0])
    assert wire.router_message_from_wire(alone, clock) == said[0]
