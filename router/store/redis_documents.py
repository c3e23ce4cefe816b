"""RedisDocuments: router/store/documents.py over Redis, a string for each document.

Each owner also has a sorted set of document names by time of arrival (ms), and a hash of their
sizes, with the sum of the sizes under the empty name. A change is one Lua call. All keys expire.
"""

from __future__ import annotations

from typing import Any, Final, cast

from baton.runtime.redis.keys import KeyGroup
from router.store.documents import Keeping
from router.store.redis_links import Links

_FORGET: Final = """
local function forget(name)
  local size = redis.call('HGET', KEYS[3], name)
  redis.call('ZREM', KEYS[2], name)
  if size then
    redis.call('HDEL', KEYS[3], name)
    redis.call('HINCRBY', KEYS[3], '', -size)
  end
end
"""

# KEYS: document, index, sizes | ARGV: name, content, ttl ms, most bytes, replace (1|0), what the
# keys of this owner's documents begin with
PUT: Final = (
    _FORGET
    + """
local size, ttl, most = #ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
if size > most or (ARGV[5] == '1' and redis.call('EXISTS', KEYS[1]) == 0) then return 0 end
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now - ttl)) do forget(name) end
forget(ARGV[1])
while redis.call('HINCRBY', KEYS[3], '', 0) + size > most do
  local oldest = redis.call('ZRANGE', KEYS[2], 0, 0)[1]
  redis.call('DEL', ARGV[6] .. oldest)
  forget(oldest)
end
local last = redis.call('ZRANGE', KEYS[2], -1, -1, 'WITHSCORES')[2]
if last and last + 0 >= now then now = last + 1 end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ttl)
redis.call('ZADD', KEYS[2], now, ARGV[1])
redis.call('HSET', KEYS[3], ARGV[1], size)
redis.call('HINCRBY', KEYS[3], '', size)
redis.call('PEXPIRE', KEYS[2], ttl)
redis.call('PEXPIRE', KEYS[3], ttl)
return 1"""
)

# KEYS: document, index, sizes | ARGV: name
DROP: Final = (
    _FORGET
    + """
forget(ARGV[1])
return redis.call('DEL', KEYS[1])"""
)


class RedisDocuments:
    """Documents in Redis, those of one owner in one key group."""

    def __init__(self, links: Links) -> None:
        self._links = links
        register = links.all[0].client.register_script
        self._put = register(PUT)
        self._drop = register(DROP)

    async def put(
        self, owner: str, name: str, content: bytes, keeping: Keeping, replace: bool = False
    ) -> bool:
        link = self._links.of(owner)
        args: list[Any] = [
            name,
            content,
            int(keeping.ttl_s * 1000),
            keeping.max_bytes,
            int(replace),
        ]
        args.append(link.keys.document_key(owner, ""))
        keys = _keys(link.keys, owner, name)
        return bool(await self._links.evaluate(link, self._put, keys, args))

    async def get(self, owner: str, name: str) -> bytes | None:
        link = self._links.of(owner)
        key = link.keys.document_key(owner, name)
        return cast("bytes | None", await self._links.call(lambda: link.client.get(key)))

    async def drop(self, owner: str, name: str) -> bool:
        link = self._links.of(owner)
        keys = _keys(link.keys, owner, name)
        return bool(await self._links.evaluate(link, self._drop, keys, [name]))


def _keys(keys: KeyGroup, owner: str, name: str) -> list[str]:
    return [
        keys.document_key(owner, name), keys.document_index_key(owner),
        keys.document_sizes_key(owner),
    ]  # fmt: skip
