"""The short way of the busiest routes answers as the long one does."""

from __future__ import annotations

import httpx
import pytest

from baton.protocol.errors import InternalError, Overloaded
from router.server.app import DirectRoutes
from tests.front.fakes import Front

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
PATHS = {"/v1/chat/completions": CHAT, "/v1/completions": {"prompt": "hello", "max_tokens": 4}}


@pytest.fixture(autouse=True, params=[True, False], ids=["direct", "all the way"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """With the short way, and without it."""
    if not request.param:
        monkeypatch.setattr(DirectRoutes, "__init__", _without)
    return request.param


def _without(self: DirectRoutes, app: object, _: object) -> None:
    self._app, self._posts = app, {}  # type: ignore[assignment]


@pytest.mark.parametrize(("path", "body"), PATHS.items())
async def test_an_answer(path: str, body: dict[str, object]) -> None:
    async with Front().client() as client:
        reply = await client.post(path, json=body, headers={"x-request-id": "mine"})
    assert reply.status_code == 200
    assert reply.headers["x-request-id"] == "mine"
    assert reply.json()["usage"]["completion_tokens"] > 0


async def test_faults_of_the_client() -> None:
    async with Front().client() as client:
        bad = await client.post("/v1/chat/completions", json={"messages": "none"})
        media = await client.post("/v1/chat/completions", content="{}")
        method = await client.get("/v1/chat/completions")
        nothing = await client.post("/v1/chat/completions/", json=CHAT)
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "messages")
    assert (media.status_code, media.json()["error"]["code"]) == (415, "unsupported_media_type")
    assert (method.status_code, method.headers["allow"]) == (405, "POST")
    assert nothing.status_code == 404


async def test_faults_on_the_way() -> None:
    async with Front().failing(Overloaded("full", retry_after_s=7)).client() as client:
        full = await client.post("/v1/chat/completions", json=CHAT)
    assert (full.status_code, full.headers["retry-after"]) == (429, "7")
    async with Front().failing(InternalError("a secret")).client() as client:
        ours = await client.post("/v1/chat/completions", json=CHAT)
    assert ours.status_code == 500
    assert "secret" not in ours.text


async def test_a_bug_of_ours_is_answered_and_told_to_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("router.api.http_api.reply_id", broken)
    app = Front().app()
    quiet = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=quiet, base_url="http://router") as client:
        reply = await client.post("/v1/chat/completions", json=CHAT)
    assert (reply.status_code, reply.json()["error"]["type"]) == (500, "server_error")
    loud = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=loud, base_url="http://router") as client:
        with pytest.raises(ZeroDivisionError):
            await client.post("/v1/chat/completions", json=CHAT)
