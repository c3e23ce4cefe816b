"""Completions over HTTP, told as the events of the gRPC client: one oracle judges both.

A plain call is made once; a resumable one, when its connection breaks or a router says 503, is made
again at the next router, after the last whole event that was read (docs/resumable.md).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import httpx

from baton.client import GenerateEvent, Usage
from baton.protocol.errors import BatonError, InternalError, Unavailable, error_from_code
from baton.protocol.sampling import SamplingParams

PAUSE_S = 0.2  # before the next router is asked


@dataclass(frozen=True)
class HttpCall:
    """One completion: asked of the first of `routers` (base URLs), of the next if it is resumable.
    `streamed`: as server-sent events, else as one body. `grace_s` 0: a plain request."""

    request_id: str
    prompt: Sequence[int]
    params: SamplingParams
    routers: Sequence[str]
    streamed: bool
    deadline_s: float
    grace_s: int = 0

    @property
    def body(self) -> dict[str, Any]:
        asked: dict[str, Any] = {
            "prompt": list(self.prompt),
            "stream": self.streamed,
            "cache_salt": self.request_id,
            "return_token_ids": True,
        }
        if self.streamed:
            asked["stream_options"] = {"include_usage": True}
        default = SamplingParams()
        for each in fields(SamplingParams):
            value = getattr(self.params, each.name)
            if value != getattr(default, each.name):
                asked[each.name] = value
        return asked

    @property
    def headers(self) -> dict[str, str]:
        more = {"x-baton-resumable": str(self.grace_s)} if self.grace_s else {}
        return {"x-request-id": self.request_id, **more}


async def http_events(call: HttpCall) -> AsyncGenerator[GenerateEvent, None]:
    """The events of the call, usage with the last one. Raises BatonError."""
    told: Counter[int] = Counter()
    held: GenerateEvent | None = None  # its usage may come alone, after it
    async for reply in _replies(call):
        for choice in reply["choices"]:
            if held is not None:
                yield held
            held = _event(call.request_id, choice, told)
        if reply.get("usage"):
            assert held is not None, "usage comes after tokens"
            held = replace(held, usage=_usage(reply["usage"]))
    if held is not None:
        yield held


def _event(request_id: str, choice: Any, told: Counter[int]) -> GenerateEvent:
    sample, ids = choice["index"], tuple(choice.get("token_ids") or ())
    position = told[sample]
    told[sample] += len(ids)
    reason = choice["finish_reason"]
    return GenerateEvent(request_id, sample, position, ids, choice["text"], reason, 0, None)


def _usage(told: Any) -> Usage:
    return Usage(told["prompt_tokens"], told["completion_tokens"])


async def _replies(call: HttpCall) -> AsyncGenerator[Any, None]:
    """The call's bodies: one, or those of its events. Raises BatonError."""
    headers, heard_at = call.headers, time.monotonic()
    async with httpx.AsyncClient(trust_env=False, timeout=call.deadline_s) as http:
        for router in itertools.cycle(call.routers):
            try:
                async for id_, reply in _answer(http, router, call, headers):
                    heard_at = time.monotonic()
                    yield reply
                    if id_:  # taken: not to be told again
                        headers["last-event-id"] = id_
            except (Unavailable, httpx.TransportError) as error:
                if time.monotonic() - heard_at >= call.grace_s:
                    raise _as_ours(error) from error
                await asyncio.sleep(PAUSE_S)
            else:
                return


async def _answer(
    http: httpx.AsyncClient, router: str, call: HttpCall, headers: dict[str, str]
) -> AsyncGenerator[tuple[str, Any], None]:
    """One router's answer: (id of the event, what it says)."""
    url = f"{router}/v1/completions"
    async with http.stream("POST", url, json=call.body, headers=headers) as answer:
        if answer.status_code != 200:
            raise _refusal(answer.status_code, await answer.aread())
        if not call.streamed:
            yield "", json.loads(await answer.aread())
            return
        rest = b""
        async for piece in answer.aiter_raw():
            *events, rest = (rest + piece).split(b"\n\n")
            for event in events:
                lines = dict(line.split(b": ", 1) for line in event.split(b"\n"))
                if lines[b"data"] == b"[DONE]":
                    return
                yield lines.get(b"id", b"").decode(), _said(lines[b"data"])
        raise httpx.RemoteProtocolError("the body ended before its last event")


def _said(data: bytes) -> Any:
    """What an event says. Raises BatonError if it is an error."""
    reply = json.loads(data)
    if "error" in reply:
        raise error_from_code(str(reply["error"].get("code")), str(reply["error"]["message"]))
    return reply


def _refusal(status: int, body: bytes) -> BatonError:
    text = f"{status} {body[:300].decode(errors='replace')}"
    return Unavailable(text) if status == 503 else InternalError(text)


def _as_ours(error: Exception) -> BatonError:
    return error if isinstance(error, BatonError) else Unavailable(repr(error))
