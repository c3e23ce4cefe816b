"""The two state machines of a KV conversation, without I/O: receive(event) -> [actions].

Everything that decides what a conversation may do lives in this file (its events and actions are
values in steps.py, who may speak in identity.py); sockets, pools, locks and
clocks live in exporter.py and fetcher.py, which perform the actions and report back as events.

    fetcher                                   exporter
    HELLO (challenge)              ------>
                                   <------    HELLO (answer + own challenge)
    HELLO (answer), FETCH          ------>    checks secret, epoch, export: opens it
                                   <------    DATA ... as published; CONFIRM while nothing is
                                   <------    END (lease held throughout, first tokens)
    ACK                            ------>    releases the export

Instead of FETCH: RENEW (answered by CONFIRM), or CONFIRM (answered by CONFIRM) and then an ACK
that releases. A step missing from a table is illegal and raises, naming state and event:
KVCorrupt when the peer caused it, IllegalTransition when we did.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

from baton.errors import IllegalTransition, KVCorrupt, KVError, KVLost, KVRefused, KVStale
from baton.events import FirstToken
from baton.handles import KVHandle
from baton.kv_spec import LayerSpec
from kv_transfer.frames import MAX_PAYLOAD, Header, Kind
from kv_transfer.identity import Identity, Side
from kv_transfer.messages import Ack, Confirm, Data, End, Failure, FailureCode, Fetch, Hello, Renew
from kv_transfer.steps import (
    Arrived,
    Check,
    Closed,
    ExporterAction,
    ExporterEvent,
    FetcherAction,
    FetcherEvent,
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


def _event_type(event: object) -> type:
    return type(event.message) if isinstance(event, Arrived) else type(event)


def _illegal(event: object, state: enum.Enum) -> KVError | IllegalTransition:
    text = f"illegal event {_event_type(event).__name__} in state {state.name}"
    return KVCorrupt(text) if isinstance(event, Arrived) else IllegalTransition(text)


def tokens_per_frame(layer: LayerSpec, dtype: str) -> int:
    """How many tokens of `layer` fit into one frame; 0 if not even one does."""
    return MAX_PAYLOAD // layer.token_bytes(dtype)


# ---- exporter -----------------------------------------------------------------------------------
class ExporterState(enum.Enum):
    NEW = enum.auto()
    GREETED = enum.auto()
    READY = enum.auto()  # the peer is authenticated
    OPENING = enum.auto()
    STREAMING = enum.auto()
    ENDING = enum.auto()  # all bytes are out; the lease is verified once more
    ENDED = enum.auto()
    CHECKING = enum.auto()
    HELD = enum.auto()
    DONE = enum.auto()


class ExporterSession:
    """Serves one conversation. `nonce` is our challenge, fresh for each conversation."""

    def __init__(self, identity: Identity, nonce: bytes, layers: Sequence[LayerSpec]) -> None:
        self.state = ExporterState.NEW
        self.export_seq = 0
        self.epoch = 0
        self._identity = identity
        self._nonce = nonce
        self._frame_tokens = [tokens_per_frame(layer, identity.format.dtype) for layer in layers]
        self._sent = [0] * len(layers)
        self._num_tokens = 0
        self._num_frames = 0
        self._start_token = 0
        self._first_tokens: tuple[FirstToken, ...] = ()
        self._peer: Hello | None = None

    @property
    def done(self) -> bool:
        return self.state is ExporterState.DONE

    def receive(self, event: ExporterEvent) -> list[ExporterAction]:
        """Raises KVCorrupt for a frame, IllegalTransition for a local event out of place."""
        if isinstance(event, Closed):
            self.state = ExporterState.DONE
            return []
        handler = EXPORTER_TABLE.get((self.state, _event_type(event)))
        if handler is None:
            raise _illegal(event, self.state)
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

    def _fail(self, failure: Failure) -> list[ExporterAction]:
        self.state = ExporterState.DONE
        return [Send(failure)]

    def on_challenge(self, hello: Hello) -> list[ExporterAction]:
        failure = self._identity.refuse(hello)
        if failure is not None:
            return self._fail(failure)
        self._peer = hello
        self.state = ExporterState.GREETED
        return [Send(self._identity.hello(Side.EXPORTER, self._nonce, hello.nonce))]

    def on_proof(self, hello: Hello) -> list[ExporterAction]:
        assert self._peer is not None
        same = replace(hello, mac=b"") == replace(self._peer, mac=b"")
        if not same or not self._identity.proven(hello, Side.FETCHER, self._nonce):
            return self._fail(Failure(FailureCode.AUTH, "wrong deployment secret"))
        self.state = ExporterState.READY
        return []

    def on_fetch(self, fetch: Fetch) -> list[ExporterAction]:
        if fetch.codec != "raw" or fetch.head0 or fetch.num_heads:
            return self._fail(
                Failure(FailureCode.PROTOCOL, "only codec raw and all heads are served")
            )
        self.export_seq, self.epoch = fetch.export_seq, fetch.epoch
        self._start_token = fetch.start_token
        self.state = ExporterState.OPENING
        return [Open(fetch)]

    def on_opened(self, event: Opened) -> list[ExporterAction]:
        if self._start_token > event.num_tokens:
            text = f"start token {self._start_token} beyond {event.num_tokens}"
            return self._fail(Failure(FailureCode.PROTOCOL, text))
        self._num_tokens = event.num_tokens
        self._sent = [self._start_token] * len(self._sent)
        self.state = ExporterState.STREAMING
        return []

    def on_progress(self, event: Progress) -> list[ExporterAction]:
        actions: list[ExporterAction] = []
        for layer, upto in enumerate(event.upto):
            while self._sent[layer] < upto:
                start = self._sent[layer]
                end = min(upto, start + self._frame_tokens[layer])
                actions.append(SendData(layer, start, end))
                self._sent[layer] = end
        self._num_frames += len(actions)
        if event.first_tokens is not None and min(self._sent) == self._num_tokens:
            self._first_tokens = event.first_tokens
            self.state = ExporterState.ENDING
            actions.append(Check(None))
        return actions

    def on_idle(self, event: Idle) -> list[ExporterAction]:
        return [Send(Confirm(self.export_seq, b"", self.epoch, held=True))]

    def on_lease_held(self, event: LeaseHeld) -> list[ExporterAction]:
        self.state = ExporterState.ENDED
        return [Send(End(self._num_tokens, True, self._first_tokens, self._num_frames))]

    def on_question(self, message: Renew | Confirm) -> list[ExporterAction]:
        self.export_seq, self.epoch = message.export_seq, message.epoch
        self.state = ExporterState.CHECKING
        return [Check(message)]

    def on_confirmed(self, event: LeaseHeld) -> list[ExporterAction]:
        self.state = ExporterState.HELD
        return [Send(Confirm(self.export_seq, b"", self.epoch, held=True))]

    def on_refused(self, event: Refused) -> list[ExporterAction]:
        return self._fail(event.failure)

    def on_ack(self, ack: Ack) -> list[ExporterAction]:
        if ack.export_seq != self.export_seq:
            raise KVCorrupt(f"ACK of export {ack.export_seq}, not {self.export_seq}")
        self.state = ExporterState.DONE
        return [Release(self.export_seq, self.epoch)]


_E = ExporterState
_ExporterHandler: TypeAlias = Callable[[ExporterSession, Any], list[ExporterAction]]
# Closed is legal everywhere and ends the conversation, never the lease. Only `receive` calls these.
EXPORTER_TABLE: Final[dict[tuple[ExporterState, type], _ExporterHandler]] = {
    (_E.NEW, Hello): ExporterSession.on_challenge,
    (_E.GREETED, Hello): ExporterSession.on_proof,
    (_E.READY, Fetch): ExporterSession.on_fetch,
    (_E.READY, Renew): ExporterSession.on_question,
    (_E.READY, Confirm): ExporterSession.on_question,
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


# ---- fetcher ------------------------------------------------------------------------------------
class FetcherState(enum.Enum):
    NEW = enum.auto()
    GREETING = enum.auto()
    STREAMING = enum.auto()
    CHECKING = enum.auto()
    DONE = enum.auto()
    FAILED = enum.auto()


class Intent(enum.Enum):
    FETCH = enum.auto()
    RENEW = enum.auto()
    RELEASE = enum.auto()


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the fetching side wants of which export, speaking for `epoch` of the request."""

    handle: KVHandle
    epoch: int
    intent: Intent = Intent.FETCH
    start_token: int = 0
    timeout_ms: int = 0

    def message(self) -> Fetch | Renew | Confirm:
        handle = self.handle
        if self.intent is Intent.FETCH:
            return Fetch(
                handle.export_seq,
                handle.secret,
                handle.request_id,
                self.epoch,
                start_token=self.start_token,
                timeout_ms=self.timeout_ms,
            )
        if self.intent is Intent.RENEW:
            return Renew(handle.export_seq, handle.secret, self.epoch)
        return Confirm(handle.export_seq, handle.secret, self.epoch)


class FetcherSession:
    """Holds one conversation. After DONE a fetch has its `end`: only then may a block be used."""

    def __init__(
        self, identity: Identity, nonce: bytes, layers: Sequence[LayerSpec], wanted: Wanted
    ) -> None:
        self.state = FetcherState.NEW
        self.end: End | None = None
        self.export_seq = wanted.handle.export_seq
        self.epoch = wanted.epoch
        self._identity = identity
        self._nonce = nonce
        self._layers = layers
        self._wanted = wanted
        self._received = [wanted.start_token] * len(layers)
        self._num_frames = 0

    @property
    def done(self) -> bool:
        return self.state is FetcherState.DONE

    def receive(self, event: FetcherEvent) -> list[FetcherAction]:
        """Raises the KVError that ends it; IllegalTransition for a local event out of place."""
        handler = FETCHER_TABLE.get((self.state, _event_type(event)))
        try:
            if handler is None:
                raise _illegal(event, self.state)
            return handler(self, event)
        except KVError:
            self.state = FetcherState.FAILED
            raise

    def on_start(self, event: Start) -> list[FetcherAction]:
        self.state = FetcherState.GREETING
        return [Send(self._identity.hello(Side.FETCHER, self._nonce, None))]

    def on_hello(self, event: Arrived) -> list[FetcherAction]:
        hello = event.message
        assert isinstance(hello, Hello)
        if hello.boot_id != self._wanted.handle.boot_id:
            raise KVStale(f"exporter restarted: boot id {hello.boot_id}")
        failure = self._identity.refuse(hello)
        if failure is not None:
            raise failure.error()
        if not self._identity.proven(hello, Side.EXPORTER, self._nonce):
            raise KVRefused("wrong deployment secret")
        fetching = self._wanted.intent is Intent.FETCH
        self.state = FetcherState.STREAMING if fetching else FetcherState.CHECKING
        proof = self._identity.hello(Side.FETCHER, self._nonce, hello.nonce)
        return [Send(proof), Send(self._wanted.message())]

    def _check_header(self, header: Header) -> None:
        if (header.export_seq, header.epoch) != (self.export_seq, self.epoch):
            raise KVCorrupt(
                f"{header.kind.name} of export {header.export_seq} epoch {header.epoch}, "
                f"not {self.export_seq} epoch {self.epoch}"
            )

    def on_data(self, event: Arrived) -> list[FetcherAction]:
        header, data = event.header, event.message
        assert isinstance(data, Data)
        self._check_header(header)
        if header.layer >= len(self._layers):
            raise KVCorrupt(f"DATA of layer {header.layer} of {len(self._layers)}")
        spec = self._layers[header.layer]
        start, end = header.token0, header.token0 + header.num_tokens
        # Contiguous per layer: a lost, replayed or reordered frame is noticed at once.
        if (
            start != self._received[header.layer]
            or not start < end <= self._wanted.handle.num_tokens
        ):
            raise KVCorrupt(
                f"DATA of layer {header.layer} tokens [{start}, {end}), "
                f"expected from {self._received[header.layer]}"
            )
        if (header.head0, header.num_heads) != (0, spec.kv_heads):
            raise KVCorrupt(f"DATA of heads {header.head0}+{header.num_heads}, not all")
        if len(data.payload) != (end - start) * spec.token_bytes(self._identity.format.dtype):
            raise KVCorrupt(f"DATA of {len(data.payload)} bytes for {end - start} tokens")
        self._received[header.layer] = end
        self._num_frames += 1
        return [Write(header.layer, start, end, data.payload)]

    def on_alive(self, event: Arrived) -> list[FetcherAction]:
        self._check_header(event.header)
        return []

    def on_end(self, event: Arrived) -> list[FetcherAction]:
        end = event.message
        assert isinstance(end, End)
        self._check_header(event.header)
        if not end.lease_held:
            raise KVStale("the lease did not hold throughout the transfer")
        complete = min(self._received) == self._wanted.handle.num_tokens == end.num_tokens
        if not complete or end.num_frames != self._num_frames:
            raise KVCorrupt(
                f"END after {self._num_frames} frames up to {min(self._received)}, it says "
                f"{end.num_frames} up to {end.num_tokens}"
            )
        self.end = end
        self.state = FetcherState.DONE
        return [Send(Ack(self.export_seq)), Finish()]

    def on_confirmed(self, event: Arrived) -> list[FetcherAction]:
        confirm = event.message
        assert isinstance(confirm, Confirm)
        self._check_header(event.header)
        if not confirm.held:
            raise KVStale("the lease is over")
        self.state = FetcherState.DONE
        if self._wanted.intent is Intent.RELEASE:
            return [Send(Ack(self.export_seq)), Finish()]
        return [Finish()]

    def on_failure(self, event: Arrived) -> list[FetcherAction]:
        assert isinstance(event.message, Failure)
        raise event.message.error()

    def on_closed(self, event: Closed) -> list[FetcherAction]:
        raise KVLost(f"exporter closed the conversation in state {self.state.name}")


_F = FetcherState
_FetcherHandler: TypeAlias = Callable[[FetcherSession, Any], list[FetcherAction]]
FETCHER_TABLE: Final[dict[tuple[FetcherState, type], _FetcherHandler]] = {
    (_F.NEW, Start): FetcherSession.on_start,
    (_F.GREETING, Hello): FetcherSession.on_hello,
    (_F.STREAMING, Data): FetcherSession.on_data,
    (_F.STREAMING, Confirm): FetcherSession.on_alive,
    (_F.STREAMING, End): FetcherSession.on_end,
    (_F.CHECKING, Confirm): FetcherSession.on_confirmed,
    **{(s, Failure): FetcherSession.on_failure for s in (_F.GREETING, _F.STREAMING, _F.CHECKING)},
    **{(s, Closed): FetcherSession.on_closed for s in (_F.GREETING, _F.STREAMING, _F.CHECKING)},
}


def header_of(kind: Kind, export_seq: int, epoch: int) -> Header:
    """The header of a control frame: HELLO names no export, the challenge comes first."""
    if kind is Kind.HELLO:
        return Header(kind)
    return Header(kind, export_seq, epoch)
