"""The real OpenAI SDK, talking to a front door behind a real server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import openai

from tests.front.fakes import Front, serving


@asynccontextmanager
async def sdk(front: Front, key: str = "none") -> AsyncIterator[openai.AsyncOpenAI]:
    """A client that repeats nothing by itself."""
    async with serving(front) as port:
        url = f"http://127.0.0.1:{port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
            yield client
