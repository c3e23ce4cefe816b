"""The admin server: aborts that clients hear of, drains, what is under way; who may ask for it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.protocol.errors import Cancelled, ConfigError
from baton.protocol.events import TokenEvent
from baton.protocol.messages import DrainNode
from baton.protocol.request import Request
from router.admin.control import ControlApi
from router.admin.server import AdminApi, create_admin_app
from router.config import RouterConfig
from router.request.trace import RequestTrace
from tests.front.fakes import FakeDispatcher, Front
from tests.router.fakes import fake_nodes, make_request, running_router


class AbortedDispatcher(FakeDispatcher):
    """An operator ends each request after two tokens."""

    async def run(self, request: Request, trace: RequestTrace) -> AsyncGenerator[TokenEvent, None]:
        count = 0
        async for event in super().run(request, trace):
            yield event
            count += 1
            if count == 2:
                trace.aborted = True
                raise Cancelled("the request was cancelled")


async def test_what_an_operator_ends_has_an_end_for_its_client() -> None:
    front = Front(dispatcher=AbortedDispatcher(answer="hi there, hello"))
    chat = {"messages": [{"role": "user", "content": "x"}]}
    async with front.client() as client:
        whole = (await client.post("/v1/chat/completions", json=chat)).json()
        assert whole["choices"][0]["finish_reason"] == "abort"
        assert whole["choices"][0]["message"]["content"] == "hi"
        assert whole["usage"]["completion_tokens"] == 2
        reply = await client.post("/v1/chat/completions", json={**chat, "stream": True})
        assert reply.text.count('"finish_reason":"abort"') == 1
        assert reply.text.endswith("data: [DONE]\n\n")
        body = {"prompt": "x", "stop": "it"}  # the held-back tail is shown, too
        cut = (await client.post("/v1/completions", json=body)).json()["choices"][0]
        assert (cut["text"], cut["finish_reason"]) == ("hi", "abort")
        body = {"token_ids": [5], "sampling_params": {}}
        ids = (await client.post("/inference/v1/generate", json=body)).json()["choices"][0]
        assert (len(ids["token_ids"]), ids["finish_reason"]) == (2, "abort")
        page = (await client.get("/metrics")).text
        assert 'baton_request_failure_total{code="abort",model_name="tiny"} 4.0' in page


@dataclass
class LiveDispatcher(FakeDispatcher):
    """With two requests under way."""

    ended: list[str] = field(default_factory=list[str])

    def live(self) -> list[tuple[Request, RequestTrace]]:
        return [(make_request(id_), RequestTrace()) for id_ in ("cmpl-a-0.1", "cmpl-b-0.2")]

    def waiting(self) -> list[tuple[Request, RequestTrace]]:
        return [(make_request("cmpl-c-0.3"), RequestTrace())]

    def abort(self, request_id: str, by_operator: bool = False) -> bool:
        assert by_operator
        self.ended.append(request_id)
        return True


async def test_the_admin_servers_routes() -> None:
    dispatcher = LiveDispatcher()
    async with fake_nodes("p") as (p,), running_router([p]) as router:
        registry: Any = router.registry
        config = RouterConfig(
            api_key=("tenants",),
            admin_key=("sesame",),
            secret="hidden",
            redis_url="redis://:pw@h/0",
        )
        front = Front(dispatcher=dispatcher, registry=registry, config=config)
        transport = httpx.ASGITransport(create_admin_app(front.services))
        async with httpx.AsyncClient(transport=transport, base_url="http://admin") as client:
            for key in ("", "tenants"):
                client.headers["authorization"] = f"Bearer {key}"
                for path in ("/debug", "/metrics", "/server_info"):
                    assert (await client.get(path)).status_code == 401
                assert (await client.post("/drain", json={})).status_code == 401
            client.headers["authorization"] = "Bearer sesame"
            reply = await client.post("/abort_requests", json={"request_ids": ["a", "nobody"]})
            assert reply.json() == {"aborted": ["cmpl-a-0.1"]}
            assert dispatcher.ended == ["cmpl-a-0.1"]
            reply = await client.post("/abort_requests", json={"request_ids": ["c"]})
            assert reply.json() == {"aborted": ["cmpl-c-0.3"]}
            debug = (await client.get("/debug")).json()
            (waiting,) = debug["waiting"]
            assert (waiting["id"], waiting["prompt_tokens"]) == ("cmpl-c-0.3", 10)
            assert waiting["age_s"] > 0
            assert [each["id"] for each in debug["requests"]] == ["cmpl-a-0.1", "cmpl-b-0.2"]
            assert debug["nodes"][0]["node_id"] == "p"
            info = (await client.get("/server_info")).text
            assert not any(secret in info for secret in ("sesame", "hidden", "pw@h"))
            assert b"baton_migrations_total" in (await client.get("/metrics")).content
            assert (await client.get("/health")).status_code == 200
            for body, where in (
                ({"request_ids": "a"}, "request_ids"),
                ({"request_ids": ["a"] * 1025}, "request_ids"),
            ):
                bad = await client.post("/abort_requests", json=body)
                assert (bad.status_code, bad.json()["error"]["param"]) == (400, where)
            everyone = (await client.post("/abort_requests", json={})).json()
            assert everyone == {"aborted": ["cmpl-a-0.1", "cmpl-b-0.2", "cmpl-c-0.3"]}
            wrong = await client.post("/drain", json={"node": "other"})
            assert wrong.json()["error"]["param"] == "node"
            await client.post("/drain", json={"node": "p"})
            await p.hear(DrainNode)
            assert not front.lifecycle.draining
            assert (await client.post("/drain", json={})).json() == {"draining": "router"}
            assert front.lifecycle.draining
            assert (await client.get("/drain")).json()["error"]["code"] == "method_not_allowed"
        async with front.client(authorization="Bearer sesame") as public:
            assert (await public.get("/metrics")).status_code == 401
        async with front.client(authorization="Bearer tenants") as public:
            for path in ("/abort_requests", "/drain", "/pause", "/sleep", "/reset_prefix_cache"):
                assert (await public.post(path, json={})).status_code == 404
            assert (await public.get("/debug")).status_code == 404
            assert (await public.get("/metrics")).status_code == 200
            assert (await public.get("/load")).json() == {"server_load": 0}


async def test_no_route_of_operators_opens_to_another_key() -> None:
    async with running_router([]) as router:
        registry: Any = router.registry
        config = RouterConfig(api_key=("tenants",), admin_key=("sesame",))
        services = Front(registry=registry, config=config).services
    routes = [*AdminApi(services).routes(), *ControlApi(services).routes()]
    paths = {(method, it.path) for it in routes for method in it.methods or ()}
    levers = {"/pause", "/resume", "/sleep", "/wake_up", "/reset_prefix_cache"}
    adapters = {"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
    assert levers | adapters < {path for _, path in paths}
    transport = httpx.ASGITransport(create_admin_app(services))
    for key in ("tenants", "x", ""):
        headers = {"authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(
            transport=transport, base_url="http://admin", headers=headers
        ) as client:
            for method, path in paths:
                reply = await client.request(method, path)
                assert reply.status_code == (200 if path == "/health" else 401), (method, path)


def test_the_admin_port_needs_a_key_of_its_own(tmp_path: Path) -> None:
    both = {"tls_cert": "c", "tls_key": "k"}
    RouterConfig(admin_port=0, admin_key=("lever",)).check()
    RouterConfig(admin_port=0, admin_keys="operators.toml").check()
    RouterConfig(admin_port=0, admin_host="::", admin_key=("lever",), **both).check()  # type: ignore[arg-type]
    refused = [
        ("admin_port", RouterConfig(admin_port=-1, admin_key=("lever",))),
        ("admin_key", RouterConfig(admin_port=0)),
        ("admin_key", RouterConfig(admin_port=0, api_key=("k",), api_keys="keys.toml")),
        ("admin_key", RouterConfig(admin_key=(" ",))),
        ("insecure", RouterConfig(admin_port=0, admin_host="0.0.0.0", admin_key=("lever",))),
    ]
    for field_name, config in refused:
        with pytest.raises(ConfigError) as caught:
            config.check()
        assert caught.value.field == field_name


def test_a_tenants_key_is_no_admin_key(tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.toml"
    tenants.write_text('[[keys]]\nname = "alice"\nkey = "alices"\n')
    operators = tmp_path / "operators.toml"
    operators.write_text('[[keys]]\nname = "olga"\nkey = "olgas"\n')
    ring = RouterConfig(admin_keys=str(operators), api_keys=str(tenants)).admin_ring()
    assert ring.match(b"olgas") is not None
    assert ring.match(b"alices") is None
    for given in (
        {"admin_key": ("alices",), "api_keys": str(tenants)},
        {"admin_keys": str(operators), "api_key": ("x", "olgas")},
    ):
        with pytest.raises(ConfigError) as caught:
            RouterConfig(**given).admin_ring()  # type: ignore[arg-type]
        assert caught.value.field == "admin_key"
        assert "alices" not in caught.value.message
