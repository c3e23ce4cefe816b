"""/v1/responses and /v1/messages through the whole system in PD mode say what a chat says.

The demo model, greedy; whole and streamed. The real SDKs are in tests/clients.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from router.server.app import create_app
from tests.cluster import Plan, cluster
from tests.front.dialects import check_message, check_response, events_of

pytestmark = pytest.mark.slow

MODEL = Path(__file__).parents[2] / "demo_model"
QUESTIONS = ("What is PagedAttention?", "Why prefill?")
MAX_TOKENS = 24


async def test_three_dialects_say_the_same() -> None:
    async with cluster(Plan(MODEL)) as c:
        transport = httpx.ASGITransport(create_app(c.router.services))
        async with httpx.AsyncClient(transport=transport, base_url="http://baton") as client:
            for question in QUESTIONS:
                await _compare(client, question)
        await c.settle()
        assert sum(member.transfers.bytes_received["grpc"] for member in c.decode) > 0


async def _compare(client: httpx.AsyncClient, question: str) -> None:
    asked = [{"role": "user", "content": question}]
    chat = await _post(
        client, "/v1/chat/completions", messages=asked, max_completion_tokens=MAX_TOKENS
    )
    said = chat.json()["choices"][0]
    text, usage = said["message"]["content"], chat.json()["usage"]
    assert text
    cut_short = said["finish_reason"] == "length"

    body: dict[str, Any] = {"input": question, "max_output_tokens": MAX_TOKENS}
    whole = (await _post(client, "/v1/responses", **body)).json()
    stream = await _post(client, "/v1/responses", stream=True, **body)
    for response in (whole, check_response(events_of(stream.text))):
        assert response["output"][0]["content"][0]["text"] == text
        assert response["status"] == ("incomplete" if cut_short else "completed")
        assert response["usage"]["input_tokens"] == usage["prompt_tokens"]
        assert response["usage"]["output_tokens"] == usage["completion_tokens"]

    body = {"messages": asked, "max_tokens": MAX_TOKENS}
    counted = (await _post(client, "/v1/messages/count_tokens", messages=asked)).json()
    whole = (await _post(client, "/v1/messages", **body)).json()
    stream = await _post(client, "/v1/messages", stream=True, **body)
    for message in (whole, check_message(events_of(stream.text))):
        assert message["content"] == [{"type": "text", "text": text}]
        assert message["stop_reason"] == ("max_tokens" if cut_short else "end_turn")
        told = message["usage"]
        assert told["output_tokens"] == usage["completion_tokens"]
        assert told["input_tokens"] + told["cache_read_input_tokens"] == usage["prompt_tokens"]
    assert counted["input_tokens"] == usage["prompt_tokens"]


async def _post(client: httpx.AsyncClient, path: str, **body: Any) -> httpx.Response:
    greedy = {} if path.endswith("count_tokens") else {"temperature": 0}
    reply = await client.post(path, json={**greedy, **body})
    assert reply.status_code == 200, reply.text
    return reply
