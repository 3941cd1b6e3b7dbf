#!lua name=baton

-- What Baton keeps in Redis: who is alive (leases), which worker holds which block (index), what was placed on whom (ledger).
-- All of it can be rebuilt. Works on Redis 7.0 and Valkey. One instance: keys are made here, not declared.
--
--   baton:workers              set of worker ids
--   baton:worker:<id>          hash with a TTL, from the worker's heartbeat
--   baton:block:<digest>       set of "<worker>@<incarnation>", with a TTL
--   baton:charges:<stage>:<id> sorted set "<request>:<attempt>|<tokens>" by expiry (ms); baton:load:<stage>:<id> its sum of tokens
--   baton:placed:<request>:<attempt>  hash stage -> worker, with the charge's TTL
--
-- What has no TTL (workers, charges, load) is small and dies with its worker; an evicting Redis must only evict the rest
-- (`volatile-lfu`, see deploy/redis/index.conf).

local BLOCK_TTL_S = 6 * 3600
local STAGES = { 'prefill', 'decode' }
local FULL = 1e6 -- cost of a decode worker without room: it comes after all that have room
local HELD_WEIGHT = 0.1 -- holding the whole prompt is worth a tenth of a worker's capacity
local LOCAL_SHARE = 0.25 -- of a prefill rate: what a decode worker is thought to compute beside its batch, until it has measured it
local LOCAL_CANDIDATES = 4 -- decode workers, best first, that are compared as places for the prefill, too
local LOCAL_MARGIN_MS = 5 -- by which prefill there must be earlier where others decode: it costs them
local LOCAL_PASS_MS = 60 -- an idle decode worker computes a prompt in one pass up to this; whoever joins meanwhile waits for it
local HANDOVER_MS = 2 -- what asking for a lease and pushing cost the first token, beside the bytes
local LINK = 1e9 -- bytes/s of a link that nobody has measured

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

local function charge(stage, worker, request, tokens, now, ttl)
  local charges, placed = 'baton:charges:' .. stage .. ':' .. worker, 'baton:placed:' .. request
  if redis.call('ZADD', charges, 'NX', now + ttl, request .. '|' .. tokens) == 1 then
    redis.call('INCRBY', 'baton:load:' .. stage .. ':' .. worker, tokens)
  end
  redis.call('HSET', placed, stage, worker)
  redis.call('PEXPIRE', placed, ttl)
end

local function forget_charges(worker)
  for _, stage in ipairs(STAGES) do
    redis.call('DEL', 'baton:charges:' .. stage .. ':' .. worker, 'baton:load:' .. stage .. ':' .. worker)
  end
end

-- A worker whose lease ran out: what was charged to it is placed elsewhere by now.
local function forget_worker(worker)
  redis.call('SREM', 'baton:workers', worker)
  forget_charges(worker)
end

-- Give back whatever this attempt was charged at `stage`; `others` are workers to look at besides the recorded one.
local function discharge(request, stage, others)
  local placed = 'baton:placed:' .. request
  local recorded = redis.call('HGET', placed, stage)
  if recorded then
    redis.call('HDEL', placed, stage)
    others[#others + 1] = recorded
  end
  for _, worker in ipairs(others) do
    local found = {}
    for _, member in ipairs(redis.call('ZRANGE', 'baton:charges:' .. stage .. ':' .. worker, 0, -1)) do
      if string.sub(member, 1, #request + 1) == request .. '|' then found[#found + 1] = member end
    end
    give_back(stage, worker, found)
  end
end

-- register(worker, incarnation, ttl_ms, field, value, ...) -> 1 when this incarnation was unknown
local function register(_, args)
  local worker, incarnation, key = args[1], args[2], 'baton:worker:' .. args[1]
  local unknown = redis.call('HGET', key, 'incarnation') ~= incarnation
  if unknown then forget_charges(worker) end
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
    forget_worker(args[1])
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
      forget_worker(worker)
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

-- The workers that may serve this model and request, and the set "<worker>@<incarnation>" of all that are alive.
local function candidates(fingerprint, excluded)
  local found, alive = {}, {}
  for _, id in ipairs(redis.call('SMEMBERS', 'baton:workers')) do
    local f = redis.call('HMGET', 'baton:worker:' .. id, 'incarnation', 'roles', 'status', 'fingerprint', 'rate',
      'free_blocks', 'num_blocks', 'sequences', 'max_sequences', 'queued_tokens', 'fixed_ms', 'local_rate', 'step_ms', 'link',
      'block_bytes')
    if not f[1] then
      forget_worker(id)
    else
      local member = id .. '@' .. f[1]
      alive[member] = true
      if f[3] == 'ready' and f[4] == fingerprint and not string.find(excluded, ',' .. id .. ',', 1, true) then
        found[#found + 1] = {
          id = id, incarnation = f[1], member = member, roles = ',' .. f[2] .. ',', matched = 0,
          rate = math.max(tonumber(f[5]) or 0, 0), free_blocks = tonumber(f[6]) or 0, num_blocks = tonumber(f[7]) or 0,
          sequences = tonumber(f[8]) or 0, max_sequences = math.max(tonumber(f[9]) or 1, 1),
          queued_tokens = tonumber(f[10]) or 0, fixed_ms = tonumber(f[11]) or 0, local_rate = tonumber(f[12]) or 0,
          step_ms = tonumber(f[13]) or 0, link = tonumber(f[14]) or 0, block_bytes = tonumber(f[15]) or 0,
        }
      end
    end
  end
  return found, alive
end

-- Set the longest cached prefix of every worker, in blocks: one pass, ending with the first block that none of them holds.
-- Entries of dead incarnations are removed on the way. One call in sixteen renews the TTLs, so that what is hit stays.
local function match_prefixes(workers, alive, args, first, renew)
  local active = workers
  for i = first, #args do
    local key, holds, still = 'baton:block:' .. args[i], {}, {}
    for _, holder in ipairs(redis.call('SMEMBERS', key)) do
      if alive[holder] then
        holds[holder] = true
      else
        redis.call('SREM', key, holder)
      end
    end
    for _, worker in ipairs(active) do
      if holds[worker.member] then
        worker.matched = i - first + 1
        still[#still + 1] = worker
      end
    end
    if #still == 0 then return end
    if renew then redis.call('EXPIRE', key, BLOCK_TTL_S) end
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

-- The slowest measured prefill rate, 0 if there is none: what an unmeasured worker is taken for, with its fixed cost of a pass.
local function slowest_rate(workers)
  local slowest, fixed_ms = 0, 0
  for _, worker in ipairs(workers) do
    if worker.rate > 0 and (slowest == 0 or worker.rate < slowest) then slowest = worker.rate end
    fixed_ms = math.max(fixed_ms, worker.fixed_ms)
  end
  for _, worker in ipairs(workers) do
    if worker.rate == 0 then worker.fixed_ms = fixed_ms end
  end
  return slowest
end

-- Prefill workers, earliest first token first: ms until each would have computed what it is charged and this prompt's rest.
local function rank_prefill(workers, now, slowest)
  local ranked = {}
  for _, worker in ipairs(workers) do
    if has_role(worker, 'prefill') then
      local load, count = charged('prefill', worker.id, now)
      local rate = worker.rate > 0 and worker.rate or (slowest > 0 and slowest or 1)
      local cost = worker.fixed_ms + 1000 * (math.max(load, worker.queued_tokens) + worker.uncached) / rate
      ranked[#ranked + 1] = { id = worker.id, worker = worker, count = count, cost = cost }
    end
  end
  table.sort(ranked, cheaper)
  return ranked
end

-- Where of the best decode workers the prompt would be computed the earliest, and in how many ms; nil without any rate.
local function cheapest_local(decode, now, slowest)
  local found, least
  for i = 1, math.min(#decode, LOCAL_CANDIDATES) do
    local worker = decode[i].worker
    local own = worker.rate > 0 and worker.rate or slowest
    local idle = worker.sequences == 0 and decode[i].count == 0 and 1000 * worker.uncached <= LOCAL_PASS_MS * own
    local rate = idle and own or (worker.local_rate > 0 and worker.local_rate or LOCAL_SHARE * own)
    if rate > 0 and not decode[i].full then
      local queued = math.max(charged('prefill', worker.id, now), worker.queued_tokens)
      local cost = worker.fixed_ms + (idle and 0 or worker.step_ms + LOCAL_MARGIN_MS)
        + 1000 * (queued + worker.uncached) / rate
      if not least or cost < least then found, least = i, cost end
    end
  end
  return found, least
end

-- Decode workers, those with room first, then by predicted load and by what of the prompt they lack. Load is the larger of
-- what was charged (newer) and what the worker said (truer), as a share of its capacity.
local function rank_decode(workers, now, tokens, block_size, reserve)
  local ranked = {}
  for _, worker in ipairs(workers) do
    if has_role(worker, 'decode') then
      local load, count = charged('decode', worker.id, now)
      local sequences = math.max(count, worker.sequences)
      local capacity = math.max(worker.num_blocks * block_size, 1)
      local used = math.max(load, (worker.num_blocks - worker.free_blocks) * block_size)
      local full = sequences >= worker.max_sequences or used + reserve - worker.matched * block_size > capacity
      local cost = math.max(sequences / worker.max_sequences, used / capacity)
        + HELD_WEIGHT * worker.uncached / math.max(tokens, 1) + (full and FULL or 0)
      ranked[#ranked + 1] = { id = worker.id, worker = worker, count = count, cost = cost, full = full }
    end
  end
  table.sort(ranked, cheaper)
  return ranked
end

-- place(request:attempt, tokens, block_size, reserve_tokens, ttl_ms, cut_over_tokens, fingerprint, ",excluded,", now_ms, digest, ...)
-- now_ms: 0 for this server's clock; a simulation has its own.
-- cut_over_tokens: an uncached rest up to this is prefilled by the decode worker; negative: whenever that brings the first token
-- earlier, by the rates that workers measured.
-- -> {prefill, incarnation, matched blocks there, matched blocks at the first decode candidate, reason, decode, decode, ...}
-- Again for the same attempt (the answer was lost): the earlier charges are given back first.
local function place(_, args)
  local request, tokens, block_size = args[1], tonumber(args[2]), tonumber(args[3])
  local reserve, ttl, cut_over = tonumber(args[4]), tonumber(args[5]), tonumber(args[6])
  local now = tonumber(args[9])
  if now == 0 then now = now_ms() end
  for _, stage in ipairs(STAGES) do discharge(request, stage, {}) end
  local workers, alive = candidates(args[7], args[8])
  match_prefixes(workers, alive, args, 10, now % 16 == 0)
  for _, worker in ipairs(workers) do
    worker.uncached = math.max(tokens - worker.matched * block_size, 1)
  end

  local decode = rank_decode(workers, now, tokens, block_size, reserve)
  if #decode == 0 then return { '', '0', 0, 0, 'no decode worker' } end
  local slowest = slowest_rate(workers)
  local prefill = rank_prefill(workers, now, slowest)
  local best = decode[1].worker
  local chosen, reason = best, nil
  if #prefill == 0 then
    reason = 'local: no prefill worker'
  elseif cut_over >= 0 and best.uncached <= cut_over then
    reason = 'local: short'
  elseif prefill[1].id == best.id then
    reason = 'local: same worker'
  else
    chosen = prefill[1].worker
    reason = decode[1].full and 'full' or (chosen.matched > 0 and 'prefix' or 'load')
    local at, least
    if cut_over < 0 then at, least = cheapest_local(decode, now, slowest) end
    if at then
      local bytes = math.ceil(best.uncached / block_size) * chosen.block_bytes
      local transfer = HANDOVER_MS + 1000 * bytes / (chosen.link > 0 and chosen.link or LINK)
      if least < prefill[1].cost + transfer then
        best = decode[at].worker
        chosen = best
        reason = 'local: earlier'
      end
    end
  end
  charge('prefill', chosen.id, request, chosen.uncached, now, ttl)
  charge('decode', best.id, request, reserve, now, ttl)
  local answer = { chosen.id, chosen.incarnation, chosen.matched, best.matched, reason }
  if chosen.id ~= best.id then
    for i = 1, math.min(#decode, 4) do answer[#answer + 1] = decode[i].id end
  end
  return answer
end

-- release(request:attempt, stage, worker, ...): give the charge back; the workers are looked at if its record was evicted
local function release(_, args)
  local others = {}
  for i = 3, #args do others[#others + 1] = args[i] end
  discharge(args[1], args[2], others)
  return 1
end

-- charged(stage, worker) -> tokens charged now
local function charged_now(_, args)
  local load = charged(args[1], args[2], now_ms())
  return load
end

redis.register_function('baton_register', register)
redis.register_function('baton_unregister', unregister)
redis.register_function('baton_states', states)
redis.register_function('baton_announce', announce)
redis.register_function('baton_place', place)
redis.register_function('baton_release', release)
redis.register_function('baton_charged', charged_now)
