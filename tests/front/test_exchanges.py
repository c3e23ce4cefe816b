"""A draining router says goodbye with every answer: the next request belongs to another one."""

from __future__ import annotations

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

from router.server.exchanges import Exchanges
from router.services import Lifecycle


async def whole(_: Request) -> PlainTextResponse:
    return PlainTextResponse("a", headers={"Connection": "keep-alive"})


async def pieces(_: Request) -> StreamingResponse:
    return StreamingResponse(iter(["a", "b"]))


async def test_answers_end_their_connection_once_the_router_drains() -> None:
    lifecycle = Lifecycle()
    app = Exchanges(Starlette(routes=[Route("/w", whole), Route("/p", pieces)]), lifecycle)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        assert (await client.get("/w")).headers.get_list("connection") == ["keep-alive"]
        assert "connection" not in (await client.get("/p")).headers
        lifecycle.draining = True
        for path in ("/w", "/p", "/no-such-route"):
            answer = await client.get(path)
            assert answer.headers.get_list("connection") == ["close"], path


async def test_every_answer_has_the_id_and_a_dialect_its_own_paths() -> None:
    plain = Starlette(routes=[Route("/w", whole)])
    other = Starlette(routes=[Route("/of/it", pieces)])
    transport = httpx.ASGITransport(app=Exchanges(plain, Lifecycle(), {"/of": other}))
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        given = await client.get("/w", headers={"x-request-id": "mine"})
        assert given.headers["x-request-id"] == "mine"
        drawn = (await client.get("/of/it")).headers["x-request-id"]
        assert (await client.get("/of/it")).headers["x-request-id"] != drawn
        assert (await client.get("/of/it")).text == "ab"
        assert (await client.get("/no-such-route")).headers["x-request-id"]
