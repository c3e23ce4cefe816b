"""schemathesis against /openapi.json of a running system: no server error, replies as described.

It needs an environment of its own (it pins many packages):

    python -m venv /tmp/clients && /tmp/clients/bin/pip install schemathesis
    SCHEMATHESIS=/tmp/clients/bin/schemathesis ./run test tests/clients/test_schemathesis.py

Only one of its checks is left out: which bodies are valid also depends on lengths in tokens, and
on the model, which no schema can say.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import uvicorn

from router.app import create_app
from router.http_guard import HttpLimits, uvicorn_settings
from tests.cluster import Plan, cluster
from tests.tiny_models import make_tiny_model

PROGRAM = os.environ.get("SCHEMATHESIS", "")
RUN_S = 420.0
OPTIONS = (
    "--phases", "examples,coverage,fuzzing", "-n", "5", "--workers", "2", "--checks", "all",
    "--exclude-checks", "positive_data_acceptance", "--continue-on-failure", "--no-color",
    "--request-timeout", "100", "--max-response-time", "100",
)  # fmt: skip

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PROGRAM, reason="SCHEMATHESIS does not name the program"),
]


async def test_no_request_makes_a_server_error(tmp_path: Path) -> None:
    model = make_tiny_model("llama", tmp_path / "model")
    nodes = ({"max_model_len": 64},)  # answers are short, whatever is asked
    async with AsyncExitStack() as stack:
        c = await stack.enter_async_context(cluster(Plan(model, prefill=nodes, decode=nodes)))
        settings = uvicorn_settings(HttpLimits())
        app = create_app(c.router.services)
        config = uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, **settings)
        server = uvicorn.Server(config)
        config.load()
        server.lifespan = config.lifespan_class(config)
        await server.startup()
        stack.push_async_callback(server.shutdown)
        port = server.servers[0].sockets[0].getsockname()[1]
        url = f"http://127.0.0.1:{port}/openapi.json"
        process = await asyncio.create_subprocess_exec(
            PROGRAM, "run", url, *OPTIONS,
            cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        async with asyncio.timeout(RUN_S):
            output, _ = await process.communicate()
        assert process.returncode == 0, output.decode()[-8000:]
        await c.settle()
        assert sum(member.stats.num_failed for member in c.members) == 0
