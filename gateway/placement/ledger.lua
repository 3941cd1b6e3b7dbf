-- The load ledger: what was placed on whom and is not over yet. A charge is the tokens of one attempt at one worker.
--
--   baton:charges:<stage>:<id>  sorted set "<request>:<attempt>|<tokens>" by expiry (ms); stage is prefill or decode
--   baton:load:<stage>:<id>     the sum of those tokens
--   baton:load:began:<id>       when the prompt that the worker computes now began, ms
--   baton:load:busy:<id>        hash: the share of its time that a prefill worker was given work for, and when that was so
--   baton:load:since            when this ledger began, ms
--   baton:placed:<request>:<attempt>  hash: stage -> "<worker>|<tokens>", with the charge's TTL
--   baton:ready:<stage>:<kind>  sorted set of the workers that may be chosen, least loaded first; registry.lua fills it
--
-- Charges have no TTL: they are small and die with their worker. An evicting Redis may evict `placed` (deploy/redis/index.conf).

local STAGES = { 'prefill', 'decode' }

-- The time in ms: a virtual clock's where it is above 0, else this server's.
local function clock(given)
  local now = tonumber(given) or 0
  if now > 0 then return now end
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- What a worker last registered; nil when its lease ran out, or when another release wrote it.
local function record_of(worker)
  local packed = redis.call('HGET', 'baton:worker:' .. worker, 'record')
  return packed and cmsgpack.unpack(packed) or nil
end

local function has_role(record, stage)
  for _, role in ipairs(record.roles) do
    if role == stage then return true end
  end
  return false
end

-- The charged tokens of a worker and the number of its charges. Expired ones count until its next heartbeat.
local function ledger(stage, worker)
  local count = redis.call('ZCARD', 'baton:charges:' .. stage .. ':' .. worker)
  if count == 0 then return 0, 0 end
  return tonumber(redis.call('GET', 'baton:load:' .. stage .. ':' .. worker) or '0'), count
end

-- A prefill worker's load: ms until a typical prompt would be computed.
local function prefill_score(record, load)
  local rate = record.prefill_tokens_per_s
  if rate <= 0 then rate = tonumber(redis.call('GET', 'baton:rate:' .. record.kind) or '1') end
  return record.prefill_fixed_ms + 1000 * (math.max(load, record.queued_tokens) + POLICY.ledger.typical_prompt_tokens) / rate
end

-- A decode worker's load: the share of its sequences or blocks that is taken, whichever is larger.
local function decode_score(record, load, count)
  local used = math.max(load, (record.num_blocks - record.free_blocks) * record.block_size)
  return math.max(math.max(count, record.sequences) / math.max(record.max_sequences, 1),
    used / math.max(record.num_blocks * record.block_size, 1))
end

-- Sort a worker anew among the ready ones of a stage. One that may not be chosen is left out.
local function rescore(stage, worker)
  local home = redis.call('GET', 'baton:home:' .. worker)
  if not home then return end
  local stages, kind = string.match(home, '^([^|]*)|(.*)$')
  if not string.find(stages, ',' .. stage .. ',', 1, true) then return end
  local record = record_of(worker)
  if not record then return end
  local load, count = ledger(stage, worker)
  local score = stage == 'prefill' and prefill_score(record, load) or decode_score(record, load, count)
  redis.call('ZADD', 'baton:ready:' .. stage .. ':' .. kind, tostring(score), worker)
end

-- Take charges off a worker; `members` that are not there any more change nothing.
local function give_back(stage, worker, members, now)
  local charges, sum = 'baton:charges:' .. stage .. ':' .. worker, 0
  for _, member in ipairs(members) do
    if redis.call('ZREM', charges, member) == 1 then sum = sum + tonumber(string.match(member, '|(%d+)$')) end
  end
  if sum == 0 then return end
  redis.call('DECRBY', 'baton:load:' .. stage .. ':' .. worker, sum)
  if stage == 'prefill' then redis.call('SET', 'baton:load:began:' .. worker, now) end -- the next prompt begins
  rescore(stage, worker)
end

local function charge(stage, worker, request, tokens, now, ttl)
  local charges, placed = 'baton:charges:' .. stage .. ':' .. worker, 'baton:placed:' .. request
  if redis.call('ZADD', charges, 'NX', now + ttl, request .. '|' .. tokens) == 1 then
    if stage == 'prefill' and redis.call('ZCARD', charges) == 1 then redis.call('SET', 'baton:load:began:' .. worker, now) end
    redis.call('INCRBY', 'baton:load:' .. stage .. ':' .. worker, tokens)
    rescore(stage, worker)
  end
  redis.call('HSET', placed, stage, worker .. '|' .. tokens)
  redis.call('PEXPIRE', placed, ttl)
end

-- Give back what an attempt was charged at a stage. Without a record of it (it was evicted) `others` are searched.
local function discharge(request, stage, others, now)
  local placed = 'baton:placed:' .. request
  local recorded = redis.call('HGET', placed, stage)
  if recorded then
    redis.call('HDEL', placed, stage)
    local worker, tokens = string.match(recorded, '^(.*)|(%d+)$')
    give_back(stage, worker, { request .. '|' .. tokens }, now)
    return
  end
  for _, worker in ipairs(others) do
    local found = {}
    for _, member in ipairs(redis.call('ZRANGE', 'baton:charges:' .. stage .. ':' .. worker, 0, POLICY.ledger.max_scanned - 1)) do
      if string.sub(member, 1, #request + 1) == request .. '|' then found[#found + 1] = member end
    end
    give_back(stage, worker, found, now)
  end
end

-- Give back the charges whose deadline has passed.
local function expire(stage, worker, now)
  local charges = 'baton:charges:' .. stage .. ':' .. worker
  local expired = redis.call('ZRANGEBYSCORE', charges, '-inf', now, 'LIMIT', 0, POLICY.ledger.max_expired)
  if #expired > 0 then give_back(stage, worker, expired, now) end
  if redis.call('EXISTS', charges) == 0 then redis.call('DEL', 'baton:load:' .. stage .. ':' .. worker) end
end

local function forget_charges(worker)
  for _, stage in ipairs(STAGES) do
    redis.call('DEL', 'baton:charges:' .. stage .. ':' .. worker, 'baton:load:' .. stage .. ':' .. worker)
  end
  redis.call('DEL', 'baton:load:began:' .. worker, 'baton:load:busy:' .. worker)
end

-- release(request:attempt, stage, now_ms, worker, ...): give the charge back; the workers are searched if its record is gone
local function release(_, args)
  local others = {}
  for i = 4, #args do others[#others + 1] = args[i] end
  discharge(args[1], args[2], others, clock(args[3]))
  return 1
end

-- charged(stage, worker) -> tokens charged now
local function charged(_, args)
  expire(args[1], args[2], clock(0))
  local load = ledger(args[1], args[2])
  return load
end

redis.register_function('baton3_release', release)
redis.register_function('baton3_charged', charged)
