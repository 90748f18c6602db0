"""The Lua scripts: every step of the metadata that must be atomic.

A script touches the keys of one node, or the books, never both: on a cluster they live
in different slots. `allow-oom`, since a store that is full must still be able to free,
publish what it has and count. Times come from Redis, so servers' clocks do not matter.
"""

from __future__ import annotations

_NOW = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
"""

# A list of children lives as long as what it belongs to, the record included.
_WITH_LISTS = """#!lua flags=allow-oom
local function keep_list(children, manifest, record)
  local left = {redis.call('PTTL', manifest), redis.call('PTTL', record)}
  if left[1] == -1 or left[2] == -1 then
    redis.call('PERSIST', children)
  else
    redis.call('PEXPIRE', children, math.max(left[1], left[2], 1))
  end
end
"""

# KEYS: manifest, pins, pinned_below, lease, record, children
# ARGV: segment prefix, segments, lease token, ttl ms, grace ms, record, record ttl ms,
#       top tier, then the manifest's field-value pairs
PUBLISH = (
    _WITH_LISTS
    + """
local prefix, count, token = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local ttl, grace = tonumber(ARGV[4]), tonumber(ARGV[5])
for i = 0, count - 1 do
  if redis.call('EXISTS', prefix .. i) == 0 then return {'missing', i} end
end
local holder = redis.call('GET', KEYS[4])
if holder and holder ~= token then return {'lease'} end
redis.call('SET', KEYS[5], ARGV[6], 'PX', math.max(ARGV[7], ttl, redis.call('PTTL', KEYS[5])))
local old = redis.call('HMGET', KEYS[1], 'generation', 'top', 'attempt', 'count', 'hits',
  'ttl', 'record_ttl')
local pinned = redis.call('SCARD', KEYS[2]) + redis.call('SCARD', KEYS[3]) > 0
if old[1] and tonumber(old[2]) >= tonumber(ARGV[8]) then
  if pinned then redis.call('PERSIST', KEYS[5]) end
  keep_list(KEYS[6], KEYS[1], KEYS[5])
  return {'present', tonumber(old[1])}
end
local generation = (tonumber(old[1]) or 0) + 1
local left = redis.call('PTTL', KEYS[1])
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'generation', generation, 'top', ARGV[8], 'count', count,
  'hits', old[5] or 0, 'ttl', math.max(ttl, tonumber(old[6]) or 0),
  'record_ttl', math.max(ARGV[7], tonumber(old[7]) or 0))
for i = 9, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
if pinned then
  redis.call('PERSIST', KEYS[5])
  for i = 0, count - 1 do redis.call('PERSIST', prefix .. i) end
else
  ttl = math.max(ttl, left)
  redis.call('PEXPIRE', KEYS[1], ttl)
  for i = 0, count - 1 do redis.call('PEXPIRE', prefix .. i, ttl + grace) end
end
keep_list(KEYS[6], KEYS[1], KEYS[5])
return {'published', generation, old[3] or '', tonumber(old[4]) or 0}
"""
)

# Extend a node's life to at least ttl. KEYS: manifest, record, children, betters
# ARGV: segment prefix up to the attempt, ttl ms, grace ms, record ttl ms
TOUCH = (
    _WITH_LISTS
    + """
local node = redis.call('HMGET', KEYS[1], 'attempt', 'count', 'ttl')
if not node[1] then return 0 end
local ttl = tonumber(ARGV[2])
if ttl > (tonumber(node[3]) or 0) then redis.call('HSET', KEYS[1], 'ttl', ttl) end
redis.call('PEXPIRE', KEYS[1], ttl, 'GT')
redis.call('PEXPIRE', KEYS[2], math.max(ttl, ARGV[4]), 'GT')
keep_list(KEYS[3], KEYS[1], KEYS[2])
keep_list(KEYS[4], KEYS[1], KEYS[2])
local left = redis.call('PTTL', KEYS[1])
if left >= 0 then
  local prefix = ARGV[1] .. node[1] .. ':'
  if redis.call('PTTL', prefix .. '0') < left + tonumber(ARGV[3]) / 2 then
    for i = 0, node[2] - 1 do
      redis.call('PEXPIRE', prefix .. i, left + ARGV[3], 'GT')
    end
  end
end
return 1
"""
)

# Pin (ARGV[1] = 1) or unpin (0) a node, by the member ARGV[3] in KEYS[2].
# Afterwards it lives as long as was ever asked for, at least the given times.
# KEYS: manifest, the set to change, the other set, record, children, betters
# ARGV: 1 or 0, segment prefix up to the attempt, member, ttl ms afterwards, grace ms,
#       record ttl ms afterwards
PIN = (
    _WITH_LISTS
    + """
local node = redis.call('HMGET', KEYS[1], 'attempt', 'count', 'ttl', 'record_ttl')
if ARGV[1] == '1' then
  if not node[1] then return -1 end
  redis.call('SADD', KEYS[2], ARGV[3])
  local prefix = ARGV[2] .. node[1] .. ':'
  redis.call('PERSIST', KEYS[1])
  redis.call('PERSIST', KEYS[4])
  for i = 0, node[2] - 1 do redis.call('PERSIST', prefix .. i) end
  keep_list(KEYS[5], KEYS[1], KEYS[4])
  keep_list(KEYS[6], KEYS[1], KEYS[4])
  return redis.call('SCARD', KEYS[2])
end
local removed = redis.call('SREM', KEYS[2], ARGV[3])
local pins = redis.call('SCARD', KEYS[2])
if removed == 1 and pins + redis.call('SCARD', KEYS[3]) == 0 then
  local ttl = math.max(ARGV[4], tonumber(node[3]) or 0)
  redis.call('PEXPIRE', KEYS[4], math.max(ARGV[6], ttl, tonumber(node[4]) or 0))
  if node[1] then
    local prefix = ARGV[2] .. node[1] .. ':'
    redis.call('PEXPIRE', KEYS[1], ttl)
    for i = 0, node[2] - 1 do redis.call('PEXPIRE', prefix .. i, ttl + ARGV[5]) end
  end
  keep_list(KEYS[5], KEYS[1], KEYS[4])
  keep_list(KEYS[6], KEYS[1], KEYS[4])
end
return pins
"""
)

# Read the manifest and count the hit. KEYS: manifest
OPEN = """#!lua flags=allow-oom
local node = redis.call('HMGET', KEYS[1], 'generation', 'attempt', 'parts', 'cost', 'bytes')
if not node[1] then return nil end
node[6] = redis.call('HINCRBY', KEYS[1], 'hits', 1)
return node
"""

# Remove the manifest, hence the node; its segments are unlinked by the caller.
# 'unbind' removes the record in the same step: a child is published below a node that
# has at least this, so none can be missed.
# KEYS: manifest, pins, pinned_below, children, bindings, record, holds
# ARGV: attempt that it must name or '', what protects it: '' nothing, 'evict', 'unbind'
DROP = f"""#!lua flags=allow-oom
{_NOW}
local node = redis.call('HMGET', KEYS[1], 'attempt', 'count', 'bytes', 'parent')
if ARGV[2] ~= '' then
  if redis.call('SCARD', KEYS[2]) + redis.call('SCARD', KEYS[3]) > 0 then return {{'pinned'}} end
  if redis.call('ZCARD', KEYS[4]) > 0 then return {{'parent'}} end
end
if ARGV[2] == 'evict' then
  redis.call('ZREMRANGEBYSCORE', KEYS[7], '-inf', now)
  if redis.call('ZCARD', KEYS[7]) > 0 then return {{'held'}} end
end
if ARGV[2] == 'unbind' then
  redis.call('ZREMRANGEBYSCORE', KEYS[5], '-inf', now)
  if redis.call('ZCARD', KEYS[5]) > 0 then return {{'bound'}} end
end
if node[1] and ARGV[1] ~= '' and ARGV[1] ~= node[1] then return {{'other'}} end
if ARGV[2] == 'unbind' then redis.call('UNLINK', KEYS[6], KEYS[7]) end
if not node[1] then return {{'absent'}} end
redis.call('UNLINK', KEYS[1])
return {{'dropped', node[1], tonumber(node[2]), tonumber(node[3]), node[4]}}
"""

# Announce a child before it is published; young entries survive without manifest.
# Returns 0 if the parent is gone, its record too. KEYS: children, manifest, record
# ARGV: child, grace ms
ADOPT = f"""{_WITH_LISTS}
{_NOW}
if redis.call('EXISTS', KEYS[2], KEYS[3]) == 0 then return 0 end
redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])
keep_list(KEYS[1], KEYS[2], KEYS[3])
return 1
"""

# Note what is to go with a node. Returns 0 if the node is gone, its record too.
# KEYS: betters, manifest, record. ARGV: better node
BETTER = f"""{_WITH_LISTS}
if redis.call('EXISTS', KEYS[2], KEYS[3]) == 0 then return 0 end
redis.call('SADD', KEYS[1], ARGV[1])
keep_list(KEYS[1], KEYS[2], KEYS[3])
return 1
"""

# Keep a node from eviction while a put below it runs. KEYS: holds. ARGV: put, lease ms
HOLD = f"""#!lua flags=allow-oom
{_NOW}
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])
if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
return 1
"""

# The children of a node, none if a pin or a handle keeps it.
# KEYS: pins, bindings, children
LOOSE_CHILDREN = f"""#!lua flags=allow-oom
{_NOW}
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
if redis.call('SCARD', KEYS[1]) + redis.call('ZCARD', KEYS[2]) > 0 then return {{}} end
return redis.call('ZRANGE', KEYS[3], 0, -1)
"""

# Forget children that are gone, unless they were announced just now.
# KEYS: children. ARGV: children without manifest
DISOWN = f"""#!lua flags=allow-oom
{_NOW}
local removed = 0
for _, child in ipairs(ARGV) do
  local until_ms = redis.call('ZSCORE', KEYS[1], child)
  if until_ms and tonumber(until_ms) <= now then
    removed = removed + redis.call('ZREM', KEYS[1], child)
  end
end
return removed
"""

# Extend the leases of an attempt's unpublished segments.
# ARGV: segment prefix, from, to (exclusive), ttl ms
RENEW = """#!lua flags=allow-oom
for i = ARGV[2], ARGV[3] - 1 do redis.call('PEXPIRE', ARGV[1] .. i, ARGV[4]) end
return 1
"""

# Open an attempt in the books. KEYS: sizes, writing. ARGV: member, lease ms
BOOK_BEGIN = f"""#!lua flags=allow-oom
{_NOW}
if redis.call('HSETNX', KEYS[1], ARGV[1], 0) == 0 then return 0 end
redis.call('ZADD', KEYS[2], now + ARGV[2], ARGV[1])
return 1
"""

# Reserve bytes. KEYS: sizes, total. ARGV: member, bytes, limit.
# Returns how many bytes are too many, 0 if reserved, -1 if the attempt is unknown.
BOOK_RESERVE = """#!lua flags=allow-oom
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then return -1 end
local total = tonumber(redis.call('GET', KEYS[2]) or 0) + ARGV[2]
if total > tonumber(ARGV[3]) then return total - ARGV[3] end
redis.call('HINCRBY', KEYS[1], ARGV[1], ARGV[2])
redis.call('SET', KEYS[2], string.format('%.0f', total))
return 0
"""

# Extend an attempt's lease in the books. KEYS: writing. ARGV: member, lease ms
BOOK_RENEW = f"""#!lua flags=allow-oom
{_NOW}
return redis.call('ZADD', KEYS[1], 'XX', 'CH', now + ARGV[2], ARGV[1])
"""

# Turn a reservation into a published node of exactly these bytes.
# KEYS: sizes, total, writing, counts, index, used
# ARGV: member, bytes, segments, node id, value
BOOK_PUBLISH = f"""#!lua flags=allow-oom
{_NOW}
local reserved = tonumber(redis.call('HGET', KEYS[1], ARGV[1]) or 0)
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('INCRBY', KEYS[2], ARGV[2] - reserved)
redis.call('ZREM', KEYS[3], ARGV[1])
redis.call('HSET', KEYS[4], ARGV[1], ARGV[3])
redis.call('ZADD', KEYS[5], ARGV[5], ARGV[4])
redis.call('ZADD', KEYS[6], now, ARGV[4])
return 1
"""

# Strike an attempt off the books. KEYS: sizes, total, writing, counts, trash
# ARGV: member. Returns the bytes freed.
BOOK_RELEASE = """#!lua flags=allow-oom
local bytes = tonumber(redis.call('HGET', KEYS[1], ARGV[1]) or 0)
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('HDEL', KEYS[4], ARGV[1])
redis.call('ZREM', KEYS[3], ARGV[1])
redis.call('ZREM', KEYS[5], ARGV[1])
if bytes > 0 then redis.call('DECRBY', KEYS[2], bytes) end
return bytes
"""

# Note a use. KEYS: index, used. ARGV: node id, value
BOOK_USE = f"""#!lua flags=allow-oom
{_NOW}
redis.call('ZADD', KEYS[1], 'XX', ARGV[2], ARGV[1])
redis.call('ZADD', KEYS[2], 'XX', now, ARGV[1])
return 1
"""

# Schedule a replaced generation for unlinking. KEYS: trash. ARGV: member, delay ms
BOOK_TRASH = f"""#!lua flags=allow-oom
{_NOW}
redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])
return 1
"""

# Members of a sorted set whose time has come. KEYS: set. ARGV: at most so many
DUE = f"""#!lua flags=allow-oom
{_NOW}
return redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, ARGV[1])
"""

# Bind a handle. KEYS: handle. ARGV: handle, tenant, node, metadata, ttl ms
# Returns {created, ttl, node} in seconds and ms, or nil if it names another node. One that
# was moved away from the node stays where it is.
BIND = """#!lua flags=allow-oom
local old = redis.call('HMGET', KEYS[1], 'node', 'created', 'from')
local created = old[2] or redis.call('TIME')[1]
if old[1] and old[1] ~= ARGV[3] then
  if old[3] ~= ARGV[3] then return nil end
else
  redis.call('HSET', KEYS[1], 'handle', ARGV[1], 'tenant', ARGV[2], 'node', ARGV[3],
    'metadata', ARGV[4], 'created', created)
end
redis.call('HSET', KEYS[1], 'ttl', ARGV[5])
redis.call('PEXPIRE', KEYS[1], ARGV[5])
return {tonumber(created), tonumber(ARGV[5]), old[1] or ARGV[3]}
"""

# Take a handle's binding off a node without children. The one step that decides a move:
# a child announced later is one of the old chain. KEYS: children, bindings. ARGV: digest
LEAVE = """#!lua flags=allow-oom
if redis.call('ZCARD', KEYS[1]) > 0 then return 0 end
redis.call('ZREM', KEYS[2], ARGV[1])
return 1
"""

# Bind a handle to another node. KEYS: handle. ARGV: from, to, 1 if there are metadata,
# metadata. Returns 'gone', 'elsewhere' or 'moved'
MOVE = """#!lua flags=allow-oom
local node = redis.call('HGET', KEYS[1], 'node')
if not node then return 'gone' end
if node == ARGV[2] then return 'moved' end
if node ~= ARGV[1] then return 'elsewhere' end
redis.call('HSET', KEYS[1], 'node', ARGV[2], 'from', ARGV[1])
if ARGV[3] == '1' then redis.call('HSET', KEYS[1], 'metadata', ARGV[4]) end
return 'moved'
"""

# Remove a handle. KEYS: handle. Returns {node, node that it was moved from or ''} or nil
UNBIND = """#!lua flags=allow-oom
local old = redis.call('HMGET', KEYS[1], 'node', 'from')
if not old[1] then return nil end
redis.call('UNLINK', KEYS[1])
return {old[1], old[2] or ''}
"""

# Note on the node that a handle points at it. KEYS: bindings. ARGV: digest, ttl ms
BOUND = f"""#!lua flags=allow-oom
{_NOW}
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])
local left = redis.call('PTTL', KEYS[1])
if left < tonumber(ARGV[2]) then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
return 1
"""

# List a handle under its tenant. KEYS: tenant_handles. ARGV: handle, created s, ttl ms
LISTED = """#!lua flags=allow-oom
redis.call('ZADD', KEYS[1], 'NX', ARGV[2], ARGV[1])
if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[3]) then
  redis.call('PEXPIRE', KEYS[1], ARGV[3])
end
return 1
"""

# Read a handle and start its time to live anew. KEYS: handle
RESOLVE = """#!lua flags=allow-oom
local ttl = redis.call('HGET', KEYS[1], 'ttl')
if not ttl then return nil end
redis.call('PEXPIRE', KEYS[1], ttl)
return redis.call('HMGET', KEYS[1], 'handle', 'tenant', 'node', 'metadata', 'created', 'ttl')
"""

# Begin a request, or extend the attempt that holds a token. KEYS: request
# ARGV: request digest, handle, fresh token, lease ms, ttl ms, token held or ''
# Returns {state, handle, answer, token}; states as in the proto, 0 = conflict.
BEGIN = f"""#!lua flags=allow-oom
{_NOW}
local old = redis.call('HMGET', KEYS[1], 'request', 'handle', 'answer', 'until', 'token')
if old[1] and old[1] ~= ARGV[1] then return {{0, '', '', ''}} end
if old[3] then return {{3, old[2], old[3], ''}} end
if ARGV[6] ~= '' then
  if old[5] ~= ARGV[6] then return {{2, old[2] or ARGV[2], '', ''}} end
  redis.call('HSET', KEYS[1], 'until', math.max(now + ARGV[4], old[4]))
  redis.call('PEXPIRE', KEYS[1], math.max(ARGV[5], ARGV[4]), 'GT')
  return {{1, old[2], '', ARGV[6]}}
end
if old[1] and tonumber(old[4]) > now then return {{2, old[2], '', ''}} end
local handle = old[2] or ARGV[2]
redis.call('HSET', KEYS[1], 'request', ARGV[1], 'handle', handle, 'token', ARGV[3],
  'until', now + ARGV[4], 'ttl', ARGV[5])
redis.call('PEXPIRE', KEYS[1], math.max(ARGV[5], ARGV[4]))
return {{1, handle, '', ARGV[3]}}
"""

# Finish a request. KEYS: request. ARGV: token, answer ('' = forget)
FINISH = """#!lua flags=allow-oom
local old = redis.call('HMGET', KEYS[1], 'token', 'ttl', 'answer')
if not old[1] or old[1] ~= ARGV[1] then return 0 end
if ARGV[2] == '' then
  if old[3] then return 0 end
  redis.call('DEL', KEYS[1])
  return 1
end
redis.call('HSET', KEYS[1], 'answer', ARGV[2])
redis.call('PEXPIRE', KEYS[1], old[2])
return 1
"""

# Add a target to an alias; the oldest beyond 16 go. KEYS: alias. ARGV: target, ttl ms
ALIAS = f"""#!lua flags=allow-oom
{_NOW}
redis.call('ZADD', KEYS[1], now, ARGV[1])
redis.call('ZREMRANGEBYRANK', KEYS[1], 0, -17)
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1
"""

# Take a lease, or extend the one that a token holds.
# KEYS: lease. ARGV: fresh token, ttl ms, token held or ''
# Returns 0, or ms that another still holds it, or -1 if the token's lease has lapsed.
ACQUIRE = """#!lua flags=allow-oom
if ARGV[3] ~= '' then
  local holder = redis.call('GET', KEYS[1])
  if not holder then return -1 end
  if holder ~= ARGV[3] then return math.max(1, redis.call('PTTL', KEYS[1])) end
  redis.call('PEXPIRE', KEYS[1], ARGV[2], 'GT')
  return 0
end
if redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then return 0 end
return math.max(1, redis.call('PTTL', KEYS[1]))
"""

# Give a lease back. KEYS: lease. ARGV: token
RELEASE = """#!lua flags=allow-oom
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""
