"""The exporter's machine, without I/O: the good paths, every refusal, and every illegal pair."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.protocol.errors import IllegalTransition, KVCorrupt
from baton.protocol.kv_spec import LayerSpec
from baton.runtime.rotation.deployment_secret import fixed
from kv_transfer.protocol.base import KVSpan
from kv_transfer.protocol.frames import MAX_PAYLOAD
from kv_transfer.protocol.identity import Identity, Side, prove
from kv_transfer.protocol.messages import (
    DIRECT,
    INT8,
    Ack,
    Confirm,
    End,
    Failure,
    FailureCode,
    Fetch,
    Hello,
    Renew,
    SharedBlockTables,
)
from kv_transfer.protocol.session import (
    EXPORTER_TABLE,
    ExporterSession,
    ExporterState,
)
from kv_transfer.protocol.steps import (
    Announce,
    Arrived,
    Check,
    Closed,
    Idle,
    LeaseHeld,
    Open,
    Opened,
    Progress,
    Refused,
    Release,
    Send,
    SendData,
)
from tests.transfer.machines import (
    BF16,
    EPOCH,
    FIRST,
    LAYERS,
    ND,
    NP,
    PEER_MESSAGES,
    SEQ,
    STALE,
    TOKENS,
    D,
    P,
    control,
    send,
    sent,
    span,
)


def exporter(state: ExporterState = ExporterState.NEW, **settings: bool) -> ExporterSession:
    """A session brought to `state` by the shortest honest path."""
    session = ExporterSession(P, NP, LAYERS, **settings)
    checks = (ExporterState.CHECKING, ExporterState.HELD)
    question = Renew(SEQ, b"k", EPOCH) if state in checks else Fetch(SEQ, b"k", "r", EPOCH)
    complete = Progress((TOKENS, TOKENS), FIRST)
    path = [
        control(D.hello(Side.FETCHER, ND, None)),
        control(D.hello(Side.FETCHER, ND, NP)),
        control(question),
        *((LeaseHeld(),) if state in checks else (Opened(TOKENS), complete, LeaseHeld())),
        Closed(),
    ]
    for event in path:
        if session.state is state:
            return session
        session.receive(event)
    assert session.state is state
    return session


def test_exporter_serves_a_fetch_layer_by_layer() -> None:
    session = exporter(ExporterState.READY)
    fetch = Fetch(SEQ, b"k", "r", EPOCH, start_token=3)
    assert session.receive(control(fetch)) == [Open(fetch)]
    assert session.receive(Opened(TOKENS)) == []
    assert session.receive(Progress((8, 0), None)) == [send(0, 3, 8)]
    assert session.receive(Progress((8, 0), None)) == []
    assert session.receive(Idle()) == [Send(Confirm(SEQ, b"", EPOCH, held=True))]
    assert session.receive(Progress((20, 20), None)) == [send(0, 8, 20), send(1, 3, 20)]
    assert session.receive(Progress((20, 20), FIRST)) == [Check(None)]
    assert session.receive(LeaseHeld()) == [Send(End(TOKENS, True, FIRST, 3))]
    assert session.receive(control(Ack(SEQ))) == [Release(SEQ, EPOCH)]
    assert session.state is ExporterState.READY


def test_exporter_cuts_frames_at_a_megabyte() -> None:
    wide = (LayerSpec(8, 128, 128),)  # 4 KiB a token
    session = ExporterSession(P, NP, wide)
    session.receive(control(D.hello(Side.FETCHER, ND, None)))
    session.receive(control(D.hello(Side.FETCHER, ND, NP)))
    session.receive(control(Fetch(SEQ, b"k", "r", EPOCH)))
    session.receive(Opened(600))
    actions = session.receive(Progress((600,), None))
    spans = [action.span for action in actions if isinstance(action, SendData)]
    assert [(s.start, s.end) for s in spans] == [(0, 256), (256, 512), (512, 600)]
    assert 256 * wide[0].token_bytes("bfloat16") == MAX_PAYLOAD


def test_exporter_answers_the_challenge_with_its_own() -> None:
    session = exporter()
    (answer,) = sent(session.receive(control(D.hello(Side.FETCHER, ND, None))))
    assert isinstance(answer, Hello)
    assert answer.nonce == NP
    assert answer.mac == prove("secret", Side.EXPORTER, ND, P.boot_id, "layout")


@pytest.mark.parametrize(
    ("peer", "code"),
    [
        (replace(D, protocol_version=2), FailureCode.PROTOCOL),
        (replace(D, fingerprint="other"), FailureCode.LAYOUT),
    ],
)
def test_exporter_refuses_who_does_not_fit(peer: Identity, code: FailureCode) -> None:
    session = exporter()
    (failure,) = sent(session.receive(control(peer.hello(Side.FETCHER, ND, None))))
    assert isinstance(failure, Failure)
    assert failure.code is code
    assert session.done


@pytest.mark.parametrize(
    "proof",
    [
        replace(D, secrets=fixed("wrong")).hello(Side.FETCHER, ND, NP),
        D.hello(Side.EXPORTER, ND, NP),  # our own answer, reflected
        D.hello(Side.FETCHER, ND, b"Q" * 16),  # recorded under another challenge
        D.hello(Side.FETCHER, ND, None),  # no answer at all
        replace(D, boot_id="0c" * 16).hello(Side.FETCHER, ND, NP),  # somebody else's
    ],
)
def test_exporter_refuses_a_wrong_proof(proof: Hello) -> None:
    session = exporter(ExporterState.GREETED)
    (failure,) = sent(session.receive(control(proof)))
    assert isinstance(failure, Failure)
    assert failure.code is FailureCode.AUTH
    assert session.done


@pytest.mark.parametrize(
    ("settings", "change", "code"),
    [
        ({}, {"codec": "gzip"}, FailureCode.PROTOCOL),
        ({}, {"codec": DIRECT}, FailureCode.PROTOCOL),
        ({"direct": True}, {"codec": INT8}, FailureCode.PROTOCOL),
        ({}, {"adopt": True}, FailureCode.PROTOCOL),
        ({"windowed": True}, {"windowed": False}, FailureCode.LAYOUT),
    ],
)
def test_exporter_refuses_what_it_does_not_serve(
    settings: dict, change: dict, code: FailureCode
) -> None:
    session = exporter(ExporterState.READY, **settings)
    fetch = replace(Fetch(SEQ, b"k", "r", EPOCH), **change)
    (failure,) = sent(session.receive(control(fetch)))
    assert isinstance(failure, Failure)
    assert failure.code is code


def test_exporter_quantises_on_demand() -> None:
    """2 heads x (4 + 4 + two scales) bytes a token then, instead of 2 x 8 x 2."""
    session = exporter(ExporterState.READY)
    session.receive(control(Fetch(SEQ, b"k", "r", EPOCH, codec=INT8)))
    session.receive(Opened(TOKENS))
    assert session.receive(Progress((4, 0), None)) == [SendData(span(0, 0, 4), INT8)]


def test_exporter_lets_its_memory_be_read() -> None:
    """Tables first; then only word of what may be read, however much that is; the last question."""
    session = exporter(ExporterState.READY, direct=True)
    session.receive(control(Fetch(SEQ, b"k", "r", EPOCH, codec=DIRECT)))
    tables = ((5, 3, 9),)
    assert session.receive(Opened(TOKENS, tables)) == [Send(SharedBlockTables(8, tables))]
    assert session.receive(Progress((20, 0), None)) == [Announce(span(0, 0, 20))]
    complete = session.receive(Progress((20, 20), FIRST))
    assert complete == [Announce(span(1, 0, 20)), Check(None)]
    assert session.receive(LeaseHeld()) == [Send(End(TOKENS, True, FIRST, 2))]
    question = Confirm(SEQ, b"k", EPOCH)
    assert session.receive(control(question)) == [Check(question)]
    assert session.receive(LeaseHeld()) == [Send(Confirm(SEQ, b"", EPOCH, held=True))]
    assert session.receive(control(Ack(SEQ))) == [Release(SEQ, EPOCH)]


def test_exporter_promises_its_pages_to_who_adopts() -> None:
    """Nothing is announced; the lease is extended right before END, which says by how much."""
    session = exporter(ExporterState.READY, direct=True)
    fetch = Fetch(SEQ, b"k", "r", EPOCH, start_token=TOKENS, codec=DIRECT, adopt=True)
    session.receive(control(fetch))
    session.receive(Opened(TOKENS, ((5, 3, 9),)))
    assert session.receive(Progress((20, 0), None)) == []
    assert session.receive(Progress((20, 20), FIRST)) == [Check(None, adopting=True)]
    end = End(TOKENS, True, FIRST, 0, lease_ms=9000)
    assert session.receive(LeaseHeld(9000)) == [Send(end)]
    session.receive(control(Fetch(SEQ, b"k", "r", EPOCH, start_token=TOKENS, codec=DIRECT)))
    session.receive(Opened(TOKENS, ((5, 3, 9),)))
    assert session.receive(Progress((20, 20), FIRST)) == [Check(None)]


def test_exporter_sends_a_rank_its_heads() -> None:
    """Rank 1 of 2: the second head of the plain layer, and the latent like everybody."""
    d = replace(D, format=replace(D.format, tp_size=2, tp_rank=1))
    session = ExporterSession(P, NP, LAYERS)
    session.receive(control(d.hello(Side.FETCHER, ND, None)))
    session.receive(control(d.hello(Side.FETCHER, ND, NP)))
    session.receive(control(Fetch(SEQ, b"k", "r", EPOCH)))
    session.receive(Opened(TOKENS))
    actions = session.receive(Progress((TOKENS, TOKENS), FIRST))
    assert actions[:2] == [
        SendData(KVSpan(0, 0, TOKENS, range(1, 2)), "bfloat16"),
        SendData(KVSpan(1, 0, TOKENS, range(1)), "bfloat16"),
    ]
    session.receive(LeaseHeld())
    release = session.receive(control(Ack(SEQ, part=True)))
    assert release == [Release(SEQ, EPOCH, rank=1, ranks=frozenset((0, 1)))]


def test_exporter_asks_no_rank_for_what_another_has() -> None:
    """4 ranks, 2 heads: ranks 0 and 1 hold the same head; a lone fetcher is served by one."""
    layers = (LayerSpec(2, 4, 4),)
    frames = []
    for rank in range(4):
        own = replace(P, format=replace(BF16, tp_size=4, tp_rank=rank))
        session = ExporterSession(own, NP, layers)
        session.receive(control(D.hello(Side.FETCHER, ND, None)))
        session.receive(control(D.hello(Side.FETCHER, ND, NP)))
        session.receive(control(Fetch(SEQ, b"k", "r", EPOCH)))
        session.receive(Opened(TOKENS))
        frames += session.receive(Progress((TOKENS,), ()))[:-1]
    heads = [action.span.heads for action in frames if isinstance(action, SendData)]
    assert heads == [range(1), range(1, 2)]


def test_exporter_sends_of_a_window_what_is_still_seen() -> None:
    layers = (LayerSpec(1, 4, 4, window=6, kind="sliding"), LayerSpec(1, 4, 4))
    session = ExporterSession(P, NP, layers, windowed=True)
    session.receive(control(D.hello(Side.FETCHER, ND, None)))
    session.receive(control(D.hello(Side.FETCHER, ND, NP)))
    session.receive(control(Fetch(SEQ, b"k", "r", EPOCH, start_token=4, windowed=True)))
    session.receive(Opened(TOKENS))
    assert session.receive(Progress((10, 0), None)) == []
    spans = [a.span for a in session.receive(Progress((20, 20), None)) if isinstance(a, SendData)]
    assert [(s.layer, s.start, s.end) for s in spans] == [(0, 14, 20), (1, 4, 20)]


def test_exporter_refuses_tokens_that_exceed_a_frame() -> None:
    """Quantised 8 bit they would fit, raw they do not."""
    session = ExporterSession(P, NP, (LayerSpec(1024, 512, 512),))
    session.receive(control(D.hello(Side.FETCHER, ND, None)))
    session.receive(control(D.hello(Side.FETCHER, ND, NP)))
    session.receive(control(Fetch(SEQ, b"k", "r", EPOCH)))
    (failure,) = sent(session.receive(Opened(1)))
    assert isinstance(failure, Failure)
    assert failure.code is FailureCode.PROTOCOL


@pytest.mark.parametrize("state", [ExporterState.READY, ExporterState.ENDED, ExporterState.HELD])
@pytest.mark.parametrize(
    "question", [Fetch(9, b"k", "s", 1), Renew(9, b"k", 1), Confirm(9, b"", 1)]
)
def test_exporter_goes_on_to_the_next_question(
    state: ExporterState, question: Fetch | Renew | Confirm
) -> None:
    session = exporter(state)
    wanted = Open(question) if isinstance(question, Fetch) else Check(question)
    assert session.receive(control(question, 9, 1)) == [wanted]
    assert (session.export_seq, session.epoch) == (9, 1)


def test_exporter_answers_a_release_that_wants_it() -> None:
    session = exporter(ExporterState.HELD)
    over = Send(Confirm(SEQ, b"", EPOCH, held=False))
    ack = control(Ack(SEQ, answer=True))
    assert session.receive(ack) == [Release(SEQ, EPOCH, wait=True), over]
    assert session.state is ExporterState.READY


def test_exporter_refuses_a_start_beyond_the_end() -> None:
    session = exporter(ExporterState.READY)
    session.receive(control(Fetch(SEQ, b"k", "r", EPOCH, start_token=TOKENS + 1)))
    (failure,) = sent(session.receive(Opened(TOKENS)))
    assert isinstance(failure, Failure)
    assert session.done


def test_a_fetch_of_nothing_is_an_end_at_once() -> None:
    session = exporter(ExporterState.READY)
    session.receive(control(Fetch(SEQ, b"k", "r", EPOCH, start_token=TOKENS)))
    session.receive(Opened(TOKENS))
    assert session.receive(Progress((0, 0), FIRST)) == [Check(None)]


@pytest.mark.parametrize(
    "state",
    [
        ExporterState.OPENING,
        ExporterState.STREAMING,
        ExporterState.ENDING,
        ExporterState.CHECKING,
    ],
)
def test_exporter_passes_a_refusal_on(state: ExporterState) -> None:
    session = exporter(state)
    assert session.receive(Refused(STALE)) == [Send(STALE)]
    assert session.done


@pytest.mark.parametrize("question", [Renew(SEQ, b"k", EPOCH), Confirm(SEQ, b"k", EPOCH)])
def test_exporter_confirms_and_then_may_release(question: Renew | Confirm) -> None:
    session = exporter(ExporterState.READY)
    assert session.receive(control(question)) == [Check(question)]
    assert session.receive(LeaseHeld()) == [Send(Confirm(SEQ, b"", EPOCH, held=True))]
    assert session.receive(control(Ack(SEQ))) == [Release(SEQ, EPOCH)]


@pytest.mark.parametrize("state", ExporterState)
def test_exporter_may_be_left_at_any_time(state: ExporterState) -> None:
    session = exporter(state)
    assert session.receive(Closed()) == []
    assert session.done


@pytest.mark.parametrize(
    ("state", "event"),
    [
        (ExporterState.READY, control(Fetch(SEQ, b"k", "r", EPOCH), seq=SEQ + 1)),
        (ExporterState.READY, control(Renew(SEQ, b"k", EPOCH), epoch=EPOCH + 1)),
        (ExporterState.ENDED, control(Ack(SEQ), seq=SEQ + 1)),
        (ExporterState.ENDED, control(Ack(SEQ + 1))),
    ],
)
def test_exporter_notices_frames_of_another_export(state: ExporterState, event: Arrived) -> None:
    with pytest.raises(KVCorrupt):
        exporter(state).receive(event)


EXPORTER_EVENTS = [
    *(control(message) for message in PEER_MESSAGES),
    Opened(TOKENS),
    Refused(STALE),
    Progress((1, 1), None),
    Idle(),
    LeaseHeld(),
]


def event_name(event: object) -> str:
    return type(event.message if isinstance(event, Arrived) else event).__name__


@pytest.mark.parametrize("state", ExporterState)
def test_exporter_refuses_every_other_pair(state: ExporterState) -> None:
    num_illegal = 0
    for event in EXPORTER_EVENTS:
        kind = type(event.message) if isinstance(event, Arrived) else type(event)
        if (state, kind) in EXPORTER_TABLE:
            continue
        num_illegal += 1
        expected = KVCorrupt if isinstance(event, Arrived) else IllegalTransition
        with pytest.raises(expected, match=rf"{kind.__name__} in state {state.name}"):
            exporter(state).receive(event)
    assert num_illegal == len(EXPORTER_EVENTS) - sum(s is state for s, _ in EXPORTER_TABLE)
