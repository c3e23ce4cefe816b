"""A model with recurrent state on decode nodes alone, by real processes: transformers' tokens for
several requests at once, and for streams whose node is killed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from baton.client import AsyncClient, GenerateOptions
from baton.protocol.sampling import SamplingParams
from tests.golden.random_models import save_random
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
