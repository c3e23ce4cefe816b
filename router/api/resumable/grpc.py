"""Resumable requests over gRPC: router/api/grpc/inference.py reads their deltas from here, instead
of running them itself.

The record of a request keeps the call's message, without the positions that the client has seen.
For each reader a new completion is made of that message, as over HTTP; the gRPC service passes in
how. This file does not use protobuf.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from hmac import compare_digest
from typing import Final

from baton.protocol.errors import (
    InvalidRequest,
    KeyReused,
    RequestNotFound,
    Unavailable,
)
from router.request.completion import CallRunner, Completion, Delta
from router.resumable.canonical import Canonical, body_digest, record_id
from router.resumable.replay import ToldDispatch
from router.resumable.runs import Found, Runs
from router.resumable.terms import MAX_GRACE_S
from router.services import RouterServices

API: Final = "grpc"
MAX_RESUMABLE_NAME: Final = 128
Make = Callable[[bytes, str], Awaitable[Completion]]


@dataclass(frozen=True, slots=True)
class GrpcAsked:
    """A call of Generate. `after`: how many events the client has seen, per sample. `body`: the
    serialized message without these numbers."""

    name: str
    owner: str
    grace_s: int
    after: Sequence[int]
    body: bytes


class NoCaller:
    """Takes the place of the gRPC context if a completion is made from a record, not by a call."""

    def time_remaining(self) -> None:
        return None

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()


class ResumableCalls:
    """Begins and reads resumable requests. `make(body, name)` makes the completion of a serialized
    message. All state is in the router's Runs."""

    def __init__(self, services: RouterServices, make: Make) -> None:
        self._services = services
        self._make = make
        if services.runs is not None:
            services.runs.builders[API] = self._completion

    async def open(
        self, asked: GrpcAsked, completion: Completion | None
    ) -> tuple[Completion, AsyncGenerator[tuple[Delta, bool], None]]:
        """Find the request of a call, or begin it. Return a completion and all its deltas; each
        delta comes with a bool: whether it is new to the reader.

        `completion`: the checked completion of the call, or None if the call can only read again.
        Raises InvalidRequest, Overloaded, KeyReused, RequestNotFound, Unavailable.
        """
        runs = self._services.runs
        if runs is None:
            raise Unavailable("this server takes no resumable requests")
        if asked.grace_s > MAX_GRACE_S:
            message = f"resumable_s must be between 0 and {MAX_GRACE_S}"
            raise InvalidRequest(message, field="resumable_s")
        found = await runs.find(asked.owner, asked.name)
        if found is None and (any(asked.after) or not asked.grace_s):
            message = f"no such request: {asked.name[:200]!r}"
            raise RequestNotFound(message, field="request_id")
        if found is None:
            runs.check_open()
            completion = completion or await self._make(asked.body, asked.name)
            found = await self._begin(runs, asked, completion)
        if not compare_digest(found.body_digest, body_digest(API, asked.body)):
            message = "this request id was used with another body"
            raise KeyReused(message, field="request_id")
        reader = await self._completion(found.canonical)
        return reader, _read(runs, found, reader, asked.after)

    async def _begin(self, runs: Runs, asked: GrpcAsked, completion: Completion) -> Found:
        if len(asked.name) > MAX_RESUMABLE_NAME:
            message = f"request_id: at most {MAX_RESUMABLE_NAME} characters, if it is resumable"
            raise InvalidRequest(message, field="request_id")
        request = replace(completion.request, id=record_id(asked.owner, asked.name))
        completion.request = request
        canonical = Canonical(
            API, asked.name, asked.owner, int(time.time()), asked.grace_s, asked.body, request
        )
        fields = canonical.fields(runs.clock, "prompt")
        return await runs.begin(canonical, completion.twin(), fields)

    async def _completion(self, canonical: Canonical) -> Completion:
        completion = await self._make(canonical.body, canonical.name)
        completion.request = canonical.request
        return completion.twin()


async def _read(
    runs: Runs, found: Found, completion: Completion, after: Sequence[int]
) -> AsyncGenerator[tuple[Delta, bool], None]:
    seen = list(after) + [0] * (completion.num_choices - len(after))
    async with runs.reading(found, resumed=any(after)) as told:
        runner = CallRunner(ToldDispatch(told), runs.readers, runs.clock)
        async with aclosing(completion.deltas(runner)) as deltas:
            async for delta in deltas:
                fresh = seen[delta.sample] == 0
                seen[delta.sample] -= not fresh
                yield delta, fresh
