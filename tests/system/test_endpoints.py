"""Endpoints beside OpenAI's generation, through router and nodes in PD mode.

Token ids in and out, ids beside the text, adapters by name, words that must not come, aborts by an
operator, and vLLM's Grafana board: every expression of it has data.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from prometheus_client.parser import text_string_to_metric_families

from router.admin.server import create_admin_app
from router.server.app import create_app
from tests.cluster import Cluster, Plan, cluster
from tests.engine.test_models_lora import ALL, linear_layers, make_adapter, merged_model
from tests.golden.greedy import NEW_TOKENS, transformers_tokens
from tests.system.references import prompts
from tests.tiny_models import make_tiny_model
from tests.waiting import WAIT_S, eventually

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
PROMPT = list(prompts((20,))[0])
SERVED = "house-name"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"))


@asynccontextmanager
async def served(plan: Plan) -> AsyncIterator[tuple[Cluster, httpx.AsyncClient]]:
    """A cluster and an HTTP client of its router; afterwards every pool is whole."""
    async with cluster(plan) as c:
        transport = httpx.ASGITransport(create_app(c.router.services))
        async with httpx.AsyncClient(transport=transport, base_url="http://baton") as client:
            yield c, client
        await c.settle()


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    reply = await client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def streamed(client: httpx.AsyncClient, path: str, **body: Any) -> list[dict[str, Any]]:
    reply = await client.post(path, json={**body, "stream": True})
    assert reply.status_code == 200, reply.text
    *events, done = [x.removeprefix("data: ") for x in reply.text.split("\n\n") if x]
    assert done == "[DONE]"
    return [orjson.loads(event) for event in events]


async def test_token_ids_in_and_out(model: Path) -> None:
    async with served(Plan(model)) as (_, client):
        ask = {"prompt": PROMPT, "max_tokens": 9, **GREEDY, "return_token_ids": True}
        reply = await post(client, "/v1/completions", **ask)
        (choice,) = reply["choices"]
        wanted = choice["token_ids"]
        assert len(wanted) == 9
        assert choice["prompt_token_ids"] == PROMPT
        chunks = await streamed(client, "/v1/completions", **ask)
        parts = [chunk["choices"][0] for chunk in chunks]
        assert [t for part in parts for t in part.get("token_ids", ())] == wanted
        told = [part["prompt_token_ids"] for part in parts]
        assert told == [PROMPT, *[None] * (len(parts) - 1)]
        body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 9, **GREEDY, "logprobs": 2}}
        whole = await post(client, "/inference/v1/generate", request_id="mine", **body)
        assert whole["request_id"] == "mine"
        assert whole["choices"][0]["token_ids"] == wanted
        assert whole["choices"][0]["finish_reason"] == "length"
        told = whole["choices"][0]["logprobs"]["content"]
        assert [entry["token"] for entry in told] == [f"token_id:{token}" for token in wanted]
        assert all(len(entry["top_logprobs"]) == 2 for entry in told)
        chunks = await streamed(
            client, "/inference/v1/generate", stream_options={"include_usage": True}, **body
        )
        assert chunks[-1]["usage"] == {
            "prompt_tokens": len(PROMPT), "completion_tokens": 9, "total_tokens": len(PROMPT) + 9
        }  # fmt: skip
        streams = [chunk["choices"][0] for chunk in chunks[:-1]]
        assert [t for part in streams for t in part["token_ids"]] == wanted
        assert streams[-1]["finish_reason"] == "length"
        messages = [{"role": "user", "content": "hello"}]
        chat = {"messages": messages, "max_tokens": 7, **GREEDY, "return_token_ids": True}
        reply = await post(client, "/v1/chat/completions", **chat)
        asked = await post(client, "/tokenize", messages=messages)
        assert reply["prompt_token_ids"] == asked["tokens"]
        chunks = await streamed(client, "/v1/chat/completions", **chat)
        assert chunks[0]["prompt_token_ids"] == asked["tokens"]
        ids = [t for chunk in chunks for t in chunk["choices"][0].get("token_ids", ())]
        assert ids == reply["choices"][0]["token_ids"]
        assert len(ids) == 7


async def test_cut_prompts_and_tokens_that_may_or_may_not_come(model: Path) -> None:
    async with served(Plan(model)) as (_, client):
        ask = {"prompt": PROMPT, "max_tokens": 6, **GREEDY, "return_token_ids": True}
        cut = await post(client, "/v1/completions", **ask, truncate_prompt_tokens=5)
        assert cut["choices"][0]["prompt_token_ids"] == PROMPT[-5:]
        assert cut["usage"]["prompt_tokens"] == 5
        free = (await post(client, "/v1/completions", **ask))["choices"][0]
        words = [(await post(client, "/detokenize", tokens=[t]))["prompt"]
                 for t in free["token_ids"]]  # fmt: skip
        bad = next(word for word in words if word.isascii() and word.strip() and len(word) < 4)
        held = (await post(client, "/v1/completions", **ask, bad_words=[bad]))["choices"][0]
        index = words.index(bad)
        assert held["token_ids"][:index] == free["token_ids"][:index]
        assert free["token_ids"][index] not in held["token_ids"]
        allowed = {7, 70, free["token_ids"][0]}
        few = {**ask, "allowed_token_ids": sorted(allowed), "n": 3, "temperature": 1.0}
        for search in (False, True):  # token 1 on the prefill node, the others on the decode node
            reply = await post(client, "/v1/completions", **few, use_beam_search=search)
            ids = [choice["token_ids"] for choice in reply["choices"]]
            assert [len(each) for each in ids] == [6, 6, 6]
            assert {token for each in ids for token in each} <= allowed
        best = await post(client, "/v1/completions", **{**few, "n": 1, "temperature": 0})
        assert best["choices"][0]["token_ids"][0] == free["token_ids"][0]


async def test_adapters_are_models_by_name(model: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "adapter", linear_layers(model, ALL), seed=1)
    lora = {"lora_modules": (f"poet={adapter}",)}
    plan = Plan(model, prefill=(lora,), decode=(lora,), router={"served_model_name": (SERVED,)})
    plain = transformers_tokens(merged_model(model, None), [PROMPT])[0]
    merged = transformers_tokens(merged_model(model, adapter), [PROMPT])[0]
    assert plain != merged
    async with served(plan) as (c, client):
        cards = (await client.get("/v1/models")).json()["data"]
        assert [(card["id"], card["parent"]) for card in cards] == [
            (SERVED, None), ("poet", SERVED)
        ]  # fmt: skip
        assert (await client.get("/v1/models/poet")).json()["parent"] == SERVED
        ask = {"prompt": PROMPT, "max_tokens": NEW_TOKENS, **GREEDY, "return_token_ids": True}
        for name, wanted in ((SERVED, plain), ("poet", merged)):
            reply = await post(client, "/v1/completions", model=name, **ask)
            assert reply["model"] == name
            assert reply["choices"][0]["token_ids"] == wanted
        unknown = await client.post("/v1/completions", json={"model": "other", **ask})
        assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "model")
        own, base = [
            (await post(client, "/v1/embeddings", model=name, input=PROMPT))["data"][0]["embedding"]
            for name in ("poet", SERVED)
        ]
        assert own != pytest.approx(base, abs=1e-3)
        assert c.prefill[0].stats.num_pooled_prompts == 2
        page = (await client.get("/metrics")).text
        assert 'vllm:lora_requests_info{max_lora="1",model_name="house-name"' in page


@pytest.mark.parametrize("after", [0, 3])
async def test_an_operators_abort_is_told_as_an_end(model: Path, after: int) -> None:
    async with served(Plan(model, router={"admin_port": 0, "admin_key": ("o",)})) as (c, client):
        admin = httpx.ASGITransport(create_admin_app(c.router.services))
        key = {"authorization": "Bearer o"}
        async with httpx.AsyncClient(
            transport=admin, base_url="http://admin", headers=key
        ) as operator:
            body = {"prompt": PROMPT, "max_tokens": 400, **GREEDY}
            go_on = c.hold_after(20)
            asked = asyncio.create_task(
                client.post("/v1/completions", json=body, headers={"x-request-id": "long.one"})
            )

            async def under_way() -> list[Any]:
                live = (await operator.get("/debug")).json()["requests"]
                return [each for each in live if each["output_tokens"] >= after]

            live = await eventually(under_way)
            assert live[0]["id"].startswith("cmpl-long.one-0.")
            nobody = await post(operator, "/abort_requests", request_ids=["long"])
            assert nobody == {"aborted": []}
            load = (await client.get("/load")).json()
            assert load == {"server_load": 1}
            told = await post(operator, "/abort_requests", request_ids=["long.one"])
            assert told == {"aborted": [live[0]["id"]]}
            go_on.set()
            async with asyncio.timeout(WAIT_S):
                reply = await asked
            assert reply.headers["x-request-id"] == "long.one"
            assert reply.json()["id"] == "cmpl-long.one"
            assert reply.json()["choices"][0]["finish_reason"] == "abort"
            assert after <= reply.json()["usage"]["completion_tokens"] < 400
            assert (await client.get("/load")).json() == {"server_load": 0}
            debug = (await operator.get("/debug")).json()
            assert {node["role"] for node in debug["nodes"]} == {"prefill", "decode"}
            assert "api_key" not in (await operator.get("/server_info")).json()["config"]
            assert (await client.get("/ready")).status_code == 200
            await post(operator, "/drain", node=debug["nodes"][0]["node_id"])
            await post(operator, "/drain")
            assert (await client.get("/ready")).status_code == 503


# ---- vLLM's Grafana board ----

_RATE = '{model_name="$model_name"}[$__rate_interval]'
_HISTOGRAMS = (
    "e2e_request_latency_seconds",
    "time_per_output_token_seconds",
    "inter_token_latency_seconds",  # its newer name
    "time_to_first_token_seconds",
)
BOARD = [
    *(
        f"histogram_quantile({quantile}, sum by(le) (rate(vllm:{name}_bucket{_RATE})))"
        for name in _HISTOGRAMS
        for quantile in (0.99, 0.95, 0.9, 0.5)
    ),
    *(f"rate(vllm:{name}_sum{_RATE})\n/\nrate(vllm:{name}_count{_RATE})" for name in _HISTOGRAMS),
    f"rate(vllm:prompt_tokens_total{_RATE})",
    f"rate(vllm:generation_tokens_total{_RATE})",
    'vllm:num_requests_running{model_name="$model_name"}',
    'vllm:num_requests_waiting{model_name="$model_name"}',
    'vllm:gpu_cache_usage_perc{model_name="$model_name"}',
    'vllm:kv_cache_usage_perc{model_name="$model_name"}',  # its newer name
    f"sum by(le) (increase(vllm:request_prompt_tokens_bucket{_RATE}))",
    f"sum by(le) (increase(vllm:request_generation_tokens_bucket{_RATE}))",
    f"sum by(finished_reason) (increase(vllm:request_success_total{_RATE}))",
    f"rate(vllm:request_queue_time_seconds_sum{_RATE})",
    f"rate(vllm:request_prefill_time_seconds_sum{_RATE})",
    f"rate(vllm:request_decode_time_seconds_sum{_RATE})",
    f"rate(vllm:request_max_num_generation_tokens_sum{_RATE})",
    # Other boards of vLLM's.
    f"rate(vllm:request_inference_time_seconds_sum{_RATE})",
    f"rate(vllm:request_params_n_count{_RATE})",
    f"rate(vllm:request_params_max_tokens_sum{_RATE})",
    f"rate(vllm:prefix_cache_hits_total{_RATE}) / rate(vllm:prefix_cache_queries_total{_RATE})",
    f"rate(vllm:num_preemptions_total{_RATE})",
    'vllm:cache_config_info{model_name="$model_name"}',
]
_IDLE = ("num_requests_", "cache_usage_perc", "num_preemptions")  # may well be 0


async def test_every_expression_of_the_board_has_data(model: Path) -> None:
    name: dict[str, Any] = {"served_model_name": (SERVED,)}
    async with served(Plan(model, (name,), (name,), name)) as (c, client):
        for _ in range(2):
            await post(client, "/v1/completions", prompt=PROMPT * 4, max_tokens=5, **GREEDY)
        pages = [(await client.get("/metrics")).text]
        pages += [each.node.shell.metrics.render().decode() for each in c.members]
    values: dict[str, float] = {}
    for family in itertools.chain(*map(text_string_to_metric_families, pages)):
        for sample in family.samples:
            if sample.labels.get("model_name") == SERVED:
                values[sample.name] = values.get(sample.name, 0.0) + sample.value
    for expression in BOARD:
        names = re.findall(r"(vllm:\w+)\{model_name=", expression)
        assert names, expression
        for name in names:
            assert name in values, expression
            assert values[name] > 0 or any(idle in name for idle in _IDLE), expression
