"""Other systems' servers beside Baton's in `baton bench serve`: `--peer CMD`, `--peer-url URL`.

Both are any OpenAI-compatible server. CMD is started anew for each of its rounds, on the port that
replaces `{port}`, and ended after it. A server at URL keeps running, idle while others have their
turn. A server that we did not write does not say when it is ready, so it is asked for one token
until it answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import socket
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import httpx

from baton.protocol.errors import ConfigError
from bench.children import stop
from bench.load import LoadTarget, find_model, open_client
from bench.sse import StreamError

PORT: Final = "{port}"
START_S: Final = 600.0  # a large model is converted or compiled
ASK_AGAIN_S: Final = 0.25
STOP_S: Final = 40.0


def label_of(peer: str) -> str:
    """Return the name in tables: of a command its program, of a URL its host and port."""
    return urlsplit(peer).netloc or Path(shlex.split(peer)[0]).name


@contextlib.asynccontextmanager
async def peer_server(command: str, target: LoadTarget) -> AsyncGenerator[str, None]:
    """Start `command` and yield the server's URL once it answers; end it with the context.

    `target` has the model and the key that every request will use. Raises ConfigError if the server
    does not start.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [word.replace(PORT, str(port)) for word in shlex.split(command)]
    url = f"http://127.0.0.1:{port}"
    try:
        process = await asyncio.create_subprocess_exec(
            *words, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
    except OSError as error:
        raise ConfigError(f"--peer {command}: {error}", field="peer") from error
    try:
        await _wait_ready(process, target.at(url), command)
        yield url
    finally:
        await stop(process, STOP_S)


async def _wait_ready(
    process: asyncio.subprocess.Process, target: LoadTarget, command: str
) -> None:
    ended = asyncio.create_task(process.wait())
    answers = asyncio.create_task(_until_it_answers(target))
    done, pending = await asyncio.wait(
        {ended, answers}, timeout=START_S, return_when=asyncio.FIRST_COMPLETED
    )
    for task in pending:
        task.cancel()
    if pending:
        await asyncio.wait(pending)
    if answers in done:
        answers.result()
        return
    why = f"ended with status {process.returncode}" if ended in done else "does not answer"
    raise ConfigError(f"--peer {command} {why}", field="peer")


async def _until_it_answers(target: LoadTarget) -> None:
    async with open_client(target) as client:
        while True:
            with contextlib.suppress(httpx.HTTPError, StreamError):
                body = {"model": await find_model(client, target), "prompt": "a", "max_tokens": 1}
                response = await client.post("/v1/completions", json=body)
                if response.is_success:
                    return
            await asyncio.sleep(ASK_AGAIN_S)
