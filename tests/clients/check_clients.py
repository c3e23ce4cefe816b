"""Real, unmodified clients against a real cluster: `./run clients` (not a part of `./run test`).

Each script in tests/clients/scripts is an ordinary program of its client's users. It runs in an
environment of its own and ends with "ok" and what it saw.
"""

from __future__ import annotations

import httpx
import pytest

from tests.clients.conftest import Cluster, Install, run_script

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.parametrize("script", ["openai_chat.py", "openai_responses.py"])
async def test_openai(script: str, install: Install, agent: Cluster) -> None:
    assert "ok" in await run_script(install(["openai"]), script, agent)


async def test_anthropic(install: Install, agent: Cluster) -> None:
    assert "ok" in await run_script(install(["anthropic"]), "anthropic_messages.py", agent)


async def test_openai_agents(install: Install, agent: Cluster) -> None:
    assert "ok" in await run_script(install(["openai-agents"]), "openai_agents.py", agent)


async def test_litellm(install: Install, agent: Cluster) -> None:
    # litellm imports `mcp` wherever tools are, and does not declare it.
    assert "ok" in await run_script(install(["litellm", "mcp"]), "litellm_calls.py", agent)


async def test_langchain(install: Install, agent: Cluster) -> None:
    python = install(["langchain-openai", "langchain-anthropic"])
    assert "ok" in await run_script(python, "langchain_agents.py", agent)


@pytest.mark.parametrize(
    ("script", "requirements"),
    [
        ("openai_structured.py", ("openai",)),
        ("anthropic_structured.py", ("anthropic",)),
        ("langchain_structured.py", ("langchain-openai", "langchain-anthropic")),
    ],
)
async def test_structured_outputs(
    script: str, requirements: tuple[str, ...], install: Install, agent: Cluster
) -> None:
    await _needs_guided_decoding(agent)
    assert "ok" in await run_script(install(requirements), script, agent)


async def _needs_guided_decoding(cluster: Cluster) -> None:
    """Skip where the router refuses a response_format by name."""
    body = {"input": "a", "max_output_tokens": 1, "text": {"format": {"type": "json_object"}}}
    headers = {"authorization": f"Bearer {cluster.key}"}
    async with httpx.AsyncClient(base_url=cluster.url, headers=headers) as client:
        reply = await client.post("/v1/responses", json=body)
    if reply.status_code == 400 and reply.json()["error"]["code"] == "unsupported_feature":
        pytest.skip(f"guided decoding is not served: {reply.json()['error']['message']}")
    assert reply.status_code == 200, reply.text
