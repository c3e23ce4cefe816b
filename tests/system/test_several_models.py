"""Several models behind one router: each request is its own model's, as if that were alone.

Two tiny models with vocabularies that have no byte in common, each with its own nodes; what another
model's request, node death or full queue does must not be seen. fp32: == one engine per model.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
import redis.asyncio as aredis

from baton.client import AsyncClient
from baton.client.values import GenerateOptions
from baton.llm import LLM
from baton.protocol.errors import ModelNotFound
from baton.protocol.sampling import SamplingParams
from baton.runtime.failpoints import VARIABLE
from decode_node.__main__ import PROGRAM as DECODE
from prefill_node.__main__ import PROGRAM as PREFILL
from router.api.grpc.inference import GrpcServer
from router.config import RouterConfig
from router.main import Router
from router.server.app import create_app
from tests.cluster import PATIENT, Member, Plan, member_of
from tests.front.resumable import Reader
from tests.system.processes import Processes, ServerProcess
from tests.system.test_failover import die
from tests.tiny_models import make_other_vocabulary, make_tiny_model
from tests.waiting import WAIT_S, end, eventually

NAMES = ("small", "other")
TEXT = "the answer to this is"
MESSAGES = [{"role": "user", "content": "hello there, who are you?"}]
PARAMS = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}


@dataclass(frozen=True)
class Reference:
    """The folder of each model, and what its own engine answers."""

    folders: dict[str, Path]
    texts: dict[str, str]
    chats: dict[str, str]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    root = tmp_path_factory.mktemp("models")
    folders = {
        "small": make_tiny_model("llama", root / "a"),
        "other": make_other_vocabulary(root / "b"),
    }
    texts, chats = dict[str, str](), dict[str, str]()
    for name, folder in folders.items():
        llm = LLM(model=str(folder), num_kv_blocks=64, threads=1)
        texts[name] = llm.generate([TEXT], PARAMS)[0].text or ""
        chats[name] = llm.chat(MESSAGES, PARAMS)[0].text or ""  # pyright: ignore[reportArgumentType]
    assert texts["small"] != texts["other"]
    return Reference(folders, texts, chats)


def models_file(folder: Path, reference: Reference, **more: dict[str, Any]) -> Path:
    """Write `--models`; `more`: further options of a model."""
    entries = {
        name: {"model": str(path), **more.get(name, {})} for name, path in reference.folders.items()
    }
    file = folder / "models.yaml"
    file.write_bytes(orjson.dumps({"models": entries}))  # JSON is YAML
    return file


@dataclass
class Two:
    """A running router with the nodes of two models."""

    nodes: dict[str, tuple[Member, list[Member]]]  # P and the D's of each model
    router: Router
    http: httpx.AsyncClient
    grpc: AsyncClient

    async def text(self, model: str, **more: Any) -> str:
        body = {"model": model, "prompt": TEXT, **GREEDY, **more}
        reply = await self.http.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"][0]["text"]

    async def chat(self, model: str) -> str:
        """Streamed."""
        body = {"model": model, "messages": MESSAGES, **GREEDY, "stream": True}
        reply = await self.http.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
        told = [line[6:] for line in reply.text.splitlines() if line.startswith("data: {")]
        chunks = [orjson.loads(each) for each in told]
        assert {chunk["model"] for chunk in chunks} == {model}
        return "".join(c["delta"].get("content") or "" for it in chunks for c in it["choices"])


@asynccontextmanager
async def two(
    reference: Reference, folder: Path, num_decode: int = 1, **more: dict[str, Any]
) -> AsyncIterator[Two]:
    async with AsyncExitStack() as stack:
        nodes: dict[str, tuple[Member, list[Member]]] = {}
        for name, path in reference.folders.items():
            plan, named = Plan(path), {"served_model_name": (name,)}
            prefill = await member_of(stack, PREFILL, plan, named)
            decode = [await member_of(stack, DECODE, plan, named) for _ in range(num_decode)]
            nodes[name] = prefill, decode
        config = RouterConfig(
            models=str(models_file(folder, reference, **more)),
            port=0,
            grpc_port=0,
            prefill_node=tuple(prefill.node.address for prefill, _ in nodes.values()),
            decode_node=tuple(it.node.address for _, many in nodes.values() for it in many),
            timing=PATIENT,
        )
        router = Router(config)
        server = GrpcServer(router.services)
        port = server.bind()
        await router.start()
        stack.push_async_callback(router.stop)
        await server.start()
        stack.push_async_callback(server.stop, 0)
        stack.push_async_callback(end, asyncio.create_task(router.run_background()))

        async def registered() -> bool:
            return len(router.registry.records()) == 2 + 2 * num_decode

        await eventually(registered)
        transport = httpx.ASGITransport(create_app(router.services))
        http = await stack.enter_async_context(
            httpx.AsyncClient(transport=transport, base_url="http://baton", timeout=WAIT_S)
        )
        grpc = await stack.enter_async_context(AsyncClient(f"127.0.0.1:{port}"))
        yield Two(nodes, router, http, grpc)


async def test_each_model_answers_as_its_own_engine(reference: Reference, tmp_path: Path) -> None:
    async with two(reference, tmp_path, small={"aliases": ["tiny"]}) as it:
        asked = [name for name in NAMES for _ in range(4)]
        texts, chats = await asyncio.gather(
            asyncio.gather(*(it.text(name) for name in asked)),
            asyncio.gather(*(it.chat(name) for name in asked)),
        )
        assert texts == [reference.texts[name] for name in asked]
        assert chats == [reference.chats[name] for name in asked]
        assert await it.text("tiny") == reference.texts["small"]
        for name, (prefill, [decode]) in it.nodes.items():
            requests = prefill.stats.num_prompt_tokens, decode.stats.num_generated_tokens
            assert all(requests), f"{name} was served by its own nodes"

        listed = (await it.http.get("/v1/models")).json()["data"]
        assert [card["id"] for card in listed] == ["small", "tiny", "other"]
        one = (await it.http.get("/v1/models/other")).json()
        assert (one["id"], one["max_model_len"]) == ("other", 512)

        for body, status, code in (
            ({"model": "none", "prompt": "x"}, 404, "model_not_found"),
            ({"prompt": "x"}, 400, "invalid_request"),
        ):
            reply = await it.http.post("/v1/completions", json=body)
            told = reply.json()["error"]
            assert (reply.status_code, told["param"], told["code"]) == (status, "model", code), told
            assert "small" in told["message"]
            assert "other" in told["message"]

        for name in NAMES:
            body = {"model": name, "prompt": TEXT}
            ids = (await it.http.post("/tokenize", json=body)).json()["tokens"]
            body = {"model": name, "tokens": ids}
            assert (await it.http.post("/detokenize", json=body)).json()["prompt"] == TEXT
            done = await it.grpc.generate(TEXT, PARAMS, GenerateOptions(model=name))
            assert done.text == reference.texts[name]
        with pytest.raises(ModelNotFound, match="other"):
            await it.grpc.generate(TEXT, PARAMS, GenerateOptions(model="none"))
        assert [model.id for model in await it.grpc.models()] == ["small", "other"]

        page = (await it.http.get("/metrics")).text
        for name in NAMES:
            for family in ("baton_request_success_total", "baton_generation_tokens_total"):
                lines = [x for x in page.splitlines() if x.startswith(family) and name in x]
                assert any(float(line.split()[-1]) > 0 for line in lines), (family, name)


async def test_a_dead_node_of_one_model_is_no_others_business(
    reference: Reference, tmp_path: Path
) -> None:
    async with two(reference, tmp_path, num_decode=2) as it:
        go_on = [asyncio.create_task(it.text(name, max_tokens=300)) for name in NAMES * 3]

        async def decoding() -> bool:
            live = it.router.services.dispatcher.live()
            return len(live) == 6 and all(trace.output_tokens > 5 for _, trace in live)

        await eventually(decoding)
        traces = [trace for _, trace in it.router.services.dispatcher.live()]
        for victim in it.nodes["small"][1]:
            await die(victim)
        told = await asyncio.gather(*go_on)
        alone = [await it.text(name, max_tokens=300) for name in NAMES]
        assert told == alone * 3
        retries = {name: {t.retries for t in traces if t.model == name} for name in NAMES}
        assert retries["other"] == {0}
        assert min(retries["small"]) > 0, "each was on one of the nodes that died"


async def test_limits_and_options_are_the_models_own(reference: Reference, tmp_path: Path) -> None:
    small = {"max_request_tokens": 64, "max_logprobs": 2, "response_role": "narrator"}
    async with two(reference, tmp_path, small=small) as it:
        for name, role in (("small", "narrator"), ("other", "assistant")):
            body = {**GREEDY, "model": name, "messages": MESSAGES, "max_tokens": 1}
            reply = await it.http.post("/v1/chat/completions", json=body)
            assert reply.json()["choices"][0]["message"]["role"] == role
        for name, status in (("small", 400), ("other", 200)):
            for more in ({"max_tokens": 60}, {"max_tokens": 1, "logprobs": 3}):
                body = {**GREEDY, "model": name, "prompt": TEXT, **more}
                reply = await it.http.post("/v1/completions", json=body)
                assert reply.status_code == status, reply.text


async def test_a_node_of_no_model_is_refused(reference: Reference, tmp_path: Path) -> None:
    """By its name, and where the file says which weights a model has, by those."""
    wrong = {"digest": "0" * 16}
    async with AsyncExitStack() as stack:
        path = reference.folders["other"]
        node = await member_of(stack, DECODE, Plan(path), {"served_model_name": ("other",)})
        stray = await member_of(stack, DECODE, Plan(path), {"served_model_name": ("stray",)})
        config = RouterConfig(
            models=str(models_file(tmp_path, reference, other=wrong)),
            port=0,
            grpc_port=0,
            decode_node=(node.node.address, stray.node.address),
            timing=PATIENT,
        )
        router = Router(config)
        await router.start()
        stack.push_async_callback(router.stop)

        async def refused() -> bool:
            return all(status.refused for status in router.registry.statuses())

        await eventually(refused)
        for status in router.registry.statuses():
            assert "none of this router's models" in status.refused
        assert not router.services.ready


@dataclass
class Deployment:
    """Two routers and two models as processes, around a Redis."""

    routers: list[ServerProcess]
    decode: dict[str, ServerProcess]
    http: httpx.AsyncClient

    def ask(self, router: int, model: str, name: str) -> Reader:
        url = f"http://{self.routers[router].address}/v1/completions"
        headers = {"x-baton-resumable": "60", "x-request-id": name}
        body = {"model": model, "prompt": TEXT, **GREEDY, "max_tokens": 400, "stream": True}
        return Reader(self.http, "POST", url, json=body, headers=headers)

    async def can_serve(self) -> bool:
        """Both routers answer for both models."""
        for router in self.routers:
            for name in NAMES:
                body = {"model": name, "prompt": TEXT, "max_tokens": 1}
                url = f"http://{router.address}/v1/completions"
                if (await self.http.post(url, json=body)).status_code != 200:
                    return False
        return True


@asynccontextmanager
async def deployment(
    reference: Reference, folder: Path, redis_url: str
) -> AsyncIterator[Deployment]:
    client = aredis.Redis.from_url(redis_url)
    await client.flushall()
    await client.aclose()
    async with AsyncExitStack() as stack:
        flags = ("--num-kv-blocks", "64", "--max-num-seqs", "8", "--served-model-name")
        slow = {VARIABLE: "d.step_n:*:delay=10"}  # else streams may end before a router is killed
        starts: list[Any] = []
        for name, path in reference.folders.items():
            group = await stack.enter_async_context(Processes(path, folder, redis_url))
            starts.append(group.start("prefill_node", f"p-{name}", (*flags, name)))
            starts.append(group.start("decode_node", f"d-{name}", (*flags, name), slow))
        routers = await stack.enter_async_context(Processes(None, folder, redis_url))
        file = models_file(folder, reference)
        starts += [routers.router([], [], ("--models", str(file))) for _ in range(2)]
        _, d_small, _, d_other, *fronts = await asyncio.gather(*starts)
        http = await stack.enter_async_context(httpx.AsyncClient(trust_env=False, timeout=WAIT_S))
        running = Deployment(fronts, {"small": d_small, "other": d_other}, http)
        await eventually(running.can_serve)
        yield running


def said(events: list[tuple[str, str, str]]) -> str:
    chunks = [orjson.loads(data) for _, _, data in events if data != "[DONE]"]
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


@pytest.mark.redis
@pytest.mark.slow
@pytest.mark.long
async def test_another_router_with_the_same_file_adopts_each_models_requests(
    reference: Reference, tmp_path: Path, redis_url: str
) -> None:
    async with deployment(reference, tmp_path, redis_url) as d:
        plain = dict[str, str]()
        for name in NAMES:
            reader = d.ask(1, name, f"plain-{name}")
            plain[name] = said(await reader.done())
            assert plain[name].startswith(reference.texts[name]), reader.body
        first = {name: d.ask(0, name, f"killed-{name}") for name in NAMES}
        for reader in first.values():
            await reader.at_least(20)
        await d.routers[0].kill()
        for name, reader in first.items():
            seen = await reader.done()
            assert reader.cut
            assert said(seen) != plain[name], "the kill came too late to prove anything"
            url = f"http://{d.routers[1].address}/v1/requests/killed-{name}/stream"
            rest = Reader(d.http, "GET", url, headers={"last-event-id": seen[-1][0]})
            assert said(seen) + said(await rest.done()) == plain[name]
