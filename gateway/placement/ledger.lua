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
local MOST_TOKENS = 1e12 -- of one charge
local record_of, keep_news -- registry.lua and index.lua have them

local function is_id(text)
  return type(text) == 'string' and #text <= 64 and string.find(text, '^[%w_-]+$') ~= nil
end

-- What this call knows of one thing of a worker; `make` reads it at first.
local function known(what, worker, make)
  local name = what .. ':' .. worker
  if seen[name] == nil then seen[name] = make() or false end
  return seen[name]
end

local function has_role(record, stage)
  for at = 1, math.min(#record.roles, POLICY.registry.max_roles) do
    if record.roles[at] == stage then return true end
  end
  return false
end

-- A worker's charges at a stage as this call leaves them: tokens, count, and the members that it took off.
local function book_of(stage, worker)
  return known('book:' .. stage, worker, function()
    local count = read('ZCARD', 'baton:charges:' .. stage .. ':' .. worker) or 0
    local load = count > 0 and number(text('baton:load:' .. stage .. ':' .. worker), 0) or 0
    return { load = load, count = count, gone = {} }
  end)
end

-- The charged tokens of a worker and the number of its charges. Expired ones count until it is entered again.
local function ledger(stage, worker)
  local book = book_of(stage, worker)
  if book.count == 0 then return 0, 0 end
  return book.load, book.count
end

-- A prefill worker's load: ms until a typical prompt would be computed.
local function prefill_score(record, load)
  local rate = record.prefill_tokens_per_s
  if rate <= 0 then rate = math.max(number(text('baton:rate:' .. record.kind), 1), 1) end
  return record.prefill_fixed_ms + 1000 * (math.max(load, record.queued_tokens) + POLICY.ledger.typical_prompt_tokens) / rate
end

-- A decode worker's load: the share of its sequences or blocks that is taken, whichever is larger.
local function decode_score(record, load, count)
  local used = math.max(load, (record.num_blocks - record.free_blocks) * record.block_size)
  return math.max(math.max(count, record.sequences) / math.max(record.max_sequences, 1),
    used / math.max(record.num_blocks * record.block_size, 1))
end

-- The ready sets that a worker is in: ",role,role,|kind"; false for none.
local function home_of(worker)
  return known('home', worker, function() return text('baton:home:' .. worker) end)
end

-- Sort a worker anew among the ready ones of a stage. One that may not be chosen is left out.
local function rescore(stage, worker)
  local home = home_of(worker)
  local stages, kind = string.match(home or '', '^([^|]*)|(.*)$')
  if not stages or not string.find(stages, ',' .. stage .. ',', 1, true) then return end
  local record = record_of(worker)
  if not record then return end
  local load, count = ledger(stage, worker)
  local score = stage == 'prefill' and prefill_score(record, load) or decode_score(record, load, count)
  write('ZADD', 'baton:ready:' .. stage .. ':' .. kind, tostring(score), worker)
end

-- Take charges off a worker; `members` that are not there any more change nothing. The caller sorts it anew.
local function give_back(stage, worker, members, now)
  local charges, book, sum = 'baton:charges:' .. stage .. ':' .. worker, book_of(stage, worker), 0
  if book.is_closed then return end
  for at = 1, math.min(#members, POLICY.ledger.max_expired) do
    local member = members[at]
    if not book.gone[member] and read('ZSCORE', charges, member) then
      book.gone[member], book.count = true, book.count - 1
      sum = sum + number(string.match(member, '|(%d+)$'), 0)
      write('ZREM', charges, member)
    end
  end
  if sum == 0 then return end
  book.load = math.max(book.load - sum, 0)
  write('SET', 'baton:load:' .. stage .. ':' .. worker, whole(book.load))
  if stage == 'prefill' then write('SET', 'baton:load:began:' .. worker, whole(now)) end -- the next prompt begins
end

local function charge(stage, worker, request, tokens, now, ttl)
  local charges, placed, book = 'baton:charges:' .. stage .. ':' .. worker, 'baton:placed:' .. request, book_of(stage, worker)
  tokens = whole(math.min(tokens, MOST_TOKENS))
  local member = request .. '|' .. tokens
  if book.gone[member] or not read('ZSCORE', charges, member) then
    if stage == 'prefill' and book.count == 0 then write('SET', 'baton:load:began:' .. worker, whole(now)) end
    book.gone[member], book.count, book.load = nil, book.count + 1, book.load + tonumber(tokens)
    write('ZADD', charges, whole(now + ttl), member)
    write('SET', 'baton:load:' .. stage .. ':' .. worker, whole(book.load))
    rescore(stage, worker)
  end
  write('HSET', placed, stage, worker .. '|' .. tokens)
  write('PEXPIRE', placed, whole(ttl))
end

-- Give back what an attempt was charged at a stage, as its record says. Which worker has to be sorted anew; nil for none.
local function discharge(request, stage, now)
  local placed = 'baton:placed:' .. request
  local recorded = fields(placed, LONGEST_TEXT, stage)[1]
  local worker, tokens = string.match(recorded or '', '^([%w_-]+)|(%d+)$')
  if recorded then write('HDEL', placed, stage) end
  if worker then give_back(stage, worker, { request .. '|' .. tokens }, now) end
  return worker
end

-- Give back what an attempt without a record (it was evicted) was charged at a stage, wherever it is among `others`.
local function search(request, stage, others, now, changed)
  for at = 1, math.min(#others, POLICY.ledger.max_searched) do
    local other, found = others[at], {}
    local members = read('ZRANGE', 'baton:charges:' .. stage .. ':' .. other, 0, POLICY.ledger.max_scanned - 1)
    for _, member in ipairs(members or {}) do
      if string.sub(member, 1, #request + 1) == request .. '|' then found[#found + 1] = member end
    end
    if #found > 0 then
      give_back(stage, other, found, now)
      changed[#changed + 1] = { stage, other }
    end
  end
end

-- The words of a list, as far as workers may be called so.
local function names_in(list)
  local found, first, last = {}, nil, 0
  for _ = 1, POLICY.ledger.max_searched do
    first, last = string.find(list or '', '[%w_-]+', last + 1)
    if not first then break end
    if is_id(string.sub(list, first, last)) then found[#found + 1] = string.sub(list, first, last) end
  end
  return found
end

-- Give back the charges whose deadline has passed.
local function expire(stage, worker, now)
  local charges = 'baton:charges:' .. stage .. ':' .. worker
  local expired = read('ZRANGEBYSCORE', charges, '-inf', whole(now), 'LIMIT', 0, POLICY.ledger.max_expired) or {}
  if #expired > 0 then give_back(stage, worker, expired, now) end
  if book_of(stage, worker).count == 0 then write('DEL', 'baton:load:' .. stage .. ':' .. worker) end
end

local function forget_charges(worker)
  for _, stage in ipairs(STAGES) do
    write('DEL', 'baton:charges:' .. stage .. ':' .. worker)
    write('DEL', 'baton:load:' .. stage .. ':' .. worker)
    seen['book:' .. stage .. ':' .. worker] = { load = 0, count = 0, gone = {}, is_closed = true }
  end
  write('DEL', 'baton:load:began:' .. worker)
  write('DEL', 'baton:load:busy:' .. worker)
end

-- release(now_ms, then for each: request:attempt, ",stage,stage,", ",worker,worker,") -> how many of them it came to
-- Gives charges back. The workers are searched where an attempt's record is gone; a few of these a call, which then ends.
local function release(args)
  local now, changed, searched, done = clock(args[1]), {}, 0, 0
  for at = 2, #args, 3 do
    if searched >= POLICY.ledger.max_searches then break end
    local request, records = args[at], fields('baton:placed:' .. args[at], LONGEST_TEXT, unpack(STAGES))
    for index, stage in ipairs(STAGES) do
      if string.find(args[at + 1] or '', ',' .. stage .. ',', 1, true) then
        local worker = discharge(request, stage, now)
        if worker then
          changed[#changed + 1] = { stage, worker }
        elseif records[index] or not (records[1] or records[2]) then -- nonsense, or none; else it was given back before
          search(request, stage, names_in(args[at + 2]), now, changed)
          searched = searched + 1
        end
      end
    end
    done = done + 1
  end
  local sorted = {}
  for _, one in ipairs(changed) do
    local name = table.concat(one, ':')
    if not sorted[name] then rescore(one[1], one[2]) end
    sorted[name] = true
  end
  return done
end

-- charged(stage, worker) -> tokens charged now
local function charged(args)
  expire(args[1], args[2], clock(0))
  rescore(args[1], args[2])
  local load = ledger(args[1], args[2])
  return load
end

serve('baton4_release', release)
serve('baton4_charged', charged)
