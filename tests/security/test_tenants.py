"""Tenants share no cached prompt: not through the cache, not by `cached_tokens`, not by placement.

With real engines: whether a prefix was there shows in what was computed, which is what a
stopwatch would measure. Sharing is opt-in (`--share-prefix-cache`), or by giving keys one tenant.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.client import AsyncClient
from baton.protocol.errors import Unauthenticated
from baton.protocol.request import Request
from baton.protocol.sampling import SamplingParams
from baton.text.tokenizer import Tokenizer
from router.api.grpc.inference import GrpcServer
from router.config import RouterConfig
from router.request.terms import Terms
from router.server.app import create_app
from router.tenants.keys import EVERYBODY, KeyRing
from tests.cluster import Cluster, Plan, cluster
from tests.front.fakes import BACKEND, MODEL, TOKENIZER, Front
from tests.tiny_models import make_tiny_model

PROMPT = "the same long prompt of two tenants, to the letter, over several blocks of the cache " * 2
BODY = {"prompt": PROMPT, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
KEYS = """
[[keys]]
name = "alice"
key = "alice-key"
[[keys]]
name = "bob"
key = "bob-key"
[[keys]]
name = "bert"
key = "bert-key"
tenant = "bob"
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("tenants") / "model")


@asynccontextmanager
async def client_of(c: Cluster, key: str) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(c.router.services))
    headers = {"authorization": f"Bearer {key}", "anthropic-version": "2023-06-01"}
    async with httpx.AsyncClient(
        transport=transport, base_url="http://baton", headers=headers
    ) as client:
        yield client


def hits_of(c: Cluster) -> int:
    """Prompt tokens that were not computed, by the engines' own count."""
    return sum(member.stats.num_prefix_hit_tokens for member in c.members)


async def post(c: Cluster, key: str, path: str, body: dict[str, Any]) -> int:
    """One request; answers how many of its prompt tokens came from a cache."""
    before = hits_of(c)
    async with client_of(c, key) as client:
        reply = await client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    hits = hits_of(c) - before
    usage = reply.json().get("usage") or {}
    told = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    assert (told > 0) <= (hits > 0), "what is told was so"
    return hits


async def ask(c: Cluster, key: str, **more: Any) -> int:
    return await post(c, key, "/v1/completions", {**BODY, **more})


def plan_of(model: Path, **router: Any) -> Plan:
    return Plan(model, decode=({"block_size": 8},), prefill=({"block_size": 8},), router=router)


async def test_two_keys_never_share(model: Path) -> None:
    async with cluster(plan_of(model, api_key=("a", "b"))) as c:
        assert await ask(c, "a") == 0
        assert await ask(c, "a") > 0, "its own prompt is found again"
        assert await ask(c, "b") == 0
        assert await ask(c, "b") > 0
        for salt in ("a", "b", "#", "x"):  # nor can a salt of their own choice
            assert await ask(c, "b", cache_salt=salt) == 0
        await c.settle()


async def test_tenants_of_a_key_file_share_within_themselves_alone(
    model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(KEYS)
    async with cluster(plan_of(model, api_keys=str(file))) as c:
        assert await ask(c, "alice-key") == 0
        assert await ask(c, "bob-key") == 0
        assert await ask(c, "bert-key") > 0, "one tenant"
        assert await ask(c, "bob-key", cache_salt="private") == 0
        await c.settle()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_every_dialect_keeps_tenants_apart(model: Path, path: str) -> None:
    said = [{"role": "user", "content": PROMPT}]
    async with cluster(plan_of(model, api_key=("a", "b"))) as c:
        body: dict[str, Any] = {"model": c.prefill[0].engine.config.model_name}
        if path == "/v1/responses":
            body |= {"input": PROMPT, "max_output_tokens": 16}
        else:
            body |= {"messages": said, "max_tokens": 16}
        assert await post(c, "a", path, body) == 0
        assert await post(c, "a", path, body) > 0
        assert await post(c, "b", path, body) == 0


async def test_tokens_in_and_grpc_keep_tenants_apart(model: Path) -> None:
    ids = list(range(10, 60))
    async with cluster(plan_of(model, api_key=("a", "b"))) as c:
        path, sampling = "/inference/v1/generate", {"max_tokens": 2, "temperature": 0}
        body = {"token_ids": ids, "sampling_params": sampling}
        assert await post(c, "a", path, body) == 0
        assert await post(c, "a", path, body) > 0
        assert await post(c, "b", path, body) == 0
        server = GrpcServer(c.router.services)
        address = f"127.0.0.1:{server.bind()}"
        await server.start()
        greedy = SamplingParams(max_tokens=2, temperature=0.0)
        try:
            before = hits_of(c)
            async with AsyncClient(address, "a") as client:
                await client.generate(ids, greedy)
            assert hits_of(c) > before, "as by HTTP"
            other = list(range(100, 150))
            for key, found in (("a", False), ("b", False), ("b", True)):
                before = hits_of(c)
                async with AsyncClient(address, key) as client:
                    await client.generate(other, greedy)
                assert (hits_of(c) > before) == found
            async with AsyncClient(address, "c") as client:
                with pytest.raises(Unauthenticated):
                    await client.generate(ids, greedy)
        finally:
            await server.stop(0)


async def test_sharing_is_opt_in(model: Path) -> None:
    plan = plan_of(model, api_key=("a", "b"), share_prefix_cache=True)
    async with cluster(plan) as c:
        assert await ask(c, "a") == 0
        assert await ask(c, "b") > 0
        assert await ask(c, "b", cache_salt="mine") == 0, "each request may still opt out"


async def test_the_only_key_shares_with_nobody_and_needs_no_salt() -> None:
    front = Front(config=RouterConfig(api_key=("only",)))
    async with front.client(authorization="Bearer only") as client:
        await client.post("/v1/completions", json={"prompt": "a"})
    assert front.dispatcher.requests[0].tenant_salt == ""


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses",
             "/v1/responses/input_tokens", "/tokenize"]
)  # fmt: skip
async def test_what_was_encoded_is_known_to_its_tenant_alone(path: str) -> None:
    """A stopwatch would tell whether somebody has sent the same text."""
    tokenizer = Tokenizer(BACKEND, TOKENIZER.special_tokens, keep_bytes=1 << 20)
    assert tokenizer.pieces is not None
    front = Front(config=RouterConfig(api_key=("a", "b")), tokenizer=tokenizer)
    said: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "a secret, or two"}],
    }
    if path.startswith("/v1/responses"):
        said = {"model": MODEL, "input": "a secret, or two"}
    if path == "/v1/messages":
        said["max_tokens"] = 8
    known: list[int] = []
    for key in ("a", "a", "b", "b"):
        before = tokenizer.pieces.stats.kept
        async with front.client(
            authorization=f"Bearer {key}", **{"anthropic-version": "2023-06-01"}
        ) as client:
            reply = await client.post(path, json=said)
        assert reply.status_code == 200, reply.text
        known.append(tokenizer.pieces.stats.kept - before)
    assert known[0] == known[2]
    assert known[1] == known[3] >= known[0] + len("a secret, or two")


def test_no_tenants_salt_is_anothers(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(KEYS)
    ring = KeyRing.load(["plain", "other"], str(file))
    salts: dict[str, str] = {}
    for key in ("plain", "other", "alice-key", "bob-key"):
        grant = ring.match(key.encode())
        assert grant is not None
        for own in ("", "x", "alice", "5:alice", "#"):
            asked = Request("r", (1,), SamplingParams(), tenant_salt=own)
            salts[f"{key} {own}"] = Terms(grant).applied(asked).tenant_salt
    assert len(set(salts.values())) == len(salts)
    assert all(len(salt) == 64 for salt in salts.values())


def test_grants_of_several_keys() -> None:
    one, two = KeyRing.load(["a", "b"]).match(b"a"), KeyRing.load(["a", "b"]).match(b"b")
    assert one is not None
    assert two is not None
    assert one.isolated
    assert one.domain != two.domain
    assert (one.tenant, one.weight) == (EVERYBODY.tenant, EVERYBODY.weight), (
        "one share of the queue"
    )
    shared = KeyRing.load(["a", "b"], share_cache=True).match(b"a")
    assert shared is not None
    assert not shared.isolated
    assert shared.domain == one.domain
    assert len(KeyRing.load(["a", "a"])) == 1
