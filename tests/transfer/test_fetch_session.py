"""The fetcher's machine, without I/O, and both machines together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from baton.protocol.errors import IllegalTransition, KVCorrupt, KVError, KVLost, KVRefused, KVStale
from baton.runtime.rotation.deployment_secret import fixed
from kv_transfer.protocol.base import Payload, Remote
from kv_transfer.protocol.fetch_session import (
    FETCHER_TABLE,
    FetcherSession,
    FetcherState,
    Intent,
    WantedExport,
)
from kv_transfer.protocol.frames import Header, Kind
from kv_transfer.protocol.identity import Side
from kv_transfer.protocol.messages import (
    DIRECT,
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
    SharedBlockTables,
)
from kv_transfer.protocol.session import (
    ExporterSession,
    ExporterState,
)
from kv_transfer.protocol.steps import (
    Arrived,
    Check,
    Closed,
    Landed,
    LeaseHeld,
    Open,
    Opened,
    Progress,
    Pull,
    Release,
    Send,
    SendData,
    Settle,
    Start,
    Write,
)
from tests.transfer.machines import (
    EPOCH,
    FIRST,
    HANDLE,
    HELD,
    LAYERS,
    ND,
    NP,
    PEER_MESSAGES,
    SEQ,
    TOKENS,
    D,
    P,
    control,
    data,
    notice,
    sent,
    span,
)

HELLO_P = control(P.hello(Side.EXPORTER, NP, ND))


def fetcher(
    state: FetcherState = FetcherState.NEW, intent: Intent = Intent.FETCH, start_token: int = 0
) -> FetcherSession:
    if state is FetcherState.CHECKING and intent is Intent.FETCH:
        intent = Intent.RENEW
    if state is FetcherState.RELEASING:
        intent = Intent.RELEASE
    wanted = WantedExport(HANDLE, EPOCH, intent, start_token, 5000)
    if state is FetcherState.CONFIRMING:
        wanted = replace(wanted, codec=DIRECT)
    session = FetcherSession(D, ND, LAYERS, wanted)
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
    if state is FetcherState.RELEASING:
        session.receive(HELD)
    if state is FetcherState.CONFIRMING:
        session.receive(control(SharedBlockTables(8, ((0, 1, 2),))))
        session.receive(notice(0, 0, TOKENS))
        session.receive(notice(1, 0, TOKENS))
        session.receive(control(End(TOKENS, True, FIRST, 2)))
    if state is FetcherState.DONE:
        session.receive(data(0, 0, TOKENS))
        session.receive(data(1, 0, TOKENS))
        session.receive(control(End(TOKENS, True, FIRST, 2)))
    assert session.state is state
    return session


def test_fetcher_holds_a_whole_conversation() -> None:
    session = fetcher(start_token=4)
    assert sent(session.receive(Start())) == [D.hello(Side.FETCHER, ND, None)]
    fetch = Fetch(SEQ, b"k" * 16, "r", EPOCH, start_token=4, timeout_ms=5000)
    assert sent(session.receive(HELLO_P)) == [D.hello(Side.FETCHER, ND, NP), fetch]
    for layer, start, end in ((0, 4, 9), (1, 4, 20), (0, 9, 20)):
        event = data(layer, start, end)
        assert isinstance(event.message, Data)
        wanted = span(layer, start, end)
        payload = Payload(event.message.payload, "bfloat16", wanted.heads)
        assert session.receive(event) == [Write(wanted, payload)]
        assert session.receive(control(Confirm(SEQ, b"", EPOCH, held=True))) == []
    end = End(TOKENS, True, FIRST, 3)
    assert session.receive(control(end)) == [Send(Ack(SEQ))]
    assert session.done
    assert session.end == end


def test_fetcher_renews() -> None:
    session = fetcher(FetcherState.GREETING, Intent.RENEW)
    assert sent(session.receive(HELLO_P))[1] == Renew(SEQ, b"k" * 16, EPOCH)
    assert session.receive(HELD) == []
    assert session.done
    assert session.end is None


def test_fetcher_releases_and_waits_until_it_is_done() -> None:
    session = fetcher(FetcherState.GREETING, Intent.RELEASE)
    assert sent(session.receive(HELLO_P))[1] == Confirm(SEQ, b"k" * 16, EPOCH)
    assert session.receive(HELD) == [Send(Ack(SEQ, answer=True))]
    assert not session.done
    assert session.receive(control(Confirm(SEQ, b"", EPOCH, held=False))) == []
    assert session.done
    assert session.end is None


def test_fetcher_needs_no_handshake_on_a_kept_connection() -> None:
    first = fetcher(FetcherState.DONE)
    assert first.peer is not None
    again = FetcherSession(D, ND, LAYERS, WantedExport(HANDLE, EPOCH, Intent.RENEW), first.peer)
    assert again.receive(Start()) == [Send(Renew(SEQ, b"k" * 16, EPOCH))]
    fetch = FetcherSession(D, ND, LAYERS, WantedExport(HANDLE, EPOCH), first.peer)
    assert sent(fetch.receive(Start())) == [Fetch(SEQ, b"k" * 16, "r", EPOCH)]
    fetch.receive(data(0, 0, TOKENS))
    fetch.receive(data(1, 0, TOKENS))
    assert fetch.receive(control(End(TOKENS, True, FIRST, 2))) == [Send(Ack(SEQ))]


def test_fetcher_reads_by_itself_and_asks_after_its_last_read() -> None:
    wanted = WantedExport(HANDLE, EPOCH, start_token=4, codec=DIRECT)
    session = FetcherSession(D, ND, LAYERS, wanted)
    session.receive(Start())
    session.receive(HELLO_P)
    assert session.receive(control(SharedBlockTables(8, ((5, 3, 9),)))) == []
    remote = Remote(P.format, ((5, 3, 9),))
    assert session.receive(notice(0, 4, TOKENS)) == [Pull(span(0, 4, TOKENS), remote)]
    assert session.receive(notice(1, 4, TOKENS)) == [Pull(span(1, 4, TOKENS), remote)]
    end = End(TOKENS, True, FIRST, 2)
    question = Send(Confirm(SEQ, b"k" * 16, EPOCH))
    assert session.receive(control(end)) == [Settle(), question]
    assert session.end is None, "not before the lease is confirmed"
    assert not session.done
    assert session.receive(HELD) == [Send(Ack(SEQ))]
    assert session.end == end


def test_fetcher_that_adopts_reads_nothing_and_asks_nothing_more() -> None:
    wanted = WantedExport(HANDLE, EPOCH, start_token=TOKENS, codec=DIRECT, hold=True, adopt=True)
    session = FetcherSession(D, ND, LAYERS, wanted)
    session.receive(Start())
    _, fetch = sent(session.receive(HELLO_P))
    assert isinstance(fetch, Fetch)
    assert fetch.adopt
    session.receive(control(SharedBlockTables(8, ((5, 3, 9),))))
    end = End(TOKENS, True, FIRST, 0, lease_ms=9000)
    assert session.receive(control(end)) == []
    assert session.done
    assert session.end == end
    assert session.remote == Remote(P.format, ((5, 3, 9),))


def test_a_lease_that_ended_during_the_last_read_is_stale() -> None:
    session = fetcher(FetcherState.CONFIRMING)
    with pytest.raises(KVStale):
        session.receive(control(Confirm(SEQ, b"", EPOCH, held=False)))
    assert session.end is None


@pytest.mark.parametrize(
    ("codec", "events"),
    [
        ("raw", [control(SharedBlockTables(8, ()))]),
        (DIRECT, [control(SharedBlockTables(16, ()))]),
        (DIRECT, [control(SharedBlockTables(8, ())), control(SharedBlockTables(8, ()))]),
        (DIRECT, [notice(0, 0, 4)]),
        (DIRECT, [control(SharedBlockTables(8, ())), data(0, 0, 4)]),
        (DIRECT, [control(SharedBlockTables(8, ()), seq=SEQ + 1)]),
    ],
)
def test_fetcher_refuses_tables_that_do_not_fit(codec: str, events: list[Arrived]) -> None:
    session = FetcherSession(D, ND, LAYERS, WantedExport(HANDLE, EPOCH, codec=codec))
    session.receive(Start())
    session.receive(HELLO_P)
    for event in events[:-1]:
        session.receive(event)
    with pytest.raises(KVCorrupt):
        session.receive(events[-1])


def test_what_has_landed_in_place_counts_like_any_frame() -> None:
    session = fetcher(FetcherState.STREAMING)
    assert session.in_pool_dtype
    for layer in (0, 1):
        event = data(layer, 0, TOKENS)
        assert isinstance(event.message, Data)
        length = len(event.message.payload)
        assert session.expect(event.header, length) == span(layer, 0, TOKENS)
        assert session.receive(Landed(event.header, length)) == []
        with pytest.raises(KVCorrupt):
            session.expect(event.header, length)
    session.receive(control(End(TOKENS, True, FIRST, 2)))
    with pytest.raises(KVCorrupt, match="DONE"):
        session.expect(data(0, 0, 1).header, 32)


def test_fetcher_may_hold_what_it_has_fetched() -> None:
    session = FetcherSession(D, ND, LAYERS, WantedExport(HANDLE, EPOCH, hold=True))
    session.receive(Start())
    session.receive(HELLO_P)
    session.receive(data(0, 0, TOKENS))
    session.receive(data(1, 0, TOKENS))
    assert session.receive(control(End(TOKENS, True, FIRST, 2))) == []
    assert session.done


@pytest.mark.parametrize("intent", [Intent.FETCH, Intent.RELEASE])
def test_a_rank_speaks_for_itself_alone(intent: Intent) -> None:
    session = FetcherSession(D, ND, LAYERS, WantedExport(HANDLE, EPOCH, intent, part=True))
    session.receive(Start())
    session.receive(HELLO_P)
    if intent is Intent.FETCH:
        session.receive(data(0, 0, TOKENS))
        session.receive(data(1, 0, TOKENS))
        last = session.receive(control(End(TOKENS, True, FIRST, 2)))
    else:
        last = session.receive(HELD)
    assert last == [Send(Ack(SEQ, part=True, answer=intent is Intent.RELEASE))]


@pytest.mark.parametrize(
    ("hello", "error", "text"),
    [
        (replace(P, boot_id="0b" * 16).hello(Side.EXPORTER, NP, ND), KVStale, "restarted"),
        (replace(P, fingerprint="x").hello(Side.EXPORTER, NP, ND), KVRefused, "layout"),
        (replace(P, protocol_version=9).hello(Side.EXPORTER, NP, ND), KVRefused, "version"),
        (replace(P, secrets=fixed("x")).hello(Side.EXPORTER, NP, ND), KVRefused, "secret"),
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


WAITING = (
    FetcherState.GREETING,
    FetcherState.STREAMING,
    FetcherState.CONFIRMING,
    FetcherState.CHECKING,
    FetcherState.RELEASING,
)


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


FETCHER_EVENTS = [
    Start(),
    Closed(),
    Landed(Header(Kind.DATA), 0),
    *(control(message) for message in PEER_MESSAGES),
]


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
        assert not session.done or isinstance(event, Start | Closed | Landed)


# ---- both together ------------------------------------------------------------------------------
def converse(tamper: Callable[[Message], Message] = lambda message: message) -> FetcherSession:
    """Let the two machines talk until the fetch is done; payloads are zeros."""
    p, d = (
        ExporterSession(P, NP, LAYERS),
        FetcherSession(D, ND, LAYERS, WantedExport(HANDLE, EPOCH)),
    )
    to_p = [control(message) for message in sent(d.receive(Start()))]
    progress = [Progress((8, 0), None), Progress((20, 8), None), Progress((20, 20), FIRST)]
    released = False
    while not released:
        streaming = p.state is ExporterState.STREAMING
        actions = p.receive(progress.pop(0) if streaming else to_p.pop(0))
        while actions:
            action = actions.pop(0)
            match action:
                case Send(message):
                    answers = d.receive(control(tamper(message)))
                    to_p += [control(message) for message in sent(answers)]
                case SendData(span):
                    d.receive(data(span.layer, span.start, span.end))
                case Open():
                    actions += p.receive(Opened(TOKENS))
                case Check():
                    actions += p.receive(LeaseHeld())
                case Release(export_seq):
                    assert export_seq == SEQ
                    released = True
    return d


def test_the_two_machines_fit() -> None:
    session = converse()
    assert session.end == End(TOKENS, True, FIRST, 4)


def test_the_two_machines_notice_a_changed_end() -> None:
    def fewer(message: Message) -> Message:
        return replace(message, num_frames=3) if isinstance(message, End) else message

    with pytest.raises(KVError):
        converse(fewer)
