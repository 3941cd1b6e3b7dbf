-- The registry: which workers live, and which of them may be chosen. Gateways enter the workers that they hear; no worker's user may
-- write anything of this. 0.1.0's workers enter themselves, under the same names.
--
--   baton:workers      set of worker ids
--   baton:worker:<id>  hash with a TTL: `incarnation`; `record`, what placement needs of the heartbeat (msgpack, `WorkerRecord` in
--                      common/store.py); `known`: it idled once, so the ledger has all of its work; `at`, `by`: when it was entered (ms),
--                      and by which gateway
--   baton:home:<id>    the ready sets that the worker is in: ",role,role,|kind"
--   baton:rate:<kind>  the fleet's mean prefill rate, for workers that have not measured theirs
--
-- `kind` names the blocks of a worker's pool (model, KV dtype, block size). Only workers of one kind are ever compared.

local LONGEST_RECORD, LONGEST_KIND, LONGEST_ROLE = 4096, 200, 32 -- bytes
local LEAST_FIGURE = 1e-6 -- a smaller one is none
local FIGURES = {
  'protocol', 'block_size', 'block_bytes', 'num_blocks', 'free_blocks', 'max_sequences', 'sequences', 'queued_tokens',
  'prefill_tokens_per_s', 'prefill_fixed_ms', 'attention_doubles_at', 'local_tokens_per_s', 'decode_step_ms', 'link_bytes_per_s',
  'tiers', 'host_bytes_per_s', 'disk_bytes_per_s', 'pull_bytes_per_s',
}
local LATER = { tiers = true, host_bytes_per_s = true, disk_bytes_per_s = true, pull_bytes_per_s = true } -- a record of an older build lacks these

local function is_incarnation(text)
  return type(text) == 'string' and #text <= 20 and string.find(text, '^%d+$') ~= nil
end

-- A record with every figure finite and not negative; nil for anything else.
local function unpacked(packed)
  if type(packed) ~= 'string' or #packed > LONGEST_RECORD then return nil end
  local is_one, record = pcall(cmsgpack.unpack, packed)
  if not is_one or type(record) ~= 'table' then return nil end
  for _, name in ipairs(FIGURES) do
    if LATER[name] and record[name] == nil then record[name] = 0 end
    local value = type(record[name]) == 'number' and number(record[name])
    if not value then return nil end
    if value < LEAST_FIGURE then record[name] = 0 end
  end
  if type(record.kind) ~= 'string' or #record.kind > LONGEST_KIND or type(record.status) ~= 'string' then return nil end
  if type(record.roles) ~= 'table' or #record.roles > POLICY.registry.max_roles then return nil end
  for _, role in ipairs(record.roles) do
    if type(role) ~= 'string' or #role > LONGEST_ROLE then return nil end
  end
  return record
end

-- A worker's incarnation, its record, and whether it is known; all nil after its lease, or where that is no worker's.
local function entry_of(worker)
  return known('entry', worker, function()
    if not is_id(worker) then return nil end
    local f = fields('baton:worker:' .. worker, LONGEST_RECORD, 'incarnation', 'record', 'known', 'at', 'by')
    local record = is_incarnation(f[1]) and unpacked(f[2])
    return record and { incarnation = f[1], record = record, known = f[3], at = f[4], by = f[5] }
  end)
end

function record_of(worker)
  local entry = entry_of(worker)
  return entry and entry.record or nil
end

-- Nobody may choose the worker any more.
local function leave_home(worker)
  local kind = string.match(home_of(worker) or '', '|(.*)$')
  seen['home:' .. worker] = false
  write('DEL', 'baton:home:' .. worker)
  if not kind then return end
  for _, stage in ipairs(STAGES) do write('ZREM', 'baton:ready:' .. stage .. ':' .. kind, worker) end
end

-- A worker whose lease ran out. Its requests are placed elsewhere by now.
local function forget_worker(worker)
  write('SREM', 'baton:workers', worker)
  if not is_id(worker) then return end
  leave_home(worker)
  forget_charges(worker)
end

-- Enter the ready sets that fit what the worker says of itself, and leave all others.
local function settle_home(worker, record, home)
  if record.status ~= 'ready' then
    leave_home(worker)
  elseif home_of(worker) ~= home then
    leave_home(worker)
    write('SET', 'baton:home:' .. worker, home)
    seen['home:' .. worker] = home
  end
end

local function note_rate(kind, rate, ttl)
  local mean = known('rate', kind, function() return { number(text('baton:rate:' .. kind), rate) } end)
  mean[1] = mean[1] + POLICY.ledger.rate_smoothing * (rate - mean[1])
  write('SET', 'baton:rate:' .. kind, tostring(mean[1]), 'PX', whole(ttl))
end

-- Whether another gateway entered the worker just now, with the same roles.
local function is_fresh(before, incarnation, home, worker, now, by)
  if not before or not before.by or before.by == by or before.incarnation ~= incarnation then return false end
  local age = now - number(before.at, 0)
  return age >= 0 and age < POLICY.registry.fresh_ms and home_of(worker) == home
end

local function enter(worker, incarnation, packed, ttl, now, by)
  local record = is_id(worker) and is_incarnation(incarnation) and unpacked(packed)
  if not record then return false end
  local key, before = 'baton:worker:' .. worker, entry_of(worker)
  local home = ',' .. table.concat(record.roles, ',') .. ',|' .. record.kind
  if record.status == 'ready' and is_fresh(before, incarnation, home, worker, now, by) then return true end
  seen['entry:' .. worker] = { incarnation = incarnation, record = record }
  if not before or before.incarnation ~= incarnation then
    forget_charges(worker)
    write('HDEL', key, 'known')
  end
  write('HSET', key, 'incarnation', incarnation, 'record', packed, 'at', whole(now), 'by', by)
  if record.sequences + record.queued_tokens == 0 then write('HSET', key, 'known', 1) end
  write('PEXPIRE', key, whole(ttl))
  write('SADD', 'baton:workers', worker)
  settle_home(worker, record, home)
  if record.prefill_tokens_per_s > 0 then note_rate(record.kind, record.prefill_tokens_per_s, ttl) end
  for _, stage in ipairs(STAGES) do
    expire(stage, worker, now)
    rescore(stage, worker)
  end
  keep_news(worker, incarnation)
  return true
end

-- enter(gateway, ttl_ms, now_ms, then for each worker: id, incarnation, record) -> the ids that can't be entered. now_ms: see `clock`
local function enter_all(args)
  local ttl, now, refused = number(args[2], 1, 1), clock(args[3]), {}
  for at = 4, math.min(#args, 3 + 3 * POLICY.registry.max_entered), 3 do
    if not enter(args[at], args[at + 1], args[at + 2], ttl, now, args[1]) then refused[#refused + 1] = args[at] end
  end
  return refused
end

-- leave(worker, incarnation): end the lease, unless a newer incarnation holds it
local function leave(args)
  local entry = entry_of(args[1])
  if not entry or entry.incarnation == args[2] then
    write('DEL', 'baton:worker:' .. args[1])
    forget_worker(args[1])
  end
  return 1
end

serve('baton4_enter', enter_all)
serve('baton4_leave', leave)
