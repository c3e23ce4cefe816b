"""STATE in both machines: any sizes of states arrive whole, and a frame out of place is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.protocol.errors import KVCorrupt
from baton.protocol.kv_spec import LayerSpec, StateSpec
from kv_transfer.protocol.base import StateSpan
from kv_transfer.protocol.fetch_session import FetcherSession, WantedExport
from kv_transfer.protocol.frames import MAX_PAYLOAD
from kv_transfer.protocol.identity import Side
from kv_transfer.protocol.messages import DIRECT, RAW, End, Fetch, SharedBlockTables, State
from kv_transfer.protocol.session import ExporterSession, state_header
from kv_transfer.protocol.steps import (
    Arrived,
    Check,
    LeaseHeld,
    Opened,
    Progress,
    Send,
    SendState,
    Start,
    WriteState,
)
from tests.transfer.machines import EPOCH, FIRST, HANDLE, ND, NP, SEQ, TOKENS, D, P, control

BIG = 2 * MAX_PAYLOAD + 12  # bytes: three frames


def keeping(num_bytes: int) -> LayerSpec:
    """A layer without KV and a state of so many bytes, or none."""
    state = StateSpec(recurrent=(num_bytes // 4,)) if num_bytes else None
    return LayerSpec(0, 0, 0, kind="state", state=state)


def exporter(layers: Sequence[LayerSpec], codec: str = RAW) -> ExporterSession:
    """A session that has opened the export."""
    session = ExporterSession(P, NP, layers, direct=codec == DIRECT)
    session.receive(control(D.hello(Side.FETCHER, ND, None)))
    session.receive(control(D.hello(Side.FETCHER, ND, NP)))
    session.receive(control(Fetch(SEQ, b"k", "r", EPOCH, codec=codec)))
    session.receive(Opened(TOKENS))
    return session


def fetcher(layers: Sequence[LayerSpec], codec: str = RAW) -> FetcherSession:
    """A session that waits for the first frame of the export."""
    session = FetcherSession(D, ND, layers, WantedExport(HANDLE, EPOCH, codec=codec))
    session.receive(Start())
    session.receive(control(P.hello(Side.EXPORTER, NP, ND)))
    if codec == DIRECT:
        session.receive(control(SharedBlockTables(8, ((),))))
    return session


def frame(layer: int, start: int, size: int, **header: int) -> Arrived:
    made = state_header(StateSpan(layer, start, start + size), SEQ, EPOCH)
    return Arrived(replace(made, **header), State(memoryview(bytes(size))))


@given(
    sizes=st.lists(st.sampled_from((0, 4, 96, MAX_PAYLOAD, BIG)), min_size=1, max_size=4),
    codec=st.sampled_from((RAW, DIRECT)),
    order=st.randoms(use_true_random=False),
)
def test_every_byte_of_every_state_is_sent_once(
    sizes: list[int], codec: str, order: object
) -> None:
    """Layers may end in any order; END comes when all have."""
    layers = [keeping(size) for size in sizes]
    p, d = exporter(layers, codec), fetcher(layers, codec)
    done = list(range(len(sizes)))
    order.shuffle(done)  # type: ignore[attr-defined]
    upto, actions, written = [TOKENS - 1] * len(sizes), [], [0] * len(sizes)
    assert p.receive(Progress(tuple(upto), None)) == []
    for layer in done:
        upto[layer] = TOKENS
        actions += p.receive(Progress(tuple(upto), None))
    assert p.receive(Progress(tuple(upto), FIRST)) == [Check(None)]
    for action in actions:
        assert isinstance(action, SendState)
        layer, start, end = action.span.layer, action.span.start, action.span.end
        assert end - start <= MAX_PAYLOAD
        [write] = d.receive(frame(layer, start, end - start))
        assert isinstance(write, WriteState)
        assert write.span == action.span
        assert start == written[layer]
        written[layer] = end
    assert written == sizes
    [end] = p.receive(LeaseHeld())
    assert isinstance(end, Send)
    assert isinstance(end.message, End)
    assert end.message.num_frames == len(actions)
    d.receive(control(end.message))
    assert d.done == (codec == RAW)  # under `direct` the lease is asked for once more


LAYERS = (LayerSpec(2, 4, 4), keeping(BIG), keeping(0))


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(frame(3, 0, 4), id="no such layer"),
        pytest.param(frame(2, 0, 4), id="a layer without state"),
        pytest.param(frame(0, 0, 4), id="before all tokens of the layer"),
        pytest.param(frame(1, 4, 4), id="not from its first byte"),
        pytest.param(frame(1, 0, BIG + 4), id="beyond its end"),
        pytest.param(frame(1, 0, 0), id="empty"),
        pytest.param(frame(1, 0, 4, num_tokens=1), id="with tokens"),
        pytest.param(frame(1, 0, 4, num_heads=1), id="with heads"),
        pytest.param(frame(1, 0, 4, export_seq=SEQ + 1), id="another export"),
        pytest.param(frame(1, 0, 4, epoch=EPOCH - 1), id="an older epoch"),
    ],
)
def test_a_frame_out_of_place_is_refused(wrong: Arrived) -> None:
    with pytest.raises(KVCorrupt):
        fetcher(LAYERS).receive(wrong)


@pytest.mark.parametrize("sent", [(), (4,), (4, BIG - 8)])
def test_end_before_the_whole_state_is_refused(sent: tuple[int, ...]) -> None:
    layers, at = (keeping(BIG),), 0
    session = fetcher(layers)
    for size in sent:
        session.receive(frame(0, at, size))
        at += size
    with pytest.raises(KVCorrupt, match="END after"):
        session.receive(control(End(TOKENS, True, FIRST, len(sent))))
