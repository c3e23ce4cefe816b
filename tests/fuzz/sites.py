"""What is fuzzed against: per kind of model two pools in shared memory, and what a well-behaved
exporter of the one says to a fetcher that fills the other. Made for a run, gone with it."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch

from baton.engine.memory.kv_cache import KVArena
from baton.protocol.errors import KVError
from baton.protocol.handles import Endpoint, KVHandle
from baton.protocol.kv_spec import BlockLists, HeldBlocks, LayerSpec, PoolFormat, first_visible
from baton.runtime.rotation.deployment_secret import fixed
from kv_transfer.lanes.records import HangupWatch
from kv_transfer.lanes.shm_arena import ShmArena
from kv_transfer.pool.codec import converted
from kv_transfer.pool.layout import ArenaMemory
from kv_transfer.pool.memory_map import MemoryMap, map_of
from kv_transfer.protocol.base import KVSpan, Payload
from kv_transfer.protocol.bodies import encode_body, kind_of
from kv_transfer.protocol.fetch_session import Intent, WantedExport
from kv_transfer.protocol.frames import encode, seed_of
from kv_transfer.protocol.identity import Identity, Side
from kv_transfer.protocol.messages import (
    DIRECT,
    INT8,
    Ack,
    Confirm,
    End,
    Fetch,
    Message,
    Renew,
    SharedBlockTables,
)
from kv_transfer.protocol.session import data_header, header_of
from kv_transfer.protocol.shares import first_sent
from tests.fuzz.mutations import damaged, resealed
from tests.transfer.pools import fill_random, fill_untouched

BF16 = PoolFormat(8, "bfloat16", codecs=("raw", "int8"))
P = Identity("0a" * 16, "layout", BF16, fixed("secret"))
D = Identity("0d" * 16, "layout", BF16, fixed("secret"))
NP, ND = b"P" * 16, b"D" * 16
SEED = seed_of(P.boot_id)
SEQ, EPOCH, TOKENS, START, LEASE_MS = 1, 2, 20, 3, 10_000
HANDLE = KVHandle(
    P.boot_id, SEQ, "r", 1, TOKENS, b"k" * 16, Endpoint(P.boot_id, "layout", BF16, ()), LEASE_MS
)
# Layers that share their blocks, and layers in three groups, one of which a window has left behind;
# that site's ends have other block sizes.
MIXED = (LayerSpec(2, 4, 4), LayerSpec(4, 8, 8, window=8), LayerSpec(1, 8, 0, kind="mla"))
GROUPED = (LayerSpec(2, 4, 4), LayerSpec(2, 4, 4, window=8), LayerSpec(2, 4, 4))
NUM_BLOCKS: Final = 16
RESERVED_BYTES: Final = 1 << 22


class FuzzError(AssertionError):
    """A reader did what it never may."""


def require(condition: bool, what: str) -> None:
    if not condition:
        raise FuzzError(what)


@contextmanager
def expected() -> Iterator[None]:
    """KVError is the one thing that may come out."""
    with suppress(KVError):
        yield


def control(message: Message, seq: int = SEQ, epoch: int = EPOCH) -> bytes:
    return encode(header_of(kind_of(message), seq, epoch), [encode_body(message)], SEED)


@dataclass(frozen=True, slots=True)
class Pool:
    """Of one end, in a file that the other end may map; `blocks` hold the sequence."""

    shared: ShmArena
    arena: KVArena
    memory: ArenaMemory
    map: MemoryMap
    blocks: BlockLists


@dataclass(frozen=True, slots=True)
class Site:
    """A pair of pools of one model, P's filled."""

    fetcher: Identity
    layers: tuple[LayerSpec, ...]
    p: Pool
    d: Pool

    @property
    def others(self) -> list[int]:
        """Blocks of D's pool that belong to somebody else."""
        ours = {block for held in self.d.blocks for block in held.ids}
        return [block for block in range(NUM_BLOCKS) if block not in ours]

    def first(self, layer: int, wanted: WantedExport) -> int:
        """The first token of `layer` that travels."""
        return first_sent(self.layers[layer], wanted.start_token, TOKENS, wanted.windowed)

    def rows(self, span: KVSpan, codec: str) -> bytes:
        """What P says of `span`."""
        read = self.p.memory.read(span.layer, self.p.blocks, span.start, span.end, span.heads)
        whole = Payload(memoryview(b"".join(read)), BF16.dtype, span.heads)
        wanted = converted(self.layers[span.layer], whole, INT8) if codec == INT8 else [whole.data]
        return b"" if codec == DIRECT else b"".join(wanted)


@dataclass(frozen=True, slots=True)
class Talk:
    """A conversation: what is asked, and what P says after its HELLO."""

    site: Site
    wanted: WantedExport
    frames: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Sites:
    talks: tuple[Talk, ...]
    frames: tuple[bytes, ...]  # every valid frame there is: what others are made of
    watch: HangupWatch  # of the `dist` lane: a thread, one for all

    def changed(self, rng: random.Random, frame: bytes) -> bytes:
        if rng.random() < 0.6:
            with expected():  # unless it has been damaged before
                return resealed(rng, frame, SEED)
        return damaged(rng, frame, self.frames)


WANTED = (
    WantedExport(HANDLE, EPOCH, start_token=START),
    WantedExport(HANDLE, EPOCH, codec=INT8),
    WantedExport(HANDLE, EPOCH, codec=DIRECT, start_token=START),
    WantedExport(HANDLE, EPOCH, codec=DIRECT, start_token=TOKENS, hold=True, adopt=True),
    WantedExport(HANDLE, EPOCH, Intent.RENEW),
    WantedExport(HANDLE, EPOCH, Intent.RELEASE),
)
_FETCH = Fetch(SEQ, HANDLE.secret, "r", EPOCH, timeout_ms=5000)
_RENEW, _ASK = Renew(SEQ, HANDLE.secret, EPOCH), Confirm(SEQ, HANDLE.secret, EPOCH)
_ADOPT = replace(_FETCH, codec=DIRECT, start_token=TOKENS, adopt=True)
QUESTIONS: tuple[tuple[Message, ...], ...] = (
    (replace(_FETCH, start_token=START), Ack(SEQ)),
    (replace(_FETCH, codec=INT8), Ack(SEQ, part=True)),
    (replace(_FETCH, codec=DIRECT), _ASK, Ack(SEQ, answer=True)),
    (_ADOPT, _RENEW, _ASK, Ack(SEQ, answer=True)),
    (_ADOPT, replace(_ADOPT, codec=INT8), Ack(SEQ)),
    (_RENEW, _RENEW),
    (_ASK, Ack(SEQ, answer=True)),
    (replace(_FETCH, start_token=TOKENS), _RENEW, Ack(SEQ)),
)


@contextmanager
def open_sites() -> Iterator[Sites]:
    with tempfile.TemporaryDirectory(prefix="baton-fuzz-") as directory:
        sites = [_site(layers, Path(directory)) for layers in (MIXED, GROUPED)]
        talks = tuple(
            Talk(site, wanted, tuple(_said(site, wanted)))
            for site in sites
            for wanted in (replace(each, windowed=site.p.memory.windowed) for each in WANTED)
        )
        frames = [frame for talk in talks for frame in talk.frames]
        frames += [control(message) for messages in QUESTIONS for message in messages]
        frames.append(control(D.hello(Side.FETCHER, ND, NP)))
        watch = HangupWatch()
        try:
            yield Sites(talks, tuple(frames), watch)
        finally:
            watch.stop()
            for site in sites:
                for pool in (site.p, site.d):
                    pool.shared.close()


def _said(site: Site, wanted: WantedExport) -> Iterator[bytes]:
    held = control(Confirm(SEQ, b"", EPOCH, held=True))
    if wanted.intent is not Intent.FETCH:
        yield held
        if wanted.intent is Intent.RELEASE:
            yield control(Confirm(SEQ, b"", EPOCH, held=False))
        return
    direct = wanted.codec == DIRECT
    if direct:
        yield control(SharedBlockTables(8, site.p.memory.tables(site.p.blocks)))
    count = 0
    for upto in (15, TOKENS):
        for layer, spec in enumerate(site.layers):
            start = site.first(layer, wanted)
            start = max(start, 15) if upto == TOKENS else start
            if start < upto:
                span = KVSpan(layer, start, upto, range(spec.kv_heads))
                header = data_header(span, SEQ, EPOCH)
                yield encode(header, [site.rows(span, wanted.codec)], SEED)
                count += 1
        yield held
    lease_ms = LEASE_MS if wanted.adopt else 0
    yield control(End(TOKENS, True, (), count, lease_ms=lease_ms))
    if direct and not wanted.adopt:
        yield held


def _site(layers: tuple[LayerSpec, ...], directory: Path) -> Site:
    fetcher = replace(D, format=replace(BF16, block_size=16)) if layers is GROUPED else D
    p, d = (_pool(identity, layers, directory) for identity in (P, fetcher))
    fill_random(p.arena, seed=1)
    fill_untouched(d.arena)
    return Site(fetcher, layers, p, d)


def _pool(identity: Identity, layers: tuple[LayerSpec, ...], directory: Path) -> Pool:
    form, windowed, made = identity.format, layers is GROUPED, list[ShmArena]()

    def memory(num_bytes: int, page_bytes: int) -> torch.Tensor:
        boot_id = f"{identity.boot_id}{len(layers):02x}{windowed:02x}"
        made.append(ShmArena(boot_id, num_bytes, page_bytes, directory, RESERVED_BYTES))
        return made[0].memory()

    arena = KVArena(layers, NUM_BLOCKS, form.block_size, form.dtype, memory=memory)
    (shared,) = made
    ids = random.Random(identity.boot_id).sample(range(NUM_BLOCKS), NUM_BLOCKS)
    blocks: list[HeldBlocks] = []
    for window in arena.groups.windows:
        first = first_visible(window, TOKENS) // form.block_size if windowed else 0
        count = -(-TOKENS // form.block_size) - first
        blocks.append(HeldBlocks(tuple(ids.pop() for _ in range(count)), first))
    pool_map = map_of(arena, shared.address, shared.place.num_bytes)
    return Pool(shared, arena, ArenaMemory(arena, windowed=windowed), pool_map, tuple(blocks))
