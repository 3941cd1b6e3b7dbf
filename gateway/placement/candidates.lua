-- Which workers one placement compares: the least loaded of each role, and those that hold most of the prompt's prefix.
-- policy.toml bounds every loop, so a call takes about as long in a fleet of thousands as in a small one.

local TIER_SUFFIX = { [0] = '', '\1', '\2' } -- of a block's key: the pool's, host memory's, files'

-- A worker as placement sees it; nil after its lease, and for what is no worker's entry.
local function read_worker(id)
  local entry = entry_of(id)
  if not entry then return nil end
  local worker = { id = id, incarnation = entry.incarnation, member = id .. '@' .. entry.incarnation, matched = 0, below = 0, on_disk = 0, known = entry.known }
  return setmetatable(worker, { __index = entry.record }) -- placement changes figures; the ledger reads them as they were
end

-- What a placement looks for: the prompt's block digests from args[first] on, their kind, and the excluded workers.
local function search_of(args, first, kind, excluded, protocol)
  return { args = args, first = first, count = math.max(0, math.min(#args - first + 1, POLICY.index.max_blocks)), kind = kind, excluded = excluded, protocol = protocol }
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

-- Add the least loaded workers of a role. Names without an entry are forgotten: as many as were looked at.
local function add_least_loaded(found, role, search)
  local key, added, from = 'baton:ready:' .. role .. ':' .. search.kind, 0, 0
  while added < POLICY.candidates.per_role and from < POLICY.candidates.max_read do
    local ids = read('ZRANGE', key, from, from + POLICY.candidates.per_role - 1) or {}
    if #ids == 0 then return end
    from = from + #ids
    for _, id in ipairs(ids) do
      local worker = found[id] or read_worker(id)
      if worker then
        added = added + add(found, worker, search)
      else
        forget_worker(id)
        write('ZREM', key, id)
      end
    end
  end
end

-- Whether any worker but dead ones holds the prompt's block `at`.
local function is_held(search, at, dead)
  local key = block_key(search, at)
  if #dead == 0 then return read('EXISTS', key) == 1 end
  local count = read('SCARD', key) or 0
  if count == 0 then return false end
  for _, holds in ipairs(read('SMISMEMBER', key, unpack(dead)) or {}) do count = count - holds end
  return count > 0
end

-- How many of the prompt's first blocks any worker holds. Pools evict a prefix from its end, so it has no gaps.
local function deepest(search, dead)
  local low, high = 0, search.count
  if high > 0 and is_held(search, high, dead) then return high end
  while low < high do
    local middle = math.ceil((low + high) / 2)
    if is_held(search, middle, dead) then low = middle else high = middle - 1 end
  end
  return low
end

-- Some holders of a block: a system prompt's may have thousands.
local function holders(key, dead)
  local most = POLICY.candidates.holders + #dead
  if (read('SCARD', key) or 0) <= most then return read('SMEMBERS', key) or {} end
  return read('SRANDMEMBER', key, most) or {}
end

-- Add holders of the prompt's blocks to `found`, those of the longest prefix first. Returns that prefix's length in blocks. Dead
-- holders (former incarnations, and what is nobody) are added to `dead`, a list and a set.
local function add_holders(found, search, dead)
  local depth, looked, added = deepest(search, dead), {}, 0
  for _, share in ipairs({ 1, 0.75, 0.5, 0.25, 0 }) do
    if depth == 0 or added >= POLICY.candidates.holders then break end
    for _, member in ipairs(holders(block_key(search, math.max(1, math.ceil(share * depth))), dead)) do
      if not looked[member] and not dead[member] and added < POLICY.candidates.holders then
        looked[member] = true
        local id, incarnation = string.match(string.sub(member, 1, LONGEST_TEXT), '^([%w_-]+)@(%d+)$')
        local worker = id and (found[id] or read_worker(id))
        if worker and worker.incarnation == incarnation then
          added = added + add(found, worker, search)
        elseif #dead < POLICY.candidates.max_dead then
          dead[member] = true
          dead[#dead + 1] = member
        end
      end
    end
  end
  return depth
end

-- Take dead holders out of the prompt's last blocks; what is left of them is found again.
local function clear_dead(search, depth, dead)
  if #dead == 0 then return end
  for at = depth, math.max(1, depth - POLICY.index.max_cleared + 1), -1 do write('SREM', block_key(search, at), unpack(dead)) end
end

-- Divide workers into those that hold the block, and the others.
local function split(workers, key)
  if #workers == 0 then return workers, workers end
  local members, holding, others = {}, {}, {}
  for at, worker in ipairs(workers) do members[at] = worker.member end
  for at, holds in ipairs(read('SMISMEMBER', key, unpack(members)) or {}) do
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

-- How many of a worker's matched blocks are in this tier or below it alone: the last ones, since a tier gives those up first.
local function count_below(worker, search, tier)
  local function is_below(at) return (read('SMISMEMBER', block_key(search, at) .. string.char(tier), worker.member) or {})[1] == 1 end
  if worker.matched == 0 or not is_below(worker.matched) then return 0 end
  local low, high = 1, worker.matched
  while low < high do
    local middle = math.floor((low + high) / 2)
    if is_below(middle) then high = middle else low = middle + 1 end
  end
  return worker.matched - low + 1
end

-- Set what workers with tiers below their pool would have to load. Returns the most tiers that one has.
local function match_tiers(workers, search)
  local most = 0
  for _, worker in ipairs(workers) do
    most = math.max(most, math.min(worker.tiers, #TIER_SUFFIX))
    if worker.tiers > 0 then worker.below = count_below(worker, search, 1) end
    if worker.tiers > 1 and worker.below > 0 then worker.on_disk = math.min(worker.below, count_below(worker, search, 2)) end
  end
  return most
end

-- The workers to compare. `renew` keeps the prompt's blocks in the index.
local function candidates(search, renew)
  local found, dead, deepest_dead = {}, {}, 0
  for _, role in ipairs(STAGES) do add_least_loaded(found, role, search) end
  for _ = 1, 3 do -- dead holders may hide others with a shorter prefix
    local before = #dead
    local depth = add_holders(found, search, dead)
    if #dead == before then
      match_prefixes(found, search, depth)
      local tiers = match_tiers(found, search)
      for at = 1, renew and depth or 0 do
        for tier = 0, tiers do write('EXPIRE', block_key(search, at) .. TIER_SUFFIX[tier], POLICY.index.block_ttl_s) end
      end
      break
    end
    deepest_dead = math.max(deepest_dead, depth)
  end
  clear_dead(search, deepest_dead, dead)
  return found
end
