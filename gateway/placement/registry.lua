-- The registry: which workers live, and which of them may be chosen.
--
--   baton:workers      set of worker ids
--   baton:worker:<id>  hash with the lease's TTL: `incarnation`; `state`, the heartbeat; `record`, what placement needs of it
--                      (msgpack, `WorkerRecord` in common/store.py); `known`: it idled once, so the ledger has all of its work
--   baton:home:<id>    the ready sets that the worker is in: ",role,role,|kind"
--   baton:rate:<kind>  the fleet's mean prefill rate, for workers that have not measured theirs
--
-- `kind` names the blocks of a worker's pool (model, KV dtype, block size). Only workers of one kind are ever compared.

-- Nobody may choose the worker any more.
local function leave_home(worker)
  local home = redis.call('GET', 'baton:home:' .. worker)
  if not home then return end
  local kind = string.match(home, '|(.*)$')
  for _, stage in ipairs(STAGES) do redis.call('ZREM', 'baton:ready:' .. stage .. ':' .. kind, worker) end
  redis.call('DEL', 'baton:home:' .. worker)
end

-- A worker whose lease ran out. Its requests are placed elsewhere by now.
local function forget_worker(worker)
  redis.call('SREM', 'baton:workers', worker)
  leave_home(worker)
  forget_charges(worker)
end

-- Enter the ready sets that fit what the worker says of itself, and leave all others.
local function settle_home(worker, record)
  local home = ',' .. table.concat(record.roles, ',') .. ',|' .. record.kind
  if record.status ~= 'ready' then
    leave_home(worker)
  elseif redis.call('GET', 'baton:home:' .. worker) ~= home then
    leave_home(worker)
    redis.call('SET', 'baton:home:' .. worker, home)
  end
end

local function note_rate(kind, rate, ttl)
  local key = 'baton:rate:' .. kind
  local mean = tonumber(redis.call('GET', key) or rate)
  redis.call('SET', key, tostring(mean + POLICY.ledger.rate_smoothing * (rate - mean)), 'PX', ttl)
end

-- register(worker, incarnation, ttl_ms, now_ms, state, record) -> 1 when this incarnation was unknown. now_ms: see `clock`.
local function register(_, args)
  local worker, incarnation, key = args[1], args[2], 'baton:worker:' .. args[1]
  local ttl, now, record = tonumber(args[3]), clock(args[4]), cmsgpack.unpack(args[6])
  local unknown = redis.call('HGET', key, 'incarnation') ~= incarnation
  if unknown then
    forget_charges(worker)
    redis.call('HDEL', key, 'known')
  end
  redis.call('HSET', key, 'incarnation', incarnation, 'state', args[5], 'record', args[6])
  redis.call('PEXPIRE', key, ttl)
  redis.call('SADD', 'baton:workers', worker)
  if record.sequences + record.queued_tokens == 0 then redis.call('HSET', key, 'known', 1) end
  settle_home(worker, record)
  if record.prefill_tokens_per_s > 0 then note_rate(record.kind, record.prefill_tokens_per_s, ttl) end
  for _, stage in ipairs(STAGES) do
    expire(stage, worker, now)
    rescore(stage, worker)
  end
  return unknown and 1 or 0
end

-- unregister(worker, incarnation): end the lease, unless a newer incarnation holds it
local function unregister(_, args)
  local key = 'baton:worker:' .. args[1]
  if redis.call('HGET', key, 'incarnation') == args[2] then
    redis.call('DEL', key)
    forget_worker(args[1])
  end
  return 1
end

-- states() -> the heartbeat of every live worker. It changes nothing: the planner's user may call it and is not trusted with more.
local function states()
  local found = {}
  for _, worker in ipairs(redis.call('SMEMBERS', 'baton:workers')) do
    found[#found + 1] = redis.call('HGET', 'baton:worker:' .. worker, 'state') or nil
  end
  return found
end

redis.register_function('baton3_register', register)
redis.register_function('baton3_unregister', unregister)
redis.register_function('baton3_states', states)
