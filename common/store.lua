#!lua name=baton

-- What Baton keeps in Redis: who is alive (leases), which worker holds which block (index), what was placed on whom (ledger).
-- All of it can be rebuilt. Works on Redis 7.0 and Valkey. One instance: keys are made here, not declared.
--
--   baton:workers              set of worker ids
--   baton:worker:<id>          hash with a TTL, from the worker's heartbeat
--   baton:block:<digest>       set of "<worker>@<incarnation>", with a TTL
--   baton:charges:<stage>:<id> sorted set "<request>:<attempt>|<tokens>" by expiry (ms); baton:load:<stage>:<id> its sum of tokens

local BLOCK_TTL_S = 3600

local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

local function tokens_of(member)
  return tonumber(string.match(member, '|(%d+)$')) or 0
end

local function give_back(stage, worker, members)
  local charges, load = 'baton:charges:' .. stage .. ':' .. worker, 'baton:load:' .. stage .. ':' .. worker
  local sum = 0
  for _, member in ipairs(members) do
    if redis.call('ZREM', charges, member) == 1 then
      sum = sum + tokens_of(member)
    end
  end
  if sum > 0 then
    redis.call('DECRBY', load, sum)
  end
end

-- The charged tokens and the number of charges of a worker, after the expired ones were given back.
local function charged(stage, worker, now)
  local charges = 'baton:charges:' .. stage .. ':' .. worker
  local expired = redis.call('ZRANGEBYSCORE', charges, '-inf', now, 'LIMIT', 0, 1000)
  if #expired > 0 then
    give_back(stage, worker, expired)
  end
  local count = redis.call('ZCARD', charges)
  if count == 0 then
    redis.call('DEL', 'baton:load:' .. stage .. ':' .. worker)
    return 0, 0
  end
  return tonumber(redis.call('GET', 'baton:load:' .. stage .. ':' .. worker) or '0'), count
end

local function charge(stage, worker, request, tokens, expires_at)
  local charges = 'baton:charges:' .. stage .. ':' .. worker
  if redis.call('ZADD', charges, 'NX', expires_at, request .. '|' .. tokens) == 1 then
    redis.call('INCRBY', 'baton:load:' .. stage .. ':' .. worker, tokens)
  end
end

-- register(worker, incarnation, ttl_ms, field, value, ...) -> 1 when this incarnation was unknown
local function register(_, args)
  local worker, incarnation, key = args[1], args[2], 'baton:worker:' .. args[1]
  local unknown = redis.call('HGET', key, 'incarnation') ~= incarnation
  local fields = {}
  for i = 4, #args do fields[#fields + 1] = args[i] end
  redis.call('HSET', key, 'incarnation', incarnation, unpack(fields))
  redis.call('PEXPIRE', key, tonumber(args[3]))
  redis.call('SADD', 'baton:workers', worker)
  return unknown and 1 or 0
end

-- unregister(worker, incarnation)
local function unregister(_, args)
  local key = 'baton:worker:' .. args[1]
  if redis.call('HGET', key, 'incarnation') == args[2] then
    redis.call('DEL', key)
    redis.call('SREM', 'baton:workers', args[1])
  end
  return 1
end

-- states() -> the `state` field of every live worker
local function states()
  local found = {}
  for _, worker in ipairs(redis.call('SMEMBERS', 'baton:workers')) do
    local state = redis.call('HGET', 'baton:worker:' .. worker, 'state')
    if state then
      found[#found + 1] = state
    else
      redis.call('SREM', 'baton:workers', worker)
    end
  end
  return found
end

-- announce(worker@incarnation, number added, digest, ...): the rest of the digests are removed
local function announce(_, args)
  local member, added = args[1], tonumber(args[2])
  for i = 3, #args do
    local key = 'baton:block:' .. args[i]
    if i - 2 <= added then
      redis.call('SADD', key, member)
      redis.call('EXPIRE', key, BLOCK_TTL_S)
    else
      redis.call('SREM', key, member)
    end
  end
  return #args - 2
end

local function candidates(fingerprint, excluded)
  local found = {}
  for _, id in ipairs(redis.call('SMEMBERS', 'baton:workers')) do
    local f = redis.call('HMGET', 'baton:worker:' .. id, 'incarnation', 'roles', 'status', 'fingerprint', 'rate',
      'free_blocks', 'sequences', 'max_sequences', 'queued_tokens')
    if not f[1] then
      redis.call('SREM', 'baton:workers', id)
    elseif f[3] == 'ready' and f[4] == fingerprint and not string.find(excluded, ',' .. id .. ',', 1, true) then
      found[#found + 1] = {
        id = id, incarnation = f[1], roles = ',' .. f[2] .. ',', rate = math.max(tonumber(f[5]) or 0, 0),
        free_blocks = tonumber(f[6]) or 0, sequences = tonumber(f[7]) or 0, max_sequences = tonumber(f[8]) or 1,
        queued_tokens = tonumber(f[9]) or 0, matched = 0, member = id .. '@' .. f[1],
      }
    end
  end
  return found
end

-- The longest cached prefix of every worker, in blocks: one pass, ending with the first block that nobody holds.
local function match_prefixes(workers, args, first)
  local active = workers
  for i = first, #args do
    local holders = redis.call('SMEMBERS', 'baton:block:' .. args[i])
    if #holders == 0 then return end
    local holds, still = {}, {}
    for _, holder in ipairs(holders) do holds[holder] = true end
    for _, worker in ipairs(active) do
      if holds[worker.member] then
        worker.matched = i - first + 1
        still[#still + 1] = worker
      end
    end
    if #still == 0 then return end
    active = still
  end
end

local function has_role(worker, role)
  return string.find(worker.roles, ',' .. role .. ',', 1, true) ~= nil
end

local function cheaper(a, b)
  if a.cost ~= b.cost then return a.cost < b.cost end
  if a.count ~= b.count then return a.count < b.count end
  return a.id < b.id
end

-- place(request:attempt, tokens, block_size, reserve_tokens, ttl_ms, cut_over_tokens, fingerprint, ",excluded,", digest, ...)
-- -> {prefill, incarnation, matched blocks there, matched blocks at the first decode candidate, reason, decode, decode, ...}
local function place(_, args)
  local request, tokens, block_size = args[1], tonumber(args[2]), tonumber(args[3])
  local reserve, ttl, cut_over = tonumber(args[4]), tonumber(args[5]), tonumber(args[6])
  local now = now_ms()
  local workers = candidates(args[7], args[8])
  match_prefixes(workers, args, 9)

  local slowest = 0
  for _, worker in ipairs(workers) do
    if worker.rate > 0 and (slowest == 0 or worker.rate < slowest) then slowest = worker.rate end
  end
  local prefill, decode = {}, {}
  for _, worker in ipairs(workers) do
    worker.uncached = math.max(tokens - worker.matched * block_size, 1)
    if has_role(worker, 'prefill') then
      local load, count = charged('prefill', worker.id, now)
      local rate = worker.rate > 0 and worker.rate or (slowest > 0 and slowest or 1)
      prefill[#prefill + 1] = { id = worker.id, worker = worker, count = count,
        cost = (math.max(load, worker.queued_tokens) + worker.uncached) / rate }
    end
    if has_role(worker, 'decode') then
      local load, count = charged('decode', worker.id, now)
      local sequences = math.max(count, worker.sequences)
      local full = sequences >= worker.max_sequences or worker.free_blocks * block_size < worker.uncached
      decode[#decode + 1] = { id = worker.id, worker = worker, count = count,
        cost = (full and 1e6 or 0) + sequences / worker.max_sequences + load / 1e7
          + worker.uncached / math.max(tokens, 1) * 0.1 }
    end
  end
  if #decode == 0 then return { '', '0', 0, 0, 'no decode worker' } end
  table.sort(decode, cheaper)
  table.sort(prefill, cheaper)

  local best = decode[1].worker
  local reason
  if #prefill == 0 then
    reason = 'local: no prefill worker'
  elseif best.uncached <= cut_over then
    reason = 'local: short'
  elseif prefill[1].id == best.id then
    reason = 'local: same worker'
  end
  charge('decode', best.id, request, reserve, now + ttl)
  if reason then
    charge('prefill', best.id, request, best.uncached, now + ttl)
    return { best.id, best.incarnation, best.matched, best.matched, reason }
  end
  local chosen = prefill[1].worker
  charge('prefill', chosen.id, request, chosen.uncached, now + ttl)
  local answer = { chosen.id, chosen.incarnation, chosen.matched, best.matched, chosen.matched > 0 and 'prefix' or 'load' }
  for i = 1, math.min(#decode, 4) do answer[#answer + 1] = decode[i].id end
  return answer
end

-- release(request:attempt, stage, worker, ...): give the charges of the request at these workers back
local function release(_, args)
  for i = 3, #args do
    local charges = 'baton:charges:' .. args[2] .. ':' .. args[i]
    local found = {}
    for _, member in ipairs(redis.call('ZRANGE', charges, 0, -1)) do
      if string.sub(member, 1, #args[1] + 1) == args[1] .. '|' then found[#found + 1] = member end
    end
    give_back(args[2], args[i], found)
  end
  return 1
end

redis.register_function('baton_register', register)
redis.register_function('baton_unregister', unregister)
redis.register_function('baton_states', states)
redis.register_function('baton_announce', announce)
redis.register_function('baton_place', place)
redis.register_function('baton_release', release)
