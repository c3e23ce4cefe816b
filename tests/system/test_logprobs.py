"""Log-probabilities through the whole system in PD mode equal transformers' log-softmax in fp32.

Every number is checked, of output and prompt: the tokens' own and the alternatives', which are the
most probable tokens and no others; over HTTP (completions with echo, as lm-eval asks, and chats)
and gRPC, streamed and not, greedy and sampled, also when the prompt's KV was already cached on the
prefill node.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.protocol.events import TokenLogprob
from baton.protocol.sampling import SamplingParams
from router.server.app import create_app
from tests.cluster import Cluster, Plan, cluster
from tests.system.references import Tokens, prompts
from tests.tiny_models import make_tiny_model

TOLERANCE = 1e-4
NUM_TOKENS = 8
TOP = 4
PROMPTS = prompts((40, 1, 23))
GREEDY: dict[str, Any] = {"temperature": 0.0}
SAMPLED: dict[str, Any] = {"temperature": 2.0, "seed": 11}


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


async def tokens_of(c: Cluster, prompt: Tokens, drawn: Mapping[str, Any] = GREEDY) -> Tokens:
    params = SamplingParams(**drawn, max_tokens=NUM_TOKENS, ignore_eos=True)
    return (await c.client.generate(prompt, params)).token_ids


def near(told: Sequence[float], expected: torch.Tensor) -> None:
    assert told == pytest.approx(expected.tolist(), abs=TOLERANCE)


def id_of(name: str) -> int:
    """Of a token that is named by its id."""
    kind, _, number = name.partition(":")
    assert kind == "token_id", name
    return int(number)


def these_and_no_others(told: Mapping[int, float], row: torch.Tensor, *also: int) -> None:
    """The TOP most probable tokens of a row and `also`, each with its own log-probability."""
    best = row.topk(TOP + 1)
    assert best.values[TOP - 1] - best.values[TOP] > 2 * TOLERANCE, "no telling which is better"
    assert set(told) == {*best.indices[:TOP].tolist(), *also}
    near(list(told.values()), row[list(told)])


def rank_of(token_id: int, row: torch.Tensor) -> int:
    return 1 + int((row > row[token_id]).sum())


def own(rows: torch.Tensor, ids: Sequence[int]) -> torch.Tensor:
    """Log-probabilities of the tokens themselves."""
    return rows.gather(1, torch.tensor(list(ids))[:, None])[:, 0]


@pytest.mark.parametrize("drawn", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
async def test_completions_with_echo(model: Path, reference: Any, drawn: dict[str, Any]) -> None:
    """A sampled token is told with the model's own number, of before the temperature."""
    unlikely = 0
    async with served(model) as (c, client):
        for prompt in (*PROMPTS, PROMPTS[0]):  # the last one's KV is cached, and told all the same
            ids = prompt + await tokens_of(c, prompt, drawn)
            rows = log_softmax(reference, ids)
            ask: dict[str, Any] = {
                "prompt": list(prompt),
                "max_tokens": NUM_TOKENS,
                "echo": True,
                "logprobs": TOP,
                "return_tokens_as_token_ids": True,
                **drawn,
            }
            choice = (await post(client, "/v1/completions", **ask))["choices"][0]
            told = choice["logprobs"]
            assert [id_of(name) for name in told["tokens"]] == list(ids)
            assert (told["token_logprobs"][0], told["top_logprobs"][0]) == (None, None)
            near(told["token_logprobs"][1:], own(rows, ids[1:]))
            for row, top, token in zip(rows, told["top_logprobs"][1:], ids[1:], strict=True):
                these_and_no_others({id_of(name): top[name] for name in top}, row, token)
            unlikely += sum(len(top) > TOP for top in told["top_logprobs"][len(prompt) :])
            assert told["text_offset"][0] == 0
            assert told["text_offset"] == sorted(told["text_offset"])
            assert await streamed(client, **ask) == (choice["text"], told)
    assert (unlikely > 0) is (drawn is SAMPLED), "tokens that are none of the best"


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
        continuation = (await tokens_of(c, context))[:likely]
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
            near(logprobs, own(rows, ending))
            tops = told["top_logprobs"][len(context) : end]
            best = [max(top.values()) for top in tops]
            near(best, rows.amax(-1))
            assert (logprobs == best) is is_greedy


async def test_chats_and_what_a_stop_string_cuts(model: Path, reference: Any) -> None:
    async with served(model) as (c, client):
        ask: dict[str, Any] = {
            "messages": [{"role": "user", "content": "hello there"}],
            "max_tokens": NUM_TOKENS,
            "logprobs": True,
            "top_logprobs": TOP,
            "skip_special_tokens": False,
            "return_tokens_as_token_ids": True,
        }
        reply = await post(client, "/v1/chat/completions", **ask, prompt_logprobs=TOP)
        shown = (await client.post("/tokenize", json={"messages": ask["messages"]})).json()
        prompt = tuple(shown["tokens"])
        output = await tokens_of(c, prompt)
        rows = log_softmax(reference, prompt + output)
        content = reply["choices"][0]["logprobs"]["content"]
        assert [id_of(entry["token"]) for entry in content] == list(output)
        near([entry["logprob"] for entry in content], own(rows[len(prompt) - 1 :], output))
        for entry, row in zip(content, rows[len(prompt) - 1 :], strict=True):
            top = {id_of(each["token"]): each["logprob"] for each in entry["top_logprobs"]}
            these_and_no_others(top, row)
            assert list(top.values()) == sorted(top.values(), reverse=True)
        text = reply["choices"][0]["message"]["content"]
        spelled = [bytes(entry["bytes"]) for entry in content]
        assert b"".join(spelled).decode("utf-8", "replace") == text
        told = reply["prompt_logprobs"]
        assert (len(told), told[0]) == (len(prompt), None)
        for entry, row, token in zip(told[1:], rows, prompt[1:], strict=False):
            these_and_no_others({int(i): entry[i]["logprob"] for i in entry}, row, token)
            assert all(entry[i]["rank"] == rank_of(int(i), row) for i in entry)
        first = len(spelled[0].decode("utf-8", "replace"))
        stop = text[first : first + 2]
        cut = await post(client, "/v1/chat/completions", **ask, stop=[stop])
        assert cut["choices"][0]["finish_reason"] == "stop"
        kept = cut["choices"][0]["logprobs"]["content"]
        # Without logprobs of the prompt fewer rows are computed: numbers differ by rounding.
        assert [each["token"] for each in kept] == [each["token"] for each in content[: len(kept)]]
        near([each["logprob"] for each in kept], own(rows[len(prompt) - 1 :], output[: len(kept)]))
        assert len(kept) == cut["usage"]["completion_tokens"] < len(content)


async def test_the_grpc_client(model: Path, reference: Any) -> None:
    params = SamplingParams(
        **GREEDY, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=TOP, prompt_logprobs=TOP
    )

    def check(told: Sequence[TokenLogprob], row: torch.Tensor, token: int) -> None:
        assert told[0].token_id == token, "itself first"
        numbers = {each.token_id: each.logprob for each in told}
        assert len(numbers) == len(told)
        these_and_no_others(numbers, row, token)
        assert all(each.rank == rank_of(each.token_id, row) for each in told)

    async with served(model) as (c, _):
        for prompt, done in zip(PROMPTS, await c.generate(PROMPTS, params), strict=True):
            ids = prompt + done.token_ids
            rows = log_softmax(reference, ids)
            assert len(done.prompt_logprobs) == len(prompt) - 1
            told = [*done.prompt_logprobs, *done.logprobs]
            for each, row, token in zip(told, rows, ids[1:], strict=True):
                check(each, row, token)
