#!lua name=baton2

-- What Baton keeps in Redis: who is alive (leases), which worker holds which block (index), what was placed on whom (ledger).
-- All of it can be rebuilt. Works on Redis 7.0 and Valkey. One instance: keys are made here, not declared.
--
-- Processes of two releases call this during an upgrade, and each loads its own release's text. So the number in the names of the
-- library and its functions grows whenever arguments, answers or the meaning of a key change: then both stay, each for its
-- callers. Without such a change the text loaded last serves all of them.
--
--   baton:workers              set of worker ids
--   baton:ready:<role>:<fingerprint>  sorted set of the ids that may be chosen, least loaded first
--   baton:home:<id>            which of those sets the worker is in: ",role,role,|fingerprint"
--   baton:rate:<fingerprint>   what a prefill rate is among them: what an unmeasured one is taken for
--   baton:worker:<id>          hash with a TTL, from the worker's heartbeat; `known`: it was idle once, so the ledger lacks nothing of it;
--                              `protocol`: of its messages, 1 where a release wrote none
--   baton:block:<digest>       set of "<worker>@<incarnation>", with a TTL
--   baton:charges:<stage>:<id> sorted set "<request>:<attempt>|<tokens>" by expiry (ms); baton:load:<stage>:<id> its sum of tokens
--   baton:load:began:<id>      when the prompt that it computes now began, ms; baton:load:since  when this ledger began, ms
--   baton:placed:<request>:<attempt>  hash stage -> worker, with the charge's TTL
--
-- What has no TTL (workers, ready, home, charges, load) is small and dies with its worker; an evicting Redis must only evict the rest
-- (`volatile-lfu`, see deploy/redis/index.conf).

local BLOCK_TTL_S = 6 * 3600
local STAGES = { 'prefill', 'decode' }
local FULL = 1e6 -- cost of a decode worker without room: it comes after all that have room
local LOOKED_AT = 16 -- workers of each role, least loaded first, and holders of the prompt's prefix, that are compared in one call
local EXACT_BLOCKS = 16 -- up to which a prefix is looked up block by block; a longer one by halving: pools evict prefixes from their ends
local TYPICAL_TOKENS = 2048 -- a prompt's, where workers are sorted without a request
local WORK_WEIGHT = 8 -- of computing against waiting when all workers have a queue: what is computed here delays who comes next
local IDLE_WEIGHT = 2 -- the same while somebody idles: what need not be computed is room for who comes next
local SCARCE_MS = 20 -- of waiting at the least loaded worker, half-way from one weight to the other
local LOCAL_SHARE = 0.5 -- of a prefill rate: what a decode worker is thought to compute beside its batch, until it has measured it
local CANDIDATES = 4 -- decode workers that a prefill worker may ask for room, best first
local LOCAL_CANDIDATES = 4 -- decode workers, best first, that are compared as places for the prefill, too
local FULL_PASS = 2048 -- tokens of a pass: longer prompts have one of their own, shorter ones share it (prefill/scheduler.py)
local LOCAL_CROWD = 64 -- sequences of a batch whose delay by a prompt beside them weighs as much as the prompt's own time
local LOCAL_PATIENCE_MS = 360 -- of prompts beside a batch: with more the harm grows fast, and with the sequences that wait
local BUSY_MS = 5000 -- over which the work that a prefill worker is given is averaged
local BUSY = 0.5 -- share of its time up to which one more prompt delays few of those that come after it
local CROWDING = 8 -- times the prompt's own work that it delays them, for the whole of the share beyond
local LOCAL_PASS_MS = 60 -- an idle decode worker computes a prompt in one pass up to this; whoever joins meanwhile waits for it
local YOUNG_MS = 60000 -- until a ledger may lack charges because Redis was emptied; later it is newer than any heartbeat
local HANDOVER_MS = 2 -- what asking for a lease and pushing cost, beside the bytes
local LINK = 1e9 -- bytes/s of a link that nobody has measured
local READ = 2e12 -- bytes/s at which a decode step reads its context, more or less
local ANSWER_TOKENS = 64 -- over which what a hand-over costs a sequence is spread, to compare it with a step
local MOVING_SHARE = 0.1 -- of the hidden part of a hand-over: it takes bandwidth and room

local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

local function tokens_of(member)
  return tonumber(string.match(member, '|(%d+)$')) or 0
end

local rescore -- below

local function give_back(stage, worker, members, now)
  local charges, load = 'baton:charges:' .. stage .. ':' .. worker, 'baton:load:' .. stage .. ':' .. worker
  local sum = 0
  for _, member in ipairs(members) do
    if redis.call('ZREM', charges, member) == 1 then
      sum = sum + tokens_of(member)
    end
  end
  if sum > 0 then
    redis.call('DECRBY', load, sum)
    if stage == 'prefill' then redis.call('SET', 'baton:load:began:' .. worker, now) end -- the next one's turn
    rescore(stage, worker)
  end
end

-- The charged tokens and the number of charges of a worker; expired ones count until its next heartbeat.
local function ledger(stage, worker)
  local count = redis.call('ZCARD', 'baton:charges:' .. stage .. ':' .. worker)
  if count == 0 then return 0, 0 end
  return tonumber(redis.call('GET', 'baton:load:' .. stage .. ':' .. worker) or '0'), count
end

-- Sort the worker anew among those of a role: ms until a typical prompt is computed, or the share of its room that is taken.
function rescore(stage, worker)
  local home = redis.call('GET', 'baton:home:' .. worker)
  if not home then return end
  local roles, fingerprint = string.match(home, '^([^|]*)|(.*)$')
  if not string.find(roles, ',' .. stage .. ',', 1, true) then return end
  local f = redis.call('HMGET', 'baton:worker:' .. worker, 'rate', 'queued_tokens', 'fixed_ms', 'sequences', 'max_sequences',
    'free_blocks', 'num_blocks', 'block_size')
  local load, count = ledger(stage, worker)
  local score
  if stage == 'prefill' then
    local rate = tonumber(f[1]) or 0
    if rate <= 0 then rate = tonumber(redis.call('GET', 'baton:rate:' .. fingerprint) or '1') end
    score = (tonumber(f[3]) or 0) + 1000 * (math.max(load, tonumber(f[2]) or 0) + TYPICAL_TOKENS) / rate
  else
    local num_blocks, block_size = tonumber(f[7]) or 0, tonumber(f[8]) or 1
    local used = math.max(load, (num_blocks - (tonumber(f[6]) or 0)) * block_size)
    score = math.max(math.max(count, tonumber(f[4]) or 0) / math.max(tonumber(f[5]) or 1, 1),
      used / math.max(num_blocks * block_size, 1))
  end
  redis.call('ZADD', 'baton:ready:' .. stage .. ':' .. fingerprint, tostring(score), worker)
end

-- Give back what expired.
local function expire(stage, worker, now)
  local expired = redis.call('ZRANGEBYSCORE', 'baton:charges:' .. stage .. ':' .. worker, '-inf', now, 'LIMIT', 0, 1000)
  if #expired > 0 then give_back(stage, worker, expired, now) end
  if redis.call('EXISTS', 'baton:charges:' .. stage .. ':' .. worker) == 0 then
    redis.call('DEL', 'baton:load:' .. stage .. ':' .. worker)
  end
end

local function charge(stage, worker, request, tokens, now, ttl)
  local charges, placed = 'baton:charges:' .. stage .. ':' .. worker, 'baton:placed:' .. request
  if redis.call('ZADD', charges, 'NX', now + ttl, request .. '|' .. tokens) == 1 then
    if stage == 'prefill' and redis.call('ZCARD', charges) == 1 then redis.call('SET', 'baton:load:began:' .. worker, now) end
    redis.call('INCRBY', 'baton:load:' .. stage .. ':' .. worker, tokens)
    rescore(stage, worker)
  end
  redis.call('HSET', placed, stage, worker)
  redis.call('PEXPIRE', placed, ttl)
end

local function forget_charges(worker)
  for _, stage in ipairs(STAGES) do
    redis.call('DEL', 'baton:charges:' .. stage .. ':' .. worker, 'baton:load:' .. stage .. ':' .. worker)
  end
  redis.call('DEL', 'baton:load:began:' .. worker, 'baton:load:busy:' .. worker)
end

-- Nobody may choose the worker any more.
local function leave_home(worker)
  local home = redis.call('GET', 'baton:home:' .. worker)
  if not home then return end
  local fingerprint = string.match(home, '|(.*)$')
  for _, stage in ipairs(STAGES) do redis.call('ZREM', 'baton:ready:' .. stage .. ':' .. fingerprint, worker) end
  redis.call('DEL', 'baton:home:' .. worker)
end

-- A worker whose lease ran out: what was charged to it is placed elsewhere by now.
local function forget_worker(worker)
  redis.call('SREM', 'baton:workers', worker)
  leave_home(worker)
  forget_charges(worker)
end

-- Give back whatever this attempt was charged at `stage`; `others` are workers to look at besides the recorded one.
local function discharge(request, stage, others, now)
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
    give_back(stage, worker, found, now)
  end
end

-- A measured prefill rate, smoothed over the heartbeats of a fleet; kept as long as they come.
local function note_rate(fingerprint, rate, ttl)
  local key = 'baton:rate:' .. fingerprint
  local known = tonumber(redis.call('GET', key) or rate)
  redis.call('SET', key, tostring(known + 0.05 * (rate - known)), 'PX', ttl)
end

-- register(worker, incarnation, ttl_ms, now_ms, field, value, ...) -> 1 when this incarnation was unknown
local function register(_, args)
  local worker, incarnation, key = args[1], args[2], 'baton:worker:' .. args[1]
  local ttl, now = tonumber(args[3]), tonumber(args[4])
  if now == 0 then now = now_ms() end
  local unknown = redis.call('HGET', key, 'incarnation') ~= incarnation
  if unknown then
    forget_charges(worker)
    redis.call('HDEL', key, 'known')
  end
  local fields = {}
  for i = 5, #args do fields[#fields + 1] = args[i] end
  redis.call('HSET', key, 'incarnation', incarnation, unpack(fields))
  redis.call('PEXPIRE', key, ttl)
  redis.call('SADD', 'baton:workers', worker)
  local f = redis.call('HMGET', key, 'roles', 'status', 'fingerprint', 'rate', 'sequences', 'queued_tokens')
  if (tonumber(f[5]) or 0) + (tonumber(f[6]) or 0) == 0 then redis.call('HSET', key, 'known', 1) end
  local home = ',' .. f[1] .. ',|' .. f[3]
  if f[2] ~= 'ready' then
    leave_home(worker)
  elseif redis.call('GET', 'baton:home:' .. worker) ~= home then
    leave_home(worker)
    redis.call('SET', 'baton:home:' .. worker, home)
  end
  local rate = tonumber(f[4]) or 0
  if rate > 0 then note_rate(f[3], rate, ttl) end
  for _, stage in ipairs(STAGES) do
    expire(stage, worker, now)
    rescore(stage, worker)
  end
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

-- states() -> the `state` field of every live worker. It only reads: who may ask need not be allowed to change anything. Those
-- whose lease ran out are forgotten by the next placement.
local function states()
  local found = {}
  for _, worker in ipairs(redis.call('SMEMBERS', 'baton:workers')) do
    found[#found + 1] = redis.call('HGET', 'baton:worker:' .. worker, 'state') or nil
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

-- A worker as placement sees it; nil, and forgotten, when its lease ran out.
local function read_worker(id)
  local f = redis.call('HMGET', 'baton:worker:' .. id, 'incarnation', 'roles', 'rate', 'free_blocks', 'num_blocks', 'sequences',
    'max_sequences', 'queued_tokens', 'fixed_ms', 'local_rate', 'step_ms', 'link', 'block_bytes', 'known', 'protocol', 'double')
  if not f[1] then
    forget_worker(id)
    return nil
  end
  return {
    id = id, incarnation = f[1], member = id .. '@' .. f[1], roles = ',' .. f[2] .. ',', matched = 0,
    rate = math.max(tonumber(f[3]) or 0, 0), free_blocks = tonumber(f[4]) or 0, num_blocks = tonumber(f[5]) or 0,
    sequences = tonumber(f[6]) or 0, max_sequences = math.max(tonumber(f[7]) or 1, 1), queued_tokens = tonumber(f[8]) or 0,
    fixed_ms = tonumber(f[9]) or 0, local_rate = tonumber(f[10]) or 0, step_ms = tonumber(f[11]) or 0,
    link = tonumber(f[12]) or 0, block_bytes = tonumber(f[13]) or 0, known = f[14],
    protocol = tonumber(f[15]) or 1, double = tonumber(f[16]) or 0,
  }
end

-- Add the least loaded workers of a role to `found` (list and set by id); the dead are forgotten on the way.
local function add_least_loaded(found, role, fingerprint, excluded)
  local key, from, added = 'baton:ready:' .. role .. ':' .. fingerprint, 0, 0
  repeat
    local ids = redis.call('ZRANGE', key, from, from + LOOKED_AT - 1)
    for _, id in ipairs(ids) do
      local known = found[id]
      if not known and not string.find(excluded, ',' .. id .. ',', 1, true) then
        known = read_worker(id)
        if known then
          found[id] = known
          found[#found + 1] = known
        end
        if not known then from = from - 1 end -- it left the set
      end
      if found[id] then added = added + 1 end
      from = from + 1
    end
  until #ids == 0 or added >= LOOKED_AT
end

-- How many of the prompt's first blocks anybody holds, if prefixes have no gaps.
local function deepest(args, first)
  local low, high = 0, #args - first + 1
  if high > 0 and redis.call('EXISTS', 'baton:block:' .. args[#args]) == 1 then return high end
  while low < high do
    local middle = math.ceil((low + high) / 2)
    if redis.call('EXISTS', 'baton:block:' .. args[first + middle - 1]) == 1 then low = middle else high = middle - 1 end
  end
  return low
end

-- Some who hold a block.
local function holders(key)
  if redis.call('SCARD', key) <= LOOKED_AT then return redis.call('SMEMBERS', key) end
  return redis.call('SRANDMEMBER', key, LOOKED_AT)
end

-- Add holders of the prompt's blocks to `found`, those of the longest prefix first. Returns its length in blocks, and the dead
-- among them: incarnations that are no more.
local function add_holders(found, args, first, fingerprint, excluded)
  local depth = deepest(args, first)
  local dead, seen, added = {}, {}, 0
  for _, share in ipairs({ 1, 0.75, 0.5, 0.25, 0 }) do
    local at = math.max(1, math.ceil(share * depth))
    if depth == 0 or added >= LOOKED_AT then break end
    for _, member in ipairs(holders('baton:block:' .. args[first + at - 1])) do
      local id, incarnation = string.match(member, '^(.*)@(.-)$')
      if not seen[member] and added < LOOKED_AT then
        seen[member] = true
        local f = redis.call('HMGET', 'baton:worker:' .. id, 'incarnation', 'status', 'fingerprint')
        if f[1] ~= incarnation then
          dead[#dead + 1] = member
        elseif f[2] == 'ready' and f[3] == fingerprint and not string.find(excluded, ',' .. id .. ',', 1, true) then
          added = added + 1
          if not found[id] then
            found[id] = read_worker(id)
            found[#found + 1] = found[id]
          end
        end
      end
    end
  end
  return depth, dead
end

-- Which of `workers` hold the block.
local function split(workers, digest)
  if #workers == 0 then return workers, workers end
  local members, holding, others = {}, {}, {}
  for at, worker in ipairs(workers) do members[at] = worker.member end
  for at, holds in ipairs(redis.call('SMISMEMBER', 'baton:block:' .. digest, unpack(members))) do
    local side = holds == 1 and holding or others
    side[#side + 1] = workers[at]
  end
  return holding, others
end

-- Set the longest prefix of workers that hold `low` blocks and at most `high`, by halving.
local function match_deep(workers, args, first, low, high)
  for _, worker in ipairs(workers) do worker.matched = low end
  if #workers == 0 or low >= high then return end
  local middle = math.ceil((low + high) / 2)
  local holding, others = split(workers, args[first + middle - 1])
  match_deep(holding, args, first, middle, high)
  match_deep(others, args, first, low, middle - 1)
end

-- Set the longest cached prefix of every worker, in blocks. One call in sixteen renews the TTLs, so that what is hit stays.
local function match_prefixes(workers, args, first, depth, renew)
  local holding = workers
  if depth > EXACT_BLOCKS then
    local all, others = split(workers, args[first + depth - 1])
    for _, worker in ipairs(all) do worker.matched = depth end
    match_deep(others, args, first, 0, depth - 1)
  else
    for at = 1, depth do
      if #holding == 0 then break end
      holding = split(holding, args[first + at - 1])
      for _, worker in ipairs(holding) do worker.matched = at end
    end
  end
  if renew then
    for at = 1, depth do redis.call('EXPIRE', 'baton:block:' .. args[first + at - 1], BLOCK_TTL_S) end
  end
end

-- The workers to compare: the least loaded of both roles, and who holds most of the prompt.
local function candidates(args, first, fingerprint, excluded, renew)
  local found = {}
  for _, role in ipairs(STAGES) do add_least_loaded(found, role, fingerprint, excluded) end
  for _ = 1, 3 do
    local depth, dead = add_holders(found, args, first, fingerprint, excluded)
    if #dead == 0 then
      match_prefixes(found, args, first, depth, renew)
      break
    end
    for at = 1, depth do redis.call('SREM', 'baton:block:' .. args[first + at - 1], unpack(dead)) end
  end
  return found
end

local function has_role(worker, role)
  return string.find(worker.roles, ',' .. role .. ',', 1, true) ~= nil
end

local function cheaper(a, b)
  if a.cost ~= b.cost then return a.cost < b.cost end
  if a.count ~= b.count then return a.count < b.count end
  return a.id < b.id
end

-- What an unmeasured worker is taken for: the slowest measured prefill rate, else what somebody computes beside a batch, else
-- 0; with the dearest fixed cost of a pass and of attention.
local function assume(workers)
  local slowest, beside, fixed_ms, double = 0, 0, 0, 0
  for _, worker in ipairs(workers) do
    if worker.rate > 0 and (slowest == 0 or worker.rate < slowest) then slowest = worker.rate end
    if worker.double > 0 and (double == 0 or worker.double < double) then double = worker.double end
    beside = math.max(beside, worker.local_rate)
    fixed_ms = math.max(fixed_ms, worker.fixed_ms)
  end
  for _, worker in ipairs(workers) do
    if worker.rate == 0 then worker.fixed_ms, worker.double = fixed_ms, double end
  end
  return slowest > 0 and slowest or beside
end

-- What a prompt of `tokens` is to a worker, in tokens with nothing before them: each attends to all before it, cached or not.
local function effort(worker, uncached, tokens)
  if worker.double == 0 then return uncached end
  return math.ceil(uncached + uncached * (2 * tokens - uncached) / (2 * worker.double))
end

-- ms until a worker has computed the prompts charged to it at `rate`, and `fixed_ms` for each pass; the first of them has been on its
-- way for some time. In a young ledger the word of a worker that has been busy since before counts, too.
local function wait_ms(worker, rate, fixed_ms, now)
  local load, count = ledger('prefill', worker.id)
  local passes = math.min(count, math.ceil(load / FULL_PASS))
  if worker.doubted then return 1000 * math.max(load, worker.queued_tokens) / rate + passes * fixed_ms, count end
  if count == 0 then return 0, 0 end
  local began = tonumber(redis.call('GET', 'baton:load:began:' .. worker.id) or now)
  local all = 1000 * load / rate + passes * fixed_ms
  return all - math.max(0, math.min(now - began, all / count)), count
end

-- Prefill workers, cheapest first: ms until each would have computed what it is charged (`wait`) and this prompt's rest (`work`).
-- While somebody idles, a prefix is worth twice what computing it takes, and is copied by being computed elsewhere when its holders'
-- queue is longer. The longer all queues are, the more computing counts, because everybody behind waits for it. Returns its weight, too.
local function rank_prefill(workers, assumed, now)
  local ranked, least = {}, nil
  for _, worker in ipairs(workers) do
    if has_role(worker, 'prefill') then
      local rate = worker.rate > 0 and worker.rate or (assumed > 0 and assumed or 1)
      local wait, count = wait_ms(worker, rate, worker.fixed_ms, now)
      local work = worker.fixed_ms + 1000 * worker.effort / rate
      ranked[#ranked + 1] = {
        id = worker.id, worker = worker, count = count, rate = rate, wait = wait, work = work, ms = wait + work,
      }
      least = math.min(least or wait, wait)
    end
  end
  least = least or 0
  local weight = IDLE_WEIGHT + (WORK_WEIGHT - IDLE_WEIGHT) * least / (least + SCARCE_MS)
  for _, option in ipairs(ranked) do option.cost = option.wait + weight * option.work end
  table.sort(ranked, cheaper)
  return ranked, weight
end

-- Where of the best decode workers the prompt of `tokens` would be computed the earliest: {at, ms, cost}; nil without any rate. What
-- computing weighs beyond its own time is told by the best prefill worker's figures, `first`: the same work weighs the same here and
-- there, whoever takes himself for the faster.
local function cheapest_local(decode, assumed, first, tokens, weight, now)
  local best
  for at = 1, math.min(#decode, LOCAL_CANDIDATES) do
    local worker = decode[at].worker
    local own = worker.rate > 0 and worker.rate or assumed
    local sequences = worker.doubted and math.max(worker.sequences, decode[at].count) or decode[at].count
    local idle = sequences == 0 and 1000 * worker.effort <= LOCAL_PASS_MS * own
    local rate = idle and own or (worker.local_rate > 0 and worker.local_rate or LOCAL_SHARE * own)
    if rate > 0 and not decode[at].full then
      local wait = wait_ms(worker, rate, 0, now)
      local computing = 1000 * (idle and worker.effort or worker.uncached) / rate -- beside a batch the rate has attention in it
      local ms = worker.fixed_ms + (idle and 0 or worker.step_ms) + wait + computing
      local delay = (wait * rate + 1000 * worker.uncached) / own -- of those that decode there, by all prompts
      local harm = idle and 0 or computing * sequences / LOCAL_CROWD
        + math.max(sequences, 1) * delay * (delay / LOCAL_PATIENCE_MS) ^ 2
      local scarce = first and 1000 * effort(first.worker, worker.uncached, tokens) / first.rate or 1000 * worker.effort / own
      local cost = ms + harm + (weight - 1) * scarce
      if not best or cost < best.cost then best = { at = at, ms = ms, cost = cost } end
    end
  end
  return best
end

-- The share of its time that a prefill worker was given work for lately; 1 also for who was given more.
local function busy(worker, now)
  local f = redis.call('HMGET', 'baton:load:busy:' .. worker, 'share', 'at')
  return (tonumber(f[1]) or 0) * math.exp(math.min((tonumber(f[2]) or now) - now, 0) / BUSY_MS)
end

local function note_busy(worker, share, now)
  local key = 'baton:load:busy:' .. worker
  redis.call('HSET', key, 'share', tostring(math.min(share, 1)), 'at', now)
  redis.call('PEXPIRE', key, 10 * BUSY_MS)
end

-- What moving what a decode worker lacks takes.
local function moving_ms(worker, link, block_size)
  return 1000 * math.ceil(worker.uncached / block_size) * worker.block_bytes / (link > 0 and link or LINK)
end

-- ms a token in the batch takes to be read, and a step beside that and with an almost empty batch: from what the worker said. An
-- idle one may have nothing newer than its last full batch, a new one nothing: 0.
local function step_parts(worker, block_size)
  local token_ms = 1000 * worker.block_bytes / block_size / READ
  if worker.sequences == 0 then return token_ms, 0 end
  local said = (worker.num_blocks - worker.free_blocks) * block_size
  local rest = math.max(worker.step_ms - token_ms * said, 0.25 * worker.step_ms)
  return token_ms, rest / (1 + worker.sequences / worker.max_sequences)
end

-- Decode workers, those with room first, then by the predicted step with this sequence in the batch and by what the hand-over adds
-- to it: what the prefill doesn't hide (`work` ms, over `link`), and a share of the rest. Load is the larger of what was charged
-- (newer) and what the worker said (truer).
local function rank_decode(workers, tokens, block_size, reserve, work, link)
  local ranked, fastest = {}, 0
  for _, worker in ipairs(workers) do
    if has_role(worker, 'decode') then
      local load, count = ledger('decode', worker.id)
      local sequences = math.max(count, worker.sequences)
      local used = math.max(load, (worker.num_blocks - worker.free_blocks) * block_size)
      local room = worker.num_blocks * block_size - used + worker.matched * block_size
      local full = sequences >= worker.max_sequences or reserve > room
      local token_ms, empty_ms = step_parts(worker, block_size)
      local moving = moving_ms(worker, link, block_size)
      if empty_ms > 0 and (fastest == 0 or empty_ms < fastest) then fastest = empty_ms end
      ranked[#ranked + 1] = {
        id = worker.id, worker = worker, count = count, full = full, empty_ms = empty_ms, context_ms = token_ms * (used + tokens),
        share = 1 + (sequences + 1) / worker.max_sequences, unhidden = math.max(0, moving - work), moving = moving,
      }
    end
  end
  for _, option in ipairs(ranked) do
    local empty_ms = option.empty_ms > 0 and option.empty_ms or (fastest > 0 and fastest or 1)
    option.step = empty_ms * option.share + option.context_ms
    option.cost = option.step + (option.unhidden + MOVING_SHARE * option.moving) / ANSWER_TOKENS + (option.full and FULL or 0)
  end
  table.sort(ranked, cheaper)
  return ranked
end

-- Whether the ledger began a short time ago.
local function is_young(now)
  redis.call('SET', 'baton:load:since', now, 'NX')
  return now - tonumber(redis.call('GET', 'baton:load:since')) < YOUNG_MS
end

-- Those that understand the caller's messages, and whose messages it understands: of its protocol, one older or one newer.
local function within_reach(workers, protocol)
  local found = {}
  for _, worker in ipairs(workers) do
    if math.abs(worker.protocol - protocol) <= 1 then found[#found + 1] = worker end
  end
  return found
end

-- place(request:attempt, tokens, block_size, reserve_tokens, ttl_ms, cut_over_tokens, fingerprint, ",excluded,", now_ms, protocol,
--       digest, ...)
-- cut_over_tokens: an uncached rest up to this is prefilled by the decode worker; negative: whenever that brings the first token
-- earlier, by the rates that workers measured. now_ms: 0 for this server's clock; a simulation has its own.
-- -> {prefill, incarnation, matched blocks there, matched blocks at the first decode candidate, reason, costs, decode, decode, ...}
-- costs: "name=value ..." of what was compared, times in ms; -1 = not known.
-- Again for the same attempt (the answer was lost): the earlier charges are given back first.
local function place(_, args)
  local request, tokens, block_size = args[1], tonumber(args[2]), tonumber(args[3])
  local reserve, ttl, cut_over = tonumber(args[4]), tonumber(args[5]), tonumber(args[6])
  local now = tonumber(args[9])
  if now == 0 then now = now_ms() end
  for _, stage in ipairs(STAGES) do discharge(request, stage, {}, now) end
  local workers = within_reach(candidates(args, 11, args[7], args[8], now % 16 == 0), tonumber(args[10]))
  local young = is_young(now)
  for _, worker in ipairs(workers) do
    worker.uncached = math.max(tokens - worker.matched * block_size, 1)
    worker.doubted = young and not worker.known -- the ledger may lack what it was doing before
  end

  local assumed = assume(workers)
  for _, worker in ipairs(workers) do worker.effort = effort(worker, worker.uncached, tokens) end
  local prefill, weight = rank_prefill(workers, assumed, now)
  local first = prefill[1]
  local decode = rank_decode(workers, tokens, block_size, reserve, first and first.work or 0, first and first.worker.link or 0)
  if #decode == 0 then return { '', '0', 0, 0, 'no decode worker', '' } end
  local best = decode[1].worker
  local chosen, reason, predicted = best, nil, nil
  local nearby = cheapest_local(decode, assumed, first, tokens, weight, now)
  local transfer = HANDOVER_MS + decode[1].unhidden
  -- Who comes next waits for what a busy worker is given, however soon that one is done: with others beside it, for less.
  local share = first and busy(first.id, now) or 0
  local crowding = first and math.max(0, share - BUSY) * CROWDING * first.work / #prefill or 0
  if #prefill == 0 then
    if nearby then best = decode[nearby.at].worker end
    chosen = best
    reason = 'local: no prefill worker'
  elseif cut_over >= 0 and best.uncached <= cut_over then
    reason = 'local: short'
  elseif first.id == best.id then
    reason = 'local: same worker'
  elseif cut_over < 0 and nearby and nearby.cost < first.cost + transfer + crowding then
    best = decode[nearby.at].worker
    chosen = best
    reason = 'local: earlier'
    predicted = nearby.ms
  else
    chosen = first.worker
    reason = decode[1].full and 'full' or (chosen.matched > 0 and 'prefix' or 'load')
    predicted = first.ms
    if assumed > 0 then note_busy(chosen.id, share + first.work / BUSY_MS, now) end
  end
  charge('prefill', chosen.id, request, chosen.effort, now, ttl)
  charge('decode', best.id, request, reserve, now, ttl)
  local costs = string.format('predicted_ms=%.1f prefill_ms=%.1f local_ms=%.1f transfer_ms=%.1f crowding_ms=%.1f '
    .. 'matched_tokens=%d candidates=%d',
    assumed > 0 and (predicted or first and first.ms or nearby and nearby.ms) or -1, -- nothing is known of anybody: no figure
    assumed > 0 and first and first.ms or -1, nearby and nearby.ms or -1, transfer, crowding,
    chosen.matched * block_size, #workers)
  local answer = { chosen.id, chosen.incarnation, chosen.matched, best.matched, reason, costs }
  if chosen.id ~= best.id then
    local listed = not has_role(chosen, 'decode')
    for i = 1, math.min(#decode, CANDIDATES) do
      answer[#answer + 1] = decode[i].id
      listed = listed or decode[i].id == chosen.id
    end
    -- It can go on with what it computed, also when all others are full: prompts of several never wait for each other's room.
    if not listed then answer[#answer] = chosen.id end
  end
  return answer
end

-- release(request:attempt, stage, now_ms, worker, ...): give the charge back; the workers are looked at if its record was evicted
local function release(_, args)
  local others, now = {}, tonumber(args[3]) or 0
  if now == 0 then now = now_ms() end
  for i = 4, #args do others[#others + 1] = args[i] end
  discharge(args[1], args[2], others, now)
  return 1
end

-- charged(stage, worker) -> tokens charged now
local function charged_now(_, args)
  expire(args[1], args[2], now_ms())
  local load = ledger(args[1], args[2])
  return load
end

redis.register_function('baton2_register', register)
redis.register_function('baton2_unregister', unregister)
redis.register_function('baton2_states', states)
redis.register_function('baton2_announce', announce)
redis.register_function('baton2_place', place)
redis.register_function('baton2_release', release)
redis.register_function('baton2_charged', charged_now)
