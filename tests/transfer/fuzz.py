"""Random bytes against everything that reads what a KV peer sends: frames, bodies, both machines.

    python -m tests.transfer.fuzz --inputs 1000000 --seed 1

Inputs are whole honest conversations' frames, mutated: bits and bytes changed, cut, grown, spliced,
fields set to extremes. Half of them get a right digest afterwards, for else nothing behind it would
ever be reached. Right is: a value or KVCorrupt (the machines: any KVError), nothing else, and no
byte taken from outside of the input.
"""

from __future__ import annotations

import argparse
import random
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import xxhash

from baton.errors import IllegalTransition, KVCorrupt, KVError
from kv_transfer.bodies import decode_body, encode_body, kind_of
from kv_transfer.fetch_session import FetcherSession, Wanted
from kv_transfer.frames import HEADER_BYTES, Kind, decode, decode_header, encode, seed_of, split
from kv_transfer.identity import Side
from kv_transfer.messages import DIRECT, Data
from kv_transfer.session import ExporterSession, header_of
from kv_transfer.steps import Arrived, Opened, Progress, Start
from tests.transfer.machines import (
    EPOCH,
    FIRST,
    HANDLE,
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
)

SEED = seed_of(P.boot_id)
EXTREMES = (0, 1, 0x7F, 0x80, 0xFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
FIELDS = (4, 5, 6, 8, 10, 12, 16, 20, 24, 28, 32)  # offsets of header fields


def honest_frames() -> list[bytes]:
    """One of each kind, as both sides send them."""
    messages = [
        *PEER_MESSAGES,
        P.hello(Side.EXPORTER, NP, ND),
        D.hello(Side.FETCHER, ND, NP),
    ]
    frames = [
        encode(header_of(kind_of(m), SEQ, EPOCH), [encode_body(m)], SEED)
        for m in messages
        if not isinstance(m, Data)
    ]
    for event in (data(0, 0, 4), data(1, 0, TOKENS), notice(0, 0, TOKENS)):
        assert isinstance(event.message, Data)
        frames.append(encode(event.header, [event.message.payload], SEED))
    return frames


def mutated(rng: random.Random, frames: list[bytes]) -> bytes:
    """One frame or parcel, changed in one to four places."""
    frame = bytearray(rng.choice(frames))
    for _ in range(rng.randint(1, 4)):
        match rng.randrange(7):
            case 0 if frame:
                frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
            case 1 if frame:
                frame[rng.randrange(len(frame))] = rng.randrange(256)
            case 2:
                del frame[rng.randrange(len(frame) + 1) :]
            case 3:
                frame += rng.randbytes(rng.randrange(40))
            case 4:
                other = rng.choice(frames)
                cut = rng.randrange(min(len(frame), len(other)) + 1)
                frame = bytearray(frame[:cut] + other[cut:])
            case 5 if len(frame) >= HEADER_BYTES:
                struct.pack_into("<I", frame, rng.choice(FIELDS), rng.choice(EXTREMES))
            case _:
                frame += rng.choice(frames)
    return bytes(frame)


def with_right_digest(frame: bytes) -> bytes:
    """The frame with its length and digest made good: what lies behind them is to be reached."""
    if len(frame) < HEADER_BYTES:
        return frame
    whole = bytearray(frame)
    struct.pack_into("<I", whole, 20, len(frame) - HEADER_BYTES)
    seed = 0 if whole[4] in (Kind.HELLO, Kind.ERR) else SEED
    digest = xxhash.xxh3_64_intdigest(bytes(whole[:40] + whole[HEADER_BYTES:]), seed=seed)
    struct.pack_into("<Q", whole, 40, digest)
    return bytes(whole)


def exporters() -> Iterator[Callable[[], ExporterSession]]:
    """Sessions of the exporter in each state in which it listens."""

    def brought(count: int, direct: bool) -> ExporterSession:
        session = ExporterSession(P, NP, LAYERS, direct=direct)
        fetch = Wanted(HANDLE, EPOCH, codec=DIRECT if direct else "raw").message()
        steps = [
            control(D.hello(Side.FETCHER, ND, None)),
            control(D.hello(Side.FETCHER, ND, NP)),
            control(fetch),
            Opened(TOKENS, ((0, 1, 2),)),
            Progress((TOKENS, TOKENS), FIRST),
        ]
        for step in steps[:count]:
            session.receive(step)
        return session

    for count in (0, 1, 2):
        for direct in (False, True):
            yield lambda count=count, direct=direct: brought(count, direct)


def fetchers() -> Iterator[Callable[[], FetcherSession]]:
    def brought(codec: str, greeted: bool) -> FetcherSession:
        session = FetcherSession(D, ND, LAYERS, Wanted(HANDLE, EPOCH, codec=codec))
        session.receive(Start())
        if greeted:
            session.receive(control(P.hello(Side.EXPORTER, NP, ND)))
        return session

    for codec in ("raw", "int8", DIRECT):
        for greeted in (False, True):
            yield lambda codec=codec, greeted=greeted: brought(codec, greeted)


class Fuzz:
    """`results` counts what became of the inputs."""

    def __init__(self, seed: int) -> None:
        self.results: Counter[str] = Counter()
        self._rng = random.Random(seed)
        self._frames = honest_frames()
        self._machines = [*exporters(), *fetchers()]

    def one(self) -> None:
        """Raises whatever is not right."""
        parcel = mutated(self._rng, self._frames)
        if self._rng.random() < 0.5:
            parcel = with_right_digest(parcel)
        covered = 0
        for frame in split(parcel):
            covered += len(frame)
            self._read(frame)
        assert covered == len(parcel)

    def _read(self, frame: memoryview) -> None:
        try:
            announced = decode_header(frame[:HEADER_BYTES], SEED)
            whole = decode(frame, SEED)
        except KVCorrupt:
            self.results["no frame"] += 1
            return
        assert whole.header == announced.header
        assert len(whole.payload) == announced.num_bytes == len(frame) - HEADER_BYTES
        try:
            message = decode_body(whole.header.kind, whole.payload)
        except KVCorrupt:
            self.results["no body"] += 1
            return
        session = self._rng.choice(self._machines)()
        before = replace(whole.header)
        try:
            session.receive(Arrived(whole.header, message))
        except KVError:
            self.results["refused"] += 1
            return
        except IllegalTransition as error:
            raise AssertionError("a peer's frame was taken for our own fault") from error
        assert before == whole.header
        self.results["accepted"] += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    fuzz, started = Fuzz(options.seed), time.monotonic()
    for _ in range(options.inputs):
        fuzz.one()
    seconds = time.monotonic() - started
    sys.stdout.write(f"{options.inputs} inputs in {seconds:.0f} s: {dict(fuzz.results)}\n")


if __name__ == "__main__":
    main()
