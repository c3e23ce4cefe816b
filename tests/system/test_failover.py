"""Every kind of request outlives its nodes: router, prefill and decode nodes in one process, fp32.

A node's death is its session's: the node aborts whatever the router gave it, the router hears no
more of it. All kinds run at once and the nodes die under them in turn, at whatever position each
has reached by then; the answers must be those of the same cluster before anything died.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import orjson
import pytest

from baton.protocol.errors import NodeLost, Unavailable
from baton.protocol.request import Request
from baton.protocol.sampling import SamplingParams
from router.request.trace import RequestTrace
from router.server.app import create_app
from router.store.base import LOGGED
from tests.cluster import Cluster, Member, Plan, cluster
from tests.engine.test_models_lora import linear_layers, make_adapter
from tests.system.references import prompts
from tests.tiny_models import make_tiny_model
from tests.waiting import WAIT_S, eventually

Body = dict[str, Any]
SHORT, LONG, OTHER = (list(ids) for ids in prompts([40, 150, 65], seed=8))
SENTENCE: Final = "([a-c]{6}-){20}end"
TOOL: Final[Body] = {
    "type": "function",
    "function": {
        "name": "note",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string", "pattern": f"^{SENTENCE}$"}},
            "required": ["text"],
            "additionalProperties": False,
        },
    },
}
CHAT: Final[Body] = {"messages": [{"role": "user", "content": "hello there, who are you?"}]}
FREE: Final[Body] = {"temperature": 0.9, "max_tokens": 170, "ignore_eos": True}
CASES: Final[dict[str, Body]] = {
    "greedy": {**FREE, "prompt": LONG, "temperature": 0},
    "seeded": {**FREE, "prompt": SHORT, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "seed": 4},
    "n": {**FREE, "prompt": OTHER, "n": 3, "seed": 5},
    "best_of": {**FREE, "prompt": SHORT, "n": 2, "best_of": 4, "seed": 6},
    "penalties": {
        **FREE, "prompt": SHORT, "seed": 7, "presence_penalty": 0.6, "frequency_penalty": 0.4,
        "repetition_penalty": 1.2,
    },
    "logprobs": {**FREE, "prompt": OTHER, "seed": 8, "logprobs": 3},
    "prompt_logprobs": {**FREE, "prompt": LONG, "seed": 9, "logprobs": 1, "prompt_logprobs": 2},
    "echo": {**FREE, "prompt": SHORT, "seed": 10, "echo": True, "logprobs": 2},
    "min_tokens": {
        "prompt": SHORT, "temperature": 1.0, "seed": 11, "max_tokens": 220, "min_tokens": 150,
        "stop_token_ids": list(range(20, 120)),
    },
    "bad_words": {**FREE, "prompt": OTHER, "seed": 12, "bad_words": ["a", "e", "qu"]},
    "logit_bias": {**FREE, "prompt": SHORT, "seed": 13, "logit_bias": {"70": 5.0, "71": -100.0}},
    "two prompts": {**FREE, "prompt": [SHORT, OTHER], "seed": 14},
    "beams": {**FREE, "prompt": OTHER, "n": 3, "use_beam_search": True, "max_tokens": 130},
    "adapter": {**FREE, "prompt": LONG, "model": "poet", "seed": 15},
    "guided": {"prompt": SHORT, "guided_regex": SENTENCE, "max_tokens": 400, "seed": 16},
    "guided n": {"prompt": SHORT, "guided_regex": SENTENCE, "max_tokens": 400, "seed": 17, "n": 2},
    "tools": {
        **CHAT, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False,
        "max_tokens": 700, "seed": 18,
    },
    "chat": {**CHAT, **FREE, "seed": 19, "logprobs": True, "top_logprobs": 2},
    "json": {**CHAT, **FREE, "seed": 20, "response_format": {"type": "json_object"}},
}  # fmt: skip
STREAMED: Final = ("seeded", "n", "logprobs", "echo", "stop", "guided", "tools", "chat")
ROOMY: Final[Body] = {"num_kv_blocks": 400, "max_num_seqs": 64}


class Kinds:
    """A cluster, and requests of all kinds to it."""

    def __init__(self, c: Cluster, client: httpx.AsyncClient) -> None:
        self.c = c
        self._client = client
        self._salt = 0
        self.mixed = False  # streamed ones resume exactly, the others fast
        self.bodies: dict[str, Body] = dict(CASES)
        self.traces: dict[str, RequestTrace] = {}

    def start(self) -> asyncio.Task[dict[str, Any]]:
        """All kinds at once, streamed ones streamed. Prefix caches know nothing of earlier runs."""
        self._salt += 1
        self.traces = {}
        return asyncio.create_task(self._all())

    async def _all(self) -> dict[str, Any]:
        asked = [(name, False) for name in self.bodies] + [(name, True) for name in STREAMED]
        told = await asyncio.gather(*(self.answer(*one) for one in asked))
        return {f"{n} streamed" if s else n: t for (n, s), t in zip(asked, told, strict=True)}

    async def answer(self, name: str, streamed: bool = False) -> Any:
        salt = f"{name} {self._salt} {streamed}"
        body = {**self.bodies[name], "cache_salt": salt, "stream": streamed}
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        headers = {"x-request-id": salt.replace(" ", "_")}
        if self.mixed:
            headers["x-baton-resume"] = "exact" if streamed else "fast"
        reply = await self._client.post(path, json=body, headers=headers)
        return _joined(reply) if streamed else self._whole(reply)

    @staticmethod
    def _whole(reply: httpx.Response) -> Any:
        assert reply.status_code == 200, reply.text
        told = reply.json()
        return {"choices": [_known(choice) for choice in told["choices"]], "usage": told["usage"]}

    def note_live(self) -> list[tuple[Request, RequestTrace]]:
        """What is under way, remembered by id."""
        live = self.c.router.services.dispatcher.live()
        self.traces |= {request.id: trace for request, trace in live}
        return live


def _known(choice: Body) -> Body:
    """Without what is drawn at each answer: ids of tool calls."""
    for call in choice.get("message", {}).get("tool_calls") or ():
        call["id"] = "drawn"
    return choice


def _joined(reply: httpx.Response) -> dict[str, list[str]]:
    """Text (arguments, logprobs) of each choice of a stream, and how each ended, once."""
    assert reply.status_code == 200, reply.text
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    assert lines.count("[DONE]") == 1
    texts: dict[int, str] = {}
    ends: dict[int, str] = {}
    for line in lines[:-1]:
        told = orjson.loads(line)
        assert "error" not in told, told
        for choice in told["choices"]:
            index, delta = choice["index"], choice.get("delta", {})
            assert index not in ends, "an event after the end"
            calls = delta.get("tool_calls") or ()
            text = choice.get("text") or delta.get("content") or ""
            text += "".join(call["function"].get("arguments", "") for call in calls)
            texts[index] = texts.get(index, "") + text
            if choice["finish_reason"] is not None:
                ends[index] = choice["finish_reason"]
    return {"texts": [texts[i] for i in sorted(texts)], "ends": [ends[i] for i in sorted(ends)]}


def assert_same(told: Any, expected: Any, where: str) -> None:
    """Equal but for the last bits of floats, and for what was cached."""
    if isinstance(expected, dict):
        assert told.keys() == expected.keys(), where
        for key in expected.keys() - {"prompt_tokens_details"}:
            assert_same(told[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(told) == len(expected), where
        for index, (one, other) in enumerate(zip(told, expected, strict=True)):
            assert_same(one, other, f"{where}[{index}]")
    elif isinstance(expected, float):
        assert told == pytest.approx(expected, abs=1e-3), where
    else:
        assert told == expected, where


async def die(member: Member) -> None:
    """Its sessions break: it aborts what it was given, and is another session's when it is back."""
    sessions = member.node.shell._sessions  # pyright: ignore[reportPrivateUsage]
    for session in list(sessions):
        session.cut(NodeLost("killed by the test"))


@asynccontextmanager
async def kinds(tmp_path: Path, **options: Any) -> AsyncIterator[Kinds]:
    path = make_tiny_model("llama", tmp_path / "model", max_position_embeddings=1024, seed=3)
    adapter = make_adapter(tmp_path / "adapter", linear_layers(path, ("q_proj", "v_proj")), seed=1)
    lora: Body = {"lora_modules": (f"poet={adapter}",)}
    prefill: list[Body] = [{**ROOMY, **lora, **options.get("prefill", {})}]
    decode: list[Body] = [{**ROOMY, **lora, **options.get("decode", {})}]
    router: Body = {"tool_call_parser": "hermes", "enable_auto_tool_choice": True}
    router |= options.get("router", {})
    plan = Plan(path, prefill * options.get("num_prefill", 1), decode * 2, router)
    async with cluster(plan) as c:
        transport = httpx.ASGITransport(create_app(c.router.services))
        async with httpx.AsyncClient(
            transport=transport, base_url="http://baton", timeout=2 * WAIT_S
        ) as client:
            found = Kinds(c, client)
            text = (await found.answer("seeded"))["choices"][0]["text"]
            late = range(len(text) * 3 // 4, len(text))
            stop = next(s for at in late if text.index(s := text[at : at + 5]) == at)
            found.bodies["stop"] = {**CASES["seeded"], "stop": [stop]}
            yield found
            await c.settle()


def under_way(found: Kinds, num_tokens: int) -> bool:
    """All have begun, and those that run have so many tokens per sample (a search tells none)."""
    live = found.note_live()
    return len(found.traces) == len(found.bodies) + len(STREAMED) + 1 and all(
        trace.output_tokens >= num_tokens * request.params.num_samples or request.params.beam_width
        for request, trace in live
    )


async def assert_counted_once(found: Kinds) -> None:
    """One end each, and its usage is the log's length, but for what a stop string cut off."""
    store = found.c.router.guard
    for request_id, trace in found.traces.items():
        record = await store.call(lambda s, r=request_id: s.read(r))
        assert record is not None
        logged = int(record.fields[LOGGED])
        assert trace.outcome == "finished", request_id
        if "stop" in request_id:
            assert logged >= trace.output_tokens
        else:
            assert logged == trace.output_tokens == int(record.fields["output_tokens"])


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"router": {"resume": "exact"}},
        {"decode": {"speculative_method": "ngram"}},
    ],
    ids=["fast", "exact", "speculation"],
)
async def test_decode_nodes_die_in_turn(
    tmp_path: Path, options: Body, caplog: pytest.LogCaptureFixture
) -> None:
    async with kinds(tmp_path, **options) as found:
        expected = await found.start()
        asking = found.start()
        for victim, num_tokens in zip(found.c.decode, (5, 30), strict=True):
            await eventually(lambda n=num_tokens: _now(under_way(found, n)))
            await die(victim)
        told = await asking
        assert_same(told, expected, "answers")
        # A dead node's word that it has the KV is lost with it: the next try finds no export.
        stale = Counter(re.findall(r"request (\S+): epoch .*: no export", caplog.text))
        retries = {trace.retries - stale[name] for name, trace in found.traces.items()}
        assert retries == {1, 2}, "each was on one of them, or on both"
        await assert_counted_once(found)
        stats = [member.stats for member in found.c.decode]
        assert (sum(s.num_replayed_tokens for s in stats) > 0) == ("router" in options)
        assert (sum(s.num_accepted_tokens for s in stats) > 0) == ("decode" in options)


@pytest.mark.long
async def test_prefill_nodes_die_in_turn(tmp_path: Path) -> None:
    """While prompts are computed, and while their KV is on its way; then again on the other one.

    Who meets both deaths is a matter of timing: all is asked again until somebody has."""
    slow = {"max_num_batched_tokens": 32, "max_num_seqs": 8, "enable_prefix_caching": False}
    async with kinds(tmp_path, prefill=slow, num_prefill=2) as found:
        found.mixed = True
        expected = await found.start()
        retries = [0]
        for _ in range(5):
            asking = found.start()
            for victim in found.c.prefill:
                enough = victim.stats.num_prompt_tokens + 200
                await eventually(lambda v=victim, e=enough: _now(v.stats.num_prompt_tokens > e))
                found.note_live()
                await die(victim)
            told = await asking
            assert_same(told, expected, "answers")
            await assert_counted_once(found)
            retries = [trace.retries for trace in found.traces.values()]
            if max(retries) == 2:
                break
        assert max(retries) == 2, "some met both deaths"


async def test_no_node_left_is_unavailable_at_once(tmp_path: Path) -> None:
    """Long before any deadline: neither front door waits for a node to come."""
    path = make_tiny_model("llama", tmp_path / "model")
    async with cluster(Plan(path, router={"node_wait_s": 0.0})) as c:
        await c.decode[0].node.stop()
        await eventually(lambda: _now(len(c.router.registry.records()) == 1))
        with pytest.raises(Unavailable):
            async with asyncio.timeout(WAIT_S):  # the request's own deadline is minutes away
                await c.client.generate(SHORT, SamplingParams(max_tokens=5))
        transport = httpx.ASGITransport(create_app(c.router.services))
        async with httpx.AsyncClient(transport=transport, base_url="http://baton") as http:
            async with asyncio.timeout(WAIT_S):
                reply = await http.post("/v1/completions", json={"prompt": SHORT})
        assert reply.status_code == 503
        error = reply.json()["error"]
        assert (error["type"], error["code"], error["param"]) == (
            "server_error",
            "unavailable",
            None,
        )
        assert error["message"]


async def _now(value: bool) -> bool:
    return value
