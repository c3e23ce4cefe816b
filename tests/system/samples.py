"""A client of several samples that believes nothing it cannot check."""

from __future__ import annotations

import asyncio

from baton.client import AsyncClient, GenerateOptions
from baton.protocol.sampling import SamplingParams
from tests.system.references import Tokens
from tests.waiting import WAIT_S, eventually


class Samples:
    """The samples of one request, read in the background: no gap, no duplicate, one end each."""

    def __init__(
        self,
        client: AsyncClient,
        prompt: Tokens,
        params: SamplingParams,
        options: GenerateOptions | None = None,
    ) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(params.n)]
        self.ended: list[bool] = [False] * params.n
        self.retries = 0
        self._stream = client.stream(prompt, params, options or GenerateOptions(timeout_s=90))
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for event in self._stream:
            assert not self.ended[event.sample], "an event after the end"
            assert event.position == len(self.tokens[event.sample]), "a gap or a duplicate"
            self.tokens[event.sample] += event.token_ids
            self.ended[event.sample] = event.finish_reason is not None
            self.retries = event.retries

    async def at_least(self, count: int) -> None:
        async def there() -> bool:
            return min(map(len, self.tokens)) >= count or self.task.done()

        await eventually(there)

    async def whole(self) -> list[Tokens]:
        async with asyncio.timeout(WAIT_S):
            await self.task
        assert all(self.ended)
        return [tuple(tokens) for tokens in self.tokens]
