"""RedisDocuments: router/store/documents.py over Redis, a string for each document.

Each owner also has a sorted set of document names by time of arrival (ms), and a hash of their
sizes, with the sum of the sizes under the empty name. A change is one Lua call. All keys expire.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Final

from redis.asyncio import Redis

from baton.runtime.redis_keys import document_index_key, document_key, document_sizes_key
from router.store.documents import Keeping

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
    """Documents in Redis. `call`: a context that limits the time of a call and translates its
    failures to StoreUnavailable (router/store/redis_store.py)."""

    def __init__(
        self, client: Redis, call: Callable[[], AbstractAsyncContextManager[None]]
    ) -> None:
        self._redis = client
        self._call = call
        self._put = client.register_script(PUT)
        self._drop = client.register_script(DROP)

    async def put(
        self, owner: str, name: str, content: bytes, keeping: Keeping, replace: bool = False
    ) -> bool:
        args = [name, content, int(keeping.ttl_s * 1000), keeping.max_bytes, int(replace)]
        async with self._call():
            kept = await self._put(keys=_keys(owner, name), args=[*args, document_key(owner, "")])
        return bool(kept)

    async def get(self, owner: str, name: str) -> bytes | None:
        async with self._call():
            reply: Any = self._redis.get(document_key(owner, name))
            return await reply

    async def drop(self, owner: str, name: str) -> bool:
        async with self._call():
            return bool(await self._drop(keys=_keys(owner, name), args=[name]))


def _keys(owner: str, name: str) -> list[str]:
    return [document_key(owner, name), document_index_key(owner), document_sizes_key(owner)]
