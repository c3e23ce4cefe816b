"""A prefill node that is stopped (SIGSTOP): a real process; router and decode node are in this one.

Its sockets live and its memory stays, but nobody answers. What must be seen: the tokens of an
undisturbed engine, the counter of what happened, and that both pools are whole afterwards, the
stopped one's once it goes on (SIGCONT).
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from baton.client import Generation
from baton.engine.memory import adopted_pages
from baton.protocol.handles import KVHandle
from baton.protocol.sampling import SamplingParams
from baton.runtime.timing import Timing
from kv_transfer.stats import TransferStats
from tests.cluster import Cluster, Member, Plan, cluster
from tests.system.processes import Processes, ServerProcess
from tests.system.references import one_engine_tokens, prompts
from tests.system.test_adoption import promises
from tests.system.test_kill import metric
from tests.tiny_models import make_wide_model
from tests.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.long]

SIZE = 16
NUM_PROMPT = 640  # ten MiB of KV: it is sent while it is computed
# The router's pings would notice the silence as well; here D is to be the one who does.
TIMING = Timing(kv_progress_s=2.5, ping_interval_s=60.0, ping_timeout_s=60.0)
PARAMS = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
OPTIONS = {"block_size": SIZE, "num_kv_blocks": 96, "max_num_batched_tokens": 32, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_wide_model(tmp_path_factory.mktemp("model"))


@dataclass
class Case:
    """`p` is the process that will be stopped, `c` all others: a second prefill node, and D."""

    model: Path
    c: Cluster
    p: ServerProcess

    async def ask_until(self, hit: threading.Event) -> Generation:
        """Prompts, one after the other, until one was prefilled by `p` and has met its fate."""
        for seed in range(30):
            [prompt] = prompts([NUM_PROMPT], seed=seed)
            generation = await asyncio.wait_for(self.c.client.generate(prompt, PARAMS), 60)
            if hit.is_set():
                [expected] = one_engine_tokens(self.model, [prompt], PARAMS)
                assert generation.token_ids == expected
                return generation
        raise AssertionError("no prompt came to the process")

    async def whole(self) -> None:
        """free + used == total and nothing is used: here, and on the node that was stopped."""
        self.p.signal(signal.SIGCONT)
        await self.c.settle()

        async def idle() -> bool:
            free, total, exports = [
                await metric(self.p, f"baton_kv_{name}")
                for name in ("blocks_free", "blocks", "transfer_active_exports")
            ]
            return free == total > 0 and exports == 0

        await eventually(idle)


@asynccontextmanager
async def case(model: Path, directory: Path, lanes: str, adopt: bool) -> AsyncIterator[Case]:
    shared = directory / "shm"
    shared.mkdir()
    options = {name.replace("_", "-"): value for name, value in OPTIONS.items()}
    flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    flags += ["--kv-lanes", lanes, "--kv-shm-dir", str(shared), "--metrics-port", "0"]
    async with Processes(model, directory) as processes:
        p = await processes.start("prefill_node", "p", [*flags, "--threads", "1"])
        try:
            here = Plan(
                model, (OPTIONS,), (OPTIONS,), timing=TIMING, elsewhere=(p.address,),
                shared=shared, lanes=tuple(lanes.split(",")), adopt=adopt,
            )  # fmt: skip
            async with cluster(here) as c:
                yield Case(model, c, p)
        finally:
            p.signal(signal.SIGCONT)  # else it would not hear that it is to end


def exporters_of(decode: Member, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Boot ids of the nodes that D asks for KV, in order."""
    connector, asked = decode.node.shell.connector, list[str]()
    fetch = connector.fetch

    async def note(handle: KVHandle, *arguments: Any, **options: Any) -> Any:
        asked.append(handle.boot_id)
        return await fetch(handle, *arguments, **options)

    monkeypatch.setattr(connector, "fetch", note)
    return asked


@pytest.mark.parametrize("lane", ["stream", "grpc", "shm,stream"])
async def test_stopped_while_d_reads(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lane: str
) -> None:
    """In the middle of its prefill: D gives up in time and asks the same export once more, for its
    node might only be slow; then another node computes the prompt."""
    async with case(model, tmp_path, lane, adopt=False) as x:
        (decode,), (other,) = x.c.decode, x.c.prefill
        stopped, exporters = threading.Event(), exporters_of(decode, monkeypatch)
        received = TransferStats.received

        def stop(stats: TransferStats, name: str, num_bytes: int) -> None:
            if exporters[-1] != other.node.shell.boot_id and not stopped.is_set():
                x.p.signal(signal.SIGSTOP)
                stopped.set()
            received(stats, name, num_bytes)

        monkeypatch.setattr(TransferStats, "received", stop)
        generation = await x.ask_until(stopped)
        assert generation.retries == 2
        assert decode.transfers.failures == {"kv_timeout": 2}
        assert decode.transfers.fetches == len(exporters) - 2, "all others succeeded"
        assert exporters[-1] == other.node.shell.boot_id
        await x.whole()


@pytest.mark.parametrize("in_time", [True, False], ids=["copied in time", "lapsed"])
async def test_stopped_while_d_decodes_in_its_pages(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_time: bool
) -> None:
    """Renewals get no answer. With time left D copies what it reads and loses no token. When the
    promise is over (D slept as well) its pages are not trusted, though nobody has touched them: a
    stopped node is no dead one. Only the time is moved; who is stopped is a process."""
    monkeypatch.setattr(adopted_pages, "TAKE_OVER_AFTER_S", 1e6)
    async with case(model, tmp_path, "shm,stream", adopt=True) as x:
        (decode,), (other,) = x.c.decode, x.c.prefill
        stopped, exporters = threading.Event(), exporters_of(decode, monkeypatch)
        runner = decode.engine.steps.runner
        inner = runner.run

        def run(*arguments: Any) -> Any:
            held = promises(decode)
            if held and exporters[-1] != other.node.shell.boot_id and not stopped.is_set():
                x.p.signal(signal.SIGSTOP)
                stopped.set()
                [promise] = held
                promise._until -= 0.6 * TIMING.kv_lease_s if in_time else promise._until
                assert promise.holds() == in_time
            return inner(*arguments)

        monkeypatch.setattr(runner, "run", run)
        generation = await x.ask_until(stopped)
        taken_over = decode.stats.num_taken_over_blocks
        assert decode.stats.num_adopted_blocks >= len(exporters) * NUM_PROMPT // SIZE
        if in_time:
            assert (generation.retries, decode.stats.num_failed) == (0, 0)
            assert taken_over == NUM_PROMPT // SIZE
        else:
            assert (generation.retries, decode.stats.num_failed) == (1, 1)
            assert taken_over == 0
            assert exporters[-1] == other.node.shell.boot_id
        await x.whole()
