"""Messages between the leader and each other rank, over a socket pair.

    leader -> rank   SETUP (JSON) ... POOL (JSON) ... then for each step FORWARD, LOGITS, DRAFT
    rank -> leader   LOADED or FAILED (JSON), READY

A message is a 5-byte header {kind u8, length u32, little-endian} and a body; a step's body is int64
numbers. Behind those of a step with images it says where their rows go; the rows themselves are
broadcast (image_rows.py). A rank waits for messages without a deadline, because an engine may be
idle; if the leader dies, its socket closes. Collectives of a running step have deadlines of their
own (group.py).
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
from baton.engine.state.batch import Batch, GroupTables, Span, States, Step
from baton.engine.state.images import StepImages
from baton.protocol.errors import InternalError

_HEADER: Final = struct.Struct("<BI")
_FIXED: Final = 3  # counts at the head of a step: tokens, spans, layer groups
_PER_SPAN: Final = 7
_IMAGE_COUNTS: Final = 5  # of images: parts of a position, rows, H, deep layers, mutual ranges
ALL_ROWS: Final = b""  # body of LOGITS for all rows of the last forward, which each rank has


class MessageKind(enum.IntEnum):
    """The kind of a message. MEET, DRAIN, STOP and DRAINED are used by data-parallel nodes only."""

    SETUP = 1  # engine configuration, rank, size
    POOL = (
        2  # number and size of blocks, number of states: make the arena, connect to the other ranks
    )
    FORWARD = 3  # run the forward of this step
    LOGITS = 4  # compute logits: of so many rows (u64), which the leader broadcasts, or ALL_ROWS
    DRAFT = 8  # run the draft head over this step, whose states the leader broadcasts
    MEET = 5  # all ranks have loaded: connect to the other ranks
    DRAIN = 6  # take no new requests, finish those that are running
    STOP = 7  # end, all ranks together
    LOADED = 10  # the rank's weights are in memory
    FAILED = 11  # why the rank cannot start
    READY = 12  # the rank has its arena and is connected; from a node: its READY line
    DRAINED = 13  # the node has no more requests


class Gone(Exception):
    """The other end has closed the socket, or died."""


class Link:
    """One end of the socket pair between the leader and a rank. One thread sends, one receives."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def limit(self, seconds: float) -> None:
        """Set a timeout: a later call raises Gone if the other end does not read, or does not
        answer, for so many seconds."""
        self._socket.settimeout(seconds)

    def send(self, kind: MessageKind, body: bytes = b"") -> None:
        """Send a message. Raises Gone."""
        try:
            self._socket.sendall(_HEADER.pack(kind, len(body)) + body)
        except OSError as error:
            raise Gone from error

    def send_json(self, kind: MessageKind, values: dict[str, Any]) -> None:
        """Send `values` as JSON. Raises Gone."""
        self.send(kind, json.dumps(values).encode())

    def receive(self) -> tuple[MessageKind, bytes]:
        """Return the next message. Waits for it without a deadline, unless `limit` has set one.
        Raises Gone."""
        kind, length = _HEADER.unpack(self._exactly(_HEADER.size))
        return MessageKind(kind), self._exactly(length)

    def expect(self, *kinds: MessageKind) -> tuple[MessageKind, dict[str, Any]]:
        """Return the kind of the next message, and its JSON ({} for an empty body).

        Raises Gone, and InternalError if the message is none of `kinds`.
        """
        kind, body = self.receive()
        if kind not in kinds:
            raise InternalError(f"{kind.name} between ranks, not {kinds[0].name}")
        return kind, json.loads(body) if body else {}

    def close(self) -> None:
        """Close this end; `receive` then raises Gone on both ends. Idempotent."""
        with suppress(OSError):  # the other end has closed already
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
    """Return a forward's inputs and layout as the body of FORWARD. `adapters`: the names of all
    adapters, in the same order on all ranks; a span refers to its adapter by the position there."""
    names = ("", *adapters)
    read = batch.read or [span.num_rows for span in batch.spans]
    spans = [
        n
        for span, num_read in zip(batch.spans, read, strict=True)
        for n in (
            span.first_row,
            span.num_rows,
            span.start,
            names.index(span.adapter),
            span.state_slot,
            span.num_prompt,
            num_read,
        )
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
    if batch.images is not None:
        parts += _image_parts(batch.images, batch.spans)
    return np.concatenate([np.asarray(part, dtype=np.int64) for part in parts]).tobytes()


def decode_step(
    body: bytes,
    attention: Attention,
    device: torch.device,
    adapters: Sequence[str] = (),
    states: States | None = None,
) -> Step:
    """Return the step that `encode_step` was given, for this rank's attention, device and recurrent
    states. `embeds` and `deep` of its images have the right shapes, and are still to be filled."""
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
    images, mutual = None, [()] * num_spans
    if numbers.are_left:
        images, mutual = _decode_images(numbers, num_tokens, num_spans, device)
    names = ("", *adapters)
    spans = tuple(
        Span(first, count, start, names[name], slot, seen, num_prompt)
        for (first, count, start, name, slot, num_prompt, _), seen in zip(rows, mutual, strict=True)
    )
    read = tuple(int(row[-1]) for row in rows)
    whole = all(count == span.num_rows for count, span in zip(read, spans, strict=True))
    batch = Batch(
        spans, tuple(tables), attention, states=states, images=images,
        read=None if whole else read,
    )  # fmt: skip
    return Step(token_ids, positions, batch)


def _image_parts(images: StepImages, spans: Sequence[Span]) -> list[Any]:
    """Return the numbers of a step's images, and the mutual ranges of its spans."""
    placed, embeds, deep = images.positions, images.embeds, images.deep
    mutual = [(index, *each) for index, span in enumerate(spans) for each in span.mutual]
    return [
        [
            0 if placed is None else len(placed),
            len(images.rows),
            0 if embeds is None else embeds.shape[1],
            0 if deep is None else len(deep),
            len(mutual),
        ],
        [] if placed is None else placed.cpu().numpy().ravel(),
        images.rows.cpu().numpy(),
        np.ravel(mutual),
    ]


def _decode_images(
    numbers: _Numbers, num_tokens: int, num_spans: int, device: torch.device
) -> tuple[StepImages, list[tuple[tuple[int, int], ...]]]:
    """Return a step's images, and the mutual ranges of each span."""
    parts, num_rows, width, num_deep, num_mutual = numbers.take(_IMAGE_COUNTS).tolist()
    positions = numbers.take(parts * num_tokens).view(parts, num_tokens).to(device)
    rows = numbers.take(num_rows).to(device)
    mutual: list[tuple[tuple[int, int], ...]] = [()] * num_spans
    ranges: Sequence[tuple[int, int, int]] = numbers.take(3 * num_mutual).view(-1, 3).tolist()
    for span, low, high in ranges:
        mutual[span] += ((low, high),)
    embeds = deep = None
    if num_rows:
        embeds = torch.empty(num_rows, width, device=device)
        deep = torch.empty(num_deep, num_rows, width, device=device)
    return StepImages(positions if parts else None, rows, embeds, deep), mutual


class _Numbers:
    """Reads a tensor of numbers from front to back."""

    def __init__(self, numbers: Tensor) -> None:
        self._left = numbers

    @property
    def are_left(self) -> bool:
        return len(self._left) > 0

    def take(self, count: int) -> Tensor:
        taken, self._left = self._left[:count], self._left[count:]
        return taken
