"""A router's console data without a router: a cluster of any size, for the pages' own tests.

`FakeConsole(nodes)` is an ASGI app with the routes that router/console/ serves. What it tells is
made from the node's number and the second, so each run tells the same.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

STATIC = Path(__file__).resolve().parents[2] / "router" / "console" / "static"
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
KEY, API_KEY = "operator", "client"
TEXT: dict[str, Any] = {
    "prompt": "What is prefill?",
    "answers": ["It reads the prompt."],
    "cut": False,
}
START = 1_790_000_000.0
KV_BLOCKS = 400
# Of summaries that did not finish: outcome and error.
ENDS = {3: ("cancelled", "cancelled"), 4: ("failed", "no decode node is healthy")}
MOST_FLOWS = 200
SLOW_REQUEST = "chatcmpl-00000000000000000000000000000007"
PARTS = (
    ("gate", 0, 0.02, None, 0), ("placement", 0.02, 0.03, None, 0), ("prefill", 0.03, 0.2, "p0",
    1),
    ("hand-over", 0.2, 0.27, "d0", 0), ("decode", 0.27, 0.55, "d0", 40),
    ("retry", 0.55, 0.6, None, 0), ("prefill", 0.6, 0.68, "p1", 1), ("hand-over", 0.68, 0.72,
    "d1", 0),
    ("decode", 0.72, 1.0, "d1", 58),
)  # fmt: skip


@dataclass(slots=True)
class FakeConsole:
    """`num_nodes`: half of them prefill. `shows_text`: to operators; API_KEY sees text anyway.
    `broken_lane`: p0 reaches d0
    by gRPC alone. `breaks`: what was asked of /console/data/break."""

    num_nodes: int = 4
    demo: bool = True
    interval_s: float = 1.0
    shows_text: bool = False
    needs_api_key: bool = False
    broken_lane: bool = False
    breaks: list[dict[str, str]] = field(default_factory=list[dict[str, str]])

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/console", self.page),
                Route("/console/data/snapshot", self.whole),
                Route("/console/data/stream", self.stream),
                Route("/console/data/nodes/{node}", self.node),
                Route("/console/data/break", self.break_it, methods=["POST"]),
                Route("/console/api/v1/requests/{name}/timeline", self.own_timeline),
                Route("/console/api/v1/{kind:path}", self.complete, methods=["POST"]),
                Route("/console/{file}", self.page),
                Route("/v1/requests", self.ended),
                Route("/v1/requests/{name}/timeline", self.timeline),
            ]
        )

    async def page(self, request: HttpRequest) -> Response:
        file = STATIC / request.path_params.get("file", "index.html")
        headers = {"content-security-policy": CSP, "cache-control": "no-cache"}
        return Response(file.read_bytes(), media_type=TYPES[file.suffix], headers=headers)

    async def whole(self, request: HttpRequest) -> Response:
        return self._guarded(request) or JSONResponse(snapshot(self, 0))

    async def stream(self, request: HttpRequest) -> Response:
        return self._guarded(request) or StreamingResponse(
            self._told(), media_type="text/event-stream"
        )

    async def _told(self) -> AsyncIterator[str]:
        yield f"event: snapshot\ndata: {json.dumps(snapshot(self, 0))}\n\n"
        second = 0
        while True:
            await asyncio.sleep(self.interval_s)
            second += 1
            yield f"event: delta\ndata: {json.dumps(delta(self, second))}\n\n"

    async def node(self, request: HttpRequest) -> Response:
        return self._guarded(request) or JSONResponse(detail(str(request.path_params["node"])))

    async def break_it(self, request: HttpRequest) -> Response:
        self.breaks.append(await request.json())
        return self._guarded(request) or JSONResponse({"done": "it is done"})

    async def ended(self, request: HttpRequest) -> Response:
        told = sorted(map(summary, range(40)), key=lambda each: -each["total_ms"])
        return self._guarded(request) or JSONResponse({"data": told})

    async def timeline(self, request: HttpRequest) -> Response:
        if (refusal := self._guarded(request)) is not None:
            return refusal
        if request.query_params.get("format") == "perfetto":
            return JSONResponse(perfetto(str(request.path_params["name"])))
        return JSONResponse(timeline(str(request.path_params["name"]), self.shows_text))

    async def own_timeline(self, request: HttpRequest) -> Response:
        """As the public port tells it: with its text to the key that asked."""
        own = request.headers.get("authorization") == f"Bearer {API_KEY}"
        return JSONResponse(timeline(str(request.path_params["name"]), own))

    async def complete(self, request: HttpRequest) -> Response:
        body = await request.json()
        return StreamingResponse(reply(body), media_type="text/event-stream")

    def _guarded(self, request: HttpRequest) -> Response | None:
        if request.headers.get("authorization") == f"Bearer {KEY}":
            return None
        return JSONResponse({"error": {"message": "the key is not known"}}, status_code=401)


def snapshot(console: FakeConsole, second: int) -> dict[str, Any]:
    return {
        "seq": second,
        "at": START + second,
        "router": {
            "id": "router-1", "version": "0.1.0", "models": ["baton-demo"],
            "uptime_s": 60.0 + second,
            "draining": False, "demo": console.demo, "needs_api_key": console.needs_api_key,
        },
        "totals": totals(second),
        "store": {"kind": "redis", "ok": True, "text": ""},
        "nodes": [node_of(number, second, console) for number in range(console.num_nodes)],
        "flows": broken() if console.broken_lane else flows(console.num_nodes, second),
        "requests": {
            "live": [live(number, second) for number in range(12)],
            "num_live": 12,
            "ended": [summary(number) for number in reversed(range(30))],
        },
        "events": [event(number) for number in range(14)],
    }  # fmt: skip


def delta(console: FakeConsole, second: int) -> dict[str, Any]:
    told = snapshot(console, second)
    told["nodes"] = told["nodes"][second % 7 :: 7]
    told["gone"] = []
    told["requests"]["ended"] = [summary(30 + second)]
    told["events"] = [event(14 + second)] if second % 5 == 0 else []
    del told["router"], told["store"]
    return told


def totals(second: int) -> dict[str, Any]:
    wave = (second * 7) % 11
    return {
        "running": 12, "waiting": 3, "requests_per_s": 4.2,
        "prompt_tokens_per_s": 5200.0 + 90 * wave,
        "output_tokens_per_s": 1310.0 + 35 * wave, "refused_per_s": 0.0,
        "retried_per_s": 0.2 if wave > 8 else 0.0, "failed_per_s": 0.0,
        "ttft_ms": {"p50": 84.0 + wave, "p95": 190.0 + 5 * wave, "p99": 320.0 + 9 * wave},
        "tpot_ms": {"p50": 11.2, "p95": 14.0 + wave / 4, "p99": 21.0 + wave / 2},
    }  # fmt: skip


def node_of(number: int, second: int, console: FakeConsole) -> dict[str, Any]:
    half = console.num_nodes // 2
    prefills = number < half
    index = number if prefills else number - half
    lost = console.num_nodes > 4 and index % 97 == 13
    return {
        "id": f"{'p' if prefills else 'd'}{index}", "role": "prefill" if prefills else "decode",
        "state": "lost" if lost else "serving",
        "address": f"10.0.{number // 250}.{number % 250}:7001",
        "instance": f"{number:08x}", "model": "baton-demo", "running": 2 + (index + second) % 9,
        "waiting": index % 3, "kv_used": (index * 53 + second * 7) % KV_BLOCKS,
        "kv_total": KV_BLOCKS,
        "kv_cached": 60, "mbu": None if prefills else 0.61, "mfu": 0.43 if prefills else 0.05,
        "tokens_per_s": 2600.0 if prefills else 640.0, "precision": "bfloat16", "ranks": 1,
        "text": "no answer for 5 s" if lost else "",
    }  # fmt: skip


def flows(num_nodes: int, second: int) -> list[dict[str, Any]]:
    half = num_nodes // 2
    return [
        {
            "from": f"p{number % half}", "to": f"d{(number * 3 + number // half) % half}",
            "lane": ("shm", "grpc")[number % 2],
            "bytes_per_s": 4.1e6 * (1 + (number * 5 + second) % 8),
            "transfers_per_s": 3.5, "ms_p50": 4.1, "ms_p99": 18.0 + number % 7,
            "faults": 2 if number == 3 else 0,
        }
        for number in range(min(MOST_FLOWS, half * half))
    ]  # fmt: skip


def broken() -> list[dict[str, Any]]:
    """Shared memory fails, and gRPC carries the KV."""
    pair = {"from": "p0", "to": "d0", "ms_p50": 4.0, "ms_p99": 9.0}
    return [
        pair | {"lane": "shm", "bytes_per_s": 0, "transfers_per_s": 0, "faults": 9, "ms_p99": None},
        pair | {"lane": "grpc", "bytes_per_s": 5e6, "transfers_per_s": 3.0, "faults": 0},
    ]


def live(number: int, second: int) -> dict[str, Any]:
    return {
        "request_id": f"chatcmpl-live{number:028d}",
        "age_ms": 480.0 * number + 1000.0 * (second % 3),
        "stage": ("prefill", "hand-over", "decode", "decode")[number % 4],
        "prompt_tokens": 210 + number,
        "output_tokens": 17 * number, "prefill_node": f"p{number % 2}",
        "decode_node": f"d{number % 2}",
        "retries": int(number == 5), "migrations": 0, "tenant": None,
    }  # fmt: skip


def summary(number: int) -> dict[str, Any]:
    slow = number == 7
    outcome, error = ENDS.get(number, ("finished", None))
    return {
        "request_id": f"chatcmpl-{number:032d}", "arrived_at": START - 40 + number,
        "total_ms": 8210.0 if slow else 640.0 + 31 * (number % 13), "ttft_ms": 92.0 + number % 17,
        "outcome": outcome, "error": error, "tenant": None, "prompt_tokens": 180 + number,
        "cached_tokens": 64, "output_tokens": 98,
        "prefill_node": "p1" if slow else f"p{number % 2}",
        "decode_node": "d1" if slow else f"d{number % 2}", "retries": int(slow), "migrations": 0,
        "preemptions": 0,
    }  # fmt: skip


def parts_of(stage: str, span: dict[str, Any], node: str) -> list[dict[str, Any]]:
    """What a node tells of a stage: half of it a queue, then its work."""
    told = {
        "prefill": {"name": "compute", "chunks": 2},
        "hand-over": {"name": "fetch", "kv_bytes": 1_500_000, "lane": "shm"},
    }
    if stage not in told:
        return []
    start, end = span["start_ms"], span["end_ms"]
    middle = (start + end) / 2
    return [
        {"name": "queue", "node": node, "start_ms": start, "end_ms": middle},
        {**told[stage], "node": node, "start_ms": middle, "end_ms": end,
         **({"layers": layers_of(middle, end)} if stage == "hand-over" else {})},
    ]  # fmt: skip


def layers_of(start: float, end: float) -> list[dict[str, Any]]:
    """Four groups of layers, one after another."""
    each = (end - start) / 4
    return [
        {"name": f"layers {2 * number}-{2 * number + 1}", "first": 2 * number,
         "last": 2 * number + 1, "start_ms": start + number * each,
         "end_ms": start + (number + 1) * each, "kv_bytes": 375_000}
        for number in range(4)
    ]  # fmt: skip


def timeline(name: str, with_text: bool = False) -> dict[str, Any]:
    """That of a live request is still under way."""
    told = summary(int(name[-4:]) if name[-4:].isdecimal() else 7) | {"request_id": name}
    if "live" in name:
        told["outcome"] = "running"
    total, tokens = float(told["total_ms"]), 0
    stages: list[dict[str, Any]] = []
    for stage, start, end, node, made in PARTS:
        span: dict[str, Any] = {
            "stage": stage, "start_ms": start * total, "end_ms": end * total,
            "epoch": int(start >= 0.55),
        }  # fmt: skip
        if node:
            span["node"] = node
            span["parts"] = parts_of(stage, span, node)
        if made:
            span["tokens"] = (tokens, tokens + made)
            tokens += made
        if stage == "retry":
            span["why"] = "node d0 was lost: the connection was closed"
        stages.append(span)
    moved: dict[str, Any] = {
        "stage": "transfer",
        "start_ms": 0.05 * total,
        "end_ms": 0.27 * total,
        "epoch": 0,
    }
    subscribed = 0.07 * total
    moved["parts"] = [
        {"name": "export", "node": "", "start_ms": moved["start_ms"], "end_ms": subscribed},
        {"name": "subscribe", "node": "", "start_ms": subscribed, "end_ms": moved["end_ms"]},
    ]
    append = {"stage": "log-append", "start_ms": 0.4 * total, "end_ms": 0.42 * total, "epoch": 0}
    log = {"appends": 98, "total_ms": 61.0, "longest_ms": 0.02 * total, "longest": [append]}
    score = {"node": "d1", "role": "decode", "chosen": True, "cost": 2.0, "queued": 1,
             "cached_tokens": 64, "free_blocks": 230, "session": 0.0, "expected_ms": 11.0,
             "meets_slo": True}  # fmt: skip
    return told | {
        "output_tokens": tokens, "ttft_ms": 0.2 * total, "stages": stages, "transfers": [moved],
        "scores": [score, score | {"node": "d0", "chosen": False, "cost": 4.5}],
        "log": log, "text": TEXT if with_text else None,
    }  # fmt: skip


def perfetto(name: str) -> dict[str, Any]:
    return {"traceEvents": [{"ph": "M", "name": "thread_name", "args": {"name": name}}]}


def event(number: int) -> dict[str, Any]:
    kinds = ("node-joined", "retry", "node-lost", "migration", "drain", "quarantine", "store")
    kind = kinds[number % len(kinds)]
    return {
        "seq": number, "at": START - 30 + number, "kind": kind, "node": f"d{number % 2}",
        "request_id": SLOW_REQUEST if kind in ("retry", "migration") else None,
        "text": f"what happened, number {number}",
    }  # fmt: skip


def detail(node: str) -> dict[str, Any]:
    states: list[list[Any]] = []
    for number in range(24):
        states += [["used", 9, f"chatcmpl-live{number:028d}"], ["cached", 5, None]]
    states += [["exported", 12, None], ["adopted", 20, None], ["hole", 6, None]]
    total = sum(int(state[1]) for state in states)
    states.append(["free", KV_BLOCKS - total, None])
    ages = [
        [index // 2 % 4 + 1 if state == "cached" else 0, number]
        for index, (state, number, _) in enumerate(states)
    ]
    prefixes = [
        {"depth": 0, "blocks": 12, "hits": 310, "tokens": 192, "parent": None, "key": "4f1c22"},
        {"depth": 1, "blocks": 30, "hits": 96, "tokens": 480, "parent": 0, "key": "9a03be"},
        {"depth": 1, "blocks": 8, "hits": 31, "tokens": 128, "parent": 0, "key": "c5d1e0"},
        {"depth": 2, "blocks": 5, "hits": 2, "tokens": 80, "parent": 1, "key": "77aa10"},
    ]
    steps = [
        {"at": START - 32 + number, "ms": 9.0 + (number * 5) % 7 + 30 * (number % 9 == 0),
         "prefill_tokens": 512 if number % 9 == 0 else 0, "decode_rows": 8 + number % 4,
         "requests": ["live1", "live2"]}
        for number in range(32)
    ]  # fmt: skip
    points = [
        {"intensity": 180.0 if number % 9 == 0 else 3.0 + number / 8,
         "gflops": 690.0 if number % 9 == 0 else 90.0 + number,
         "kind": "decode" if number % 9 else "prefill"}
        for number in range(32)
    ]  # fmt: skip
    return {
        "id": node, "role": "decode", "blocks": {
            "size": 16, "total": KV_BLOCKS, "states": states, "ages": ages,
            "adopted": 20, "holes": 6,
        },
        "prefixes": prefixes, "steps": steps,
        "roofline": {"peak_gbs": 42.0, "peak_gflops": 1100.0, "points": points},
        "tiers": [{"name": "host", "used_bytes": 3.1e9, "total_bytes": 8e9, "hits": 41}],
    }  # fmt: skip


async def reply(body: dict[str, Any]) -> AsyncIterator[str]:
    chat = "messages" in body
    number = min(98, int(body.get("max_tokens", 98)))
    for index in range(number):
        text = ("Paged", "Attention", " keeps", " KV", " in", " blocks", ".", " ")[index % 8]
        logprob = -0.02 - (index % 5) * 0.6
        if chat:
            listed = {"content": [{"token": text, "logprob": logprob, "top_logprobs": []}]}
            choice: dict[str, Any] = {"delta": {"content": text}, "logprobs": listed}
        else:
            choice = {"text": text, "logprobs": {"tokens": [text], "token_logprobs": [logprob]}}
        choice |= {"index": 0, "finish_reason": "length" if index == number - 1 else None}
        yield f"data: {json.dumps({'id': SLOW_REQUEST, 'choices': [choice]})}\n\n"
        await asyncio.sleep(0.004)
    yield "data: [DONE]\n\n"
