"""Requests count with their key from when they come in: reading and tokenizing are work, too.

Every POST route is wrapped. With as many requests of its key read, waiting and running as it may
have, the next one is refused before its body is read (router/request/gate/gate.py, Gate.preparing);
the time that it keeps the event loop busy is measured, and large bodies of one tenant keep their
distance (router/tenants/turns.py). It ends when the route has made its reply, which then passes the
gate; or with `end_preparing`, where the route itself does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, Final, cast

from starlette.requests import Request as HttpRequest
from starlette.routing import Route
from starlette.types import Scope

from router.request.gate.gate import Gate, Preparation
from router.request.terms import grant_of

Handler = Callable[[HttpRequest], Awaitable[Any]]
_PREPARATION: Final = "baton.preparation"


def counted(route: Route, gate: Callable[[], Gate]) -> Route:
    """The route, with what it prepares counted."""
    if route.methods != {"POST"}:
        return route
    endpoint = cast("Callable[[HttpRequest], Coroutine[Any, Any, Any]]", route.endpoint)

    async def prepared(request: HttpRequest) -> Any:
        with gate().preparing(grant_of(request.scope)) as preparation:
            request.scope[_PREPARATION] = preparation
            return await _Timed(endpoint(request), preparation)

    return Route(route.path, prepared, methods=["POST"])


def hooked(plain: Handler, other: Handler, names: frozenset[bytes]) -> Handler:
    """The route, and instead of it `other` for a request whose head has one of these names."""

    def chosen(request: HttpRequest) -> Awaitable[Any]:
        for name, _ in request.scope["headers"]:
            if name in names:
                return other(request)
        return plain(request)

    return chosen


def end_preparing(scope: Scope, counted_tokens: int = 0) -> None:
    """It enters the gate now, or has its answer: so many tokens of it were only counted."""
    found: Preparation | None = scope.get(_PREPARATION)  # None where nobody sends the request
    if found is not None:
        found.counted = counted_tokens
        found.end()


async def wait_to_read(scope: Scope, num_bytes: int) -> None:
    """Until a body so large is read. Raises Overloaded if that would be long."""
    found: Preparation | None = scope.get(_PREPARATION)
    wait_s = 0.0 if found is None else found.reserve(num_bytes)
    if wait_s > 0:
        await asyncio.sleep(wait_s)


@dataclass(slots=True)
class _Timed:
    """Awaits `work`, and adds up how long its steps keep the loop."""

    work: Coroutine[Any, Any, Any]
    preparation: Preparation

    def __await__(self) -> Generator[Any, Any, Any]:
        step = partial(self.work.send, None)
        while True:
            began = perf_counter()
            try:
                waits_for = step()
            except StopIteration as end:
                return end.value
            finally:
                self.preparation.busy_s += perf_counter() - began
            try:
                yield waits_for
                step = partial(self.work.send, None)
            except BaseException as error:  # noqa: BLE001  for the work to see, as it is
                step = partial(self.work.throw, error)
