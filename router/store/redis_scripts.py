"""The Lua of router/store/redis_store.py: one script per atomic operation.

MOVE (also for terminal states), CLAIM, UNCLAIM, BIND, FADE, BEAT, SWEEP, APPEND, RELEASE, FOLLOW,
READ. All keys of a call are of one key group, so that a Redis Cluster takes it. The allowed moves
are generated from TRANSITIONS. Time comes from Redis TIME only. MOVE and APPEND answer with the
words of router.store.base.WriteStatus.

Request hash: state, epoch, owner, tries, since and at (ms of the first claim and of the last
transition), seen (ms of the last read through another router), `n<sample>` (number of logged
tokens), `z<sample>` (the sample's end is logged), and the writer's own fields, prefixed `f:`. The
hash of an alias has `alias`, the request's key, and `by`, the token of the claim that bound it.
An alias may be in another key group than its request; router/store/redis_claims.py says how they
keep together.
"""

from __future__ import annotations

from typing import Final

from baton.protocol.request import TERMINAL, TRANSITIONS, RequestState
from router.store.base import ALIAS, END_MARK, LOGGED, MAX_TRIES


def lua_transitions() -> str:
    """TRANSITIONS as Lua tables: `allowed[from][to]` and `terminal[state]`."""
    rows = [
        f"  {old} = {{" + ", ".join(f"{new} = true" for new in sorted(allowed)) + "}"
        for old, allowed in TRANSITIONS.items()
    ]
    ends = ", ".join(f"{state} = true" for state in sorted(TERMINAL))
    return "local allowed = {\n" + ",\n".join(rows) + "}\nlocal terminal = {" + ends + "}\n"


_NOW: Final = """
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
"""

# `append(key, log, owner, at)`: one entry, whose values begin at ARGV[at]: epoch, sample, position,
# count, "t1,t2,...", more. Answers a status.
_APPEND: Final = f"""
local function append(key, log, owner, a)
  local sample, tokens, more = ARGV[a + 1], ARGV[a + 4], ARGV[a + 5]
  local ends = string.sub(more, 1, 1) == '{END_MARK}'
  local position, count = tonumber(ARGV[a + 2]), tonumber(ARGV[a + 3])
  local cur = redis.call('HMGET', key, 'state', 'epoch', 'owner', 'n' .. sample)
  local known = tonumber(cur[4] or 0) - position
  if not cur[1] then return 'gone' end
  if cur[3] ~= owner or tonumber(cur[2]) > tonumber(ARGV[a]) then return 'fenced' end
  if terminal[cur[1]] then return 'illegal' end
  if known < 0 then return 'gap' end
  local fresh = known < count
  if fresh then
    for _ = 1, known do tokens = string.sub(tokens, string.find(tokens, ',', 1, true) + 1) end
    redis.call('HINCRBY', key, 'n' .. sample, count - known)
  else
    tokens = ''
  end
  if fresh or (ends and redis.call('HEXISTS', key, 'z' .. sample) == 0) then
    local at = position + known
    if more == '' then
      redis.call('XADD', log, '*', 'e', ARGV[a], 's', sample, 'p', at, 't', tokens)
    else
      redis.call('XADD', log, '*', 'e', ARGV[a], 's', sample, 'p', at, 't', tokens, 'm', more)
    end
    if ends then redis.call('HSET', key, 'z' .. sample, 1) end
  end
  return 'ok'
end
"""

ALIAS_MS: Final = 25 * 3600 * 1000  # longer than any request; FADE shortens it at the end
_QUEUED: Final = RequestState.QUEUED.value
_CANCELLED: Final = RequestState.CANCELLED.value

# KEYS: request, leases, events, states, log. Answers a status; at an end also the request's alias.
# ARGV: owner, epoch, new state, catch up (1|0), lease ms, terminal ttl ms (0: delete at once),
# fewest tokens and fewest ends that the log must have for a terminal state, how many entries to
# append before that, the values of each as for APPEND, field, value, ...
MOVE: Final = (
    lua_transitions()
    + _NOW
    + _APPEND
    + f"""
local cur = redis.call('HMGET', KEYS[1], 'state', 'epoch', 'owner')
local state, stored, new, epoch = cur[1], tonumber(cur[2]), ARGV[3], tonumber(ARGV[2])
if not state then return 'gone' end
local target = epoch
if new == '{_QUEUED}' then target = epoch + 1 end
if cur[3] ~= ARGV[1] then return 'fenced' end
if state == new and stored == target then return 'ok' end
if stored > epoch then return 'fenced' end
local behind = ARGV[4] == '1' and not terminal[state]
if not behind and (stored ~= epoch or not allowed[state][new]) then return 'illegal' end
local fields = 10 + 6 * ARGV[9]
for at = 10, fields - 1, 6 do
  local status = append(KEYS[1], KEYS[5], ARGV[1], at)
  if status ~= 'ok' then return status end
end
local logged, ends = 0, 0
if terminal[new] then
  for _, name in ipairs(redis.call('HKEYS', KEYS[1])) do
    if string.find(name, '^n%d+$') then logged = logged + redis.call('HGET', KEYS[1], name) end
    if string.find(name, '^z%d+$') then ends = ends + 1 end
  end
  if logged < tonumber(ARGV[7]) or ends < tonumber(ARGV[8]) then return 'gap' end
end
local alias
redis.call('HSET', KEYS[1], 'state', new, 'epoch', target, 'at', now)
for i = fields, #ARGV, 2 do redis.call('HSET', KEYS[1], 'f:' .. ARGV[i], ARGV[i + 1]) end
redis.call('HINCRBY', KEYS[4], state, -1)
redis.call('HINCRBY', KEYS[4], new, 1)
if terminal[new] then
  redis.call('HSET', KEYS[1], 'f:{LOGGED}', logged)
  redis.call('ZREM', KEYS[2], KEYS[1])
  alias = redis.call('HGET', KEYS[1], 'f:{ALIAS}')
  redis.call('PEXPIRE', KEYS[1], ARGV[6])
  redis.call('PEXPIRE', KEYS[5], ARGV[6])
else
  redis.call('ZADD', KEYS[2], now + ARGV[5], KEYS[1])
end
redis.call('XADD', KEYS[3], 'MAXLEN', '~', 65536, '*', 'r', KEYS[1], 's', new, 'e', target)
if alias then return {{'ok', alias}} end
return 'ok'"""
)

# KEYS: request, leases, events, states | ARGV: owner, lease ms, the token of an alias of that name
# whose request is gone, field, value, ...
# Answers the hash as HGETALL does, then `now`; an empty list if the id is in use; "token key" if it
# is an alias of the request with that key.
CLAIM: Final = (
    _NOW
    + f"""
local cur = redis.call('HMGET', KEYS[1], 'state', 'epoch', 'owner', 'alias', 'by')
local epoch = cur[2] or 1
if cur[4] and not cur[1] and (cur[5] or '') ~= ARGV[3] then
  return (cur[5] or '') .. ' ' .. cur[4]
end
if not cur[1] then
  redis.call('DEL', KEYS[1])
  redis.call('HSET', KEYS[1], 'state', '{_QUEUED}', 'epoch', 1, 'tries', 0, 'since', now)
  redis.call('HINCRBY', KEYS[4], '{_QUEUED}', 1)
elseif cur[1] ~= '{_QUEUED}' or (cur[3] ~= '' and cur[3] ~= ARGV[1]) then
  return {{}}
end
redis.call('HSET', KEYS[1], 'owner', ARGV[1], 'at', now)
for i = 4, #ARGV, 2 do redis.call('HSET', KEYS[1], 'f:' .. ARGV[i], ARGV[i + 1]) end
redis.call('ZADD', KEYS[2], now + ARGV[2], KEYS[1])
redis.call('XADD', KEYS[3], 'MAXLEN', '~', 65536, '*', 'r', KEYS[1], 's', '{_QUEUED}', 'e', epoch)
local all = redis.call('HGETALL', KEYS[1])
all[#all + 1] = 'now'
all[#all + 1] = now
return all"""
)

# KEYS: request, leases, states, log | ARGV: owner. Takes back a claim whose alias is in use.
UNCLAIM: Final = f"""
local cur = redis.call('HMGET', KEYS[1], 'state', 'owner')
if cur[1] ~= '{_QUEUED}' or cur[2] ~= ARGV[1] then return end
redis.call('DEL', KEYS[1], KEYS[4])
redis.call('ZREM', KEYS[2], KEYS[1])
redis.call('HINCRBY', KEYS[3], '{_QUEUED}', -1)"""

# KEYS: alias | ARGV: request key, the token of this claim, the token of a binding whose request is
# gone. Answers "" if it is bound now, "!" if it is the id of a request, else "token key" with the
# key of the request that has it.
BIND: Final = f"""
local cur = redis.call('HMGET', KEYS[1], 'state', 'alias', 'by')
if cur[1] then return '!' end
local by = cur[3] or ''
if cur[2] and cur[2] ~= ARGV[1] and by ~= ARGV[3] then return by .. ' ' .. cur[2] end
redis.call('HSET', KEYS[1], 'alias', ARGV[1], 'by', ARGV[2])
redis.call('PEXPIRE', KEYS[1], {ALIAS_MS})
return ''"""

# KEYS: alias | ARGV: request key, ms. The request has ended: its alias ends with it.
FADE: Final = """
if redis.call('HGET', KEYS[1], 'alias') == ARGV[1] then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
end"""

# KEYS: request, or its alias. Answers like CLAIM; the request's key if it is an alias.
READ: Final = (
    _NOW
    + """
local alias = redis.call('HGET', KEYS[1], 'alias')
if alias and alias ~= KEYS[1] then return alias end
local all = redis.call('HGETALL', KEYS[1])
if #all > 0 then
  for _, each in ipairs({'now', now}) do all[#all + 1] = each end
end
return all"""
)

# KEYS: request
FOLLOW: Final = (
    _NOW
    + """
if redis.call('EXISTS', KEYS[1]) == 1 then redis.call('HSET', KEYS[1], 'seen', now) end"""
)

# KEYS: leases, request, request, ... | ARGV: owner
RELEASE: Final = """
for i = 2, #KEYS do
  if redis.call('HGET', KEYS[i], 'owner') == ARGV[1] then
    redis.call('ZADD', KEYS[1], 'XX', 0, KEYS[i])
  end
end"""

# KEYS: leases, router, request, request, ... | ARGV: owner, lease ms
# Answers the places (from 1) of the requests that are not the owner's any more.
BEAT: Final = (
    lua_transitions()
    + _NOW
    + """
redis.call('SET', KEYS[2], now, 'PX', ARGV[2])
local lost = {}
for i = 3, #KEYS do
  local cur = redis.call('HMGET', KEYS[i], 'state', 'owner')
  if cur[2] == ARGV[1] and not terminal[cur[1]] then
    redis.call('ZADD', KEYS[1], now + ARGV[2], KEYS[i])
  else
    lost[#lost + 1] = i - 2
  end
end
return lost"""
)

# KEYS: leases, events, states | ARGV: limit, terminal ttl ms, lease ms. Answers rows of request
# key, state, epoch.
SWEEP: Final = (
    lua_transitions()
    + _NOW
    + f"""
local dead = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, ARGV[1])
local out = {{}}
for _, key in ipairs(dead) do
  redis.call('ZREM', KEYS[1], key)
  local cur = redis.call('HMGET', key, 'state', 'epoch', 'f:resumable', 'tries')
  if cur[1] and not terminal[cur[1]] then
    local new = '{_CANCELLED}'
    if cur[3] == '1' and tonumber(cur[4]) < {MAX_TRIES} then
      new = '{_QUEUED}'
      redis.call('ZADD', KEYS[1], now + ARGV[3], key)
    end
    local epoch = cur[2] + 1
    redis.call('HSET', key, 'state', new, 'epoch', epoch, 'owner', '', 'at', now)
    redis.call('HINCRBY', key, 'tries', 1)
    redis.call('HINCRBY', KEYS[3], cur[1], -1)
    redis.call('HINCRBY', KEYS[3], new, 1)
    if terminal[new] then
      redis.call('PEXPIRE', key, ARGV[2])
      local log = string.gsub(key, ':req:', ':log:', 1)
      redis.call('PEXPIRE', log, ARGV[2])
    end
    redis.call('XADD', KEYS[2], 'MAXLEN', '~', 65536, '*', 'r', key, 's', new, 'e', epoch)
    out[#out + 1] = {{key, new, epoch}}
  end
end
return out"""
)

# KEYS: request, log, request, log, ... | ARGV: owner, then per entry: epoch, sample, position,
# count, "t1,t2,...", more
APPEND: Final = (
    lua_transitions()
    + _APPEND
    + """
local out = {}
for i = 1, #KEYS / 2 do
  out[i] = append(KEYS[2 * i - 1], KEYS[2 * i], ARGV[1], 6 * i - 4)
end
return out"""
)
