"""What operators do to a deployment through its router: caches, pauses, sleep, adapters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.engine.core.active_model import ActiveModel, NoModel
from baton.node import control
from router.admin.server import create_admin_app
from tests.cluster import Cluster, Plan
from tests.engine.test_models_lora import ALL, linear_layers, make_adapter, merged_model
from tests.golden.greedy import NEW_TOKENS, transformers_tokens
from tests.system.references import prompts
from tests.system.test_endpoints import GREEDY, post, served
from tests.tiny_models import make_tiny_model
from tests.waiting import WAIT_S, eventually

PROMPT = list(prompts((40,))[0])
ASK: dict[str, Any] = {"prompt": PROMPT, **GREEDY, "return_token_ids": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"))


class Operated:
    """A cluster, its client, and its operator."""

    def __init__(self, c: Cluster, client: httpx.AsyncClient, operator: httpx.AsyncClient) -> None:
        self.c = c
        self.client = client
        self.operator = operator

    async def tokens(self, count: int = NEW_TOKENS, **fields: Any) -> list[int]:
        reply = await post(self.client, "/v1/completions", **ASK, max_tokens=count, **fields)
        return reply["choices"][0]["token_ids"]

    async def refused(self, **fields: Any) -> httpx.Response:
        return await self.client.post("/v1/completions", json={**ASK, "max_tokens": 3, **fields})

    async def do(self, path: str, status: int = 200, **body: Any) -> httpx.Response:
        reply = await self.operator.post(path, json=body or None)
        assert reply.status_code == status, reply.text
        return reply

    async def told(self, path: str) -> Any:
        return (await self.operator.get(path)).json()

    async def under_way(self, tokens: int) -> list[Any]:
        live = (await self.told("/debug"))["requests"]
        return [each for each in live if each["output_tokens"] >= tokens]


@asynccontextmanager
async def operated(plan: Plan) -> AsyncIterator[Operated]:
    async with served(plan) as (c, client):
        config = replace(c.router.services.config, admin_key=("lever",))
        admin = httpx.ASGITransport(create_admin_app(replace(c.router.services, config=config)))
        bearer = {"authorization": "Bearer lever"}
        async with httpx.AsyncClient(
            transport=admin, base_url="http://admin", headers=bearer
        ) as operator:
            yield Operated(c, client, operator)


async def test_caches_are_forgotten_everywhere(model: Path) -> None:
    async with operated(Plan(model)) as o:

        async def cached() -> int:
            reply = await post(o.client, "/v1/completions", **ASK, max_tokens=2)
            return (reply["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0

        assert await cached() == 0
        assert await cached() > 0
        assert (await o.do("/reset_prefix_cache")).json() == {"success": True}
        assert all(member.engine.pool.num_cached == 0 for member in o.c.members)
        sessions = [o.c.router.registry.session(each.boot_id)
                    for each in o.c.router.registry.records()]  # fmt: skip
        assert not any(session and session.prefix.hashes for session in sessions)
        assert await cached() == 0
        assert (await o.client.post("/reset_prefix_cache")).status_code == 404, "no tenant's"


async def test_a_pause_keeps_what_is_under_way(model: Path) -> None:
    async with operated(Plan(model)) as o:
        expected = await o.tokens(30)
        go_on = o.c.hold_after(8)
        asked = asyncio.create_task(o.tokens(30))
        await eventually(lambda: o.under_way(3))
        assert (await o.do("/pause?mode=keep")).json() == {"status": "paused"}
        go_on.set()
        await asyncio.sleep(0.2)
        (before,) = await o.under_way(0)
        queued = asyncio.create_task(o.tokens(5))
        await asyncio.sleep(0.3)
        (after,) = await o.under_way(0)
        assert after["output_tokens"] == before["output_tokens"] < 30
        assert len((await o.told("/debug"))["waiting"]) == 1
        assert await o.told("/is_paused") == {"is_paused": True}
        assert (await o.do("/resume")).json() == {"status": "resumed"}
        async with asyncio.timeout(WAIT_S):
            assert await asked == expected
            assert await queued == expected[:5]
        assert await o.told("/is_paused") == {"is_paused": False}


@pytest.mark.parametrize("mode", ["abort", "wait"])
async def test_a_pause_ends_what_is_under_way(model: Path, mode: str) -> None:
    async with operated(Plan(model)) as o:
        expected = await o.tokens(30)
        go_on = o.c.hold_after(8)
        body = {**ASK, "max_tokens": 30}
        asked = asyncio.create_task(o.client.post("/v1/completions", json=body))
        await eventually(lambda: o.under_way(3))
        paused = asyncio.create_task(o.do(f"/pause?mode={mode}&clear_cache=true"))

        async def refuses() -> bool:
            return (await o.told("/is_paused"))["is_paused"]

        await eventually(refuses)
        refused = await o.refused()
        assert refused.status_code == 503
        assert "paused" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) > 0
        if mode == "wait":
            await asyncio.sleep(0.2)
            assert not paused.done()
        go_on.set()
        async with asyncio.timeout(WAIT_S):
            choice = (await asked).json()["choices"][0]
            await paused
        assert choice["finish_reason"] == ("abort" if mode == "abort" else "length")
        assert choice["token_ids"] == expected[: len(choice["token_ids"])]
        assert all(member.engine.pool.num_cached == 0 for member in o.c.members)
        await o.do("/resume")
        assert await o.tokens(30) == expected


@pytest.mark.parametrize("shared", [False, True], ids=["grpc", "shm"])
async def test_nodes_sleep_and_wake(model: Path, tmp_path: Path, shared: bool) -> None:
    async with operated(Plan(model, shared=tmp_path if shared else None)) as o:
        expected = await o.tokens()
        assert await o.told("/is_sleeping") == {"is_sleeping": False}
        slept = await o.do("/sleep?level=1")
        assert slept.json() == {"status": "sleeping", "level": 1}
        assert await o.told("/is_sleeping") == {"is_sleeping": True}
        assert all(member.engine.model is None for member in o.c.members)
        assert (await o.refused()).status_code == 503
        part = await o.do("/wake_up?tags=weights")
        assert part.json() == {"status": "sleeping", "tags": ["weights"]}
        assert (await o.refused()).status_code == 503
        assert (await o.do("/wake_up?tags=kv_cache")).json()["status"] == "awake"
        assert await o.told("/is_sleeping") == {"is_sleeping": False}
        assert await o.tokens() == expected
        again = await o.do("/sleep?level=2&mode=wait")
        assert again.json()["level"] == 2
        assert (await o.do("/wake_up")).json() == {"status": "awake", "tags": None}
        assert await o.tokens() == expected


async def test_what_operators_may_not_ask(model: Path, tmp_path: Path) -> None:
    async with operated(Plan(model)) as o:
        for path, field in (
            ("/pause?mode=later", "mode"),
            ("/sleep?level=3", "level"),
            ("/sleep?mode=keep", "mode"),
            ("/wake_up?tags=all", "tags"),
            ("/pause?soon=1", "soon"),
        ):
            assert (await o.do(path, 400)).json()["error"]["param"] == field
        for body, status, field in (
            ({"lora_name": "", "lora_path": "x"}, 400, "lora_name"),
            ({"lora_name": "x", "lora_path": ""}, 400, "lora_path"),
            ({"lora_name": model.name, "lora_path": "x"}, 400, "lora_name"),
            ({"lora_name": "x", "lora_path": str(tmp_path)}, 400, "lora_modules"),
        ):
            told = (await o.do("/v1/load_lora_adapter", status, **body)).json()["error"]
            assert told["param"] == field, told
        assert "there is no" in told["message"]
        gone = await o.do("/v1/unload_lora_adapter", 404, lora_name="x")
        assert gone.json()["error"]["param"] == "lora_name"
        assert await o.told("/is_paused") == {"is_paused": False}


@pytest.mark.parametrize("impl", ["lean", "transformers"])
async def test_adapters_come_and_go_under_load(
    model: Path, tmp_path: Path, impl: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests under way keep the weights that they began with, whatever becomes of the name."""
    monkeypatch.setattr(control, "LEAVING_S", 0.1)
    layers = linear_layers(model, ALL)
    first, second = (make_adapter(tmp_path / f"a{seed}", layers, seed) for seed in (1, 2))
    plain, one, two = (
        transformers_tokens(merged_model(model, path), [PROMPT])[0]
        for path in (None, first, second)
    )
    assert len({tuple(plain), tuple(one), tuple(two)}) == 3
    options = {"model_impl": impl}
    async with operated(Plan(model, prefill=(options,), decode=(options,))) as o:
        assert await o.tokens() == plain
        assert (await o.refused(model="poet")).status_code == 404
        loaded = await o.do("/v1/load_lora_adapter", lora_name="poet", lora_path=str(first))
        assert loaded.text == "Success: LoRA adapter 'poet' added successfully."
        cards = (await o.client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in cards][1:] == ["poet"]
        assert await o.tokens(model="poet") == one
        assert await o.tokens() == plain, "the base's KV is its own"
        twice = await o.do("/v1/load_lora_adapter", 400, lora_name="poet", lora_path=str(second))
        assert "already" in twice.json()["error"]["message"]

        go_on = o.c.hold_after(4)
        asked = asyncio.create_task(o.tokens(model="poet"))
        await eventually(lambda: o.under_way(2))
        act = asyncio.create_task(
            o.do("/v1/load_lora_adapter", lora_name="poet", lora_path=str(second),
                 load_inplace=True)
        )  # fmt: skip
        await asyncio.sleep(0.1)
        go_on.set()
        async with asyncio.timeout(WAIT_S):
            await act
            assert await asked == one
        assert await o.tokens(model="poet") == two

        go_on = o.c.hold_after(4)
        asked = asyncio.create_task(o.tokens(model="poet"))
        await eventually(lambda: o.under_way(2))
        act = asyncio.create_task(o.do("/v1/unload_lora_adapter", lora_name="poet"))
        await asyncio.sleep(0.1)
        go_on.set()
        async with asyncio.timeout(WAIT_S):
            assert (await act).text == "Success: LoRA adapter 'poet' removed successfully."
            assert await asked == two
        assert (await o.refused(model="poet")).status_code == 404

        async def none_left() -> bool:
            return not any(member.engine.info.adapters for member in o.c.members)

        await eventually(none_left)
        assert await o.tokens() == plain
        assert len((await o.client.get("/v1/models")).json()["data"]) == 1


async def test_a_load_that_fails_on_one_node_leaves_none(model: Path, tmp_path: Path) -> None:
    """Here the decode node cannot; what the prefill node took is given up."""
    adapter = make_adapter(tmp_path / "a", linear_layers(model, ALL), 1)
    async with operated(Plan(model)) as o:
        engine = o.c.decode[0].engine
        kept, engine.active = engine.active, ActiveModel(NoModel())
        failed = await o.do("/v1/load_lora_adapter", 400, lora_name="p", lora_path=str(adapter))
        assert "no model" in failed.json()["error"]["message"]
        engine.active = kept
        assert len((await o.client.get("/v1/models")).json()["data"]) == 1
        await o.do("/v1/load_lora_adapter", lora_name="p", lora_path=str(adapter))
        assert await o.tokens(model="p") != await o.tokens()
