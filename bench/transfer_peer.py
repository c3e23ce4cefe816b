"""One side of a transfer benchmark in a process of its own: `python -m bench.transfer_peer`.

It reads questions as JSON lines on stdin and answers on stdout (transfer_link.py is the other end).
It ends when its input ends. The order is: `pool` or `engine` makes the memory -> `open` starts a
connector for each way asked for -> any number of `export`, `fetch`, `prefill` and other questions.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import xxhash

from baton.engine.core.engine import Engine
from baton.engine.kernels.cpu.build import missing
from baton.engine.kernels.cpu.library import asking_state, kernels
from baton.engine.kernels.cpu.library import state as kernel_state
from baton.engine.kernels.cpu.quantized import integer_kernels_for
from baton.engine.kernels.gpu.support import state as gpu_kernel_state
from baton.engine.memory.kv_cache import KVArena
from baton.node.config import NodeConfig
from baton.node.lanes import SHM, parse_lanes
from baton.protocol.clock import SystemClock
from baton.protocol.errors import BatonError, ConfigError
from baton.protocol.events import FirstToken
from baton.protocol.handles import KVHandle
from baton.protocol.kv_spec import HeldBlocks, LayerSpec, layout_fingerprint
from baton.protocol.request import Request
from baton.protocol.sampling import SamplingParams
from baton.protocol.wire_values import handle_from_bytes, handle_to_bytes
from baton.runtime.cores import parse_cores, pin_process
from baton.runtime.rotation.deployment_secret import fixed
from baton.runtime.timing import Timing
from bench.transfer_engine import PrefillEngine
from bench.transfer_lanes import ADOPTED, DIRECT, LanePlace, all_ways, make_way
from bench.transfer_raw import RawServer, read_raw
from kv_transfer.connector import Connector, TransferOptions
from kv_transfer.pool.layout import ArenaMemory
from kv_transfer.protocol.base import Blocks
from kv_transfer.protocol.frames import MAX_PAYLOAD

BLOCK_SIZE: Final = 32
DTYPE: Final = "bfloat16"
# A whole 224 MiB export on a loaded machine and a prefill take seconds: these limits must not
# decide a measurement.
TIMING: Final = Timing(kv_lease_s=120.0, kv_progress_s=60.0)


@dataclass(frozen=True, slots=True)
class Pool:
    """The memory that is transferred: `num_tokens` tokens in the first blocks of an arena."""

    arena: KVArena
    num_tokens: int

    @property
    def blocks(self) -> Blocks:
        return (HeldBlocks(range(-(-self.num_tokens // self.arena.block_size))),)

    @property
    def memory(self) -> memoryview:
        """Return the bytes of those blocks, page after page."""
        return self.arena.buffer().cast("B")[: len(self.blocks[0].ids) * self.arena.page_bytes]


class TransferPeer:
    """Answers every question to one process of a benchmark; `answer_*` are the questions."""

    def __init__(self) -> None:
        self._pool: Pool | None = None
        self._place = LanePlace()
        self._connectors: dict[str, Connector] = {}
        self._engine: PrefillEngine | None = None
        self._raw: RawServer | None = None
        self._copy: memoryview | None = None

    # ---- memory ----------------------------------------------------------------------------------
    async def answer_pool(
        self, layers: int, heads: int, dim: int, tokens: int, directory: str = ""
    ) -> dict[str, Any]:
        """Make an arena for `tokens` tokens (whole blocks) and touch every page of it.

        Its shared file lies in `directory`.
        """
        if directory:
            self._place = LanePlace(Path(directory))
        if tokens % BLOCK_SIZE:
            raise ConfigError(f"{tokens} tokens are no whole blocks of {BLOCK_SIZE}")
        specs = (LayerSpec(heads, dim, dim),) * layers
        arena = KVArena(specs, tokens // BLOCK_SIZE, BLOCK_SIZE, DTYPE, "cpu", self._place.memory)
        pool = self._pool = Pool(arena, tokens)
        await self.answer_fill(os.getpid())
        return {"bytes": len(pool.memory)}

    async def answer_fill(self, seed: int) -> dict[str, Any]:
        """Fill the memory with other bytes, so that a test can tell which bytes have arrived."""
        generator = torch.Generator().manual_seed(seed)
        torch.frombuffer(self.pool.memory, dtype=torch.int64).random_(generator=generator)
        return {}

    async def answer_digest(self) -> dict[str, Any]:
        """Answer with the digest of the transferred bytes of all layers."""
        return {"digest": xxhash.xxh3_64_hexdigest(self.pool.memory)}

    async def answer_engine(self, model: str, tokens: int, threads: int) -> dict[str, Any]:
        """Load a real engine, whose arena is the memory. Answer with the shape of its layers."""
        self._engine = await asyncio.to_thread(self._load, model, tokens, threads)
        engine: Engine = self._engine.engine
        self._pool = Pool(engine.arena, tokens)
        spec = engine.info.layers[0]
        return {"layers": len(engine.info.layers), "heads": spec.kv_heads, "dim": spec.k_dim}

    def _load(self, model: str, tokens: int, threads: int) -> PrefillEngine:
        return PrefillEngine.load(model, tokens, threads, self._place.memory)

    # ---- lanes -----------------------------------------------------------------------------------
    async def answer_open(self, ways: list[str], tls: str | None) -> dict[str, Any]:
        """Open a connector for each of `ways` that this machine has; answer why the others are
        missing.
        """
        arena = self.pool.arena
        missing: dict[str, str] = {}
        for way in ways:
            try:
                if way in DIRECT:
                    lane = self._place.lane(way, arena, TIMING)
                else:
                    lane = make_way(way, TIMING, Path(tls) if tls else None)
                connector = Connector(
                    memory=ArenaMemory(arena),
                    boot_id=os.urandom(16).hex(),
                    fingerprint=layout_fingerprint("bench", "rope", arena.layers),
                    secrets=fixed("bench"),
                    lanes=(lane,),
                    timing=TIMING,
                    clock=SystemClock(),
                    on_released=self._released,
                    options=TransferOptions(adopt=way == ADOPTED),
                )
                await connector.start()
            except (ConfigError, ImportError) as error:
                missing[way] = str(error)
            else:
                self._connectors[way] = connector
        return {"ways": list(self._connectors), "missing": missing}

    def _released(self, handle: KVHandle, blocks: Blocks, why: str) -> None:
        if self._engine is not None:
            self._engine.unpin(blocks)

    async def answer_export(self, way: str, tokens: int) -> dict[str, Any]:
        """Offer the first `tokens` tokens. All layers and token 1 are there."""
        connector = self._connectors[way]
        request = Request(os.urandom(8).hex(), (1,), SamplingParams(seed=1))
        export = connector.export(request, 0, self.pool.blocks, tokens)
        for layer in range(len(self.pool.arena.layers)):
            if not connector.publish(export, layer, export.num_tokens):
                raise ConfigError("the export is gone")
        connector.complete(export, (FirstToken(position=0, token_id=1),))
        return {"handle": _told(export)}

    async def answer_fetch(self, way: str, handle: str, look: bool = False) -> dict[str, Any]:
        """Fetch what the other side exported by `way`.

        The times are on the clock that processes share; `bytes` counts what was copied. With
        `look`, the answer has the `digest` of what can be read in adopted pages.
        """
        export = handle_from_bytes(bytes.fromhex(handle))
        connector = self._connectors[way]
        before = connector.stats.total_received
        adopts = connector.adopts(export)
        began = time.monotonic()
        ready = await connector.fetch(export, export.epoch, self.pool.blocks, adopt=adopts)
        ended = time.monotonic()
        copied = connector.stats.total_received - before
        answer: dict[str, Any] = {"began_at": began, "ended_at": ended, "bytes": copied}
        if ready.held is not None:
            if look:
                answer["digest"] = xxhash.xxh3_64_hexdigest(self._place.pages(ready.adopted))
            await ready.held.release()
        return answer

    # ---- the engine ------------------------------------------------------------------------------
    async def answer_prefill(self, way: str, seed: int, tokens: int) -> dict[str, Any]:
        """Begin to compute a prompt of random tokens; answer as soon as the export exists."""
        assert self._engine is not None, "ask for an engine first"
        self._engine.attach(self._connectors[way])
        return {"handle": _told(await self._engine.begin(seed, tokens))}

    async def answer_prefilled(self) -> dict[str, Any]:
        """Wait for token 1; answer when it was sampled and when the last layer was written."""
        assert self._engine is not None, "ask for an engine first"
        times = await self._engine.ended()
        return {"began_at": times.began, "layer_at": times.last_layer, "ended_at": times.ended}

    # ---- baselines -------------------------------------------------------------------------------
    async def answer_raw_serve(self) -> dict[str, Any]:
        self._raw = RawServer(self.pool.memory)
        return {"addresses": self._raw.addresses}

    async def answer_raw_read(self, kind: str, address: str) -> dict[str, Any]:
        began = time.monotonic()
        await asyncio.to_thread(read_raw, kind, address, self.pool.memory)
        return {"seconds": time.monotonic() - began}

    async def answer_memcpy(self) -> dict[str, Any]:
        """Copy the memory, with one thread, to as much memory beside it. Answer with the
        seconds.
        """
        memory = self.pool.memory
        if self._copy is None:
            self._copy = memoryview(bytearray(len(memory)))
            self._copy[:] = memory  # touch every page
        began = time.monotonic()
        self._copy[:] = memory
        return {"seconds": time.monotonic() - began}

    async def answer_digest_rate(self) -> dict[str, Any]:
        """Answer with the seconds to digest the memory once, in pieces of a frame's size."""
        began = time.monotonic()
        memory = self.pool.memory
        for start in range(0, len(memory), MAX_PAYLOAD):
            xxhash.xxh3_64_intdigest(memory[start : start + MAX_PAYLOAD])
        return {"seconds": time.monotonic() - began}

    async def answer_facts(
        self, kv_lanes: str = NodeConfig().kv_lanes, kv_adopt: bool = True
    ) -> dict[str, Any]:
        """Answer what only a process with torch knows: its threads, kernels, GPU and lanes.

        `preferred` are the lanes that nodes with these flags would take.
        """
        shm = ADOPTED if kv_adopt else SHM
        return {
            "torch": torch.__version__,
            "torch_threads": torch.get_num_threads(),
            "kernels": kernel_state(),
            "asking": asking_state(),
            "integer_kernels": _integer_kernel_state(),
            "gpu": _gpu_state(),
            "ways": all_ways(),
            "preferred": [shm if name == SHM else name for name in parse_lanes(kv_lanes)],
        }

    async def answer_usage(self) -> dict[str, Any]:
        """Answer with the CPU seconds of all threads of this process since its start."""
        return {"cpu_s": time.process_time()}

    # ---- parts -----------------------------------------------------------------------------------
    @property
    def pool(self) -> Pool:
        assert self._pool is not None, "ask for a pool or an engine first"
        return self._pool

    async def stop(self) -> None:
        if self._raw is not None:
            await asyncio.to_thread(self._raw.stop)
        for connector in self._connectors.values():
            await connector.stop()
        self._place.close()


def _integer_kernel_state() -> str:
    compiled = kernels()
    if compiled is None:
        return "torch's own serve: as above"
    if integer_kernels_for(torch.bfloat16, torch.device("cpu")) is not None:
        return "compiled, as above"
    if torch.cpu._is_amx_tile_supported():  # pyright: ignore[reportPrivateUsage]
        return "torch's own serve: oneDNN multiplies in AMX tiles"
    lacking = ", ".join(missing(compiled.instructions.integer_flags))
    return f"torch's own serve: this processor has no {lacking}"


def _gpu_state() -> str:
    if not torch.cuda.is_available():
        return gpu_kernel_state()
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return f"{', '.join(names)}; kernels: {gpu_kernel_state()}"


def _told(handle: KVHandle) -> str:
    return handle_to_bytes(handle).hex()


def questions(peer: TransferPeer) -> dict[str, Callable[..., Awaitable[dict[str, Any]]]]:
    """Return the questions by name, so that a name from outside never picks an attribute."""
    listed = (
        peer.answer_pool, peer.answer_fill, peer.answer_digest, peer.answer_engine,
        peer.answer_open, peer.answer_export, peer.answer_fetch,
        peer.answer_prefill, peer.answer_prefilled, peer.answer_raw_serve, peer.answer_raw_read,
        peer.answer_memcpy, peer.answer_digest_rate, peer.answer_facts, peer.answer_usage,
    )  # fmt: skip
    return {each.__name__.removeprefix("answer_"): each for each in listed}


async def serve() -> None:
    """Answer until stdin ends; every question runs in a task of its own."""
    peer = TransferPeer()
    known = questions(peer)
    running: set[asyncio.Task[None]] = set()
    reader = asyncio.StreamReader(limit=1 << 24)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    try:
        async for line in reader:
            task = asyncio.create_task(_answer(known, json.loads(line)))
            running.add(task)
            task.add_done_callback(running.discard)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await peer.stop()


async def _answer(
    known: dict[str, Callable[..., Awaitable[dict[str, Any]]]], question: dict[str, Any]
) -> None:
    number, command = question.pop("number"), question.pop("command")
    try:
        answer = await known[command](**question)
    except (BatonError, OSError, KeyError, TypeError) as error:
        answer = {"error": f"{command}: {type(error).__name__}: {error}"}
    sys.stdout.write(json.dumps({"number": number, **answer}) + "\n")
    sys.stdout.flush()


def main() -> int:
    """Run the command. Return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.transfer_peer")
    parser.add_argument("--cores", help="cores of this process, e.g. 0,1")
    given = parser.parse_args()
    if given.cores:
        pin_process(parse_cores(given.cores))
    asyncio.run(serve())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
