"""guidellm, unmodified, measures a real cluster: every request is completed, `./run clients`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

from tests.clients.agent_model import DEMO
from tests.clients.conftest import Cluster, Install, run_client

pytestmark = pytest.mark.asyncio(loop_scope="session")

RUN_S: Final = 240.0
REQUESTS: Final = 24
PROMPT_TOKENS: Final = 64
OUTPUT_TOKENS: Final = 32


async def test_guidellm_completes_every_request(
    install: Install, demo: Cluster, tmp_path: Path
) -> None:
    # It imports torch without saying so. By its version, pip takes a CPU build where it knows one.
    python = install(["torch==2.13.0", "guidellm"])
    backend = f"kind=openai_http,target={demo.url},model={demo.model},api_key={demo.key}"
    data = f"prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}"
    command = [
        str(python.parent / "guidellm"), "run",
        "--backend", backend,
        "--profile", "kind=concurrent,streams=4",
        "--constraint", f"kind=max_requests,count={REQUESTS}",
        "--tokenizer", f"kind=hf_auto,model={DEMO}",
        "--data", f"kind=synthetic_text,{data}",
        "--disable-progress",
        "--output", f"kind=json,path={tmp_path / 'report.json'}",
    ]  # fmt: skip
    said = await run_client(command, RUN_S, tmp_path)
    benchmark = json.loads((tmp_path / "report.json").read_text())["benchmarks"][0]
    totals: dict[str, Any] = benchmark["metrics"]["request_totals"]
    assert totals["successful"] == REQUESTS, said
    assert (totals["errored"], totals["incomplete"]) == (0, 0), said
