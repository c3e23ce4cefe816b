"""Models with recurrent state by real processes: transformers' tokens for several requests at once,
for streams whose nodes are killed, and for conversations whose next turn goes to the node with the
checkpoint; on decode nodes alone, and behind prefill nodes."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from baton.client import AsyncClient, GenerateOptions
from baton.protocol.sampling import SamplingParams
from baton.runtime.failpoints import LOG_VARIABLE, VARIABLE
from tests.golden.random_models import save_random
from tests.golden.sparse_models import SPARSE_MODELS, save_sparse
from tests.golden.stateful_models import STATEFUL
from tests.system.processes import Processes
from tests.system.references import Tokens, prompts, transformers_tokens
from tests.waiting import WAIT_S, eventually

pytestmark = [pytest.mark.slow, pytest.mark.long]

NUM_TOKENS = 120  # so many that no stream has ended when its node is killed
PROMPTS = prompts((17, 65), seed=2)
PARAMS = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
NODES = ("--threads", "1", "--dtype", "float32", "--num-kv-blocks", "128", "--metrics-port", "0")


class Stream:
    """One request that is read in the background."""

    def __init__(self, client: AsyncClient, prompt: Tokens) -> None:
        self.tokens: list[int] = []
        self.retries = 0
        self.begun = asyncio.Event()
        self.task = asyncio.create_task(self._read(client, prompt))

    async def _read(self, client: AsyncClient, prompt: Tokens) -> None:
        try:
            async for event in client.stream(prompt, PARAMS, GenerateOptions(timeout_s=90)):
                self.tokens.extend(event.token_ids)
                self.retries = event.retries
                if self.tokens:
                    self.begun.set()
        finally:
            self.begun.set()


@pytest.mark.parametrize("model_type", ["qwen3_next", "mamba2"])
async def test_decode_nodes_alone_also_after_a_kill(model_type: str, tmp_path: Path) -> None:
    model = save_random(tmp_path / "m", model_type, **STATEFUL[model_type])
    expected = transformers_tokens(model, PROMPTS, NUM_TOKENS)
    async with Processes(model, tmp_path) as cluster:
        _, decode = await cluster.nodes(0, 2, NODES)
        router = await cluster.router([], decode)
        async with AsyncClient(str(router.ready["grpc_address"])) as client:

            async def both_serve() -> bool:
                return len((await client.server_info()).nodes) == 2

            await eventually(both_serve)
            streams = [Stream(client, prompt) for prompt in PROMPTS]
            async with asyncio.timeout(WAIT_S):
                for stream in streams:
                    await stream.begun.wait()
            await decode[0].kill()
            await asyncio.gather(*(stream.task for stream in streams))
    assert [tuple(stream.tokens) for stream in streams] == expected
    assert max(stream.retries for stream in streams) == 1, "the kill met no stream"


async def test_a_next_turn_goes_to_the_node_with_the_checkpoint(tmp_path: Path) -> None:
    model = save_random(tmp_path / "m", "qwen3_next", **STATEFUL["qwen3_next"])
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    first = prompts((40, 41, 42, 43), seed=3)
    flags = (*NODES, "--block-size", "8", "--state-checkpoint-spacing", "16")
    asked: list[Tokens] = []
    found: list[Tokens] = []
    cached: list[int] = []
    async with Processes(model, tmp_path, forked=True) as cluster:
        _, decode = await cluster.nodes(0, 2, (*flags, "--num-state-checkpoints", "8"))
        router = await cluster.router([], decode)
        async with AsyncClient(str(router.ready["grpc_address"])) as client:

            async def whole() -> bool:
                return len((await client.server_info()).nodes) == 2

            await eventually(whole)
            for _ in range(2):
                for index, prompt in enumerate(first):
                    answer = await client.generate(prompt, params, GenerateOptions(timeout_s=90))
                    asked.append(prompt)
                    found.append(tuple(answer.token_ids))
                    cached.append(answer.usage.cached_tokens)
                    first[index] = (*prompt, *found[-1], 9, 8, 7)
    assert found == transformers_tokens(model, asked, 8)
    assert cached == [0, 0, 0, 0, 32, 40, 40, 40]


# Where the first prefill node dies: between two chunks of a prompt, as a state is about to leave,
# and when it has left but END has not.
PLACES = ("p.mid_chunk:2", "kv.first:1", "kv.last:1")
DEATHS = {name: PLACES[index % 3] for index, name in enumerate((*STATEFUL, *SPARSE_MODELS))}


@pytest.mark.parametrize("name", DEATHS)
async def test_a_prefill_and_a_decode_node_are_killed(name: str, tmp_path: Path) -> None:
    """A prefill node dies with a prompt, then a decode node in mid-stream: each prompt is computed
    again on the prefill node that is left, and handed over to the other decode node."""
    model = (
        save_random(tmp_path / "m", name, **STATEFUL[name])
        if name in STATEFUL
        else save_sparse(tmp_path / "m", name)
    )
    expected = transformers_tokens(model, PROMPTS, NUM_TOKENS)
    steps = ("--max-num-batched-tokens", "16", "--max-num-seqs", "8")
    flags = (*NODES, *steps, "--kv-lanes", "stream")
    plan, proof = f"{DEATHS[name]}:kill9", tmp_path / "proof"
    dying = {VARIABLE: plan, LOG_VARIABLE: str(proof)}
    async with Processes(model, tmp_path, forked=True) as cluster:
        victim, (others, decode) = await asyncio.gather(
            cluster.start("prefill_node", "victim", flags, dying), cluster.nodes(1, 2, flags)
        )
        router = await cluster.router([victim, *others], decode)
        async with AsyncClient(str(router.ready["grpc_address"])) as client:

            async def all_serve() -> bool:
                return len((await client.server_info()).nodes) == 4

            await eventually(all_serve)
            prompts_again = [*PROMPTS, *PROMPTS]
            streams = [Stream(client, prompt) for prompt in prompts_again]
            async with asyncio.timeout(WAIT_S):
                for stream in streams:
                    await stream.begun.wait()
                assert await victim.process.wait() == -signal.SIGKILL
            await decode[0].kill()
            await asyncio.gather(*(stream.task for stream in streams))
    assert ":".join(proof.read_text().split()[1:3]) == DEATHS[name]
    assert [tuple(stream.tokens) for stream in streams] == [*expected, *expected]
    assert max(stream.retries for stream in streams) >= 1, "the kills met no stream"
