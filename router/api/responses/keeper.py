"""Keeper: stores responses, so that clients can read them again or continue from them.

A response is stored with the whole conversation that it answered, so a response that continues it
needs no other one. Only the API key that made a response can find it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import orjson

from baton.protocol.errors import StoreUnavailable, Unavailable
from router.api.responses.items import Item
from router.request.gate.gate import Gate
from router.services import RouterServices
from router.store.documents import Keeping
from router.store.guard import StoreGuard
from router.tenants.keys import Grant

_ENDED: Final = ("completed", "incomplete", "failed", "cancelled")


@dataclass(frozen=True, slots=True)
class Stored:
    """A stored response: the response object, and the items of the conversation that it answers."""

    response: dict[str, Any]
    items: list[Item]

    @property
    def id(self) -> str:
        return self.response["id"]

    @property
    def background(self) -> bool:
        return self.response["background"] is True

    @property
    def ended(self) -> bool:
        return self.response["status"] in _ENDED

    def with_(self, **fields: Any) -> Stored:
        return replace(self, response={**self.response, **fields})


class Keeper:
    """Stores and loads responses for one router. All routers of a deployment share them through the
    store."""

    def __init__(self, guard: StoreGuard, keeping: Keeping, gate: Callable[[], Gate]) -> None:
        self._guard = guard
        self._keeping = keeping
        self._gate = gate

    @classmethod
    def of(cls, services: RouterServices) -> Keeper | None:
        """Return the keeper of a router, or None if --stored-responses-mb is 0."""
        config = services.config
        if not config.stored_responses_mb:
            return None
        keeping = Keeping(config.stored_responses_ttl_s, config.stored_responses_mb << 20)
        return cls(services.store, keeping, lambda: services.dispatcher.gate)

    async def keep(self, owner: str, stored: Stored, replace: bool = False) -> bool:
        """Store a response; return whether it was stored. `replace`: only if it is there already.

        The key's oldest responses are deleted to make room. The response is not stored if it alone
        is too large, if there is none to replace, or if the store is away."""
        content = orjson.dumps({"response": stored.response, "items": stored.items})
        kept = await self._guard.call(
            lambda store: store.documents.put(owner, stored.id, content, self._keeping, replace)
        )
        return bool(kept)

    async def settle(self, owner: str, stored: Stored) -> bool:
        """Store the end of a response; return whether it is stored. A response in the background is
        stored already: it is replaced, unless it was deleted or has ended before."""
        if not stored.background:
            return await self.keep(owner, stored)
        try:
            known = await self.load(owner, stored.id)
        except Unavailable:
            return False  # Background.look finds the end in the log when the store is back
        if known is None or known.ended:
            return known is not None
        return await self.keep(owner, stored, replace=True)

    async def load(self, owner: str, id_: str, grant: Grant | None = None) -> Stored | None:
        """Return a stored response, or None. `grant`: of the client that asks; its large responses
        are spaced out like large bodies (router/tenants/turns.py). Raises Unavailable, Overloaded.
        """
        try:
            content = await self._guard.reach(lambda store: store.documents.get(owner, id_))
        except StoreUnavailable as error:
            raise _away() from error
        if content is None:
            return None
        wait_s = 0.0 if grant is None else self._gate().reserve(grant, len(content))
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        found = orjson.loads(content)
        return Stored(found["response"], found["items"])

    async def drop(self, owner: str, id_: str) -> bool:
        """Delete a response; return False if there was none. Raises Unavailable."""
        try:
            return await self._guard.reach(lambda store: store.documents.drop(owner, id_))
        except StoreUnavailable as error:
            raise _away() from error


def _away() -> Unavailable:
    return Unavailable("the store is away: stored responses must wait for it")
