-- Which workers one placement compares: the least loaded of each role, and those that hold most of the prompt's prefix.
-- policy.toml bounds every loop, so a call takes about as long in a fleet of thousands as in a small one.

-- A worker as placement sees it. After its lease it is nil, and forgotten.
local function read_worker(id)
  local f = redis.call('HMGET', 'baton:worker:' .. id, 'incarnation', 'record', 'known')
  local incarnation, packed, known = f[1], f[2], f[3]
  if not incarnation then
    forget_worker(id)
    return nil
  end
  if not packed then return nil end -- another release wrote it
  local worker = cmsgpack.unpack(packed)
  worker.id, worker.incarnation, worker.member = id, incarnation, id .. '@' .. incarnation
  worker.matched, worker.known = 0, known
  return worker
end

-- What a placement looks for: the prompt's block digests from args[first] on, their kind, and the excluded workers.
local function search_of(args, first, kind, excluded, protocol)
  return { args = args, first = first, count = #args - first + 1, kind = kind, excluded = excluded, protocol = protocol }
end

local function block_key(search, at)
  return 'baton:block:' .. search.args[search.first + at - 1]
end

-- Whether a worker may be chosen. Messages work between protocol versions that are one apart.
local function fits(search, worker)
  return worker.status == 'ready' and worker.kind == search.kind and math.abs(worker.protocol - search.protocol) <= 1
    and not string.find(search.excluded, ',' .. worker.id .. ',', 1, true)
end

-- Add a worker to `found`, a list and a set by id. Returns 1 if it is in there now, else 0.
local function add(found, worker, search)
  if not worker or not fits(search, worker) then return 0 end
  if not found[worker.id] then
    found[worker.id] = worker
    found[#found + 1] = worker
  end
  return 1
end

-- Add the least loaded workers of a role, and forget dead ones.
local function add_least_loaded(found, role, search)
  local key, from, added, read = 'baton:ready:' .. role .. ':' .. search.kind, 0, 0, 0
  repeat
    local ids = redis.call('ZRANGE', key, from, from + POLICY.candidates.per_role - 1)
    for _, id in ipairs(ids) do
      read, from = read + 1, from + 1
      local worker = found[id] or read_worker(id)
      if not worker then
        from = from - 1 -- it left the set, so the next one took its place
        redis.call('ZREM', key, id)
      else
        added = added + add(found, worker, search)
      end
    end
  until #ids == 0 or added >= POLICY.candidates.per_role or read >= POLICY.candidates.max_read
end

-- How many of the prompt's first blocks any worker holds. Pools evict a prefix from its end, so it has no gaps.
local function deepest(search)
  local low, high = 0, search.count
  if high > 0 and redis.call('EXISTS', block_key(search, high)) == 1 then return high end
  while low < high do
    local middle = math.ceil((low + high) / 2)
    if redis.call('EXISTS', block_key(search, middle)) == 1 then low = middle else high = middle - 1 end
  end
  return low
end

-- Some holders of a block: a system prompt's may have thousands.
local function holders(key)
  if redis.call('SCARD', key) <= POLICY.candidates.holders then return redis.call('SMEMBERS', key) end
  return redis.call('SRANDMEMBER', key, POLICY.candidates.holders)
end

-- Add holders of the prompt's blocks to `found`, those of the longest prefix first. Returns that prefix's length in blocks, and
-- dead holders: former incarnations.
local function add_holders(found, search)
  local depth, dead, seen, added = deepest(search), {}, {}, 0
  for _, share in ipairs({ 1, 0.75, 0.5, 0.25, 0 }) do
    if depth == 0 or added >= POLICY.candidates.holders then break end
    for _, member in ipairs(holders(block_key(search, math.max(1, math.ceil(share * depth))))) do
      if not seen[member] and added < POLICY.candidates.holders then
        seen[member] = true
        local id, incarnation = string.match(member, '^(.*)@(.-)$')
        if redis.call('HGET', 'baton:worker:' .. id, 'incarnation') ~= incarnation then
          dead[#dead + 1] = member
        else
          added = added + add(found, found[id] or read_worker(id), search)
        end
      end
    end
  end
  return depth, dead
end

-- Divide workers into those that hold the block, and the others.
local function split(workers, key)
  if #workers == 0 then return workers, workers end
  local members, holding, others = {}, {}, {}
  for at, worker in ipairs(workers) do members[at] = worker.member end
  for at, holds in ipairs(redis.call('SMISMEMBER', key, unpack(members))) do
    local side = holds == 1 and holding or others
    side[#side + 1] = workers[at]
  end
  return holding, others
end

-- Set the prefix of workers that hold at least `low` and at most `high` blocks, by halving.
local function match_deep(workers, search, low, high)
  for _, worker in ipairs(workers) do worker.matched = low end
  if #workers == 0 or low >= high then return end
  local middle = math.ceil((low + high) / 2)
  local holding, others = split(workers, block_key(search, middle))
  match_deep(holding, search, middle, high)
  match_deep(others, search, low, middle - 1)
end

-- Set each worker's longest cached prefix, in blocks; `depth` is the longest of all.
local function match_prefixes(workers, search, depth)
  if depth > POLICY.candidates.exact_blocks then
    local all, others = split(workers, block_key(search, depth))
    for _, worker in ipairs(all) do worker.matched = depth end
    match_deep(others, search, 0, depth - 1)
    return
  end
  local holding = workers
  for at = 1, depth do
    if #holding == 0 then return end
    holding = split(holding, block_key(search, at))
    for _, worker in ipairs(holding) do worker.matched = at end
  end
end

-- The workers to compare. `renew` keeps the prompt's blocks in the index.
local function candidates(search, renew)
  local found = {}
  for _, role in ipairs(STAGES) do add_least_loaded(found, role, search) end
  for _ = 1, 3 do -- dead holders may hide others with a shorter prefix
    local depth, dead = add_holders(found, search)
    if #dead == 0 then
      match_prefixes(found, search, depth)
      for at = 1, renew and depth or 0 do redis.call('EXPIRE', block_key(search, at), POLICY.index.block_ttl_s) end
      break
    end
    for at = 1, depth do redis.call('SREM', block_key(search, at), unpack(dead)) end
  end
  return found
end
