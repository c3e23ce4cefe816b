"""Log-probabilities through the whole system in PD mode equal transformers' log-softmax in fp32.

Every number is checked: the tokens' own, the alternatives', the prompt's; over HTTP (completions
with echo, as lm-eval asks, and chats) and gRPC, streamed and not, also when the prompt's KV was
already cached on the prefill node.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.sampling import SamplingParams
from router.app import create_app
from tests.cluster import Cluster, Plan, cluster
from tests.system.references import Tokens, prompts
from tests.tiny_models import make_tiny_model

TOLERANCE = 1e-4
NUM_TOKENS = 8
TOP = 4
PROMPTS = prompts((40, 1, 23))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def reference(model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def log_softmax(reference: Any, ids: Sequence[int]) -> torch.Tensor:
    """[len(ids) - 1, vocab]: row i is about token i + 1."""
    with torch.no_grad():
        return reference(torch.tensor([list(ids)])).logits[0, :-1].log_softmax(-1)


@asynccontextmanager
async def served(model: Path) -> AsyncIterator[tuple[Cluster, httpx.AsyncClient]]:
    """A prefill and a decode node, and an HTTP client of their router; afterwards all is idle."""
    async with cluster(Plan(model)) as c:
        transport = httpx.ASGITransport(create_app(c.router.services))
        async with httpx.AsyncClient(transport=transport, base_url="http://baton") as client:
            yield c, client
        await c.settle()
        assert sum(member.stats.num_prompt_tokens for member in c.decode) == 0
        assert sum(member.transfers.bytes_received["grpc"] for member in c.decode) > 0


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    reply = await client.post(path, json={"temperature": 0, "ignore_eos": True, **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


async def greedy(c: Cluster, prompt: Tokens) -> Tokens:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return (await c.client.generate(prompt, params)).token_ids


def near(told: Sequence[float], expected: torch.Tensor) -> None:
    assert told == pytest.approx(expected.tolist(), abs=TOLERANCE)


def own(rows: torch.Tensor, ids: Sequence[int]) -> torch.Tensor:
    """Log-probabilities of the tokens themselves."""
    return rows.gather(1, torch.tensor(list(ids))[:, None])[:, 0]


async def test_completions_with_echo(model: Path, reference: Any) -> None:
    async with served(model) as (c, client):
        for prompt in (*PROMPTS, PROMPTS[0]):  # the last one's KV is cached, and told all the same
            output = await greedy(c, prompt)
            rows = log_softmax(reference, prompt + output)
            ask: dict[str, Any] = {"prompt": list(prompt), "max_tokens": NUM_TOKENS, "echo": True}
            choice = (await post(client, "/v1/completions", **ask, logprobs=TOP))["choices"][0]
            told = choice["logprobs"]
            assert len(told["tokens"]) == len(prompt) + NUM_TOKENS
            assert (told["token_logprobs"][0], told["top_logprobs"][0]) == (None, None)
            near(told["token_logprobs"][1:], own(rows, (prompt + output)[1:]))
            best = rows.topk(TOP).values
            for at, top in enumerate(told["top_logprobs"][1:]):
                near(sorted(top.values(), reverse=True)[: min(TOP, len(top))],
                     best[at][: min(TOP, len(top))])  # fmt: skip
            assert told["text_offset"][0] == 0
            assert told["text_offset"] == sorted(told["text_offset"])
            assert await streamed(client, **ask, logprobs=TOP) == (choice["text"], told)


async def streamed(client: httpx.AsyncClient, **body: Any) -> tuple[str, dict[str, Any]]:
    """The folded chunks of a streamed completion."""
    text: str = ""
    told: dict[str, list[Any]] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    ask = {"temperature": 0, "ignore_eos": True, "stream": True, **body}
    async with client.stream("POST", "/v1/completions", json=ask) as reply:
        async for line in reply.aiter_lines():
            data = line.removeprefix("data: ")
            if not data or data == "[DONE]":
                continue
            choice = orjson.loads(data)["choices"][0]
            text += choice["text"]
            for name in told:
                told[name] += (choice["logprobs"] or {}).get(name, [])
    return text, told


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_loglikelihood_as_lm_eval_asks_for_it(
    model: Path, reference: Any, max_tokens: int
) -> None:
    """Context and continuation as one prompt; one token more that is thrown away, or none."""
    context, likely = PROMPTS[0], 5
    async with served(model) as (c, client):
        continuation = (await greedy(c, context))[:likely]
        for ending, is_greedy in ((continuation, True), (PROMPTS[2][:likely], False)):
            ids = [*context, *ending]
            ask = {"prompt": [ids], "max_tokens": max_tokens, "logprobs": 1, "echo": True}
            reply = await post(client, "/v1/completions", **ask, seed=1234)
            told = reply["choices"][0]["logprobs"]
            end = len(ids)
            assert len(told["tokens"]) == end + max_tokens
            assert reply["usage"]["completion_tokens"] == max_tokens
            assert reply["choices"][0]["finish_reason"] == "length"
            logprobs = told["token_logprobs"][len(context) : end]
            rows = log_softmax(reference, ids)[len(context) - 1 :]
            near([sum(logprobs)], own(rows, ending).sum()[None])
            tops = told["top_logprobs"][len(context) : end]
            best = [max(top.values()) for top in tops]
            assert (logprobs == best) is is_greedy


async def test_chats_and_what_a_stop_string_cuts(model: Path, reference: Any) -> None:
    async with served(model) as (c, client):
        ask: dict[str, Any] = {
            "messages": [{"role": "user", "content": "hello there"}],
            "max_tokens": NUM_TOKENS,
            "logprobs": True,
            "top_logprobs": TOP,
            "skip_special_tokens": False,
        }
        reply = await post(client, "/v1/chat/completions", **ask, prompt_logprobs=1)
        shown = (await client.post("/tokenize", json={"messages": ask["messages"]})).json()
        prompt = tuple(shown["tokens"])
        output = await greedy(c, prompt)
        rows = log_softmax(reference, prompt + output)
        content = reply["choices"][0]["logprobs"]["content"]
        near([entry["logprob"] for entry in content], own(rows[len(prompt) - 1 :], output))
        for entry, best in zip(content, rows[len(prompt) - 1 :].topk(TOP).values, strict=True):
            near([each["logprob"] for each in entry["top_logprobs"]], best)
        text = reply["choices"][0]["message"]["content"]
        whole = b"".join(bytes(entry["bytes"]) for entry in content)
        assert whole.decode("utf-8", "replace") == text
        told = reply["prompt_logprobs"]
        assert (len(told), told[0]) == (len(prompt), None)
        near([row[str(i)]["logprob"] for row, i in zip(told[1:], prompt[1:], strict=True)],
             own(rows, prompt[1:]))  # fmt: skip
        assert all(row[str(i)]["rank"] == 1 or len(row) == 2 for row, i in
                   zip(told[1:], prompt[1:], strict=True))  # fmt: skip
        stop = text[len(content[0]["token"]) : len(content[0]["token"]) + 2]
        cut = await post(client, "/v1/chat/completions", **ask, stop=[stop])
        assert cut["choices"][0]["finish_reason"] == "stop"
        kept = cut["choices"][0]["logprobs"]["content"]
        assert kept == content[: len(kept)]
        assert len(kept) == cut["usage"]["completion_tokens"] < len(content)


async def test_the_grpc_client(model: Path, reference: Any) -> None:
    params = SamplingParams(
        temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2, prompt_logprobs=1
    )
    async with served(model) as (c, _):
        for prompt, done in zip(PROMPTS, await c.generate(PROMPTS, params), strict=True):
            rows = log_softmax(reference, prompt + done.token_ids)
            at = len(prompt) - 1
            assert [row[0].token_id for row in done.logprobs] == list(done.token_ids)
            near([row[0].logprob for row in done.logprobs], own(rows[at:], done.token_ids))
            assert [row[0].token_id for row in done.prompt_logprobs] == list(prompt[1:])
            near([row[0].logprob for row in done.prompt_logprobs], own(rows, prompt[1:]))
            assert all(len(row) in (2, 3) for row in done.logprobs)
