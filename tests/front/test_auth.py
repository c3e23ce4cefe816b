"""API keys: every registered route and every trick to spell it answers 401 without one."""

from __future__ import annotations

from typing import Any, cast

import pytest
from starlette.routing import Route

from router.api.http_api import HttpApi
from router.config import RouterConfig
from router.models import PromptReaders
from router.server.auth import OPEN_PATHS, ApiKeyGuard
from tests.front.fakes import Front

KEY = "secret-key"


def guarded() -> Front:
    return Front(config=RouterConfig(api_key=(KEY, "second")))


def all_routes() -> list[Route]:
    front = guarded()
    return HttpApi(front.services, PromptReaders(front.config, front.services.models)).routes()


@pytest.mark.parametrize("path", [route.path for route in all_routes()])
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "OPTIONS", "PUT", "DELETE"])
async def test_every_route_is_closed(path: str, method: str) -> None:
    async with guarded().client() as client:
        reply = await client.request(method, path)
    if path in OPEN_PATHS and method in ("GET", "HEAD"):
        assert reply.status_code == 200
    else:
        assert reply.status_code == 401
        assert reply.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    "path",
    ["/", "/nothing", "//v1/models", "/v1//models", "/health/", "/health/../v1/models", "/Health",
     "/%76%31/models", "/v1/models?x=/health", "/health;/v1/models", "/health%2f..%2fv1%2fmodels"],
)  # fmt: skip
async def test_spelling_tricks_open_nothing(path: str) -> None:
    async with guarded().client() as client:
        assert (await client.get(path)).status_code == 401


@pytest.mark.parametrize(
    "value",
    ["", "Bearer", "Bearer ", f"Basic {KEY}", KEY, f"Bearer {KEY}x", f"Bearer {KEY[:-1]}",
     f"Bearer{KEY}", f"Bearer {KEY.upper()}"],
)  # fmt: skip
async def test_wrong_keys(value: str) -> None:
    async with guarded().client(authorization=value) as client:
        reply = await client.get("/v1/models")
    assert reply.status_code == 401
    assert KEY not in reply.text


@pytest.mark.parametrize("value", [f"Bearer {KEY}", f"bearer {KEY} ", "Bearer second"])
async def test_right_keys(value: str) -> None:
    async with guarded().client(authorization=value) as client:
        assert (await client.get("/v1/models")).status_code == 200


async def test_two_authorization_headers_open_nothing() -> None:
    headers = [("authorization", f"Bearer {KEY}"), ("authorization", f"Bearer {KEY}")]
    async with guarded().client() as client:
        assert (await client.get("/v1/models", headers=headers)).status_code in (400, 401)


async def test_the_host_header_changes_nothing() -> None:
    async with guarded().client() as client:
        reply = await client.get("/v1/models", headers={"host": "x/health?"})
    assert reply.status_code == 401


async def test_without_keys_all_is_open() -> None:
    async with Front().client() as client:
        assert (await client.get("/v1/models")).status_code == 200


async def test_websockets_are_closed() -> None:
    async def never(*_: Any) -> Any:
        raise AssertionError("reached the app")

    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(cast("dict[str, Any]", message))

    scope = {"type": "websocket", "path": "/health", "headers": []}
    await ApiKeyGuard(never, [KEY])(scope, never, send)
    assert sent == [{"type": "websocket.close", "code": 1008}]


PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization",
}


@pytest.mark.parametrize(
    ("allowed", "origin", "answered"),
    [((), "https://a", None), (("https://a",), "https://a", "https://a"),
     (("*",), "https://a", "*"), (("https://a",), "https://b", None)],
)  # fmt: skip
async def test_web_pages_of_other_origins(
    allowed: tuple[str, ...], origin: str, answered: str | None
) -> None:
    front = Front(config=RouterConfig(api_key=(KEY,), allowed_origins=allowed))
    async with front.client(origin=origin) as client:
        before = await client.options("/v1/chat/completions", headers=PREFLIGHT)
        denied = await client.get("/v1/models")
        given = await client.get("/v1/models", headers={"authorization": f"Bearer {KEY}"})
    assert before.is_success == (answered is not None)
    assert (denied.status_code, given.status_code) == (401, 200), "a key is wanted all the same"
    for reply in (before, denied, given):
        assert reply.headers.get("access-control-allow-origin") == answered


async def test_ping_is_got_and_posted() -> None:
    async with Front().client() as client:
        for method in ("GET", "HEAD", "POST"):
            assert (await client.request(method, "/ping")).status_code == 200
        allowed = (await client.options("/ping")).headers["allow"]
    assert set(allowed.split(", ")) == {"GET", "HEAD", "POST"}
