"""Streams as clients read them that cut lines as Unicode does, not as SSE."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from tests.front.fakes import MODEL, FakeDispatcher, Front

ENDS = "a\u2028b\u2029c\x85d é🙂"
CALLS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}]},
    "/inference/v1/generate": {"token_ids": [5], "sampling_params": {}},
}


@pytest.mark.parametrize("path", CALLS)
async def test_no_frame_holds_what_unicode_calls_a_lines_end(path: str) -> None:
    front = Front(dispatcher=FakeDispatcher(answer=ENDS))
    body = {"model": MODEL, "stream": True, **CALLS[path]}
    if path != "/v1/responses":
        body |= {"max_tokens": 60}
    told: list[Any] = []
    async with (
        front.client(**{"anthropic-version": "2023-06-01"}) as client,
        client.stream("POST", path, json=body) as reply,
    ):
        assert reply.status_code == 200, await reply.aread()
        async for line in reply.aiter_lines():
            assert line == "" or line.startswith(("data: ", "event: ")), line
            if line.startswith("data: {"):
                told.append(orjson.loads(line.removeprefix("data: ")))
    assert told
    if path == "/v1/chat/completions":
        deltas = [chunk["choices"][0]["delta"] for chunk in told]
        assert "".join(delta.get("content") or "" for delta in deltas) == ENDS
