"""The whole proof of guided decoding: python -m tests.guided_sweep [--seeds 1000] [--through pd]

A random model, sampled at temperature 1: every output must parse and validate, whatever the seed.
Through `llm` (one engine) or `pd` (prefill and decode node over gRPC, asked over HTTP, every seed
both streamed and whole). The suite runs a small share of the same (tests/engine/test_guided.py,
tests/system/test_guided.py). Prints a line per case as it is done.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import torch

from baton.llm import LLM
from baton.protocol.request import FinishReason
from baton.protocol.sampling import GuidedDecoding, SamplingParams
from router.server.app import create_app
from tests.cluster import Plan, cluster
from tests.guided_cases import (
    MAX_TOKENS,
    REGEXES,
    SCHEMAS,
    TOOLS,
    check_call,
    check_json,
    check_regex,
)
from tests.tiny_models import make_tiny_model

CONCURRENT = 64
POSITIONS = 2048
FORMATS = ("hermes", "qwen3_coder", "llama3_json", "mistral", "deepseek_v3", "deepseek_v31")


def random_model(path: Path) -> Path:
    return make_tiny_model("llama", path, max_position_embeddings=POSITIONS)


# ---- one engine ----


def sweep_engine(llm: LLM, seeds: Iterable[int]) -> Iterator[tuple[str, tuple[int, int]]]:
    """Per case: outputs, and their tokens. Raises at the first that is wrong."""
    seeds = list(seeds)
    for name, schema in SCHEMAS.items():
        guided = GuidedDecoding("json_schema", json.dumps(schema))
        yield name, _generate(llm, guided, seeds, lambda text, s=schema: check_json(text, s))
    for pattern in REGEXES:
        guided = GuidedDecoding("regex", pattern)
        yield pattern, _generate(llm, guided, seeds, lambda text, p=pattern: check_regex(text, p))


def _generate(
    llm: LLM, guided: GuidedDecoding, seeds: list[int], check: Callable[[str], None]
) -> tuple[int, int]:
    params = [
        SamplingParams(guided=guided, max_tokens=MAX_TOKENS, temperature=1.0, seed=seed)
        for seed in seeds
    ]
    outputs = llm.generate(["hello"] * len(seeds), params)
    for output in outputs:
        assert output.finish_reason is FinishReason.STOP, output.finish_reason
        check(output.text or "")
    return len(outputs), sum(len(output.token_ids) for output in outputs)


# ---- prefill and decode ----


@asynccontextmanager
async def served(model: Path, **router: Any) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client of a router with one node of each role; afterwards all is idle."""
    node = {"num_kv_blocks": CONCURRENT * POSITIONS // 32, "check_invariants": False}
    async with cluster(Plan(model, [node], [node], router=router)) as c:
        transport = httpx.ASGITransport(create_app(c.router.services))
        async with httpx.AsyncClient(
            transport=transport, base_url="http://baton", timeout=300.0
        ) as client:
            yield client
        await c.settle()
        assert sum(member.stats.num_prompt_tokens for member in c.decode) == 0


async def ask(client: httpx.AsyncClient, stream: bool, **body: Any) -> dict[str, Any]:
    """A chat's message with `finish_reason` in it, put together from its deltas if streamed."""
    body = {
        "messages": [{"role": "user", "content": "hi"}], "temperature": 1.0, "stream": stream,
        "max_tokens": MAX_TOKENS, **body,
    }  # fmt: skip
    if not stream:
        reply = await client.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
        choice = reply.json()["choices"][0]
        return {**choice["message"], "finish_reason": choice["finish_reason"]}
    whole: dict[str, Any] = {"content": "", "tool_calls": [], "finish_reason": None}
    frames: list[str] = []
    async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        assert reply.status_code == 200, await reply.aread()
        async for line in reply.aiter_lines():
            assert not line or line.startswith("data: "), line
            if line:
                frames.append(line.removeprefix("data: "))
    assert frames.pop() == "[DONE]"
    for frame in map(json.loads, frames):
        assert "choices" in frame, frame
        _join(whole, frame["choices"][0])
    return whole


def _join(whole: dict[str, Any], choice: dict[str, Any]) -> None:
    assert whole["finish_reason"] is None, choice
    whole["finish_reason"] = choice["finish_reason"]
    whole["content"] += choice["delta"].get("content") or ""
    for part in choice["delta"].get("tool_calls") or ():
        calls = whole["tool_calls"]
        if part["index"] == len(calls):
            calls.append({"function": {"name": part["function"]["name"], "arguments": ""}})
        else:
            assert "name" not in part["function"], part
        calls[part["index"]]["function"]["arguments"] += part["function"].get("arguments") or ""


async def sweep_schemas(
    client: httpx.AsyncClient, seeds: Iterable[int]
) -> AsyncIterator[tuple[str, int]]:
    """Every schema and regex, and how many of its answers were valid."""

    async def schema(name: str, seed: int, stream: bool) -> None:
        spec = {"name": name, "strict": True, "schema": SCHEMAS[name]}
        asked = {"type": "json_schema", "json_schema": spec}
        told = await ask(client, stream, seed=seed, response_format=asked)
        assert told["finish_reason"] == "stop", told
        check_json(told["content"], SCHEMAS[name])

    async def regex(pattern: str, seed: int, stream: bool) -> None:
        told = await ask(client, stream, seed=seed, structured_outputs={"regex": pattern})
        assert told["finish_reason"] == "stop", told
        check_regex(told["content"], pattern)

    for name in SCHEMAS:
        yield name, await _all(schema, name, seeds)
    for pattern in REGEXES:
        yield pattern, await _all(regex, pattern, seeds)


async def sweep_tools(
    client: httpx.AsyncClient, seeds: Iterable[int]
) -> AsyncIterator[tuple[str, int]]:
    """Calls that must be made, any of the tools or a named one, and how many were valid."""

    async def call(choice: Any, seed: int, stream: bool) -> None:
        told = await ask(
            client, stream, seed=seed, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False
        )
        assert told["finish_reason"] == "tool_calls", told
        assert not told["content"], told
        (made,) = told["tool_calls"]
        check_call(made["function"]["name"], made["function"]["arguments"])
        if isinstance(choice, dict):
            assert made["function"]["name"] == choice["function"]["name"]

    named = {"type": "function", "function": {"name": "get_weather"}}
    for name, choice in (("required", "required"), ("named", named)):
        yield name, await _all(call, choice, seeds)


async def _all(
    one: Callable[[Any, int, bool], Awaitable[None]], case: Any, seeds: Iterable[int]
) -> int:
    """Every seed whole and streamed. What fails says which it was."""
    slots = asyncio.Semaphore(CONCURRENT)

    async def run(seed: int, stream: bool) -> None:
        async with slots:
            try:
                await one(case, seed, stream)
            except Exception as error:
                error.add_note(f"{case}, seed {seed}, {'streamed' if stream else 'whole'}")
                raise

    asked = [(seed, stream) for seed in seeds for stream in (False, True)]
    await asyncio.gather(*(run(seed, stream) for seed, stream in asked))
    return len(asked)


async def sweep_pd(model: Path, seeds: int, tool_seeds: int) -> None:
    started = time.monotonic()
    async with served(model) as client:
        async for name, count in sweep_schemas(client, range(seeds)):
            _say(started, f"{name}: {count} answers valid")
    for parser in FORMATS:
        async with served(model, tool_call_parser=parser) as client:
            async for name, count in sweep_tools(client, range(tool_seeds)):
                _say(started, f"tools as {parser}, {name}: {count} calls valid")


def _say(started: float, line: str) -> None:
    shown = line.replace("\n", "\\n")  # a regex may hold one
    sys.stdout.write(f"{time.monotonic() - started:5.0f} s  {shown}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--tool-seeds", type=int, default=1000)
    parser.add_argument("--through", choices=("llm", "pd"), default="llm")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = random_model(Path(folder))
        if asked.through == "pd":
            asyncio.run(sweep_pd(model, asked.seeds, asked.tool_seeds))
            return
        llm = LLM(str(model), num_kv_blocks=CONCURRENT * POSITIONS // 32, max_num_seqs=CONCURRENT)
        started = time.monotonic()
        for name, (count, tokens) in sweep_engine(llm, range(asked.seeds)):
            _say(started, f"{name}: {count} outputs valid, {tokens / count:.0f} tokens each")


if __name__ == "__main__":
    main()
