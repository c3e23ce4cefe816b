"""Both session machines, without I/O: the good paths, every refusal, and every illegal pair."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from baton.errors import IllegalTransition, KVCorrupt, KVError, KVLost, KVRefused, KVStale
from baton.events import FirstToken
from baton.handles import Endpoint, KVHandle
from baton.kv_spec import LayerSpec, PoolFormat
from kv_transfer.bodies import kind_of
from kv_transfer.frames import MAX_PAYLOAD, Header, Kind
from kv_transfer.identity import Identity, Side, prove
from kv_transfer.messages import (
    Ack,
    Confirm,
    Data,
    End,
    Failure,
    FailureCode,
    Fetch,
    Hello,
    Message,
    Renew,
)
from kv_transfer.session import (
    EXPORTER_TABLE,
    FETCHER_TABLE,
    ExporterSession,
    ExporterState,
    FetcherSession,
    FetcherState,
    Intent,
    Wanted,
    header_of,
)
from kv_transfer.steps import (
    Arrived,
    Check,
    Closed,
    Finish,
    Idle,
    LeaseHeld,
    Open,
    Opened,
    Progress,
    Refused,
    Release,
    Send,
    SendData,
    Start,
    Write,
)

LAYERS = (LayerSpec(2, 4, 4), LayerSpec(1, 8, 0, kind="mla"))
BF16 = PoolFormat(8, "bfloat16")
P = Identity("0a" * 16, "layout", BF16, b"secret")
D = Identity("0d" * 16, "layout", replace(BF16, block_size=32), b"secret")
NP, ND = b"P" * 16, b"D" * 16
SEQ, EPOCH, TOKENS = 7, 2, 20
HANDLE = KVHandle(
    P.boot_id, SEQ, "r", 1, TOKENS, b"k" * 16, Endpoint(P.boot_id, "layout", BF16, ()), 10_000
)
FIRST = (FirstToken(3, 42),)
STALE = Failure(FailureCode.STALE, "released")


def control(message: Message, seq: int = SEQ, epoch: int = EPOCH) -> Arrived:
    return Arrived(header_of(kind_of(message), seq, epoch), message)


def sent(actions: list) -> list[Message]:
    return [action.message for action in actions if isinstance(action, Send)]


# ---- exporter -----------------------------------------------------------------------------------
def exporter(state: ExporterState = ExporterState.NEW) -> ExporterSession:
    """A session brought to `state` by the shortest honest path."""
    session = ExporterSession(P, NP, LAYERS)
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
    assert session.receive(Progress((8, 0), None)) == [SendData(0, 3, 8)]
    assert session.receive(Progress((8, 0), None)) == []
    assert session.receive(Idle()) == [Send(Confirm(SEQ, b"", EPOCH, held=True))]
    assert session.receive(Progress((20, 20), None)) == [SendData(0, 8, 20), SendData(1, 3, 20)]
    assert session.receive(Progress((20, 20), FIRST)) == [Check(None)]
    assert session.receive(LeaseHeld()) == [Send(End(TOKENS, True, FIRST, 3))]
    assert not session.done
    assert session.receive(control(Ack(SEQ))) == [Release(SEQ, EPOCH)]
    assert session.done


def test_exporter_cuts_frames_at_a_megabyte() -> None:
    wide = (LayerSpec(8, 128, 128),)  # 4 KiB a token
    session = ExporterSession(P, NP, wide)
    session.receive(control(D.hello(Side.FETCHER, ND, None)))
    session.receive(control(D.hello(Side.FETCHER, ND, NP)))
    session.receive(control(Fetch(SEQ, b"k", "r", EPOCH)))
    session.receive(Opened(600))
    actions = session.receive(Progress((600,), None))
    assert actions == [SendData(0, 0, 256), SendData(0, 256, 512), SendData(0, 512, 600)]
    assert 256 * wide[0].token_bytes("bfloat16") == MAX_PAYLOAD


def test_exporter_answers_the_challenge_with_its_own() -> None:
    session = exporter()
    (answer,) = sent(session.receive(control(D.hello(Side.FETCHER, ND, None))))
    assert isinstance(answer, Hello)
    assert answer.nonce == NP
    assert answer.mac == prove(b"secret", Side.EXPORTER, ND, P.boot_id, "layout")


@pytest.mark.parametrize(
    ("peer", "code"),
    [
        (replace(D, protocol_version=2), FailureCode.PROTOCOL),
        (replace(D, fingerprint="other"), FailureCode.LAYOUT),
        (replace(D, format=replace(BF16, dtype="float16")), FailureCode.LAYOUT),
        (replace(D, format=replace(BF16, tp_size=2)), FailureCode.LAYOUT),
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
        replace(D, secret=b"wrong").hello(Side.FETCHER, ND, NP),
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


@pytest.mark.parametrize("change", [{"codec": "int8"}, {"head0": 1}, {"num_heads": 1}])
def test_exporter_refuses_what_it_does_not_serve(change: dict) -> None:
    session = exporter(ExporterState.READY)
    fetch = replace(Fetch(SEQ, b"k", "r", EPOCH), **change)
    (failure,) = sent(session.receive(control(fetch)))
    assert isinstance(failure, Failure)
    assert failure.code is FailureCode.PROTOCOL


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


PEER_MESSAGES: list[Message] = [
    D.hello(Side.FETCHER, ND, None),
    Fetch(SEQ, b"k", "r", EPOCH),
    Data(memoryview(b"")),
    End(TOKENS, True, (), 0),
    Ack(SEQ),
    Renew(SEQ, b"k", EPOCH),
    Confirm(SEQ, b"k", EPOCH, held=True),
    STALE,
]
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


# ---- fetcher ------------------------------------------------------------------------------------
HELLO_P = control(P.hello(Side.EXPORTER, NP, ND))


def fetcher(
    state: FetcherState = FetcherState.NEW, intent: Intent = Intent.FETCH, start_token: int = 0
) -> FetcherSession:
    if state is FetcherState.CHECKING and intent is Intent.FETCH:
        intent = Intent.RENEW
    session = FetcherSession(D, ND, LAYERS, Wanted(HANDLE, EPOCH, intent, start_token, 5000))
    if state is FetcherState.NEW:
        return session
    session.receive(Start())
    if state is FetcherState.GREETING:
        return session
    if state is FetcherState.FAILED:
        with pytest.raises(KVLost):
            session.receive(Closed())
        return session
    session.receive(HELLO_P)
    if state is FetcherState.DONE:
        session.receive(data(0, 0, TOKENS))
        session.receive(data(1, 0, TOKENS))
        session.receive(control(End(TOKENS, True, FIRST, 2)))
    assert session.state is state
    return session


def data(layer: int, start: int, end: int, **header: int) -> Arrived:
    spec = LAYERS[min(layer, 1)]
    fields = {"export_seq": SEQ, "epoch": EPOCH, "num_heads": spec.kv_heads} | header
    payload = memoryview(bytes((end - start) * spec.token_bytes("bfloat16")))
    return Arrived(
        Header(Kind.DATA, layer=layer, token0=start, num_tokens=end - start, **fields),
        Data(payload),
    )


def test_fetcher_holds_a_whole_conversation() -> None:
    session = fetcher(start_token=4)
    assert sent(session.receive(Start())) == [D.hello(Side.FETCHER, ND, None)]
    fetch = Fetch(SEQ, b"k" * 16, "r", EPOCH, start_token=4, timeout_ms=5000)
    assert sent(session.receive(HELLO_P)) == [D.hello(Side.FETCHER, ND, NP), fetch]
    for layer, start, end in ((0, 4, 9), (1, 4, 20), (0, 9, 20)):
        event = data(layer, start, end)
        assert isinstance(event.message, Data)
        assert session.receive(event) == [Write(layer, start, end, event.message.payload)]
        assert session.receive(control(Confirm(SEQ, b"", EPOCH, held=True))) == []
    end = End(TOKENS, True, FIRST, 3)
    assert session.receive(control(end)) == [Send(Ack(SEQ)), Finish()]
    assert session.done
    assert session.end == end


@pytest.mark.parametrize(
    ("intent", "question", "last"),
    [
        (Intent.RENEW, Renew(SEQ, b"k" * 16, EPOCH), []),
        (Intent.RELEASE, Confirm(SEQ, b"k" * 16, EPOCH), [Send(Ack(SEQ))]),
    ],
)
def test_fetcher_renews_and_releases(intent: Intent, question: Message, last: list) -> None:
    session = fetcher(FetcherState.GREETING, intent)
    assert sent(session.receive(HELLO_P))[1] == question
    confirm = control(Confirm(SEQ, b"", EPOCH, held=True))
    assert session.receive(confirm) == [*last, Finish()]
    assert session.done
    assert session.end is None


@pytest.mark.parametrize(
    ("hello", "error", "text"),
    [
        (replace(P, boot_id="0b" * 16).hello(Side.EXPORTER, NP, ND), KVStale, "restarted"),
        (replace(P, fingerprint="x").hello(Side.EXPORTER, NP, ND), KVRefused, "layout"),
        (replace(P, protocol_version=9).hello(Side.EXPORTER, NP, ND), KVRefused, "version"),
        (replace(P, secret=b"x").hello(Side.EXPORTER, NP, ND), KVRefused, "secret"),
        (P.hello(Side.FETCHER, NP, ND), KVRefused, "secret"),
        (P.hello(Side.EXPORTER, NP, None), KVRefused, "secret"),
    ],
)
def test_fetcher_refuses_a_wrong_exporter(hello: Hello, error: type, text: str) -> None:
    session = fetcher(FetcherState.GREETING)
    with pytest.raises(error, match=text):
        session.receive(control(hello))
    assert session.state is FetcherState.FAILED


@pytest.mark.parametrize(
    "event",
    [
        data(0, 0, 4, export_seq=SEQ + 1),
        data(0, 0, 4, epoch=EPOCH - 1),
        data(2, 0, 4),
        data(0, 1, 4),
        data(0, 0, TOKENS + 1),
        data(0, 0, 0),
        data(0, 0, 4, head0=1),
        data(0, 0, 4, num_heads=1),
        replace(data(0, 0, 4), message=Data(memoryview(b"short"))),
        control(Confirm(SEQ, b"", EPOCH, held=True), seq=SEQ + 1),
        control(End(TOKENS, True, FIRST, 0), seq=SEQ + 1),
        control(End(TOKENS, True, FIRST, 0)),
    ],
)
def test_fetcher_refuses_frames_that_do_not_fit(event: Arrived) -> None:
    session = fetcher(FetcherState.STREAMING)
    with pytest.raises(KVCorrupt):
        session.receive(event)
    assert session.state is FetcherState.FAILED
    assert session.end is None


@pytest.mark.parametrize("end", [End(TOKENS, True, (), 3), End(TOKENS - 1, True, (), 2)])
def test_fetcher_counts_against_end(end: End) -> None:
    session = fetcher(FetcherState.STREAMING)
    session.receive(data(0, 0, TOKENS))
    session.receive(data(1, 0, TOKENS))
    with pytest.raises(KVCorrupt):
        session.receive(control(end))


def test_a_lease_that_did_not_hold_is_stale() -> None:
    session = fetcher(FetcherState.STREAMING)
    session.receive(data(0, 0, TOKENS))
    session.receive(data(1, 0, TOKENS))
    with pytest.raises(KVStale):
        session.receive(control(End(TOKENS, False, (), 2)))
    assert session.end is None
    with pytest.raises(KVStale):
        fetcher(FetcherState.CHECKING).receive(control(Confirm(SEQ, b"", EPOCH, held=False)))


WAITING = (FetcherState.GREETING, FetcherState.STREAMING, FetcherState.CHECKING)


@pytest.mark.parametrize("state", WAITING)
@pytest.mark.parametrize("code", FailureCode)
def test_fetcher_raises_the_peers_failure(state: FetcherState, code: FailureCode) -> None:
    failure = Failure(code, "why")
    with pytest.raises(type(failure.error()), match="why"):
        fetcher(state).receive(control(failure))


@pytest.mark.parametrize("state", WAITING)
def test_fetcher_notices_a_close(state: FetcherState) -> None:
    with pytest.raises(KVLost, match=state.name):
        fetcher(state).receive(Closed())


FETCHER_EVENTS = [Start(), Closed(), *(control(message) for message in PEER_MESSAGES)]


@pytest.mark.parametrize("state", FetcherState)
def test_fetcher_refuses_every_other_pair(state: FetcherState) -> None:
    for event in FETCHER_EVENTS:
        kind = type(event.message) if isinstance(event, Arrived) else type(event)
        if (state, kind) in FETCHER_TABLE:
            continue
        session = fetcher(state)
        expected = KVCorrupt if isinstance(event, Arrived) else IllegalTransition
        with pytest.raises(expected, match=rf"{kind.__name__} in state {state.name}"):
            session.receive(event)
        assert not session.done or isinstance(event, Start | Closed)


# ---- both together ------------------------------------------------------------------------------
def converse(tamper: Callable[[Message], Message] = lambda message: message) -> FetcherSession:
    """Let the two machines talk until the fetch is done; payloads are zeros."""
    p, d = ExporterSession(P, NP, LAYERS), FetcherSession(D, ND, LAYERS, Wanted(HANDLE, EPOCH))
    to_p = [control(message) for message in sent(d.receive(Start()))]
    progress = [Progress((8, 0), None), Progress((20, 8), None), Progress((20, 20), FIRST)]
    while not p.done:
        streaming = p.state is ExporterState.STREAMING
        actions = p.receive(progress.pop(0) if streaming else to_p.pop(0))
        while actions:
            action = actions.pop(0)
            match action:
                case Send(message):
                    answers = d.receive(control(tamper(message)))
                    to_p += [control(message) for message in sent(answers)]
                case SendData(layer, start, end):
                    d.receive(data(layer, start, end))
                case Open():
                    actions += p.receive(Opened(TOKENS))
                case Check():
                    actions += p.receive(LeaseHeld())
                case Release(export_seq):
                    assert export_seq == SEQ
    return d


def test_the_two_machines_fit() -> None:
    session = converse()
    assert session.end == End(TOKENS, True, FIRST, 4)


def test_the_two_machines_notice_a_changed_end() -> None:
    def fewer(message: Message) -> Message:
        return replace(message, num_frames=3) if isinstance(message, End) else message

    with pytest.raises(KVError):
        converse(fewer)
