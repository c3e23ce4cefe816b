"""The exporter's state machine of a KV connection, without I/O: receive(event) -> [actions].

The fetcher's is fetch_session.py. Everything that decides what a conversation may do lives in these
two files (events and actions are values in steps.py, who may speak in identity.py, who gets which
heads and tokens in shares.py); sockets, pools, locks and clocks live in exporter.py and fetcher.py,
which perform the actions and report back as events.

    fetcher                                   exporter
    HELLO (challenge)              ------>
                                   <------    HELLO (answer + own challenge)
    HELLO (answer), FETCH          ------>    checks secret, epoch, export: opens it
                                   <------    BLOCKS, if the fetcher reads our memory itself
                                   <------    DATA ... as published; CONFIRM while nothing is
                                   <------    STATE ... of a layer, once all its tokens are
                                   <------    END (lease held throughout, first tokens)
    CONFIRM, if it read itself     ------>
                                   <------    CONFIRM (the lease was held until after its last read)
    ACK                            ------>    releases the export

A fetcher that adopts (reads the blocks where they lie) gets BLOCKS, STATE and END only. END extends
the lease, and the fetcher's ACK comes when it reads no more.
Instead of FETCH: RENEW (answered by CONFIRM), or CONFIRM (answered by CONFIRM) and then an ACK
that releases. Then the next FETCH, RENEW or CONFIRM may follow without a handshake. A step missing
from a table is illegal and raises, naming state and event: KVCorrupt when the peer caused it,
IllegalTransition when we did.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, TypeAlias

from baton.protocol.errors import IllegalTransition, KVCorrupt, KVError
from baton.protocol.events import FirstToken
from baton.protocol.kv_spec import LayerSpec
from kv_transfer.protocol.base import KVSpan, StateSpan
from kv_transfer.protocol.frames import MAX_PAYLOAD, Header, Kind
from kv_transfer.protocol.identity import Identity, Side
from kv_transfer.protocol.messages import (
    DIRECT,
    INT8,
    RAW,
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
from kv_transfer.protocol.shares import fetching_ranks, first_sent, share, tokens_per_frame
from kv_transfer.protocol.steps import (
    Announce,
    Arrived,
    Check,
    Closed,
    ExporterAction,
    ExporterEvent,
    Idle,
    LeaseHeld,
    Open,
    Opened,
    Progress,
    Refused,
    Release,
    Send,
    SendData,
    SendState,
)


def event_type(event: object) -> type:
    return type(event.message) if isinstance(event, Arrived) else type(event)


def illegal(event: object, state: enum.Enum) -> KVError | IllegalTransition:
    text = f"illegal event {event_type(event).__name__} in state {state.name}"
    return KVCorrupt(text) if isinstance(event, Arrived) else IllegalTransition(text)


def header_of(kind: Kind, export_seq: int, epoch: int) -> Header:
    """Return the header of a control frame. HELLO names no export, as the challenge comes first."""
    if kind is Kind.HELLO:
        return Header(kind)
    return Header(kind, export_seq, epoch)


def data_header(span: KVSpan, export_seq: int, epoch: int) -> Header:
    return Header(
        kind=Kind.DATA,
        export_seq=export_seq,
        epoch=epoch,
        layer=span.layer,
        head0=span.heads.start,
        num_heads=len(span.heads),
        token0=span.start,
        num_tokens=span.end - span.start,
    )


def state_header(span: StateSpan, export_seq: int, epoch: int) -> Header:
    return Header(Kind.STATE, export_seq, epoch, layer=span.layer, token0=span.start)


class ExporterState(enum.Enum):
    NEW = enum.auto()
    GREETED = enum.auto()
    READY = enum.auto()  # the peer is authenticated
    OPENING = enum.auto()
    STREAMING = enum.auto()
    ENDING = enum.auto()  # all bytes are sent; the lease is verified once more
    ENDED = enum.auto()
    CHECKING = enum.auto()
    HELD = enum.auto()
    DONE = enum.auto()


class ExporterSession:
    """Serves one connection.

    `nonce`: our challenge, fresh for each connection. `direct`: the lane lets the peer read our
    memory. `windowed`: our pool drops tokens that have slid out of a window.
    """

    def __init__(
        self,
        identity: Identity,
        nonce: bytes,
        layers: Sequence[LayerSpec],
        direct: bool = False,
        windowed: bool = False,
    ) -> None:
        self.state = ExporterState.NEW
        self.export_seq = 0
        self.epoch = 0
        self._identity = identity
        self._nonce = nonce
        self._layers = layers
        self._direct = direct
        self._windowed = windowed
        self._peer: Hello | None = None
        self._begin(Fetch(0, b"", "", 0))

    def _begin(self, fetch: Fetch) -> None:
        """Reset the state of the last FETCH."""
        self._fetch = fetch
        self._heads: list[range] = []
        self._frame_tokens: list[int] = []
        self._sent: list[int] = []
        self._states: list[StateSpan] = []  # not sent yet
        self._num_tokens = 0
        self._num_frames = 0
        self._waited_ms = 0
        self._first_tokens: tuple[FirstToken, ...] = ()

    @property
    def done(self) -> bool:
        return self.state is ExporterState.DONE

    def receive(self, event: ExporterEvent) -> list[ExporterAction]:
        """Handle an event; return the actions to perform.

        Raises KVCorrupt for a frame out of place, IllegalTransition for a local event out of place.
        """
        if isinstance(event, Closed):
            self.state = ExporterState.DONE
            return []
        handler = EXPORTER_TABLE.get((self.state, event_type(event)))
        if handler is None:
            raise illegal(event, self.state)
        if isinstance(event, Arrived):
            self._check_header(event)
            return handler(self, event.message)
        return handler(self, event)

    def _check_header(self, event: Arrived) -> None:
        message, header = event.message, event.header
        if isinstance(message, Fetch | Renew | Confirm):
            expected = (message.export_seq, message.epoch)
        else:
            expected = (self.export_seq, self.epoch)
        if (header.export_seq, header.epoch) != expected:
            raise KVCorrupt(f"{header.kind.name} of export {header.export_seq}, not {expected[0]}")

    def _fail(self, code: FailureCode, text: str) -> list[ExporterAction]:
        self.state = ExporterState.DONE
        return [Send(Failure(code, text))]

    # ---- handshake -----------------------------------------------------------------------------
    def on_challenge(self, hello: Hello) -> list[ExporterAction]:
        failure = self._identity.refuse(hello)
        if failure is not None:
            return self._fail(failure.code, failure.message)
        self._peer = hello
        self.state = ExporterState.GREETED
        return [Send(self._identity.hello(Side.EXPORTER, self._nonce, hello.nonce))]

    def on_proof(self, hello: Hello) -> list[ExporterAction]:
        assert self._peer is not None
        same = replace(hello, mac=b"") == replace(self._peer, mac=b"")
        if not same or not self._identity.proven(hello, Side.FETCHER, self._nonce):
            return self._fail(FailureCode.AUTH, "wrong deployment secret")
        self.state = ExporterState.READY
        return []

    # ---- fetch ---------------------------------------------------------------------------------
    def on_fetch(self, fetch: Fetch) -> list[ExporterAction]:
        allowed = (DIRECT,) if self._direct else (RAW, INT8)
        if fetch.codec not in allowed:
            return self._fail(FailureCode.PROTOCOL, f"codec {fetch.codec!r} is not served here")
        if fetch.adopt and not self._direct:
            return self._fail(FailureCode.PROTOCOL, "nothing can be read in place by this lane")
        if self._windowed and not fetch.windowed:
            text = "this pool keeps no more of a window than is seen, the fetcher wants all of it"
            return self._fail(FailureCode.LAYOUT, text)
        self.export_seq, self.epoch = fetch.export_seq, fetch.epoch
        self._begin(fetch)
        self.state = ExporterState.OPENING
        return [Open(fetch)]

    @property
    def _dtype(self) -> str:
        """The dtype of the payloads; codec `raw` carries what our pool stores."""
        return INT8 if self._fetch.codec == INT8 else self._identity.format.dtype

    def on_opened(self, event: Opened) -> list[ExporterAction]:
        assert self._peer is not None
        fetch, own = self._fetch, self._identity.format
        if fetch.start_token > event.num_tokens:
            text = f"start token {fetch.start_token} beyond {event.num_tokens}"
            return self._fail(FailureCode.PROTOCOL, text)
        self._num_tokens = event.num_tokens
        for spec in self._layers:
            heads = share(spec, own, self._peer.format)
            self._heads.append(heads)
            self._frame_tokens.append(
                max(1, event.num_tokens)
                if self._direct or not heads
                else tokens_per_frame(spec, len(heads), self._dtype)
            )
            first = first_sent(spec, fetch.start_token, event.num_tokens, fetch.windowed)
            self._sent.append(first if heads else event.num_tokens)
        self._states = _state_spans(self._layers)
        if 0 in self._frame_tokens:
            return self._fail(FailureCode.PROTOCOL, "one token of KV exceeds a frame")
        self.state = ExporterState.STREAMING
        return [Send(SharedBlockTables(own.block_size, event.tables))] if self._direct else []

    def on_progress(self, event: Progress) -> list[ExporterAction]:
        actions: list[ExporterAction] = []
        for layer, upto in enumerate(event.upto):
            while self._sent[layer] < upto:
                start = self._sent[layer]
                end = min(upto, start + self._frame_tokens[layer])
                span = KVSpan(layer, start, end, self._heads[layer])
                actions.append(Announce(span) if self._direct else SendData(span, self._dtype))
                self._sent[layer] = end
        # A state is that behind the last token written, so it is sent behind the last of all.
        ready = [span for span in self._states if event.upto[span.layer] == self._num_tokens]
        actions += map(SendState, ready)
        self._states = [span for span in self._states if span not in ready]
        self._num_frames += len(actions)
        all_sent = min(self._sent) == self._num_tokens and not self._states
        if event.first_tokens is not None and all_sent:
            self._first_tokens = event.first_tokens
            self._waited_ms = event.waited_ms
            self.state = ExporterState.ENDING
            actions.append(Check(None, adopting=self._fetch.adopt))
        return actions

    def on_idle(self, event: Idle) -> list[ExporterAction]:
        return [Send(Confirm(self.export_seq, b"", self.epoch, held=True))]

    def on_lease_held(self, event: LeaseHeld) -> list[ExporterAction]:
        self.state = ExporterState.ENDED
        end = End(
            self._num_tokens,
            True,
            self._first_tokens,
            self._num_frames,
            self._waited_ms,
            event.lease_ms,
        )
        return [Send(end)]

    # ---- questions and releases ----------------------------------------------------------------
    def on_question(self, message: Renew | Confirm) -> list[ExporterAction]:
        self.export_seq, self.epoch = message.export_seq, message.epoch
        self.state = ExporterState.CHECKING
        return [Check(message)]

    def on_confirmed(self, event: LeaseHeld) -> list[ExporterAction]:
        self.state = ExporterState.HELD
        return [Send(Confirm(self.export_seq, b"", self.epoch, held=True))]

    def on_refused(self, event: Refused) -> list[ExporterAction]:
        return self._fail(event.failure.code, event.failure.message)

    def on_ack(self, ack: Ack) -> list[ExporterAction]:
        assert self._peer is not None
        if ack.export_seq != self.export_seq:
            raise KVCorrupt(f"ACK of export {ack.export_seq}, not {self.export_seq}")
        self.state = ExporterState.READY
        rank, ranks = 0, frozenset((0,))
        if ack.part:
            peer = self._peer.format
            rank = peer.tp_rank
            ranks = fetching_ranks(self._layers, self._identity.format, peer)
        release = Release(self.export_seq, self.epoch, rank, ranks, ack.answer)
        if not ack.answer:
            return [release]
        return [release, Send(Confirm(self.export_seq, b"", self.epoch, held=False))]


def _state_spans(layers: Sequence[LayerSpec]) -> list[StateSpan]:
    """Return all recurrent state of a sequence, a span per frame."""
    return [
        StateSpan(layer, start, min(start + MAX_PAYLOAD, spec.state_bytes))
        for layer, spec in enumerate(layers)
        for start in range(0, spec.state_bytes, MAX_PAYLOAD)
    ]


_E = ExporterState
_Handler: TypeAlias = Callable[[ExporterSession, Any], list[ExporterAction]]
_READY: Final = (_E.READY, _E.ENDED, _E.HELD)  # the next conversation may begin
# Closed is legal in every state and ends the connection, never the lease. Only `receive` calls
# these.
EXPORTER_TABLE: Final[dict[tuple[ExporterState, type], _Handler]] = {
    (_E.NEW, Hello): ExporterSession.on_challenge,
    (_E.GREETED, Hello): ExporterSession.on_proof,
    **{(state, Fetch): ExporterSession.on_fetch for state in _READY},
    **{(state, Renew): ExporterSession.on_question for state in _READY},
    **{(state, Confirm): ExporterSession.on_question for state in _READY},
    (_E.OPENING, Opened): ExporterSession.on_opened,
    (_E.OPENING, Refused): ExporterSession.on_refused,
    (_E.STREAMING, Progress): ExporterSession.on_progress,
    (_E.STREAMING, Idle): ExporterSession.on_idle,
    (_E.STREAMING, Refused): ExporterSession.on_refused,
    (_E.ENDING, LeaseHeld): ExporterSession.on_lease_held,
    (_E.ENDING, Refused): ExporterSession.on_refused,
    (_E.ENDED, Ack): ExporterSession.on_ack,
    (_E.CHECKING, LeaseHeld): ExporterSession.on_confirmed,
    (_E.CHECKING, Refused): ExporterSession.on_refused,
    (_E.HELD, Ack): ExporterSession.on_ack,
}
