"""A router that is told to stop ends each stream with an error that says so: real processes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.runtime.failpoints import VARIABLE
from tests.system.processes import Processes
from tests.tiny_models import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.long]

BODY: dict[str, Any] = {
    "prompt": [5, 6, 7], "max_tokens": 100, "temperature": 0, "ignore_eos": True, "stream": True,
}  # fmt: skip


async def test_streams_that_a_stop_cuts_off_end_with_an_error(tmp_path: Path) -> None:
    model = make_tiny_model("llama", tmp_path)
    flags = ("--num-kv-blocks", "64", "--drain-s", "0")
    async with Processes(model, tmp_path, forked=True) as run:
        slow = {VARIABLE: "d.step_n:*:delay=500"}
        p, d = await asyncio.gather(
            run.start("prefill_node", "p0", flags), run.start("decode_node", "d0", flags, slow)
        )
        router = await run.router([p], [d], ("--shutdown-s", "1"))
        said: list[str] = []
        url = f"http://{router.address}"
        async with (
            httpx.AsyncClient(base_url=url, timeout=None, trust_env=False) as http,
            http.stream("POST", "/v1/completions", json=BODY) as reply,
        ):
            async for line in reply.aiter_lines():
                if not said:
                    router.process.terminate()
                if line:
                    said.append(line)
        assert await router.stop() == 0
        assert said[-1] == "data: [DONE]"
        error = json.loads(said[-2].removeprefix("data: "))["error"]
        assert error["code"] == "unavailable"
        assert "stopping" in error["message"]
        assert "Traceback" not in router.log.read_text()
