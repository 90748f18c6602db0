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
local node = redis.call('HMGET', KEYS[1], 'attempt', 'count', 'ttl', 'probe')
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
  -- One that stays when the node shrinks tells for all.
  if redis.call('PTTL', prefix .. (node[4] or 0)) < left + tonumber(ARGV[3]) / 2 then
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
#       record ttl ms afterwards, longest ttl ms of the node or 0
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
  local ttl, cap = math.max(ARGV[4], tonumber(node[3]) or 0), tonumber(ARGV[7])
  if cap > 0 then ttl = math.min(ttl, cap) end
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
# ARGV: attempt that it must name or '', what protects it: '' nothing, 'evict', 'unbind',
#       generation that it must have or 0
DROP = f"""#!lua flags=allow-oom
{_NOW}
local node = redis.call('HMGET', KEYS[1], 'attempt', 'count', 'bytes', 'parent', 'generation')
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
if node[1] and ARGV[3] ~= '0' and ARGV[3] ~= node[5] then return {{'other'}} end
if ARGV[2] == 'unbind' then redis.call('UNLINK', KEYS[6], KEYS[7]) end
if not node[1] then return {{'absent'}} end
redis.call('UNLINK', KEYS[1])
return {{'dropped', node[1], tonumber(node[2]), tonumber(node[3]), node[4]}}
"""

# Publish a node's next generation, without its top tiers; whoever comes second learns it.
# KEYS: manifest, pins, pinned_below, holds
# ARGV: generation that it must have, then field-value pairs. Returns what happened.
SHRINK = f"""#!lua flags=allow-oom
{_NOW}
local generation = redis.call('HGET', KEYS[1], 'generation')
if not generation then return 'absent' end
if generation ~= ARGV[1] then return 'other' end
if redis.call('SCARD', KEYS[2]) + redis.call('SCARD', KEYS[3]) > 0 then return 'pinned' end
redis.call('ZREMRANGEBYSCORE', KEYS[4], '-inf', now)
if redis.call('ZCARD', KEYS[4]) > 0 then return 'held' end
redis.call('HSET', KEYS[1], 'generation', generation + 1)
for i = 2, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
return 'shrunk'
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

# What the scripts of the books share. KEYS of all of them: keys.BOOKS.
_BOOKS = """#!lua flags=allow-oom
local SIZES, TOTAL, WRITING, COUNTS, TRASH = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local CUTS, CUT_BYTES, INDEX, TALL, USED = KEYS[6], KEYS[7], KEYS[8], KEYS[9], KEYS[10]
local AGE, OWNERS, TENANTS, OWNED_BYTES = KEYS[11], KEYS[12], KEYS[13], KEYS[14]
local OWNED_NODES, PINS, OWNED_PINS, COUNTED = KEYS[15], KEYS[16], KEYS[17], KEYS[18]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function number(value) return tonumber(value or 0) or 0 end

local function text(value) return string.format('%.0f', value) end

-- Change what an attempt holds, and with it all sums.
local function charge(member, bytes)
  if bytes == 0 then return end
  redis.call('HINCRBY', SIZES, member, text(bytes))
  redis.call('INCRBY', TOTAL, text(bytes))
  local owner = redis.call('HGET', OWNERS, member)
  if owner then redis.call('HINCRBY', OWNED_BYTES, owner, text(bytes)) end
end

local function count(member, nodes)
  local owner = redis.call('HGET', OWNERS, member)
  if owner then redis.call('HINCRBY', OWNED_NODES, owner, nodes) end
end

-- Take a node out of the order; return its score, whether it is tall, and its last use.
local function take_out(node)
  local used = redis.call('HGET', USED, node)
  if not used then return nil end
  local place = used .. ':' .. node
  local score = tonumber(redis.call('ZSCORE', INDEX, place))
  local tall = redis.call('ZREM', TALL, place) == 1
  redis.call('ZREM', INDEX, place)
  local tenant = redis.call('HGET', TENANTS, node)
  if tenant then
    redis.call('ZREM', INDEX .. ':' .. tenant, place)
    redis.call('ZREM', TALL .. ':' .. tenant, place)
  end
  redis.call('HDEL', USED, node)
  return score, tall, used
end

-- Equal scores are sorted by name: the longest unused comes first.
local function put_in(node, score, tall, used)
  local place = used .. ':' .. node
  local rank = string.format('%.17g', score)
  local tenant = redis.call('HGET', TENANTS, node)
  redis.call('HSET', USED, node, used)
  redis.call('ZADD', INDEX, rank, place)
  if tenant then redis.call('ZADD', INDEX .. ':' .. tenant, rank, place) end
  if not tall then return end
  redis.call('ZADD', TALL, rank, place)
  if tenant then redis.call('ZADD', TALL .. ':' .. tenant, rank, place) end
end

local function use(node, value, clock, tall)
  -- In µs: two uses within one ms have an order, too.
  local at = time[1] * 1000000 + time[2]
  local base = clock == 'time' and at or number(redis.call('GET', AGE))
  put_in(node, base + value, tall, string.format('%017.0f', at))
end
"""

# Open an attempt. ARGV: member, lease ms. Returns 0 if there is one already.
BOOK_BEGIN = (
    _BOOKS
    + """
if redis.call('HSETNX', SIZES, ARGV[1], 0) == 0 then return 0 end
redis.call('ZADD', WRITING, now + ARGV[2], ARGV[1])
return 1
"""
)

# Count an attempt against its tenant. ARGV: member, node, tenant, most nodes or 0
# Returns how many nodes are too many, 0 if counted, -1 if the attempt is unknown.
BOOK_ADMIT = (
    _BOOKS
    + """
if redis.call('HEXISTS', SIZES, ARGV[1]) == 0 then return -1 end
if redis.call('HEXISTS', OWNERS, ARGV[1]) == 1 then return 0 end
local over = number(redis.call('HGET', OWNED_NODES, ARGV[3])) + 1 - ARGV[4]
-- A node that is there already is replaced, or stays as it is.
local replaces = redis.call('HGET', TENANTS, ARGV[2]) == ARGV[3]
if tonumber(ARGV[4]) > 0 and over > 0 and not replaces then return over end
redis.call('HSET', OWNERS, ARGV[1], ARGV[3])
redis.call('HINCRBY', OWNED_NODES, ARGV[3], 1)
return 0
"""
)

# Reserve bytes. ARGV: member, bytes, limit, limit of its tenant or 0
# Returns how many bytes are too many for all and for the tenant, {0, 0} if reserved,
# {-1, 0} if the attempt is unknown.
BOOK_RESERVE = (
    _BOOKS
    + """
if redis.call('HEXISTS', SIZES, ARGV[1]) == 0 then return {-1, 0} end
local missing = math.max(0, number(redis.call('GET', TOTAL)) + ARGV[2] - ARGV[3])
local owner, own = redis.call('HGET', OWNERS, ARGV[1]), 0
if owner and tonumber(ARGV[4]) > 0 then
  own = math.max(0, number(redis.call('HGET', OWNED_BYTES, owner)) + ARGV[2] - ARGV[4])
end
if missing + own == 0 then charge(ARGV[1], tonumber(ARGV[2])) end
return {missing, own}
"""
)

# Extend an attempt's lease. ARGV: member, lease ms
BOOK_RENEW = (
    _BOOKS
    + """
return redis.call('ZADD', WRITING, 'XX', 'CH', now + ARGV[2], ARGV[1])
"""
)

# Turn a reservation into a published node of exactly these bytes.
# ARGV: member, bytes, segments, node, value, clock, 1 if it can lose a tier, tenant or ''
BOOK_PUBLISH = (
    _BOOKS
    + """
if ARGV[8] ~= '' and redis.call('HSETNX', OWNERS, ARGV[1], ARGV[8]) == 1 then
  count(ARGV[1], 1)
  local held = number(redis.call('HGET', SIZES, ARGV[1]))
  redis.call('HINCRBY', OWNED_BYTES, ARGV[8], text(held))
end
charge(ARGV[1], ARGV[2] - number(redis.call('HGET', SIZES, ARGV[1])))
redis.call('ZREM', WRITING, ARGV[1])
redis.call('HSET', COUNTS, ARGV[1], ARGV[3])
take_out(ARGV[4])
if ARGV[8] ~= '' then redis.call('HSET', TENANTS, ARGV[4], ARGV[8]) end
use(ARGV[4], tonumber(ARGV[5]), ARGV[6], ARGV[7] == '1')
return 1
"""
)

# Strike an attempt off. ARGV: member. Returns the bytes freed.
BOOK_RELEASE = (
    _BOOKS
    + """
local bytes = number(redis.call('HGET', SIZES, ARGV[1]))
charge(ARGV[1], -bytes)
if redis.call('ZREM', TRASH, ARGV[1]) == 0 then count(ARGV[1], -1) end
redis.call('HDEL', SIZES, ARGV[1])
redis.call('HDEL', COUNTS, ARGV[1])
redis.call('HDEL', OWNERS, ARGV[1])
redis.call('ZREM', WRITING, ARGV[1])
for tier = 0, 31 do
  if redis.call('ZREM', CUTS, ARGV[1] .. ':' .. tier) == 1 then
    redis.call('HDEL', CUT_BYTES, ARGV[1] .. ':' .. tier)
  end
end
return bytes
"""
)

# Schedule an attempt for unlinking. ARGV: member, delay ms
BOOK_TRASH = (
    _BOOKS
    + """
if not redis.call('ZSCORE', TRASH, ARGV[1]) then count(ARGV[1], -1) end
redis.call('ZADD', TRASH, now + ARGV[2], ARGV[1])
return 1
"""
)

# Take an attempt out of the trash: a manifest names it. ARGV: member
BOOK_KEEP = (
    _BOOKS
    + """
if redis.call('ZREM', TRASH, ARGV[1]) == 1 then count(ARGV[1], 1) end
return 1
"""
)

# Schedule dropped tiers for unlinking. ARGV: delay ms, then (tier's name, bytes) pairs
# Returns when, as text.
BOOK_CUT = (
    _BOOKS
    + """
local at = text(now + ARGV[1])
for i = 2, #ARGV, 2 do
  redis.call('ZADD', CUTS, at, ARGV[i])
  redis.call('HSET', CUT_BYTES, ARGV[i], ARGV[i + 1])
end
return at
"""
)

# Take a tier out of CUTS, unless it was scheduled again. ARGV: tier's name, when
BOOK_UNCUT = (
    _BOOKS
    + """
local at = redis.call('ZSCORE', CUTS, ARGV[1])
if not at or tonumber(at) ~= tonumber(ARGV[2]) then return 0 end
redis.call('ZREM', CUTS, ARGV[1])
redis.call('HDEL', CUT_BYTES, ARGV[1])
return 1
"""
)

# Note that a dropped tier has been unlinked; once, however many did it.
# ARGV: tier's name, member. Returns the bytes freed.
BOOK_CUT_DONE = (
    _BOOKS
    + """
if redis.call('ZREM', CUTS, ARGV[1]) == 0 then return 0 end
local bytes = number(redis.call('HGET', CUT_BYTES, ARGV[1]))
redis.call('HDEL', CUT_BYTES, ARGV[1])
if redis.call('HEXISTS', SIZES, ARGV[2]) == 0 then return 0 end
charge(ARGV[2], -bytes)
return bytes
"""
)

# Make an account hold what its manifest says: the kept bytes, and dropped tiers until
# they are unlinked. ARGV: member, kept bytes, delay ms, then (tier's name, bytes) pairs
# Returns 1 if it did not.
BOOK_MEND = (
    _BOOKS
    + """
local size = tonumber(redis.call('HGET', SIZES, ARGV[1]) or -1)
local right, pending = tonumber(ARGV[2]), tonumber(ARGV[2])
for i = 4, #ARGV, 2 do
  right = right + ARGV[i + 1]
  if redis.call('ZSCORE', CUTS, ARGV[i]) then pending = pending + ARGV[i + 1] end
end
if size < 0 or size == pending then return 0 end
for i = 4, #ARGV, 2 do
  redis.call('ZADD', CUTS, 'NX', text(now + ARGV[3]), ARGV[i])
  redis.call('HSET', CUT_BYTES, ARGV[i], ARGV[i + 1])
end
charge(ARGV[1], right - size)
return 1
"""
)

# Note a use. ARGV: node, value, clock
BOOK_USE = (
    _BOOKS
    + """
local score, tall = take_out(ARGV[1])
if score then use(ARGV[1], tonumber(ARGV[2]), ARGV[3], tall) end
return 1
"""
)

# Change a node's value without a use. ARGV: node, difference, 1 if it can lose a tier
BOOK_REVALUE = (
    _BOOKS
    + """
local score, _, used = take_out(ARGV[1])
if score then put_in(ARGV[1], score + ARGV[2], ARGV[3] == '1', used) end
return 1
"""
)

# Take a node out of the order. ARGV: node, 1 if it was sacrificed: then all grow older
BOOK_FORGET = (
    _BOOKS
    + """
local score = take_out(ARGV[1])
redis.call('HDEL', TENANTS, ARGV[1])
if score and ARGV[2] == '1' and score > number(redis.call('GET', AGE)) then
  redis.call('SET', AGE, string.format('%.17g', score))
end
return 1
"""
)

# Bytes held and reserved; bytes of those that will be unlinked; the time, µs.
BOOK_STATE = (
    _BOOKS
    + """
local freeing = 0
for _, bytes in ipairs(redis.call('HVALS', CUT_BYTES)) do freeing = freeing + bytes end
for _, member in ipairs(redis.call('ZRANGE', TRASH, 0, -1)) do
  freeing = freeing + number(redis.call('HGET', SIZES, member))
end
return {number(redis.call('GET', TOTAL)), freeing, time[1] * 1000000 + time[2]}
"""
)

# Count a pin against its tenant. ARGV: tenant, node, most pins or 0
# Returns 0 if that is too many.
BOOK_PIN = (
    _BOOKS
    + """
local name = ARGV[1] .. ':' .. ARGV[2]
if not redis.call('ZSCORE', PINS, name) then
  local pins = number(redis.call('HGET', OWNED_PINS, ARGV[1])) + 1
  if tonumber(ARGV[3]) > 0 and pins > tonumber(ARGV[3]) then return 0 end
  redis.call('HSET', OWNED_PINS, ARGV[1], pins)
end
redis.call('ZADD', PINS, now, name)
return 1
"""
)

# Strike a pin off, unless it is younger than that. ARGV: tenant, node, age ms
BOOK_UNPIN = (
    _BOOKS
    + """
local name = ARGV[1] .. ':' .. ARGV[2]
local at = redis.call('ZSCORE', PINS, name)
if not at or tonumber(at) > now - ARGV[3] then return 0 end
redis.call('ZREM', PINS, name)
redis.call('HINCRBY', OWNED_PINS, ARGV[1], -1)
return 1
"""
)

# Count everything anew, if that is due: it takes Redis about 2 µs an attempt, so it is
# done no more often than every ARGV[1] ms, and ever less often the more there are.
RECOUNT = (
    _BOOKS
    + """
if redis.call('EXISTS', COUNTED) == 1 then return 0 end
local sizes, owners = redis.call('HGETALL', SIZES), redis.call('HGETALL', OWNERS)
redis.call('SET', COUNTED, 1, 'PX', text(math.max(ARGV[1], #sizes * 2)))
local owner, total, bytes, nodes, pins = {}, 0, {}, {}, {}
for i = 1, #owners, 2 do owner[owners[i]] = owners[i + 1] end
for i = 1, #sizes, 2 do
  local member, size = sizes[i], tonumber(sizes[i + 1])
  local tenant = owner[member]
  total = total + size
  if tenant then
    bytes[tenant] = (bytes[tenant] or 0) + size
    nodes[tenant] = (nodes[tenant] or 0) + 1
  end
end
for _, member in ipairs(redis.call('ZRANGE', TRASH, 0, -1)) do
  local tenant = owner[member]
  if tenant and nodes[tenant] then nodes[tenant] = nodes[tenant] - 1 end
end
for _, name in ipairs(redis.call('ZRANGE', PINS, 0, -1)) do
  local tenant = string.match(name, '^%x+')
  pins[tenant] = (pins[tenant] or 0) + 1
end
local function replace(key, sums)
  redis.call('DEL', key)
  for tenant, sum in pairs(sums) do redis.call('HSET', key, tenant, text(sum)) end
end
redis.call('SET', TOTAL, text(total))
replace(OWNED_BYTES, bytes)
replace(OWNED_NODES, nodes)
replace(OWNED_PINS, pins)
return 1
"""
)

# Members of a sorted set whose time has come, each followed by that time.
# KEYS: set. ARGV: at most so many
DUE = f"""#!lua flags=allow-oom
{_NOW}
return redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'WITHSCORES', 'LIMIT', 0, ARGV[1])
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
