"""Guided outputs through router, prefill and decode node: valid, streamed or not, and token for
token what one engine gives, also when the decode node changes or dies in mid-grammar.
"""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from baton.client import AsyncClient
from baton.parsers import harmony
from baton.protocol.errors import InvalidRequest
from baton.protocol.sampling import GuidedDecoding, SamplingParams
from router.server.app import create_app
from tests.cluster import Plan, cluster
from tests.guided_cases import REGEXES, SCHEMAS, TOOLS, check_call, check_json
from tests.guided_sweep import POSITIONS, ask, random_model, served, sweep_schemas, sweep_tools
from tests.system.processes import Processes
from tests.system.references import one_engine_tokens, prompts
from tests.system.test_migration import Stream, move_all
from tests.tiny_models import make_tiny_model
from tests.waiting import WAIT_S, eventually

SEEDS = 2  # each streamed and whole; tests/guided_sweep.py has more
LONG = GuidedDecoding("regex", "([a-c]{6}-){16}end")
PROMPTS = prompts((3, 17, 40), seed=3)
PARAMS = SamplingParams(temperature=1.0, seed=7, max_tokens=400, guided=LONG)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("model"))


async def test_every_answer_is_valid_streamed_or_not(model: Path) -> None:
    async with served(model) as client:
        found = {name: count async for name, count in sweep_schemas(client, range(SEEDS))}
    assert found == dict.fromkeys([*SCHEMAS, *REGEXES], 2 * SEEDS)


@pytest.mark.parametrize(
    "name",
    # Each format's grammar and parser, without an engine: tests/router/test_forced_calls.py.
    [
        "hermes", "qwen3_coder", "gemma4",
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("llama3_json", "mistral", "deepseek_v3", "kimi_k2", "glm47")
        ),
    ],
)  # fmt: skip
async def test_calls_that_must_be_made_are_valid(model: Path, name: str) -> None:
    async with served(model, tool_call_parser=name) as client:
        found = {name: count async for name, count in sweep_tools(client, range(SEEDS))}
    assert found == {"required": 2 * SEEDS, "named": 2 * SEEDS}


@pytest.fixture(scope="module")
def channels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer has harmony's marks as special tokens."""
    path = make_tiny_model(
        "llama", tmp_path_factory.mktemp("channels"), max_position_embeddings=POSITIONS,
        vocab_size=320 + len(harmony.MARKERS),
    )  # fmt: skip
    file = str(path / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    tokenizer.add_special_tokens(list(harmony.MARKERS))
    tokenizer.save(file)
    return path


@pytest.mark.parametrize("stream", [False, True])
async def test_a_model_of_channels_thinks_and_then_follows_what_was_asked_for(
    channels: Path, stream: bool
) -> None:
    tokenizer = Tokenizer.from_file(str(channels / "tokenizer.json"))
    # It would begin with a thought, and end it at once: so a random model comes to its answer.
    bias = {str(tokenizer.token_to_id("<|end|>")): 100.0}
    asked = {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMAS["person"]}}
    async with served(channels, tool_call_parser="openai", enable_auto_tool_choice=True) as client:
        for seed in range(2):
            fields: dict[str, Any] = {"seed": seed, "logit_bias": bias, "tools": TOOLS}
            told = await ask(client, stream, **fields, tool_choice="required")
            (made,) = told["tool_calls"]
            assert (told["finish_reason"], told["content"]) == (
                "tool_calls",
                None if not stream else "",
            )
            check_call(made["function"]["name"], made["function"]["arguments"])
            told = await ask(client, stream, seed=seed, logit_bias=bias, response_format=asked)
            assert told["finish_reason"] == "stop"
            check_json(told["content"], SCHEMAS["person"])
            told = await ask(client, stream, **fields, response_format=asked)
            if told["finish_reason"] == "stop":
                check_json(told["content"], SCHEMAS["person"])
            else:
                assert told["finish_reason"] == "tool_calls"


async def test_calls_need_no_parser_to_be_configured(model: Path) -> None:
    async with served(model) as client:
        told = await ask(client, False, seed=1, tools=TOOLS[1:], tool_choice="required",
                         parallel_tool_calls=False)  # fmt: skip
        assert told["finish_reason"] == "tool_calls"


async def test_a_thought_is_free_and_what_follows_is_not(model: Path) -> None:
    schema = SCHEMAS["person"]
    asked = {"type": "json_schema", "json_schema": {"name": "p", "schema": schema}}
    async with served(model, reasoning_parser="qwen3") as client:
        free = await ask(client, True, seed=2, response_format=asked, max_tokens=40)
        assert (free["finish_reason"], free["content"]) == ("length", "")
        off = {"chat_template_kwargs": {"enable_thinking": False}}
        for stream in (False, True):
            told = await ask(client, stream, seed=2, response_format=asked, **off)
            assert told["finish_reason"] == "stop"
            check_json(told["content"], schema)


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_json": SCHEMAS["person"]},
        {"guided_json": json.dumps(SCHEMAS["person"])},
        {"structured_outputs": {"json": SCHEMAS["person"], "disable_any_whitespace": True}},
        {"guided_json": SCHEMAS["person"], "guided_decoding_backend": "xgrammar", "top_k": 1},
    ],
)
async def test_the_other_spellings(model: Path, fields: dict[str, Any]) -> None:
    async with served(model) as client:
        body = {"prompt": "x", "max_tokens": 900, "seed": 3, **fields}
        reply = await client.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        (choice,) = reply.json()["choices"]
        assert choice["finish_reason"] == "stop"
        check_json(choice["text"], SCHEMAS["person"])


STRICT = {"type": "integer", "minimum": 0, "maximum": 99, "multipleOf": 7}


def chat_of(schema: dict[str, Any], strict: bool) -> dict[str, Any]:
    spec = {"name": "x", "schema": schema, "strict": strict}
    return {
        "messages": [{"role": "user", "content": "x"}], "max_tokens": 40, "seed": 1,
        "response_format": {"type": "json_schema", "json_schema": spec},
    }  # fmt: skip


@pytest.mark.parametrize("flag", [True, False])
async def test_a_named_backend_follows_what_all_of_them_do(model: Path, flag: bool) -> None:
    """Named in the request, or as the nodes' own."""
    fields = {} if flag else {"guided_decoding_backend": "xgrammar"}
    node = {"guided_decoding_backend": "xgrammar" if flag else "auto"}
    unique = {"type": "array", "uniqueItems": True}
    async with cluster(Plan(model, [node], [node])) as c:
        transport = httpx.ASGITransport(create_app(c.router.services))
        async with httpx.AsyncClient(transport=transport, base_url="http://baton") as client:
            asked = chat_of(unique, strict=True)
            reply = await client.post("/v1/chat/completions", json={**asked, **fields})
            assert reply.status_code == 400, reply.text
            error = reply.json()["error"]
            assert error["param"] == "response_format.json_schema.schema"
            assert "uniqueItems" in error["message"]
            for asked in (chat_of(unique, strict=False), chat_of(STRICT, strict=True)):
                reply = await client.post("/v1/chat/completions", json={**asked, **fields})
                assert reply.status_code == 200, reply.text
            (choice,) = reply.json()["choices"]
            check_json(choice["message"]["content"], STRICT)
        await c.settle()


async def test_calls_are_made_whatever_backend_is_named(model: Path) -> None:
    async with served(model, tool_call_parser="hermes") as client:
        told = await ask(client, False, seed=1, tools=TOOLS[1:], tool_choice="required",
                         parallel_tool_calls=False, guided_decoding_backend="xgrammar")  # fmt: skip
        assert told["finish_reason"] == "tool_calls"
        (call,) = told["tool_calls"]
        check_call(call["function"]["name"], call["function"]["arguments"])


@pytest.mark.parametrize(
    "fields", [{"n": 4}, {"n": 2, "best_of": 4}, {"n": 3, "use_beam_search": True}]
)
async def test_several_answers_are_all_of_the_form(model: Path, fields: dict[str, Any]) -> None:
    """Every sample's token 1 is masked where the prompt was computed."""
    async with served(model) as client:
        asked = {"guided_json": SCHEMAS["person"], "max_tokens": 900, "seed": 5, **fields}
        reply = await client.post("/v1/completions", json={"prompt": "x", **asked})
        assert reply.status_code == 200, reply.text
        choices = reply.json()["choices"]
        assert len(choices) == fields["n"]
        for choice in choices:
            assert choice["finish_reason"] == "stop"
            check_json(choice["text"], SCHEMAS["person"])


async def test_disaggregated_equals_one_engine_over_grpc(model: Path) -> None:
    expected = one_engine_tokens(model, PROMPTS, PARAMS)
    async with cluster(Plan(model)) as c:
        done = await c.generate(PROMPTS, PARAMS)
        assert [generation.token_ids for generation in done] == expected
        for generation in done:
            assert re.fullmatch(LONG.grammar, generation.text)
            assert generation.finish_reason == "stop"
        # Token 1 came masked from the prefill node, which replays nothing.
        assert c.prefill[0].stats.num_generated_tokens == len(PROMPTS)
        for member in c.members:
            assert member.engine.grammars is not None
            assert member.engine.grammars.num_compiled == 1
        assert sum(member.transfers.bytes_received["grpc"] for member in c.decode) > 0
        with pytest.raises(InvalidRequest) as caught:
            await c.client.generate((8,), SamplingParams(guided=GuidedDecoding("regex", "(")))
        assert caught.value.field == "guided"
        await c.settle()


@pytest.mark.parametrize("method", ["ngram", "draft"])
async def test_speculation_on_the_decode_node_changes_no_token(model: Path, method: str) -> None:
    expected = one_engine_tokens(model, PROMPTS, PARAMS)
    guess = {"speculative_method": method}
    if method == "draft":
        guess["speculative_model"] = str(model)
    async with cluster(Plan(model, decode=[guess])) as c:
        done = await c.generate(PROMPTS, PARAMS)
        assert [generation.token_ids for generation in done] == expected
        assert c.decode[0].stats.num_accepted_tokens > 0
        await c.settle()


async def test_a_request_moves_to_another_node_within_its_grammar(model: Path) -> None:
    async with cluster(Plan(model, decode=[{"num_kv_blocks": 256}] * 2)) as c:
        streams = [Stream(c.client, prompt, PARAMS) for prompt in PROMPTS]
        c.pace(streams, lambda: [len(s.tokens) for s in streams if not s.task.done()])
        for stream in streams:
            await stream.at_least(9)
        assert await move_all(c) == [True] * len(PROMPTS)
        assert [await stream.whole() for stream in streams] == one_engine_tokens(
            model, PROMPTS, PARAMS
        )
        assert c.router.services.dispatcher.migrations.done == len(PROMPTS)
        await c.settle()


async def _registered(client: AsyncClient, count: int) -> bool:
    return len((await client.server_info()).nodes) == count


@pytest.mark.slow
@pytest.mark.long
async def test_a_killed_decode_node_leaves_no_trace_in_the_output(
    model: Path, tmp_path: Path
) -> None:
    """Real processes: the other node replays what was told and goes on within the grammar."""
    flags = ("--num-kv-blocks", "64", "--max-num-seqs", "8")
    async with Processes(model, tmp_path) as processes:
        prefill, decode = await processes.nodes(1, 2, flags)
        router = await processes.router(prefill, decode)
        async with AsyncClient(router.ready["grpc_address"]) as client:
            await eventually(lambda: _registered(client, 3))
            stream = Stream(client, PROMPTS[1], PARAMS)
            await stream.at_least(30)
            info = await client.server_info()
            busy = next(node for node in info.nodes if node.role == "decode" and node.running)
            await next(one for one in decode if one.address == busy.address).kill()
            async with asyncio.timeout(WAIT_S):
                found = await stream.whole()
            assert found == one_engine_tokens(model, [PROMPTS[1]], PARAMS)[0]
            assert stream.retries >= 1
