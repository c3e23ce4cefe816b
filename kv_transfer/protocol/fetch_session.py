"""The fetcher's state machine of a KV conversation, without I/O: receive(event) -> [actions].

The exporter's machine, the course of a conversation and the rules of both are in session.py. One
machine holds one conversation (fetch, renew or release). The connection may be fresh or one that
was kept; the peer of a kept connection is known and needs no handshake.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from baton.protocol.errors import KVCorrupt, KVError, KVLost, KVRefused, KVStale
from baton.protocol.handles import KVHandle
from baton.protocol.kv_spec import LayerSpec, PoolFormat
from kv_transfer.protocol.base import KVSpan, Payload, Remote, StateSpan
from kv_transfer.protocol.frames import Header
from kv_transfer.protocol.identity import Identity, Side
from kv_transfer.protocol.messages import (
    DIRECT,
    INT8,
    RAW,
    Ack,
    Confirm,
    Data,
    End,
    Failure,
    Fetch,
    Hello,
    Renew,
    SharedBlockTables,
    State,
)
from kv_transfer.protocol.session import event_type, illegal
from kv_transfer.protocol.shares import first_sent, rows_bytes, share
from kv_transfer.protocol.steps import (
    Arrived,
    Closed,
    FetcherAction,
    FetcherEvent,
    Landed,
    Pull,
    Send,
    Settle,
    Start,
    Write,
    WriteState,
)


class FetcherState(enum.Enum):
    NEW = enum.auto()
    GREETING = enum.auto()
    STREAMING = enum.auto()
    # all has been read; the exporter is asked if the lease was held until after that
    CONFIRMING = enum.auto()
    CHECKING = enum.auto()
    RELEASING = enum.auto()
    DONE = enum.auto()
    FAILED = enum.auto()


class Intent(enum.Enum):
    FETCH = enum.auto()
    RENEW = enum.auto()
    RELEASE = enum.auto()


@dataclass(frozen=True, slots=True)
class WantedExport:
    """What the fetching side wants of which export, for `epoch` of the request.

    FETCH: with `hold` no ACK is sent; with `adopt` nothing is read, as the pages are used where
    they lie. RELEASE: `part` releases for this tensor-parallel rank alone.
    """

    handle: KVHandle
    epoch: int
    intent: Intent = Intent.FETCH
    start_token: int = 0
    timeout_ms: int = 0
    codec: str = RAW
    windowed: bool = False
    hold: bool = False
    part: bool = False
    adopt: bool = False

    def message(self) -> Fetch | Renew | Confirm:
        handle = self.handle
        if self.intent is Intent.FETCH:
            return Fetch(
                handle.export_seq,
                handle.secret,
                handle.request_id,
                self.epoch,
                self.start_token,
                self.codec,
                self.windowed,
                self.timeout_ms,
                self.adopt,
            )
        if self.intent is Intent.RENEW:
            return Renew(handle.export_seq, handle.secret, self.epoch)
        return Confirm(handle.export_seq, handle.secret, self.epoch)


class FetcherSession:
    """Holds one conversation. After DONE a fetch has its `end`: only then may a block be used.

    `peer`: the exporter's HELLO if the connection was kept from an earlier conversation, else None.
    """

    def __init__(
        self,
        identity: Identity,
        nonce: bytes,
        layers: Sequence[LayerSpec],
        wanted: WantedExport,
        peer: Hello | None = None,
    ) -> None:
        self.state = FetcherState.NEW
        self.end: End | None = None
        self.peer = peer
        self.export_seq = wanted.handle.export_seq
        self.epoch = wanted.epoch
        self._identity = identity
        self._nonce = nonce
        self._layers = layers
        self._wanted = wanted
        self._heads: list[range] = []
        self._received: list[int] = []
        self._state_bytes = [0] * len(layers)  # received
        self._dtype = ""
        self._remote: Remote | None = None
        self._num_frames = 0
        self._unconfirmed: End | None = None

    @property
    def done(self) -> bool:
        return self.state is FetcherState.DONE

    @property
    def remote(self) -> Remote | None:
        """Where a direct fetch finds the export."""
        return self._remote

    @property
    def in_pool_dtype(self) -> bool:
        """True if payloads are bytes as our own pool stores them."""
        return self._dtype == self._identity.format.dtype

    def receive(self, event: FetcherEvent) -> list[FetcherAction]:
        """Handle an event; return the actions to perform.

        Raises the KVError that ends the conversation, and IllegalTransition for a local event out
        of place.
        """
        handler = FETCHER_TABLE.get((self.state, event_type(event)))
        try:
            if handler is None:
                raise illegal(event, self.state)
            return handler(self, event)
        except KVError:
            self.state = FetcherState.FAILED
            raise

    # ---- beginning -----------------------------------------------------------------------------
    def on_start(self, event: Start) -> list[FetcherAction]:
        if self.peer is not None:
            self._begin(self.peer.format)
            return [Send(self._wanted.message())]
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
        self.peer = hello
        self._begin(hello.format)
        proof = self._identity.hello(Side.FETCHER, self._nonce, hello.nonce)
        return [Send(proof), Send(self._wanted.message())]

    def _begin(self, exporter: PoolFormat) -> None:
        wanted = self._wanted
        if wanted.intent is not Intent.FETCH:
            self.state = FetcherState.CHECKING
            return
        self.state = FetcherState.STREAMING
        self._dtype = INT8 if wanted.codec == INT8 else exporter.dtype
        num_tokens = wanted.handle.num_tokens
        for spec in self._layers:
            heads = share(spec, exporter, self._identity.format)
            first = first_sent(spec, wanted.start_token, num_tokens, wanted.windowed)
            self._heads.append(heads)
            self._received.append(first if heads else num_tokens)

    def _check_header(self, header: Header) -> None:
        if (header.export_seq, header.epoch) != (self.export_seq, self.epoch):
            raise KVCorrupt(
                f"{header.kind.name} of export {header.export_seq} epoch {header.epoch}, "
                f"not {self.export_seq} epoch {self.epoch}"
            )

    # ---- what arrives --------------------------------------------------------------------------
    def on_blocks(self, event: Arrived) -> list[FetcherAction]:
        blocks = event.message
        assert isinstance(blocks, SharedBlockTables)
        assert self.peer is not None
        self._check_header(event.header)
        if self._wanted.codec != DIRECT or self._remote is not None or self._num_frames:
            raise KVCorrupt("BLOCKS out of place")
        if blocks.block_size != self.peer.format.block_size:
            raise KVCorrupt(f"blocks of {blocks.block_size} tokens, not as in HELLO")
        self._remote = Remote(self.peer.format, blocks.tables)
        return []

    def expect(self, header: Header, num_bytes: int) -> KVSpan:
        """Return the span that a DATA frame with `num_bytes` of payload is about.

        The header is not verified yet, so this changes no state. Raises KVCorrupt if the frame
        cannot be the next one of its layer.
        """
        if self.state is not FetcherState.STREAMING:
            raise KVCorrupt(f"DATA in state {self.state.name}")
        self._check_header(header)
        if header.layer >= len(self._layers):
            raise KVCorrupt(f"DATA of layer {header.layer} of {len(self._layers)}")
        start, end = header.token0, header.token0 + header.num_tokens
        # DATA is contiguous per layer: a lost, replayed or reordered frame is noticed at once.
        if (
            start != self._received[header.layer]
            or not start < end <= self._wanted.handle.num_tokens
        ):
            raise KVCorrupt(
                f"DATA of layer {header.layer} tokens [{start}, {end}), "
                f"expected from {self._received[header.layer]}"
            )
        heads = self._heads[header.layer]
        if (header.head0, header.num_heads) != (heads.start, len(heads)):
            raise KVCorrupt(f"DATA of heads {header.head0}+{header.num_heads}, not {heads}")
        direct = self._wanted.codec == DIRECT
        row = 0 if direct else rows_bytes(self._layers[header.layer], len(heads), self._dtype)
        if num_bytes != (end - start) * row:
            raise KVCorrupt(f"DATA of {num_bytes} bytes for {end - start} tokens")
        return KVSpan(header.layer, start, end, heads)

    def _accept(self, header: Header, num_bytes: int) -> KVSpan:
        span = self.expect(header, num_bytes)
        self._received[span.layer] = span.end
        self._num_frames += 1
        return span

    def on_data(self, event: Arrived) -> list[FetcherAction]:
        assert isinstance(event.message, Data)
        payload = event.message.payload
        span = self._accept(event.header, len(payload))
        if self._wanted.codec != DIRECT:
            return [Write(span, Payload(payload, self._dtype, span.heads))]
        if self._remote is None:
            raise KVCorrupt("DATA before BLOCKS")
        return [Pull(span, self._remote)]

    def on_state(self, event: Arrived) -> list[FetcherAction]:
        """Bytes of a layer's state come contiguously, after all tokens of that layer."""
        assert isinstance(event.message, State)
        header, payload = event.header, event.message.payload
        self._check_header(header)
        layer, start, end = header.layer, header.token0, header.token0 + len(payload)
        if header.head0 or header.num_heads or header.num_tokens:
            raise KVCorrupt("STATE with heads or tokens")
        if layer >= len(self._layers):
            raise KVCorrupt(f"STATE of layer {layer} of {len(self._layers)}")
        if self._received[layer] != self._wanted.handle.num_tokens:
            raise KVCorrupt(f"STATE of layer {layer} before all of its tokens")
        expected, size = self._state_bytes[layer], self._layers[layer].state_bytes
        if not expected == start < end <= size:
            raise KVCorrupt(
                f"STATE of layer {layer} bytes [{start}, {end}) of {size}, expected from {expected}"
            )
        self._state_bytes[layer] = end
        self._num_frames += 1
        return [WriteState(StateSpan(layer, start, end), payload)]

    def on_landed(self, event: Landed) -> list[FetcherAction]:
        self._accept(event.header, event.num_bytes)
        return []

    def on_alive(self, event: Arrived) -> list[FetcherAction]:
        self._check_header(event.header)
        return []

    # ---- ends ----------------------------------------------------------------------------------
    def on_end(self, event: Arrived) -> list[FetcherAction]:
        end = event.message
        assert isinstance(end, End)
        self._check_header(event.header)
        if not end.lease_held:
            raise KVStale("the lease did not hold throughout the transfer")
        complete = min(self._received) == self._wanted.handle.num_tokens == end.num_tokens
        complete &= self._state_bytes == [spec.state_bytes for spec in self._layers]
        if not complete or end.num_frames != self._num_frames:
            raise KVCorrupt(
                f"END after {self._num_frames} frames up to {min(self._received)}, it says "
                f"{end.num_frames} up to {end.num_tokens}"
            )
        if self._wanted.codec != DIRECT or self._wanted.adopt:
            # nothing has been read in place, so no read could outlast the lease
            return self._succeed(end)
        self._unconfirmed = end
        self.state = FetcherState.CONFIRMING
        handle = self._wanted.handle
        return [Settle(), Send(Confirm(handle.export_seq, handle.secret, self.epoch))]

    def on_held_to_the_end(self, event: Arrived) -> list[FetcherAction]:
        self._require_held(event)
        assert self._unconfirmed is not None
        return self._succeed(self._unconfirmed)

    def _succeed(self, end: End) -> list[FetcherAction]:
        self.end = end
        self.state = FetcherState.DONE
        return [] if self._wanted.hold else [Send(Ack(self.export_seq, self._wanted.part))]

    def on_confirmed(self, event: Arrived) -> list[FetcherAction]:
        self._require_held(event)
        if self._wanted.intent is Intent.RELEASE:
            self.state = FetcherState.RELEASING
            return [Send(Ack(self.export_seq, self._wanted.part, answer=True))]
        self.state = FetcherState.DONE
        return []

    def _require_held(self, event: Arrived) -> None:
        confirm = event.message
        assert isinstance(confirm, Confirm)
        self._check_header(event.header)
        if not confirm.held:
            raise KVStale("the lease is over")

    def on_released(self, event: Arrived) -> list[FetcherAction]:
        self._check_header(event.header)
        self.state = FetcherState.DONE
        return []

    def on_failure(self, event: Arrived) -> list[FetcherAction]:
        assert isinstance(event.message, Failure)
        raise event.message.error()

    def on_closed(self, event: Closed) -> list[FetcherAction]:
        raise KVLost(f"exporter closed the conversation in state {self.state.name}")


_F = FetcherState
_Handler: TypeAlias = Callable[[FetcherSession, Any], list[FetcherAction]]
_WAITING: Final = (_F.GREETING, _F.STREAMING, _F.CONFIRMING, _F.CHECKING, _F.RELEASING)
FETCHER_TABLE: Final[dict[tuple[FetcherState, type], _Handler]] = {
    (_F.NEW, Start): FetcherSession.on_start,
    (_F.GREETING, Hello): FetcherSession.on_hello,
    (_F.STREAMING, SharedBlockTables): FetcherSession.on_blocks,
    (_F.STREAMING, Data): FetcherSession.on_data,
    (_F.STREAMING, State): FetcherSession.on_state,
    (_F.STREAMING, Landed): FetcherSession.on_landed,
    (_F.STREAMING, Confirm): FetcherSession.on_alive,
    (_F.STREAMING, End): FetcherSession.on_end,
    (_F.CONFIRMING, Confirm): FetcherSession.on_held_to_the_end,
    (_F.CHECKING, Confirm): FetcherSession.on_confirmed,
    (_F.RELEASING, Confirm): FetcherSession.on_released,
    **{(state, Failure): FetcherSession.on_failure for state in _WAITING},
    **{(state, Closed): FetcherSession.on_closed for state in _WAITING},
}
