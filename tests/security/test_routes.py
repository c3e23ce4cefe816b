"""Default deny: every route of every HTTP app, asked for in every way, wants the key."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.types import ASGIApp

from baton.protocol.errors import ConfigError
from router.admin.server import create_admin_app
from router.config import RouterConfig
from router.server.app import create_app
from router.server.auth import OPEN_PATHS
from tests.front.fakes import Front

KEY = "the-key"
ADMIN_KEY = "the-admin-key"
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
CREDENTIALS: list[dict[str, str]] = [
    {},
    {"authorization": "Bearer wrong"},
    {"authorization": KEY},
    {"authorization": f"Basic {KEY}"},
    {"authorization": "Bearer"},
    {"x-api-key": "wrong"},
    {"x-api-key": KEY, "authorization": "Bearer wrong"},
    {"api-key": KEY},
    {"cookie": f"authorization=Bearer {KEY}"},
    {"host": "x/health?"},
    {"x-original-url": "/health", "x-rewrite-url": "/health", "x-forwarded-host": "localhost"},
    {"x-http-method-override": "GET", "connection": "upgrade", "upgrade": "websocket"},
]


def inner(app: Any) -> Starlette:
    """The routes under the guards: what is registered, whoever adds to it."""
    while not isinstance(app, Starlette):
        app = app._app
    return app


def apps() -> dict[str, ASGIApp]:
    config = RouterConfig(api_key=(KEY,), admin_key=(ADMIN_KEY,))
    services = Front(config=config).services
    return {"public": create_app(services), "admin": create_admin_app(services)}


def spellings(path: str) -> list[str]:
    """Ways to say `path` that some proxy or router might take for another."""
    plain = path.replace("{name:path}", "tiny").replace("{", "").replace("}", "")
    first, rest = plain[1:2] or "/", plain[2:]
    return [
        plain, f"/{plain}", f"{plain}/", f"/.{plain}", f"/health/..{plain}", f"/health/;{plain}",
        f"/%{ord(first):02x}{rest}", plain.replace("/", "%2f"), plain.upper(), f"{plain}?x=/health",
        f"{plain}%00", f"/health%3f/..{plain}",
    ]  # fmt: skip


ROUTES = [
    (name, str(route.path))  # type: ignore[attr-defined]
    for name, app in apps().items()
    for route in inner(app).routes
]


@pytest.mark.parametrize(("name", "path"), ROUTES)
async def test_nothing_but_probes_answers_without_the_key(name: str, path: str) -> None:
    app = apps()[name]
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://baton") as client:
        for credentials in CREDENTIALS:
            for method in METHODS:
                reply = await client.request(method, path, headers=credentials)
                probe = path in OPEN_PATHS and method in ("GET", "HEAD")
                assert (reply.status_code != 401) == probe, (method, credentials)
        for spelling in spellings(path):
            reply = await client.get(spelling)
            opened = httpx.URL(f"http://baton{spelling}").path in OPEN_PATHS
            assert (reply.status_code != 401) == opened, spelling


def test_the_list_of_routes_is_the_real_one() -> None:
    paths = {path for name, path in ROUTES if name == "public"}
    assert {"/v1/chat/completions", "/v1/messages", "/v1/responses", "/metrics"} <= paths
    assert "/abort_requests" in {path for name, path in ROUTES if name == "admin"}


@pytest.mark.parametrize(("name", "path"), ROUTES)
async def test_the_key_of_one_port_opens_none_of_the_other(name: str, path: str) -> None:
    transport = httpx.ASGITransport(apps()[name], raise_app_exceptions=False)
    own, other = (KEY, ADMIN_KEY) if name == "public" else (ADMIN_KEY, KEY)
    async with httpx.AsyncClient(transport=transport, base_url="http://baton") as client:
        for method in METHODS:
            refused = await client.request(method, path, headers={"x-api-key": other})
            probe = path in OPEN_PATHS and method in ("GET", "HEAD")
            assert (refused.status_code != 401) == probe, method
        opened = await client.get("/metrics", headers={"authorization": f"Bearer {own}"})
        assert opened.status_code == 200


@pytest.mark.parametrize("keys", [("",), ("good", " ")])
def test_an_empty_key_is_no_key(keys: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        RouterConfig(api_key=keys).check()
    assert caught.value.field == "api_key"
