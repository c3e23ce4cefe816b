"""Sends a planned workload to one OpenAI-compatible server and measures the times.

It uses plain `/v1/completions` with streaming, so that the plan decides a prompt's length and not a
chat template.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from bench.measure import Sample
from bench.sse import StreamError, parse_lines_async, text_of
from bench.workload import PlannedRequest

CONNECT_TIMEOUT_S = 10.0
HANDOVER_METRIC = "baton_handover_seconds"


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """The server, and what all requests to it have in common."""

    url: str
    model: str | None = None
    api_key: str | None = None
    timeout_s: float = 300.0
    temperature: float = 0.0
    ignore_eos: bool = True  # vLLM's extension: answers are exactly as long as planned
    headers: tuple[tuple[str, str], ...] = ()

    def at(self, url: str) -> LoadTarget:
        """Return the same target at another server."""
        return replace(self, url=url)


@dataclass(frozen=True, slots=True)
class Handovers:
    """How often a request went from prefill to decode node, and for how many seconds in all."""

    seconds: float = 0.0
    count: float = 0.0

    def since(self, before: Handovers) -> Handovers:
        return Handovers(self.seconds - before.seconds, self.count - before.count)

    @property
    def mean_s(self) -> float | None:
        """The mean; None without hand-overs, as with every server but Baton."""
        return self.seconds / self.count if self.count else None


@dataclass(slots=True)
class LoadRun:
    """The outcome of one workload."""

    samples: list[Sample] = field(default_factory=list[Sample])
    handovers: Handovers = field(default_factory=Handovers)


def open_client(target: LoadTarget) -> httpx.AsyncClient:
    """Return a client without a connection limit: an open loop must not queue at the client."""
    headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    return httpx.AsyncClient(
        base_url=target.url.rstrip("/").removesuffix("/v1"),
        headers={**headers, **dict(target.headers)},
        timeout=httpx.Timeout(target.timeout_s, connect=CONNECT_TIMEOUT_S),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
    )


async def find_model(client: httpx.AsyncClient, target: LoadTarget) -> str:
    """Return the given model, or the first one listed. Raises StreamError."""
    if target.model:
        return target.model
    response = await client.get("/v1/models")
    models = response.json().get("data") if response.is_success else None
    if not models:
        raise StreamError(f"{target.url} lists no model (HTTP {response.status_code})")
    return str(models[0]["id"])


async def run_workload(target: LoadTarget, planned: Sequence[PlannedRequest]) -> LoadRun:
    """Send every request at its time; a failure becomes a sample with an error, not an exception.

    Raises StreamError or httpx.HTTPError only if the server cannot be reached at all.
    """
    async with open_client(target) as client:
        model = await find_model(client, target)
        before = await read_handovers(client)
        run = LoadRun()
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for request in planned:
                await asyncio.sleep(request.at_s - (time.monotonic() - began))
                body = _body(target, model, request)
                sample = Sample(request.at_s, time.monotonic() - began)
                run.samples.append(sample)
                group.create_task(_send(client, body, sample, began))
        run.handovers = (await read_handovers(client)).since(before)
        return run


def _body(target: LoadTarget, model: str, request: PlannedRequest) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model,
        "prompt": request.prompt,
        "max_tokens": request.max_tokens,
        "temperature": target.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if target.ignore_eos:
        body["ignore_eos"] = True
    return body


async def _send(
    client: httpx.AsyncClient, body: dict[str, Any], sample: Sample, began: float
) -> None:
    """Fill `sample` from one streamed answer."""
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if not response.is_success:
                await response.aread()
                raise StreamError(f"HTTP {response.status_code}: {response.text[:200]}")
            async for chunk in parse_lines_async(response.aiter_lines()):
                if text_of(chunk):
                    sample.piece_s.append(time.monotonic() - began)
                _note_usage(chunk, sample)
    except (httpx.HTTPError, StreamError) as error:
        sample.error = f"{type(error).__name__}: {error}"
    sample.ended_s = time.monotonic() - began
    if not sample.output_tokens:  # a server without usage: pieces are counted instead of tokens
        sample.output_tokens = len(sample.piece_s)
    if sample.error is None and not sample.piece_s:
        sample.error = "an empty answer"


def _note_usage(chunk: dict[str, Any], sample: Sample) -> None:
    usage = chunk.get("usage")
    if usage:
        sample.input_tokens = int(usage.get("prompt_tokens") or 0)
        sample.output_tokens = int(usage.get("completion_tokens") or 0)


async def read_handovers(client: httpx.AsyncClient) -> Handovers:
    """Return the hand-overs in the router's /metrics; zeros if the server has none."""
    try:
        response = await client.get("/metrics")
    except httpx.HTTPError:
        return Handovers()
    return parse_handovers(response.text) if response.is_success else Handovers()


def parse_handovers(text: str) -> Handovers:
    """Return the sums over all labels of the hand-over histogram."""
    totals = {f"{HANDOVER_METRIC}_sum": 0.0, f"{HANDOVER_METRIC}_count": 0.0}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in totals:
                totals[sample.name] += sample.value
    return Handovers(*totals.values())
