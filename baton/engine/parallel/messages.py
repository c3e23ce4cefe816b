"""What the leader sends the other ranks, over a socket pair with each: one message per forward.

    leader -> rank   SETUP (JSON) ... POOL (JSON) ... then for each step FORWARD, LOGITS
    rank -> leader   LOADED or FAILED (JSON), READY

A message is a 5-byte header {kind u8, length u32, little-endian} and a body; a step's body is int64
numbers. A rank that waits has no deadline: an idle engine is no fault, and a leader that dies
closes the socket. What is under way in the meantime has collectives' deadlines (group.py).
"""

from __future__ import annotations

import enum
import json
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from baton.engine.state.attention import Attention
from baton.engine.state.batch import Batch, GroupTables, Span, Step
from baton.protocol.errors import InternalError

_HEADER: Final = struct.Struct("<BI")
_FIXED: Final = 3  # numbers at the head of a step: tokens, spans, layer groups
_PER_SPAN: Final = 4
ALL_ROWS: Final = b""  # LOGITS of every row of the last forward, which each rank has


class MessageKind(enum.IntEnum):
    """Of messages."""

    SETUP = 1  # engine configuration, rank, size
    POOL = 2  # blocks and their size: make the arena, meet the others
    FORWARD = 3  # a step
    LOGITS = 4  # of rows that the leader broadcasts (how many: u64), or ALL_ROWS
    MEET = 5  # all have loaded; this and the next two: between data-parallel nodes alone
    DRAIN = 6
    STOP = 7
    LOADED = 10  # weights are in memory
    FAILED = 11  # why not
    READY = 12  # arena and group are there; of a node, its READY line
    DRAINED = 13


class Gone(Exception):
    """The other end has closed the socket, or died."""


class Link:
    """One end of the socket pair between the leader and a rank. Each direction has one user."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def limit(self, seconds: float) -> None:
        """From now on the other end is Gone if it does not read, or answer, for so long."""
        self._socket.settimeout(seconds)

    def send(self, kind: MessageKind, body: bytes = b"") -> None:
        """Raises Gone."""
        try:
            self._socket.sendall(_HEADER.pack(kind, len(body)) + body)
        except OSError as error:
            raise Gone from error

    def send_json(self, kind: MessageKind, values: dict[str, Any]) -> None:
        """Send `values` as JSON. Raises Gone."""
        self.send(kind, json.dumps(values).encode())

    def receive(self) -> tuple[MessageKind, bytes]:
        """The next message, however long it takes. Raises Gone."""
        kind, length = _HEADER.unpack(self._exactly(_HEADER.size))
        return MessageKind(kind), self._exactly(length)

    def expect(self, *kinds: MessageKind) -> tuple[MessageKind, dict[str, Any]]:
        """The next message, which must be one of `kinds`, and its JSON ({} for an empty body).

        Raises Gone, InternalError.
        """
        kind, body = self.receive()
        if kind not in kinds:
            raise InternalError(f"{kind.name} between ranks, not {kinds[0].name}")
        return kind, json.loads(body) if body else {}

    def close(self) -> None:
        """Idempotent; `receive` raises Gone on either end."""
        with suppress(OSError):  # the other end went first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _exactly(self, count: int) -> bytes:
        parts = bytearray(count)
        view = memoryview(parts)
        while view:
            try:
                taken = self._socket.recv_into(view)
            except OSError as error:
                raise Gone from error
            if not taken:
                raise Gone
            view = view[taken:]
        return bytes(parts)


def encode_step(
    token_ids: Tensor, positions: Tensor, batch: Batch, adapters: Sequence[str] = ()
) -> bytes:
    """A forward's inputs and layout. `adapters`: the names of all, in an order that all ranks
    share; a span names its own by its place there."""
    names = ("", *adapters)
    spans = [
        n
        for span in batch.spans
        for n in (span.first_row, span.num_rows, span.start, names.index(span.adapter))
    ]
    parts: list[Any] = [
        [len(token_ids), len(batch.spans), len(batch.tables)],
        token_ids.cpu().numpy(),
        positions.cpu().numpy(),
        spans,
    ]
    for table in batch.tables:
        parts += [
            [table.blocks.shape[1]],
            table.first,
            table.slots.cpu().numpy(),
            table.blocks.cpu().numpy().ravel(),
        ]
    return np.concatenate([np.asarray(part, dtype=np.int64) for part in parts]).tobytes()


def decode_step(
    body: bytes, attention: Attention, device: torch.device, adapters: Sequence[str] = ()
) -> Step:
    """What `encode_step` was given, for this rank's attention and device."""
    numbers = _Numbers(torch.frombuffer(bytearray(body), dtype=torch.int64))
    num_tokens, num_spans, num_groups = numbers.take(_FIXED).tolist()
    token_ids = numbers.take(num_tokens).to(device)
    positions = numbers.take(num_tokens).to(device)
    rows: Sequence[Sequence[int]] = numbers.take(_PER_SPAN * num_spans).view(-1, _PER_SPAN).tolist()
    tables: list[GroupTables] = []
    for _ in range(num_groups):
        width = int(numbers.take(1))
        first = tuple(numbers.take(num_spans).tolist())
        slots = numbers.take(num_tokens).to(device)
        blocks = numbers.take(num_spans * width).view(num_spans, width).to(device)
        tables.append(GroupTables(slots, blocks, first))
    names = ("", *adapters)
    spans = tuple(Span(first, count, start, names[name]) for first, count, start, name in rows)
    return Step(token_ids, positions, Batch(spans, tuple(tables), attention))


class _Numbers:
    """Takes numbers off the front."""

    def __init__(self, numbers: Tensor) -> None:
        self._left = numbers

    def take(self, count: int) -> Tensor:
        taken, self._left = self._left[:count], self._left[count:]
        return taken
