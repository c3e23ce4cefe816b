"""--strict-fields: what nothing reads is refused by name; without it, it is passed over."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from router.api.strict_fields import IGNORED, KNOWN
from router.config import RouterConfig
from router.models import PromptReaders
from router.server.app import all_routes
from tests.front.fakes import Front

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/responses": {"input": "a"},
    "/v1/responses/input_tokens": {"input": "a"},
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": {"messages": CHAT["messages"]},
    "/inference/v1/generate": {"token_ids": [1], "sampling_params": {"max_tokens": 1}},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
}


def strict() -> Front:
    return Front(config=RouterConfig(strict_fields=True, request_timeout_s=20.0))


@pytest.mark.parametrize("path", BODIES)
async def test_unknown_fields_are_refused_by_name(path: str) -> None:
    async with strict().client() as client:
        reply = await client.post(path, json={**BODIES[path], "penalty_alpha": 0.6})
        error = reply.json()["error"]
        assert reply.status_code == 400
        assert "penalty_alpha" in error["message"]
        same = {**BODIES[path], "penalty_alpha": None, "metadata": {}}
        assert (await client.post(path, json=same)).status_code == 200
    async with Front().client() as client:
        reply = await client.post(path, json={**BODIES[path], "penalty_alpha": 0.6})
        assert reply.status_code == 200


async def test_those_of_tokens_are_named_where_they_stand() -> None:
    body = {"token_ids": [1], "sampling_params": {"max_tokens": 1, "penalty_alpha": 0.6}}
    async with strict().client() as client:
        error = (await client.post("/inference/v1/generate", json=body)).json()["error"]
    assert error["param"] == "sampling_params.penalty_alpha"


async def test_other_refusals_keep_their_reasons() -> None:
    async with strict().client() as client:
        for body, field in (({"audio": {}}, "audio"), ({"max_tokens": "x"}, "max_tokens")):
            reply = await client.post("/v1/chat/completions", json={**CHAT, **body})
            assert reply.json()["error"]["param"] == field
            assert "strict" not in reply.json()["error"]["message"]
        headers = {"content-type": "application/json"}
        reply = await client.post("/v1/completions", content=b"[", headers=headers)
        assert "not valid JSON" in reply.json()["error"]["message"]


def test_every_route_with_a_body_is_known() -> None:
    """A route that is added later says what it takes, too."""
    front = Front()
    routes = all_routes(front.services, PromptReaders(front.config, front.services.models))
    posts = {route.path for route in routes if route.methods == {"POST"}}
    assert posts - {"/v1/responses/{id}/cancel"} == set(KNOWN)  # that one reads no body
    assert all(msgspec.json.encode(name) for names in KNOWN.values() for name in names)
    assert all(names >= IGNORED for names in KNOWN.values())
