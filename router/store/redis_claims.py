"""Claims of requests in Redis, and their aliases, which may be in another key group.

One script cannot touch two groups, so a claim with an alias has two steps: CLAIM makes the record,
then BIND gives it the alias. The alias decides: if it belongs to another request, UNCLAIM takes the
record back. An alias counts only while the record of its request exists. BIND writes a new token
each time, also where the alias is the request's own already, and an alias may be taken from a
request without a record only under the token that was seen. So two claims never both get one alias:
a request is bound after its record is there, and whoever saw no record must then have an old token.

A router that dies between the two steps leaves a record whose alias is not bound. The router that
adopts it claims it, and so binds the alias, or takes the record back.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from redis.commands.core import AsyncScript

from router.store import redis_scripts
from router.store.base import ALIAS, RequestRecord
from router.store.redis_links import GroupLink, Links
from router.store.redis_records import flatten, pairs, record_of, request_of

NOBODY: Final = "?"  # no claim has this token
RESUMABLE: Final = "resumable"  # field of a claim, which SWEEP reads: "1"


@dataclass(frozen=True, slots=True)
class ClaimScripts:
    claim: AsyncScript
    unclaim: AsyncScript
    bind: AsyncScript
    fade: AsyncScript

    @classmethod
    def of(cls, register: Callable[[str], AsyncScript]) -> ClaimScripts:
        names = redis_scripts.CLAIM, redis_scripts.UNCLAIM, redis_scripts.BIND, redis_scripts.FADE
        return cls(*(register(text) for text in names))


class RedisClaims:
    """Claims in the name of one `owner`, with leases of `lease_ms`. Event loop only."""

    def __init__(self, links: Links, owner: str, lease_ms: int) -> None:
        self._links = links
        self._owner = owner
        self._lease_ms = lease_ms
        self._scripts = ClaimScripts.of(links.all[0].client.register_script)

    async def claim(self, request_id: str, fields: Mapping[str, str]) -> RequestRecord | None:
        """See RequestStore.claim."""
        flat = await self._claimed(request_id, fields)
        if not flat:
            return None
        record = record_of(request_id, pairs(flat))
        alias = record.fields.get(ALIAS)
        if alias in (None, request_id) or await self._bound(alias, request_id):
            return record
        link = self._links.of(request_id)
        names = link.keys
        keys = [names.request_key(request_id), names.leases, names.states]
        keys.append(names.log_key(request_id))
        await self._links.run(link, self._scripts.unclaim, keys, [self._owner])
        return None

    def post(
        self,
        request_id: str,
        fields: Mapping[str, str],
        settle: Callable[[list[bytes] | Exception], None],
    ) -> None:
        """Claim without waiting; `settle` gets CLAIM's answer. A plain request has no alias."""

        def answered(answer: list[bytes] | bytes | Exception) -> None:
            settle([] if isinstance(answer, bytes) else answer)

        assert ALIAS not in fields, "an alias is bound in a second step"
        link = self._links.of(request_id)
        args = self._args(fields, NOBODY)
        link.scripts.post(self._scripts.claim, self._keys(link, request_id), args, answered)

    def fade(self, alias: str, request_id: str, ttl_ms: int) -> None:
        """Let an alias end with its request, without waiting. If that fails, it ends later."""
        link, key = self._links.of(alias), self._links.of(request_id).keys.request_key(request_id)
        keys = [link.keys.request_key(alias)]
        link.scripts.post(self._scripts.fade, keys, [key, ttl_ms], lambda _: None)

    async def _claimed(self, request_id: str, fields: Mapping[str, str]) -> list[bytes]:
        """Return CLAIM's answer; the id may be an alias whose request is gone."""
        link, gone = self._links.of(request_id), NOBODY
        keys, safe = self._keys(link, request_id), fields.get(RESUMABLE) == "1"
        while True:
            args = self._args(fields, gone)
            answer: list[bytes] | bytes = await self._links.run(
                link, self._scripts.claim, keys, args, safe=safe
            )
            if isinstance(answer, list):
                return answer
            gone, alive = await self._token(answer)
            if alive:
                return []

    async def _bound(self, alias: str, request_id: str) -> bool:
        """Give the request this alias. Returns False if another request has it."""
        link, token, gone = self._links.of(alias), secrets.token_hex(8), NOBODY
        key = self._links.of(request_id).keys.request_key(request_id)
        keys = [link.keys.request_key(alias)]
        while True:
            args = [key, token, gone]
            answer: bytes = await self._links.run(link, self._scripts.bind, keys, args)
            if answer in (b"", b"!"):
                return not answer
            gone, alive = await self._token(answer)
            if alive:
                return False

    async def _token(self, answer: bytes) -> tuple[str, bool]:
        """Return the token of an alias, and whether its request exists."""
        token, _, key = answer.decode().partition(" ")
        link = self._links.of(request_of(key))
        return token, bool(await self._links.call(lambda: link.client.exists(key)))

    def _keys(self, link: GroupLink, request_id: str) -> Sequence[str]:
        names = link.keys
        return (names.request_key(request_id), names.leases, names.events, names.states)

    def _args(self, fields: Mapping[str, str], gone: str) -> Sequence[str | int]:
        return (self._owner, self._lease_ms, gone, *flatten(fields))
