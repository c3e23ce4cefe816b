"""Prompts that take long: python -m tests.slow_prefills [--seconds 3,10,30,120] [--busy 3]

A prefill node that is slow, by a delay in each of its chunks, hands its KV over once and loses
nothing: on every lane, whether pages are copied or read in place. Real processes; `--busy` programs
that only compute run beside them. One line per case; the exit status is 0 if all kept the promise.
The suite runs the shortest (tests/system/test_slow_prefill.py).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.client import AsyncClient
from baton.protocol.sampling import SamplingParams
from baton.runtime.failpoints import LOG_VARIABLE, VARIABLE
from tests.system.processes import Processes, ServerProcess
from tests.system.references import Tokens, one_engine_tokens, prompts
from tests.system.test_kill import metric
from tests.tiny_models import make_wide_model
from tests.waiting import eventually

NUM_PROMPT = 640  # ten MiB of KV: it is sent while it is computed
CHUNK = 64
PARAMS = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
FLAGS = (
    "--block-size", "16", "--num-kv-blocks", "96", "--max-num-batched-tokens", str(CHUNK),
    "--max-num-seqs", "4", "--threads", "1", "--metrics-port", "0", "--dtype", "float32",
)  # fmt: skip
WAYS: dict[str, tuple[str, ...]] = {
    "grpc": ("--kv-lanes", "grpc"),
    "stream": ("--kv-lanes", "stream"),
    "dist": ("--kv-lanes", "dist,stream"),
    "nixl": ("--kv-lanes", "nixl,stream"),
    "shm": ("--kv-lanes", "shm,stream", "--no-kv-adopt"),
    "shm adopted": ("--kv-lanes", "shm,stream"),
}


@dataclass(frozen=True, slots=True)
class Ground:
    """`expected`: what one engine answers to `prompt`."""

    model: Path
    prompt: Tokens
    expected: Tokens


def make_ground(directory: Path) -> Ground:
    model = make_wide_model(directory / "model")
    [prompt] = prompts([NUM_PROMPT], seed=5)
    [expected] = one_engine_tokens(model, [prompt], PARAMS)
    return Ground(model, prompt, expected)


async def slow_prefill(ground: Ground, directory: Path, way: str, seconds: float) -> str:
    """One prompt whose prefill takes `seconds`; the proof. Raises AssertionError."""
    flags = (*FLAGS, *WAYS[way], "--kv-shm-dir", str(directory))
    delay_ms = round(seconds * 1000 / (NUM_PROMPT / CHUNK))
    slow = {
        VARIABLE: f"p.mid_chunk:*:delay={delay_ms}",
        LOG_VARIABLE: str(directory / "fired"),
    }
    async with Processes(ground.model, directory) as processes:
        p, d = await asyncio.gather(
            processes.start("prefill_node", "p", flags, slow),
            processes.start("decode_node", "d", flags),
        )
        router = await processes.router([p], [d], ["--prefill-placement", "remote"])
        async with asking(router, num_nodes=2) as client:
            began = time.monotonic()
            found = await client.generate(ground.prompt, PARAMS)
        took_s = time.monotonic() - began
        counted = await _counted(p, d)
    delays = len((directory / "fired").read_text().splitlines())
    assert (delays, took_s >= seconds) == (NUM_PROMPT // CHUNK, True), "it was not slow"
    assert found.token_ids == ground.expected
    assert found.retries == 0
    assert counted == {"computed": NUM_PROMPT, "exports": 1, "fetches": 1, "fetch_errors": 0}
    return f"{delays} delays of {delay_ms} ms, answered after {took_s:.1f} s, {counted}"


@contextlib.asynccontextmanager
async def asking(router: ServerProcess, num_nodes: int) -> AsyncIterator[AsyncClient]:
    """A client, once the router knows so many nodes."""
    client = AsyncClient(str(router.ready["grpc_address"]))

    async def known() -> bool:
        return len((await client.server_info()).nodes) == num_nodes

    try:
        await eventually(known)
        yield client
    finally:
        await client.close()


async def _counted(p: ServerProcess, d: ServerProcess) -> dict[str, float]:
    """What the nodes have done in all: the prompt was computed once, and its KV moved once."""
    fetches = "baton_kv_transfer_fetches_total"
    errors = ("kv_timeout", "kv_lost", "kv_stale", "kv_corrupt")
    return {
        "computed": await metric(p, "baton_node_prompt_tokens_total"),
        "exports": await metric(p, "baton_kv_transfer_exports_total"),
        "fetches": await metric(d, f'{fetches}{{outcome="ok"}}'),
        "fetch_errors": sum([await metric(d, f'{fetches}{{outcome="{e}"}}') for e in errors]),
    }


@contextlib.contextmanager
def busy_machine(count: int) -> Iterator[None]:
    """So many processes that only compute."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def run(ways: Sequence[str], times: Sequence[float], directory: Path) -> bool:
    ground = make_ground(directory)
    kept = True
    for seconds in times:
        for way in ways:
            try:
                place = Path(tempfile.mkdtemp(dir=directory))
                proof = "ok      " + await slow_prefill(ground, place, way, seconds)
            except (AssertionError, Exception) as error:  # noqa: BLE001 - the others still run
                kept, proof = False, f"FAILED  {type(error).__name__}: {error}"
            say(f"{way:12} {seconds:5g} s  {proof}")
    return kept


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.slow_prefills", description=__doc__)
    parser.add_argument("--seconds", default="3,10,30,120", help="of the prefills")
    parser.add_argument("--ways", default=",".join(WAYS), help="separated by commas")
    parser.add_argument("--busy", type=int, default=0, help="programs that compute beside them")
    options = parser.parse_args(argv)
    times = [float(each) for each in options.seconds.split(",")]
    with tempfile.TemporaryDirectory(prefix="baton-slow-") as place, busy_machine(options.busy):
        kept = asyncio.run(run(options.ways.split(","), times, Path(place)))
    return 0 if kept else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
