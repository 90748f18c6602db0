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

# A call is repeated after its reply was lost. Where the second run would not find what
# the first one left, the caller's word is kept this long, with the answer to it.
_REMEMBERED_MS = 60_000

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
#       longest record ttl ms for now, top tier, then the manifest's field-value pairs
# Returns {'published', generation, attempt that it replaces or '', that one's segments},
# {'present', generation}, {'missing', segment} or {'lease'}
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
-- As long as the node at least: who finds it must be able to go on once its KV has gone.
local life = math.max(math.min(ARGV[7], ARGV[8]), ttl)
redis.call('SET', KEYS[5], ARGV[6], 'PX', math.max(life, redis.call('PTTL', KEYS[5])))
local old = redis.call('HMGET', KEYS[1], 'generation', 'top', 'attempt', 'count', 'hits',
  'ttl', 'record_ttl', 'replaced', 'replaced_count')
local pinned = redis.call('SCARD', KEYS[2]) + redis.call('SCARD', KEYS[3]) > 0
if old[1] and tonumber(old[2]) >= tonumber(ARGV[9]) then
  if pinned then redis.call('PERSIST', KEYS[5]) end
  keep_list(KEYS[6], KEYS[1], KEYS[5])
  -- The same call again, after its reply was lost.
  if prefix:sub(-#old[3] - 1) == old[3] .. ':' then
    return {'published', tonumber(old[1]), old[8] or '', tonumber(old[9]) or 0}
  end
  return {'present', tonumber(old[1])}
end
local generation = (tonumber(old[1]) or 0) + 1
local left = redis.call('PTTL', KEYS[1])
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'generation', generation, 'top', ARGV[9], 'count', count,
  'hits', old[5] or 0, 'ttl', math.max(ttl, tonumber(old[6]) or 0),
  'record_ttl', math.max(ARGV[7], tonumber(old[7]) or 0))
if old[3] then redis.call('HSET', KEYS[1], 'replaced', old[3], 'replaced_count', old[4]) end
for i = 10, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
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
# ARGV: segment prefix up to the attempt, ttl ms, grace ms, record ttl ms, longest one for now
TOUCH = (
    _WITH_LISTS
    + """
local node = redis.call('HMGET', KEYS[1], 'attempt', 'count', 'ttl', 'probe')
if not node[1] then return 0 end
local ttl = tonumber(ARGV[2])
if ttl > (tonumber(node[3]) or 0) then redis.call('HSET', KEYS[1], 'ttl', ttl) end
redis.call('PEXPIRE', KEYS[1], ttl, 'GT')
redis.call('PEXPIRE', KEYS[2], math.max(math.min(ARGV[4], ARGV[5]), ttl), 'GT')
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
#       record ttl ms afterwards, longest ttl ms of the node or 0, and of the record for now
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
  local life = math.min(math.max(ARGV[6], tonumber(node[4]) or 0), ARGV[8])
  redis.call('PEXPIRE', KEYS[4], math.max(life, ttl))
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
# KEYS: manifest, pins, pinned_below, children, bindings, record, holds, dropped
# ARGV: attempt that it must name or '', what protects it: '' nothing, 'evict', 'unbind',
#       generation that it must have or 0, a fresh word, longest record ttl ms for now
# Returns {why not} or {'dropped', attempt, segments, bytes, parent, 1 if its record is
# needed: by a handle, or by a child's record}; to the same word, the same once more.
DROP = f"""#!lua flags=allow-oom
{_NOW}
local told = redis.call('HMGET', KEYS[8], 'word', 'attempt', 'count', 'bytes', 'parent', 'needed')
if told[1] == ARGV[4] then
  return {{'dropped', told[2], tonumber(told[3]), tonumber(told[4]), told[5], tonumber(told[6])}}
end
local node = redis.call('HMGET', KEYS[1], 'attempt', 'count', 'bytes', 'parent', 'generation')
if ARGV[2] ~= '' then
  if redis.call('SCARD', KEYS[2]) + redis.call('SCARD', KEYS[3]) > 0 then return {{'pinned'}} end
end
if ARGV[2] == 'evict' then
  if redis.call('ZCOUNT', KEYS[4], '(0', '+inf') > 0 then return {{'parent'}} end
  redis.call('ZREMRANGEBYSCORE', KEYS[7], '-inf', now)
  if redis.call('ZCARD', KEYS[7]) > 0 then return {{'held'}} end
end
redis.call('ZREMRANGEBYSCORE', KEYS[5], '-inf', now)
local bindings, children = redis.call('ZCARD', KEYS[5]), redis.call('ZCARD', KEYS[4])
if ARGV[2] == 'unbind' then
  if children > 0 then return {{'parent'}} end
  if bindings > 0 then return {{'bound'}} end
end
if node[1] and ARGV[1] ~= '' and ARGV[1] ~= node[1] then return {{'other'}} end
if node[1] and ARGV[3] ~= '0' and ARGV[3] ~= node[5] then return {{'other'}} end
if ARGV[2] == 'unbind' then redis.call('UNLINK', KEYS[6], KEYS[7]) end
if not node[1] then return {{'absent'}} end
redis.call('UNLINK', KEYS[1])
-- The record lived as long as the node at least: that is over.
if redis.call('PTTL', KEYS[6]) > tonumber(ARGV[5]) then
  redis.call('PEXPIRE', KEYS[6], ARGV[5])
end
local needed = bindings + children > 0 and 1 or 0
redis.call('HSET', KEYS[8], 'word', ARGV[4], 'attempt', node[1], 'count', node[2],
  'bytes', node[3], 'parent', node[4], 'needed', needed)
redis.call('PEXPIRE', KEYS[8], {_REMEMBERED_MS})
return {{'dropped', node[1], tonumber(node[2]), tonumber(node[3]), node[4], needed}}
"""

# Publish a node's next generation, without its top tiers; whoever comes second learns it.
# KEYS: manifest, pins, pinned_below, holds
# ARGV: generation that it must have, a fresh word, then field-value pairs
# Returns what happened; to the same word, the same once more.
SHRINK = f"""#!lua flags=allow-oom
{_NOW}
local generation, word = unpack(redis.call('HMGET', KEYS[1], 'generation', 'shrunk_by'))
if not generation then return 'absent' end
if word == ARGV[2] then return 'shrunk' end
if generation ~= ARGV[1] then return 'other' end
if redis.call('SCARD', KEYS[2]) + redis.call('SCARD', KEYS[3]) > 0 then return 'pinned' end
redis.call('ZREMRANGEBYSCORE', KEYS[4], '-inf', now)
if redis.call('ZCARD', KEYS[4]) > 0 then return 'held' end
redis.call('HSET', KEYS[1], 'generation', generation + 1, 'shrunk_by', ARGV[2])
for i = 3, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
return 'shrunk'
"""

# Announce a child before it is published; young entries survive without manifest.
# KEYS: children, manifest, record
# ARGV: child, grace ms, a place from 0 to below 1, children to return from there
# Returns these, or nil if the parent is gone, its record too.
ADOPT = f"""{_WITH_LISTS}
{_NOW}
if redis.call('EXISTS', KEYS[2], KEYS[3]) == 0 then return nil end
redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])
keep_list(KEYS[1], KEYS[2], KEYS[3])
local first = math.floor(ARGV[3] * redis.call('ZCARD', KEYS[1]))
return redis.call('ZRANGE', KEYS[1], first, first + ARGV[4] - 1)
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

# Forget children that are gone, unless they were announced just now; those whose records
# still need this node's are only marked as dead. Returns how many that changed.
# KEYS: children. ARGV: number of children to forget, these, then those to mark
DISOWN = f"""#!lua flags=allow-oom
{_NOW}
local changed = 0
for i = 2, #ARGV do
  local until_ms = tonumber(redis.call('ZSCORE', KEYS[1], ARGV[i]) or now + 1)
  if until_ms <= now and i <= ARGV[1] + 1 then
    changed = changed + redis.call('ZREM', KEYS[1], ARGV[i])
  elseif until_ms <= now then
    changed = changed + redis.call('ZADD', KEYS[1], 'XX', 'CH', 0, ARGV[i])
  end
end
return changed
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
local BEGUN, FREEING, DONE = KEYS[19], KEYS[20], KEYS[21]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function number(value) return tonumber(value or 0) or 0 end

local function text(value) return string.format('%.0f', value) end

-- Change how much of an attempt is going to be unlinked.
local function free(member, bytes)
  if bytes == 0 then return end
  redis.call('HINCRBY', FREEING, '', text(bytes))
  local owner = redis.call('HGET', OWNERS, member)
  if owner then redis.call('HINCRBY', FREEING, owner, text(bytes)) end
end

-- The attempt that a dropped tier belongs to.
local function attempt_of(cut) return string.match(cut, '^(.*):') end

local function cut_bytes(cut, bytes)
  free(attempt_of(cut), bytes - number(redis.call('HGET', CUT_BYTES, cut)))
  if bytes == 0 then redis.call('HDEL', CUT_BYTES, cut) end
  if bytes > 0 then redis.call('HSET', CUT_BYTES, cut, text(bytes)) end
end

-- Change what an attempt holds, and with it all sums.
local function charge(member, bytes)
  if bytes == 0 then return end
  redis.call('HINCRBY', SIZES, member, text(bytes))
  redis.call('INCRBY', TOTAL, text(bytes))
  local owner = redis.call('HGET', OWNERS, member)
  if owner then redis.call('HINCRBY', OWNED_BYTES, owner, text(bytes)) end
  if redis.call('ZSCORE', TRASH, member) then free(member, bytes) end
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

# Open an attempt. ARGV: member, lease ms, a fresh word. Returns 0 if there is one already,
# opened with another word: a call may be repeated after its reply was lost.
BOOK_BEGIN = (
    _BOOKS
    + """
if redis.call('HSETNX', SIZES, ARGV[1], 0) == 0 then
  return redis.call('HGET', BEGUN, ARGV[1]) == ARGV[3] and 1 or 0
end
redis.call('HSET', BEGUN, ARGV[1], ARGV[3])
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

# Have an attempt hold at least these bytes. ARGV: member, bytes, limit, limit of its
# tenant or 0
# Returns how many bytes are too many for all and for the tenant, {0, 0} if reserved,
# {-1, 0} if the attempt is unknown.
BOOK_RESERVE = (
    _BOOKS
    + """
if redis.call('HEXISTS', SIZES, ARGV[1]) == 0 then return {-1, 0} end
local more = ARGV[2] - number(redis.call('HGET', SIZES, ARGV[1]))
if more <= 0 then return {0, 0} end
local missing = math.max(0, number(redis.call('GET', TOTAL)) + more - ARGV[3])
local owner, own = redis.call('HGET', OWNERS, ARGV[1]), 0
if owner and tonumber(ARGV[4]) > 0 then
  own = math.max(0, number(redis.call('HGET', OWNED_BYTES, owner)) + more - ARGV[4])
end
if missing + own == 0 then charge(ARGV[1], more) end
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
redis.call('HDEL', BEGUN, ARGV[1])
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
for tier = 0, 31 do
  local cut = ARGV[1] .. ':' .. tier
  if redis.call('ZREM', CUTS, cut) == 1 then cut_bytes(cut, 0) end
end
charge(ARGV[1], -bytes)
if redis.call('ZREM', TRASH, ARGV[1]) == 0 then count(ARGV[1], -1) end
redis.call('HDEL', SIZES, ARGV[1])
redis.call('HDEL', COUNTS, ARGV[1])
redis.call('HDEL', OWNERS, ARGV[1])
redis.call('HDEL', BEGUN, ARGV[1])
redis.call('ZREM', WRITING, ARGV[1])
return bytes
"""
)

# Schedule an attempt for unlinking: it is published, or gone, even if the books have not
# heard of that. ARGV: member, delay ms, its segments or 0 if the books know
BOOK_TRASH = (
    _BOOKS
    + """
if not redis.call('ZSCORE', TRASH, ARGV[1]) then
  -- Its dropped tiers go with it: they are freed once, not twice.
  for tier = 0, 31 do
    local cut = ARGV[1] .. ':' .. tier
    if redis.call('ZREM', CUTS, cut) == 1 then cut_bytes(cut, 0) end
  end
  count(ARGV[1], -1)
  free(ARGV[1], number(redis.call('HGET', SIZES, ARGV[1])))
end
redis.call('ZADD', TRASH, now + ARGV[2], ARGV[1])
if tonumber(ARGV[3]) > 0 then redis.call('HSETNX', COUNTS, ARGV[1], ARGV[3]) end
redis.call('ZREM', WRITING, ARGV[1])
redis.call('HDEL', BEGUN, ARGV[1])
return 1
"""
)

# Take an attempt out of the trash: a manifest names it. ARGV: member
BOOK_KEEP = (
    _BOOKS
    + """
if redis.call('ZREM', TRASH, ARGV[1]) == 1 then
  count(ARGV[1], 1)
  free(ARGV[1], -number(redis.call('HGET', SIZES, ARGV[1])))
end
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
  cut_bytes(ARGV[i], tonumber(ARGV[i + 1]))
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
cut_bytes(ARGV[1], 0)
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
cut_bytes(ARGV[1], 0)
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
  cut_bytes(ARGV[i], tonumber(ARGV[i + 1]))
end
charge(ARGV[1], right - size)
return 1
"""
)

# Note a use. ARGV: node, value, clock. Returns 0 if the books do not list the node.
BOOK_USE = (
    _BOOKS
    + """
local score, tall = take_out(ARGV[1])
if not score then return 0 end
use(ARGV[1], tonumber(ARGV[2]), ARGV[3], tall)
return 1
"""
)

# Change a node's value without a use, once for each word.
# ARGV: node, difference, 1 if it can lose a tier, a fresh word
BOOK_REVALUE = (
    _BOOKS
    + f"""
local word = DONE .. ':' .. ARGV[4]
if not redis.call('SET', word, 1, 'NX', 'PX', {_REMEMBERED_MS}) then return 0 end
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
local freeing = number(redis.call('HGET', FREEING, ''))
return {number(redis.call('GET', TOTAL)), freeing, time[1] * 1000000 + time[2]}
"""
)

# Whether anything of a tenant's is about to go: scheduled for unlinking, or neither
# listed nor being written. ARGV: tenant
BOOK_GOES = (
    _BOOKS
    + """
if number(redis.call('HGET', FREEING, ARGV[1])) > 0 then return 1 end
local others = number(redis.call('HGET', OWNED_NODES, ARGV[1]))
others = others - redis.call('ZCARD', INDEX .. ':' .. ARGV[1])
for _, member in ipairs(redis.call('ZRANGEBYSCORE', WRITING, now, '+inf')) do
  if redis.call('HGET', OWNERS, member) == ARGV[1] then others = others - 1 end
end
return others > 0 and 1 or 0
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
local owner, total, bytes, nodes, pins, freeing = {}, 0, {}, {}, {}, {['']=0}
local function free_anew(member, more)
  local tenant = owner[member]
  freeing[''] = freeing[''] + more
  if tenant then freeing[tenant] = (freeing[tenant] or 0) + more end
end
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
  free_anew(member, number(redis.call('HGET', SIZES, member)))
end
local cuts = redis.call('HGETALL', CUT_BYTES)
for i = 1, #cuts, 2 do free_anew(attempt_of(cuts[i]), number(cuts[i + 1])) end
for _, name in ipairs(redis.call('ZRANGE', PINS, 0, -1)) do
  local tenant = string.match(name, '^%x+')
  pins[tenant] = (pins[tenant] or 0) + 1
end
local function replace(key, sums)
  redis.call('DEL', key)
  for tenant, sum in pairs(sums) do redis.call('HSET', key, tenant, text(sum)) end
end
redis.call('SET', TOTAL, text(total))
replace(FREEING, freeing)
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

# Bind a handle. KEYS: handle. ARGV: handle, tenant, node, metadata, ttl ms, longest for now
# Returns {created, its life, node} in seconds and ms, or nil if it names another node. One
# that was moved away from the node stays where it is.
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
local life = math.min(ARGV[5], math.max(ARGV[6], redis.call('PTTL', KEYS[1])))
redis.call('PEXPIRE', KEYS[1], life)
return {tonumber(created), life, old[1] or ARGV[3]}
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

# Remove a handle. KEYS: handle, unbound. ARGV: a fresh word
# Returns {node, node that it was moved from or ''} or nil; to the same word, the same once more.
UNBIND = f"""#!lua flags=allow-oom
local told = redis.call('HMGET', KEYS[2], 'word', 'node', 'from')
if told[1] == ARGV[1] then return {{told[2], told[3]}} end
local old = redis.call('HMGET', KEYS[1], 'node', 'from')
if not old[1] then return nil end
redis.call('UNLINK', KEYS[1])
redis.call('HSET', KEYS[2], 'word', ARGV[1], 'node', old[1], 'from', old[2] or '')
redis.call('PEXPIRE', KEYS[2], {_REMEMBERED_MS})
return {{old[1], old[2] or ''}}
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

# List a handle under its tenant. KEYS: tenant_handles
# ARGV: handle, created s, ttl ms, a place from 0 to below 1, handles to return from there
LISTED = """#!lua flags=allow-oom
redis.call('ZADD', KEYS[1], 'NX', ARGV[2], ARGV[1])
if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[3]) then
  redis.call('PEXPIRE', KEYS[1], ARGV[3])
end
local first = math.floor(ARGV[4] * redis.call('ZCARD', KEYS[1]))
return redis.call('ZRANGE', KEYS[1], first, first + ARGV[5] - 1)
"""

# Read a handle and start its time to live anew. KEYS: handle. ARGV: longest ttl ms for now
RESOLVE = """#!lua flags=allow-oom
local ttl = redis.call('HGET', KEYS[1], 'ttl')
if not ttl then return nil end
local life = math.max(math.min(ttl, ARGV[1]), redis.call('PTTL', KEYS[1]))
redis.call('PEXPIRE', KEYS[1], life)
local found = redis.call('HMGET', KEYS[1], 'handle', 'tenant', 'node', 'metadata', 'created')
found[6] = life
return found
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
if old[5] == ARGV[3] then return {{1, old[2], '', ARGV[3]}} end
if old[1] and tonumber(old[4]) > now then return {{2, old[2], '', ''}} end
local handle = old[2] or ARGV[2]
redis.call('HSET', KEYS[1], 'request', ARGV[1], 'handle', handle, 'token', ARGV[3],
  'until', now + ARGV[4], 'ttl', ARGV[5])
redis.call('PEXPIRE', KEYS[1], math.max(ARGV[5], ARGV[4]))
return {{1, handle, '', ARGV[3]}}
"""

# Finish a request. KEYS: request, forgotten
# ARGV: token, answer ('' = forget), longest ttl ms for now
FINISH = f"""#!lua flags=allow-oom
if ARGV[2] == '' and redis.call('GET', KEYS[2]) == ARGV[1] then return 1 end
local old = redis.call('HMGET', KEYS[1], 'token', 'ttl', 'answer')
if not old[1] or old[1] ~= ARGV[1] then return 0 end
if ARGV[2] == '' then
  if old[3] then return 0 end
  redis.call('DEL', KEYS[1])
  redis.call('SET', KEYS[2], ARGV[1], 'PX', {_REMEMBERED_MS})
  return 1
end
redis.call('HSET', KEYS[1], 'answer', ARGV[2])
redis.call('PEXPIRE', KEYS[1], math.min(old[2], ARGV[3]))
return 1
"""

# Add a target to an alias; the oldest beyond 16 go. KEYS: alias. ARGV: target, ttl ms
ALIAS = f"""#!lua flags=allow-oom
{_NOW}
redis.call('ZADD', KEYS[1], now, ARGV[1])
redis.call('ZREMRANGEBYRANK', KEYS[1], 0, -17)
redis.call('PEXPIRE', KEYS[1], math.max(ARGV[2], redis.call('PTTL', KEYS[1])))
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
if redis.call('GET', KEYS[1]) == ARGV[1] then return 0 end
if redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then return 0 end
return math.max(1, redis.call('PTTL', KEYS[1]))
"""

# Give a lease back. KEYS: lease. ARGV: token
RELEASE = """#!lua flags=allow-oom
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""
