-- What each tenant may still use, over all gateways. Works on Redis 7.0 and Valkey.
--
--   baton:budget:<tenant>    hash: requests and tokens left (below 0: more was used than expected), at (ms)
--   baton:running:<tenant>   sorted set of requests in flight by the end of their lease (ms); 0.1.0: by their deadline
--   baton:leased:<tenant>    the same of this release's requests alone, also without a limit of them
--   baton:reserved:<tenant>  hash: request -> tokens that come back should its gateway die
--
-- Two token buckets: each holds a minute's limit and fills evenly. `budgets.py` counts the same way while Redis is away.
-- A gateway renews the leases of what it runs. A lease that ends gives back what was reserved and not used by then; should its
-- gateway come back, the renewal takes it again. 0.1.0 shares the first two keys.

local MINUTE_MS = 60000
local KEPT_MS = 120000 -- longer than any lease and than an empty bucket
local MOST_EXPIRED = 1000 -- leases that one call ends

-- What a bucket holds now; without a limit (0) there is no bucket.
local function level(left, limit, passed_ms)
  if limit == 0 then return 0 end
  return math.min(limit, number(left, limit, -GREATEST) + limit * passed_ms / MINUTE_MS)
end

local function ms_until(wanted, left, limit)
  if limit == 0 or left >= wanted then return 0 end
  return math.ceil((wanted - left) * MINUTE_MS / limit)
end

-- A tenant's leases that ended, and the tokens that they had reserved.
local function ended(tenant, now)
  local names = read('ZRANGEBYSCORE', 'baton:leased:' .. tenant, '-inf', now, 'LIMIT', 0, MOST_EXPIRED) or {}
  if #names == 0 then return names, 0 end
  local sum = 0
  for _, tokens in ipairs(read('HMGET', 'baton:reserved:' .. tenant, unpack(names)) or {}) do
    sum = sum + number(tokens, 0, -GREATEST)
  end
  return names, sum
end

-- A tenant's buckets now, once a call, with what ended leases give back.
local function bucket(tenant, now, requests, tokens)
  local found = seen[tenant]
  if found then return found end
  local f = fields('baton:budget:' .. tenant, LONGEST_TEXT, 'requests', 'tokens', 'at')
  local passed = math.max(0, now - math.min(number(f[3], now), now))
  local names, back = ended(tenant, now)
  found = { requests = level(f[1], requests, passed), tokens = level(f[2], tokens, passed), ended = names, back = back }
  found.tokens = math.min(tokens, found.tokens + back)
  found.limits = { requests, tokens }
  seen[tenant] = found
  return found
end

local function forget(tenant, request)
  for _, key in ipairs({ 'baton:running:', 'baton:leased:' }) do write('ZREM', key .. tenant, request) end
  write('HDEL', 'baton:reserved:' .. tenant, request)
end

local function keep(key, ms)
  if (read('PTTL', key) or 0) < ms then write('PEXPIRE', key, whole(ms)) end -- 0.1.0's requests in there may live longer
end

local function put(tenant, now, found)
  local key, requests, tokens = 'baton:budget:' .. tenant, unpack(found.limits)
  write('HSET', key, 'requests', string.format('%.6f', found.requests), 'tokens', string.format('%.6f', found.tokens),
    'at', whole(now))
  local full = math.max(ms_until(requests, found.requests, requests), ms_until(tokens, found.tokens, tokens))
  write('PEXPIRE', key, whole(full + 1000))
  for _, request in ipairs(found.ended) do forget(tenant, request) end
end

local function lease(tenant, request, reserved, is_counted, until_ms)
  write('ZADD', 'baton:leased:' .. tenant, whole(until_ms), request)
  write('HSET', 'baton:reserved:' .. tenant, request, whole(reserved))
  if is_counted then write('ZADD', 'baton:running:' .. tenant, whole(until_ms), request) end
end

local function keep_leases(tenant)
  for _, name in ipairs({ 'running', 'leased', 'reserved' }) do keep('baton:' .. name .. ':' .. tenant, KEPT_MS) end
end

-- take(tenant, request, tokens wanted, requests a minute, tokens a minute, concurrent, lease_ms, now_ms or 0)
-- -> {"" or the exhausted budget, ms until it has enough, requests left, tokens left, ms until each bucket is full}
-- A request for more tokens than a minute's limit takes a full bucket.
local function take(args)
  local tenant, request, wanted = args[1], args[2], number(args[3])
  local requests, tokens, concurrent = number(args[4]), number(args[5]), number(args[6])
  local now = clock(args[8])
  local found = bucket(tenant, now, requests, tokens)
  local charge = math.min(wanted, tokens)
  local wait_requests, wait_tokens = ms_until(1, found.requests, requests), ms_until(charge, found.tokens, tokens)
  local refused, wait = '', 0
  if concurrent > 0 then
    local running = read('ZCOUNT', 'baton:running:' .. tenant, '(' .. whole(now), '+inf') or 0
    if running >= concurrent then refused, wait = 'concurrent', 1000 end
    write('ZREMRANGEBYSCORE', 'baton:running:' .. tenant, '-inf', whole(now))
  end
  if wait_tokens > 0 and wait_tokens >= wait_requests then
    refused, wait = 'tokens', wait_tokens
  elseif wait_requests > 0 then
    refused, wait = 'requests', wait_requests
  end
  if refused == '' then
    if requests > 0 then found.requests = found.requests - 1 end
    found.tokens = found.tokens - charge
    put(tenant, now, found)
    lease(tenant, request, charge, concurrent > 0, now + number(args[7]))
    keep_leases(tenant)
  end
  return { refused, wait, math.max(0, math.floor(found.requests)), math.max(0, math.floor(found.tokens)),
    ms_until(requests, found.requests, requests), ms_until(tokens, found.tokens, tokens) }
end

-- settle(tenant, request, requests back, tokens charged, tokens used, tokens used by the last renewal, requests a minute,
--        tokens a minute, now_ms or 0)
local function settle(args)
  local tenant, request, requests, tokens = args[1], args[2], number(args[7]), number(args[8])
  local now, used = clock(args[9]), number(args[5])
  local is_leased = read('ZSCORE', 'baton:leased:' .. tenant, request)
  local found = bucket(tenant, now, requests, tokens)
  local known = number(args[4])
  for _, name in ipairs(found.ended) do is_leased = is_leased and name ~= request end
  if not is_leased then known = number(args[6]) end -- the rest came back when the lease ended
  if requests > 0 then found.requests = math.min(requests, found.requests + number(args[3])) end
  if tokens > 0 then found.tokens = math.min(tokens, found.tokens + known - used) end
  put(tenant, now, found)
  forget(tenant, request)
  return 1
end

-- renew(lease_ms, now_ms or 0, then for each request: tenant, request, tokens reserved and not used, whether requests in flight
--       have a limit, requests a minute, tokens a minute)
-- A request without a lease (it ended, or Redis lost it) is charged again with what it has reserved.
local function renew(args)
  local now, changed = clock(args[2]), {}
  local until_ms = now + number(args[1])
  for at = 3, #args, 6 do
    local tenant, request, reserved = args[at], args[at + 1], number(args[at + 2], 0, -GREATEST)
    if number(read('ZSCORE', 'baton:leased:' .. tenant, request), 0) <= now then
      local tokens = number(args[at + 5])
      local found = bucket(tenant, now, number(args[at + 4]), tokens)
      if tokens > 0 then found.tokens = found.tokens - reserved end
      changed[tenant] = found
    end
    lease(tenant, request, reserved, args[at + 3] == '1', until_ms)
    if not seen['kept:' .. tenant] then
      seen['kept:' .. tenant] = true
      keep_leases(tenant)
    end
  end
  local leases = pending
  pending = {}
  for tenant, found in pairs(changed) do put(tenant, now, found) end -- it forgets ended leases: before those of now
  for _, one in ipairs(leases) do pending[#pending + 1] = one end
  return 1
end

-- left(now_ms or 0, then for each tenant: name, requests a minute, tokens a minute)
-- -> for each tenant {requests left, tokens left, requests in flight}
local function left(args)
  local now, answer = clock(args[1]), {}
  for at = 2, #args, 3 do
    local found = bucket(args[at], now, number(args[at + 1]), number(args[at + 2]))
    local running = read('ZCOUNT', 'baton:running:' .. args[at], '(' .. whole(now), '+inf') or 0
    answer[#answer + 1] = { math.floor(found.requests), math.floor(found.tokens), running }
  end
  return answer
end

serve('baton2_budget_left', left)
serve('baton2_budget_take', take)
serve('baton2_budget_settle', settle)
serve('baton2_budget_renew', renew)
