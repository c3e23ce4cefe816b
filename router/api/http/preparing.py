"""Preparation: a request counts with its API key as soon as its head has arrived.

Reading and tokenizing a body is work, so every POST route is wrapped (`counted`). If a key already
has as many requests as it may have, its next request is refused before the body is read
(router/request/gate/gate.py, Gate.preparing). The time for which a preparation keeps the event loop
busy is measured, and large bodies of one tenant are spaced out (router/tenants/turns.py). The
preparation ends when the route returns its reply, which then enters the gate; or earlier, when the
route calls `end_preparing`.
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
from router.tenants.turns import LARGE_BYTES

Handler = Callable[[HttpRequest], Awaitable[Any]]
_PREPARATION: Final = "baton.preparation"


def counted(route: Route, gate: Callable[[], Gate]) -> Route:
    """Return the route with its preparation counted, if it is a POST; else the route as it is."""
    if route.methods != {"POST"}:
        return route
    endpoint = cast("Callable[[HttpRequest], Coroutine[Any, Any, Any]]", route.endpoint)

    async def prepared(request: HttpRequest) -> Any:
        scope = request.scope
        with gate().preparing(grant_of(scope)) as preparation:
            scope[_PREPARATION] = preparation
            # Only of a large body the time counts, and measuring it costs 1 % of a request.
            work = endpoint(request)
            return await (_Timed(work, preparation) if _is_large(scope) else work)

    return Route(route.path, prepared, methods=["POST"])


def _is_large(scope: Scope) -> bool:
    """Whether the request says that its body has at least LARGE_BYTES."""
    for name, value in scope["headers"]:
        if name == b"content-length":
            return value.isdigit() and int(value) >= LARGE_BYTES
    return False


def hooked(plain: Handler, other: Handler, names: frozenset[bytes]) -> Handler:
    """Return a handler that calls `other` for a request with one of the headers `names`, and
    `plain` for any other request."""

    def chosen(request: HttpRequest) -> Awaitable[Any]:
        for name, _ in request.scope["headers"]:
            if name in names:
                return other(request)
        return plain(request)

    return chosen


def end_preparing(scope: Scope, counted_tokens: int = 0) -> None:
    """End the preparation of a request that enters the gate now or needs no gate.

    `counted_tokens`: how many tokens were counted without a computation on a node."""
    # None if no client sent the request, such as when a kept body is read again.
    found: Preparation | None = scope.get(_PREPARATION)
    if found is not None:
        found.counted = counted_tokens
        found.end()


async def wait_to_read(scope: Scope, num_bytes: int) -> None:
    """Wait until a body of `num_bytes` may be read. Raises Overloaded if the wait would be long."""
    found: Preparation | None = scope.get(_PREPARATION)
    wait_s = 0.0 if found is None else found.reserve(num_bytes)
    if wait_s > 0:
        await asyncio.sleep(wait_s)


@dataclass(slots=True)
class _Timed:
    """Awaits `work` and adds the time for which its steps keep the event loop busy to
    `preparation.busy_s`."""

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
            except BaseException as error:  # noqa: BLE001  thrown into `work` unchanged
                step = partial(self.work.throw, error)
