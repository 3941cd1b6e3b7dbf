#!lua name=baton_budgets

-- What each tenant may still use, over all gateways. Works on Redis 7.0 and Valkey.
--
--   baton:budget:<tenant>          hash: requests and tokens left (below 0: more was used than expected), at (ms)
--   baton:running:<tenant>         sorted set of requests in flight by expiry (ms)
--
-- Two token buckets: each holds a minute's limit and fills evenly. Both keys have TTLs, after which an unused bucket is full
-- again. `budgets.py` counts the same way while Redis is away.

local MINUTE_MS = 60000

local function now_ms(given)
  if tonumber(given) > 0 then return tonumber(given) end
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- What a bucket holds now; without a limit (0) there is no bucket.
local function level(left, limit, passed_ms)
  if limit == 0 then return 0 end
  return math.min(limit, (tonumber(left) or limit) + limit * passed_ms / MINUTE_MS)
end

local function read(tenant, now, requests, tokens)
  local f = redis.call('HMGET', 'baton:budget:' .. tenant, 'requests', 'tokens', 'at')
  local passed = math.max(0, now - (tonumber(f[3]) or now))
  return level(f[1], requests, passed), level(f[2], tokens, passed)
end

local function ms_until(wanted, left, limit)
  if limit == 0 or left >= wanted then return 0 end
  return math.ceil((wanted - left) * MINUTE_MS / limit)
end

local function write(tenant, now, left_requests, left_tokens, requests, tokens)
  local key = 'baton:budget:' .. tenant
  redis.call('HSET', key, 'requests', string.format('%.6f', left_requests), 'tokens', string.format('%.6f', left_tokens),
    'at', now)
  local full = math.max(ms_until(requests, left_requests, requests), ms_until(tokens, left_tokens, tokens))
  redis.call('PEXPIRE', key, full + 1000)
end

-- take(tenant, request, tokens wanted, requests a minute, tokens a minute, concurrent, ttl_ms, now_ms or 0)
-- -> {"" or the exhausted budget, ms until it has enough, requests left, tokens left, ms until each bucket is full}
-- A request for more tokens than a minute's limit takes a full bucket.
local function take(_, args)
  local tenant, request, wanted = args[1], args[2], tonumber(args[3])
  local requests, tokens, concurrent = tonumber(args[4]), tonumber(args[5]), tonumber(args[6])
  local now = now_ms(args[8])
  local running = 'baton:running:' .. tenant
  local left_requests, left_tokens = read(tenant, now, requests, tokens)
  local charge = math.min(wanted, tokens)
  local wait_requests, wait_tokens = ms_until(1, left_requests, requests), ms_until(charge, left_tokens, tokens)
  local refused, wait = '', 0
  if concurrent > 0 then
    redis.call('ZREMRANGEBYSCORE', running, '-inf', now)
    if redis.call('ZCARD', running) >= concurrent then refused, wait = 'concurrent', 1000 end
  end
  if wait_tokens > 0 and wait_tokens >= wait_requests then
    refused, wait = 'tokens', wait_tokens
  elseif wait_requests > 0 then
    refused, wait = 'requests', wait_requests
  end
  if refused == '' then
    if requests > 0 then left_requests = left_requests - 1 end
    left_tokens = left_tokens - charge
    write(tenant, now, left_requests, left_tokens, requests, tokens)
    if concurrent > 0 then
      redis.call('ZADD', running, now + tonumber(args[7]), request)
      redis.call('PEXPIRE', running, tonumber(args[7]))
    end
  end
  return { refused, wait, math.max(0, math.floor(left_requests)), math.max(0, math.floor(left_tokens)),
    ms_until(requests, left_requests, requests), ms_until(tokens, left_tokens, tokens) }
end

-- settle(tenant, request, requests back, tokens back (below 0: more was used), requests a minute, tokens a minute, now_ms or 0)
local function settle(_, args)
  local tenant, requests, tokens = args[1], tonumber(args[5]), tonumber(args[6])
  local now = now_ms(args[7])
  redis.call('ZREM', 'baton:running:' .. tenant, args[2])
  local left_requests, left_tokens = read(tenant, now, requests, tokens)
  if requests > 0 then left_requests = math.min(requests, left_requests + tonumber(args[3])) end
  if tokens > 0 then left_tokens = math.min(tokens, left_tokens + tonumber(args[4])) end
  write(tenant, now, left_requests, left_tokens, requests, tokens)
  return 1
end

-- left(now_ms or 0, then for each tenant: name, requests a minute, tokens a minute)
-- -> for each tenant {requests left, tokens left, requests in flight}
local function left(_, args)
  local now, found = now_ms(args[1]), {}
  for at = 2, #args, 3 do
    local requests, tokens = read(args[at], now, tonumber(args[at + 1]), tonumber(args[at + 2]))
    local running = redis.call('ZRANGEBYSCORE', 'baton:running:' .. args[at], '(' .. now, '+inf')
    found[#found + 1] = { math.floor(requests), math.floor(tokens), #running }
  end
  return found
end

redis.register_function('baton_budget_left', left)
redis.register_function('baton_budget_take', take)
redis.register_function('baton_budget_settle', settle)
