"""Fuzzes all that reads what a KV peer sends. `python -m tests.fuzz.frames --inputs 1000000`

Four readers, each fed whole conversations or single frames that were damaged (digest wrong) or
resealed (digest right, meaning wrong): the frame decoder with the message bodies, the fetching
machine, the exporting half with its export table, and the socket reader of the `stream` lane.

An input passes if nothing but KVError comes out, no more is read or written than was offered, a
fetch that calls itself complete has every token once, and no export is left pinned. A failure
prints its number; `--seed S --first N --inputs 1` runs it again alone.
"""

from __future__ import annotations

import argparse
import logging
import random
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

from baton.errors import KVError
from baton.handles import Endpoint, KVHandle
from baton.kv_spec import LayerSpec, PoolFormat
from baton.timing import Timing
from kv_transfer.base import Span
from kv_transfer.bodies import decode_body, encode_body, kind_of
from kv_transfer.exporter import Exporter
from kv_transfer.exports import ExportTable
from kv_transfer.fetch_session import FetcherSession, Intent, Wanted
from kv_transfer.framed_socket import FramedSocket
from kv_transfer.frames import (
    HEADER_BYTES,
    MAX_PAYLOAD,
    Kind,
    decode,
    decode_header,
    encode,
    seed_of,
    split,
)
from kv_transfer.identity import Identity, Side
from kv_transfer.layout import ArenaMemory
from kv_transfer.leases import Leases
from kv_transfer.messages import (
    Ack,
    BlockTables,
    Confirm,
    End,
    Fetch,
    Hello,
    Message,
    Renew,
)
from kv_transfer.session import data_header, header_of
from kv_transfer.shares import rows_bytes
from kv_transfer.stats import TransferStats
from kv_transfer.steps import Arrived, Closed, Landed, Pull, Start, Write
from tests.block_lists import held
from tests.fakes import FakeClock, KVArena
from tests.fuzz.mutations import EDGES, damaged, reordered, resealed

LAYERS = (LayerSpec(2, 4, 4), LayerSpec(4, 8, 8, window=8), LayerSpec(1, 8, 0, kind="mla"))
BF16 = PoolFormat(8, "bfloat16", codecs=("raw", "int8"))
P = Identity("0a" * 16, "layout", BF16, b"secret")
D = Identity("0d" * 16, "layout", replace(BF16, block_size=32), b"secret")
NP, ND = b"P" * 16, b"D" * 16
SEED = seed_of(P.boot_id)
SEQ, EPOCH, TOKENS, START = 1, 2, 20, 3
HANDLE = KVHandle(
    P.boot_id, SEQ, "r", 1, TOKENS, b"k" * 16, Endpoint(P.boot_id, "layout", BF16, ()), 10_000
)
FAR = Timing(kv_progress_s=0.001)  # nothing here is worth waiting for
Case = Callable[[random.Random], None]


class FuzzError(AssertionError):
    """A reader did what it never may."""


def require(condition: bool, what: str) -> None:
    if not condition:
        raise FuzzError(what)


def control(message: Message, seq: int = SEQ, epoch: int = EPOCH) -> bytes:
    return encode(header_of(kind_of(message), seq, epoch), [encode_body(message)], SEED)


# ---- what a well-behaved peer says --------------------------------------------------------------
def served(wanted: Wanted) -> list[bytes]:
    """The exporter's side of the conversation about `wanted`."""
    frames = [control(P.hello(Side.EXPORTER, NP, ND))]
    held = control(Confirm(SEQ, b"", EPOCH, held=True))
    if wanted.intent is not Intent.FETCH:
        released = control(Confirm(SEQ, b"", EPOCH, held=False))
        return [*frames, held, *([released] if wanted.intent is Intent.RELEASE else [])]
    direct = wanted.codec == "direct"
    if direct:
        frames.append(control(BlockTables(8, ((0, 1, 2),))))
    dtype = "int8" if wanted.codec == "int8" else "bfloat16"
    spans = [
        Span(layer, start, end, range(spec.kv_heads))
        for start, end in ((wanted.start_token, 11), (11, TOKENS))
        for layer, spec in enumerate(LAYERS)
    ]
    for span in spans:
        row = rows_bytes(LAYERS[span.layer], len(span.heads), dtype)
        payload = b"" if direct else bytes(row * (span.end - span.start))
        frames.append(encode(data_header(span, SEQ, EPOCH), [payload], SEED))
    frames += [held, control(End(TOKENS, True, (), len(spans)))]
    return [*frames, held] if direct else frames


WANTED = [
    Wanted(HANDLE, EPOCH, start_token=START),
    Wanted(HANDLE, EPOCH, codec="int8"),
    Wanted(HANDLE, EPOCH, codec="direct", start_token=START),
    Wanted(HANDLE, EPOCH, Intent.RENEW),
    Wanted(HANDLE, EPOCH, Intent.RELEASE),
]
CONVERSATIONS = [(wanted, served(wanted)) for wanted in WANTED]
QUESTIONS: list[list[Message]] = [
    [Fetch(SEQ, HANDLE.secret, "r", EPOCH, START, timeout_ms=5000), Ack(SEQ)],
    [Fetch(SEQ, HANDLE.secret, "r", EPOCH, codec="int8"), Ack(SEQ, part=True)],
    [Renew(SEQ, HANDLE.secret, EPOCH), Renew(SEQ, HANDLE.secret, EPOCH)],
    [Confirm(SEQ, HANDLE.secret, EPOCH), Ack(SEQ, answer=True)],
    [Fetch(SEQ, HANDLE.secret, "r", EPOCH, TOKENS), Renew(SEQ, HANDLE.secret, EPOCH), Ack(SEQ)],
]
FRAMES = [frame for _, frames in CONVERSATIONS for frame in frames] + [
    control(message) for messages in QUESTIONS for message in messages
]


def changed(rng: random.Random, frame: bytes) -> bytes:
    if rng.random() < 0.6:
        with expected():  # unless it has been damaged before
            return resealed(rng, frame, SEED)
    return damaged(rng, frame, FRAMES)


# ---- the readers --------------------------------------------------------------------------------
def decoding(rng: random.Random) -> None:
    """frames.split, decode, decode_header and bodies.decode_body."""
    data = changed(rng, rng.choice(FRAMES))
    pieces = list(split(data))
    require(b"".join(pieces) == data, "split loses or invents bytes")
    for piece in pieces:
        with expected():
            frame = decode(piece, SEED)
            require(len(frame.payload) == len(piece) - HEADER_BYTES, "payload of another length")
            decode_body(frame.header.kind, frame.payload)
        with expected():
            announced = decode_header(piece[:HEADER_BYTES], SEED)
            require(0 <= announced.num_bytes <= MAX_PAYLOAD, "length beyond all bounds")
    with expected():
        decode_body(rng.choice(list(Kind)), memoryview(rng.randbytes(rng.randrange(40))))


def fetching(rng: random.Random) -> None:
    """FetcherSession, on both ways that DATA takes (in a frame, or straight to its place)."""
    wanted, frames = rng.choice(CONVERSATIONS)
    frames = reordered(rng, frames)
    for _ in range(rng.choice((0, 1, 1, 2))):
        if frames:
            at = rng.randrange(len(frames))
            frames[at] = changed(rng, frames[at])
    session = FetcherSession(D, ND, LAYERS, wanted)
    written: list[Span] = []
    with expected():
        session.receive(Start())
        for frame in frames:
            if session.done:
                break
            event = _landed(session, frame) if rng.random() < 0.3 else None
            if event is None:
                decoded = decode(frame, SEED)
                event = Arrived(decoded.header, decode_body(decoded.header.kind, decoded.payload))
            else:
                written.append(session.expect(event.header, event.num_bytes))
            for action in session.receive(event):
                if isinstance(action, Write | Pull):
                    written.append(action.span)
                if isinstance(action, Write):
                    row = rows_bytes(LAYERS[action.span.layer], len(action.span.heads), "bfloat16")
                    if action.payload.dtype == "bfloat16":
                        size = row * (action.span.end - action.span.start)
                        require(len(action.payload.data) == size, "payload of another length")
        if not session.done:
            session.receive(Closed())
    _check_written(session, wanted, written)


def _landed(session: FetcherSession, frame: bytes) -> Landed | None:
    """As fetcher.py: the payload goes to its place before anything is verified."""
    announced = decode_header(memoryview(frame)[:HEADER_BYTES], SEED)
    if announced.header.kind is not Kind.DATA or not announced.num_bytes:
        return None
    if not session.in_pool_dtype:
        return None
    session.expect(announced.header, announced.num_bytes)
    announced.verify((frame[HEADER_BYTES:],))
    return Landed(announced.header, announced.num_bytes)


def _check_written(session: FetcherSession, wanted: Wanted, written: Sequence[Span]) -> None:
    upto = [wanted.start_token] * len(LAYERS)
    for span in written:
        require(span.start == upto[span.layer], "tokens twice, or never")
        require(span.end <= TOKENS, "tokens beyond the export")
        require(span.heads == range(LAYERS[span.layer].kv_heads), "heads that are not there")
        upto[span.layer] = span.end
    if session.done and wanted.intent is Intent.FETCH:
        require(min(upto) == TOKENS, "an END before everything is there")
        require(session.end is not None, "complete without an END")


class Peer:
    """A fetcher (base.Incoming) of a live exporter; it proves itself, unless `rng` says no."""

    buffer: memoryview | None = None

    def __init__(self, rng: random.Random, identity: Identity, then: list[Message]) -> None:
        self._rng = rng
        self._identity = identity
        self._then = then
        self._said = 0
        self.nonce: bytes | None = None

    def receive(self, timeout_s: float) -> bytes | None:
        rng, said = self._rng, self._said
        self._said += 1
        if said < 2:
            frame = control(self._identity.hello(Side.FETCHER, ND, self.nonce if said else None))
            return changed(rng, frame) if rng.random() < 0.05 else frame
        if not self._then:
            return None
        frame = control(self._then.pop(0))
        frame = changed(rng, frame) if rng.random() < 0.6 else frame
        return frame if rng.random() < 0.9 else frame + control(rng.choice(rng.choice(QUESTIONS)))

    def on_closed(self, callback: Callable[[], None]) -> None:
        pass


MEMORY = ArenaMemory(KVArena(LAYERS, 4, 8, "bfloat16"))


def exporting(rng: random.Random) -> None:
    """Exporter.serve with a real export table: whatever is asked, nothing stays pinned."""
    freed: list[str] = []
    table = ExportTable(
        (1,) * len(LAYERS), Leases(10.0), FakeClock(), lambda handle, blocks, why: freed.append(why)
    )
    table.add(replace(HANDLE, export_seq=table.next_sequence()), held((2, 0, 1)), 1)
    for layer in range(len(LAYERS)):
        table.publish(SEQ, layer, TOKENS)
    table.complete(SEQ, ())
    identity = D
    if rng.random() < 0.2:
        tp_size = rng.choice((1, 2, 3, 8, 64))
        pool = PoolFormat(rng.choice(EDGES[1:]), "int8", tp_size, rng.randrange(tp_size))
        identity = replace(D, format=pool)
    peer = Peer(rng, identity, list(rng.choice(QUESTIONS)))
    direct = frozenset(("direct",)) if rng.random() < 0.2 else frozenset[str]()
    exporter = Exporter(P, MEMORY, table, FAR, FakeClock(), TransferStats(), direct)
    with expected():
        for parcel in exporter.serve("direct", peer):
            for piece in split(parcel):
                frame = decode(piece, SEED)
                message = decode_body(frame.header.kind, frame.payload)
                if isinstance(message, Hello):
                    peer.nonce = message.nonce
    gone = table.release(SEQ, KVError("over"))
    require(gone is None or gone.done(), "a reader is left behind")
    require(len(freed) == 1, f"freed {len(freed)} times")


def reading(rng: random.Random) -> None:
    """FramedSocket on a socket whose peer says anything and leaves."""
    parts = [rng.choice(FRAMES) for _ in range(rng.randrange(1, 4))]
    at = rng.randrange(len(parts))
    parts[at] = changed(rng, parts[at])
    data = b"".join(parts)[: 60 << 10]
    ours, theirs = socket.socketpair()
    framed = FramedSocket(ours, rng.choice((MAX_PAYLOAD, 64)))
    try:
        theirs.sendall(data)
        theirs.close()
        taken = 0
        with expected():
            if rng.random() < 0.5:
                while (frame := framed.receive(5.0)) is not None:
                    taken += len(frame)
            else:
                while (head := framed.receive_header(5.0)) is not None:
                    place = memoryview(bytearray(decode_header(head, SEED).num_bytes))
                    cut = rng.randrange(len(place) + 1)
                    framed.receive_into([place[:cut], place[cut:]], 5.0)
                    taken += len(head) + len(place)
            require(taken == len(data), "an end in mid-frame passed for an end")
        require(taken <= len(data), "more was read than was said")
    finally:
        theirs.close()
        framed.close()


CASES: tuple[tuple[Case, int], ...] = (
    (decoding, 50),
    (fetching, 25),
    (exporting, 12),
    (reading, 13),
)


@contextmanager
def expected() -> Iterator[None]:
    """KVError is the one thing that may come out."""
    with suppress(KVError):
        yield


@contextmanager
def silence() -> Iterator[None]:
    """Corrupt frames are worth a warning each, but not a million."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def run(inputs: int, seed: int, first: int = 0) -> dict[str, int]:
    """Runs inputs [first, first + inputs) of `seed`; how many each reader got. Raises FuzzError,
    naming the input, from whatever it raised."""
    cases, weights = zip(*CASES, strict=True)
    counts = {case.__name__: 0 for case in cases}
    with silence():
        for number in range(first, first + inputs):
            rng = random.Random(f"{seed} {number}")
            (case,) = rng.choices(cases, weights)
            try:
                case(rng)
            except BaseException as error:
                text = f"input {number} of seed {seed} ({case.__name__}): {error!r}"
                raise FuzzError(text) from error
            counts[case.__name__] += 1
    return counts


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Fuzz what reads a KV peer's frames.")
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args(argv)
    started = time.monotonic()
    counts = run(options.inputs, options.seed, options.first)
    seconds = time.monotonic() - started
    sys.stdout.write(f"{sum(counts.values())} inputs in {seconds:.0f} s: {counts}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
