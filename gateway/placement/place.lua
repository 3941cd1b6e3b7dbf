-- The choice: what each place would cost a request, in predicted ms. docs/placement.md has every term in a table.
-- Workers' records have their figures; an unmeasured worker counts as the slowest measured one.

local function by_cost(a, b)
  if a.cost ~= b.cost then return a.cost < b.cost end
  if a.count ~= b.count then return a.count < b.count end
  return a.id < b.id
end

-- The rate of an unmeasured worker: the slowest measured prefill rate, else the best rate beside a batch, else 0 (unknown).
-- It also gets the highest fixed cost of a pass, and of attention.
local function assume(workers)
  local slowest, beside, fixed_ms, doubles_at = 0, 0, 0, 0
  for _, worker in ipairs(workers) do
    if worker.prefill_tokens_per_s > 0 and (slowest == 0 or worker.prefill_tokens_per_s < slowest) then
      slowest = worker.prefill_tokens_per_s
    end
    if worker.attention_doubles_at > 0 and (doubles_at == 0 or worker.attention_doubles_at < doubles_at) then
      doubles_at = worker.attention_doubles_at
    end
    beside = math.max(beside, worker.local_tokens_per_s)
    fixed_ms = math.max(fixed_ms, worker.prefill_fixed_ms)
  end
  for _, worker in ipairs(workers) do
    if worker.prefill_tokens_per_s == 0 then worker.prefill_fixed_ms, worker.attention_doubles_at = fixed_ms, doubles_at end
  end
  return slowest > 0 and slowest or beside
end

-- A prompt's uncached tokens, in tokens without context: attention to the `tokens` of the whole prompt costs more.
local function effort(worker, uncached, tokens)
  if worker.attention_doubles_at == 0 then return uncached end
  return math.min(math.ceil(uncached + uncached * (2 * tokens - uncached) / (2 * worker.attention_doubles_at)), MOST_TOKENS)
end

-- ms to load what a worker has below its pool.
local function loading_ms(worker)
  local host = worker.host_bytes_per_s > 0 and worker.host_bytes_per_s or POLICY.loading.default_host_bytes_per_s
  local disk = worker.disk_bytes_per_s > 0 and worker.disk_bytes_per_s or POLICY.loading.default_disk_bytes_per_s
  return 1000 * worker.block_bytes * (worker.below / host + worker.on_disk / disk)
end

-- ms until a worker has computed the prompts charged to it, with `fixed_ms` for each pass; the first has begun.
-- Where the ledger may lack charges, the worker's own figure counts as well.
local function wait_ms(worker, rate, fixed_ms, now)
  local load, count = ledger('prefill', worker.id)
  local passes = math.min(count, math.ceil(load / POLICY.prefill.full_pass_tokens))
  if worker.doubted then return 1000 * math.max(load, worker.queued_tokens) / rate + passes * fixed_ms, count end
  if count == 0 then return 0, 0 end
  local began = number(text('baton:load:began:' .. worker.id), now)
  local all = 1000 * load / rate + passes * fixed_ms
  return all - math.max(0, math.min(now - began, all / count)), count
end

-- The workers that push blocks to others on request with most of the prompt in their pool, and with most of it in all tiers:
-- {id, blocks, loading}, the latter the ms until these are in its pool.
local function best_holders(workers)
  local best = {}
  local function offer(kind, id, blocks, loading)
    local known = best[kind] or { id = '', blocks = 0, loading = 0 }
    local is_sooner = blocks == known.blocks and (loading < known.loading or loading == known.loading and id < known.id)
    if blocks > 0 and (blocks > known.blocks or is_sooner) then best[kind] = { id = id, blocks = blocks, loading = loading } end
  end
  for _, worker in ipairs(workers) do
    if worker.pull_bytes_per_s > 0 then
      offer('pool', worker.id, worker.matched - worker.below, 0)
      offer('tiers', worker.id, worker.matched, worker.loading)
    end
  end
  return best
end

-- What a worker would best pull: {ms, effort, id, blocks}, `effort` of what is left to compute; nil for too little.
local function pulled(worker, holders, rate, prompt)
  local best, least
  for _, kind in ipairs({ 'pool', 'tiers' }) do
    local holder = holders[kind]
    local blocks = holder and worker.pull_bytes_per_s > 0 and worker.id ~= holder.id and holder.blocks - worker.matched or 0
    if blocks > 0 and blocks * prompt.block_size >= POLICY.pull.least_tokens then
      local ms = POLICY.pull.fixed_ms + holder.loading + 1000 * blocks * worker.block_bytes / worker.pull_bytes_per_s
      local left = effort(worker, math.max(prompt.tokens - holder.blocks * prompt.block_size, 1), prompt.tokens)
      local all = ms + 1000 * left / rate
      if not least or all < least then
        best, least = { ms = ms, effort = left, id = holder.id, blocks = holder.blocks }, all
      end
    end
  end
  return best
end

-- Prefill workers, cheapest first: the wait, loading or pulling, and computing what the worker lacks of the prompt, weighted. Returns
-- the weight, too. Loading and pulling delay nobody else, since passes go on; `pull`: it is cheaper with that.
-- While a worker idles, a prefix is worth only twice its computing time, so a hot one is computed again on an idle worker. The
-- longer all queues are, the more computing counts, because all prompts behind wait for it.
local function rank_prefill(workers, assumed, prompt, now)
  local ranked, least, holders = {}, nil, best_holders(workers)
  for _, worker in ipairs(workers) do
    if has_role(worker, 'prefill') then
      local rate = worker.prefill_tokens_per_s > 0 and worker.prefill_tokens_per_s or (assumed > 0 and assumed or 1)
      local wait, count = wait_ms(worker, rate, worker.prefill_fixed_ms, now)
      ranked[#ranked + 1] = {
        id = worker.id, worker = worker, count = count, rate = rate, wait = wait, loading = worker.loading, effort = worker.effort,
        pull = pulled(worker, holders, rate, prompt),
      }
      least = math.min(least or wait, wait)
    end
  end
  least = least or 0
  local idle, busy = POLICY.prefill.idle_work_weight, POLICY.prefill.busy_work_weight
  local weight = idle + (busy - idle) * least / (least + POLICY.prefill.scarce_wait_ms)
  for _, option in ipairs(ranked) do
    local pull = option.pull
    if pull and pull.ms < 1000 * (option.effort - pull.effort) / option.rate then
      option.loading, option.effort = option.loading + pull.ms, pull.effort
    else
      option.pull = nil
    end
    option.work = option.worker.prefill_fixed_ms + 1000 * option.effort / option.rate
    option.ms = option.wait + option.loading + option.work
    option.cost = option.wait + option.loading + weight * option.work
  end
  table.sort(ranked, by_cost)
  return ranked, weight
end

-- ms that a token of context adds to a decode step, and the rest of a step with an almost empty batch, from what the worker said.
-- The rest is 0 if unknown: an idle worker's last step may have had a full batch.
local function step_parts(worker, block_size)
  local token_ms = 1000 * worker.block_bytes / block_size / POLICY.decode.kv_read_bytes_per_s
  if worker.sequences == 0 then return token_ms, 0 end
  local context = (worker.num_blocks - worker.free_blocks) * block_size
  local rest = math.max(worker.decode_step_ms - token_ms * context, POLICY.decode.min_own_share * worker.decode_step_ms)
  return token_ms, rest / (1 + worker.sequences / math.max(worker.max_sequences, 1))
end

-- ms to move the blocks that a decode worker lacks.
local function moving_ms(worker, link, block_size)
  if link <= 0 then link = POLICY.handoff.default_link_bytes_per_s end
  return 1000 * (math.ceil(worker.uncached / block_size) + worker.below) * worker.block_bytes / link -- a handoff loads none
end

-- Decode workers, those with room first: by the step with this sequence in the batch, and by what the handoff adds to it: what the
-- prefill (`work` ms, over `link`) doesn't hide, and a share of the rest. Load is the larger of what was charged (newer) and
-- what the worker reported (more exact).
local function rank_decode(workers, prompt, work, link)
  local ranked, fastest, block_size = {}, 0, prompt.block_size
  for _, worker in ipairs(workers) do
    if has_role(worker, 'decode') then
      local load, count = ledger('decode', worker.id)
      local sequences, most = math.max(count, worker.sequences), math.max(worker.max_sequences, 1)
      local used = math.max(load, (worker.num_blocks - worker.free_blocks) * block_size)
      local room = (worker.num_blocks + worker.matched - worker.below) * block_size - used
      local token_ms, empty_ms = step_parts(worker, block_size)
      local moving = moving_ms(worker, link, block_size)
      if empty_ms > 0 and (fastest == 0 or empty_ms < fastest) then fastest = empty_ms end
      ranked[#ranked + 1] = {
        id = worker.id, worker = worker, count = count, full = sequences >= most or prompt.reserve > room, empty_ms = empty_ms,
        context_ms = token_ms * (used + prompt.tokens), share = 1 + (sequences + 1) / most,
        unhidden = math.max(0, moving - work), moving = moving,
      }
    end
  end
  for _, option in ipairs(ranked) do
    local empty_ms = option.empty_ms > 0 and option.empty_ms or (fastest > 0 and fastest or 1)
    local handoff_ms = option.unhidden + POLICY.handoff.hidden_share * option.moving
    option.cost = empty_ms * option.share + option.context_ms + handoff_ms / POLICY.decode.answer_tokens
      + (option.full and POLICY.decode.full_cost_ms or 0)
  end
  table.sort(ranked, by_cost)
  return ranked
end

-- What prompts beside a batch cost its sequences: it grows with their number, and with the square of the time.
local function harm_ms(sequences, computing, delay)
  return computing * sequences / POLICY.local_prefill.crowd_sequences
    + math.max(sequences, 1) * delay * (delay / POLICY.local_prefill.patience_ms) ^ 2
end

-- The decode worker, of the best few, that would compute the prompt earliest: {at, ms, cost}; nil without any rate. The weight of
-- computing beyond its own time is taken from the best prefill worker's figures (`first`), so that it is the same here and there.
local function cheapest_local(decode, assumed, first, prompt, weight, now)
  local best
  for at = 1, math.min(#decode, POLICY.local_prefill.compared) do
    local worker = decode[at].worker
    local own = worker.prefill_tokens_per_s > 0 and worker.prefill_tokens_per_s or assumed
    local sequences = worker.doubted and math.max(worker.sequences, decode[at].count) or decode[at].count
    local idle = sequences == 0 and 1000 * worker.effort <= POLICY.local_prefill.idle_pass_ms * own
    local beside = worker.local_tokens_per_s > 0 and worker.local_tokens_per_s or POLICY.local_prefill.share_of_rate * own
    local rate = idle and own or beside
    if rate > 0 and not decode[at].full then
      local wait = wait_ms(worker, rate, 0, now)
      local computing = 1000 * (idle and worker.effort or worker.uncached) / rate -- a rate beside a batch includes attention
      local ms = worker.prefill_fixed_ms + worker.loading + (idle and 0 or worker.decode_step_ms) + wait + computing
      local delay = (wait * rate + 1000 * worker.uncached) / own
      local scarce = first and 1000 * effort(first.worker, worker.uncached, prompt.tokens) / first.rate or 1000 * worker.effort / own
      local cost = ms + (idle and 0 or harm_ms(sequences, computing, delay)) + (weight - 1) * scarce
      if not best or cost < best.cost then best = { at = at, ms = ms, cost = cost } end
    end
  end
  return best
end

-- The share of its recent time for which a prefill worker had work, at most 1.
local function busy_share(worker, now)
  local f = fields('baton:load:busy:' .. worker, LONGEST_TEXT, 'share', 'at')
  return math.min(number(f[1], 0), 1) * math.exp(math.min(number(f[2], now) - now, 0) / POLICY.prefill.busy_window_ms)
end

local function note_busy(worker, share, now)
  local key = 'baton:load:busy:' .. worker
  write('HSET', key, 'share', tostring(math.min(share, 1)), 'at', whole(now))
  write('PEXPIRE', key, 10 * POLICY.prefill.busy_window_ms)
end

-- How much this prompt delays later ones, on a worker that is usually busy; other workers share it.
local function crowding_ms(share, work, workers)
  return math.max(0, share - POLICY.prefill.busy_share) * POLICY.prefill.crowding_factor * work / workers
end

-- Whether the ledger is new.
local function is_young(now)
  local since = number(text('baton:load:since'))
  if since and since <= now then return now - since < POLICY.ledger.young_ms end
  write('SET', 'baton:load:since', whole(now))
  return true
end

-- Which of the ranked places it is: {prefill, decode, reason, predicted}; `busy`: a prefill worker's new share of its time.
local function decide(prefill, decode, nearby, prompt, crowding, transfer)
  local first, best = prefill[1], decode[1].worker
  local near = nearby and decode[nearby.at].worker
  if not first then return { prefill = near or best, decode = near or best, reason = 'local: no prefill worker' } end
  if prompt.cut_over >= 0 and best.uncached <= prompt.cut_over then
    return { prefill = best, decode = best, reason = 'local: short' }
  end
  if first.id == best.id then return { prefill = best, decode = best, reason = 'local: same worker' } end
  if prompt.cut_over < 0 and nearby and nearby.cost < first.cost + transfer + crowding then
    return { prefill = near, decode = near, reason = 'local: earlier', predicted = nearby.ms }
  end
  local reason = decode[1].full and 'full' or (first.worker.matched > 0 and 'prefix' or 'load')
  return { prefill = first.worker, decode = best, reason = reason, predicted = first.ms }
end

-- The decode candidates, best first. A prefill worker that decodes is always one: it can go on with its own KV even when all are
-- full, so prompts of several workers never wait for each other's room.
local function listed(answer, decode, chosen)
  local missing = has_role(chosen, 'decode')
  for at = 1, math.min(#decode, POLICY.candidates.decode_listed) do
    answer[#answer + 1] = decode[at].id
    missing = missing and decode[at].id ~= chosen.id
  end
  if missing then answer[#answer] = chosen.id end
  return answer
end

-- place(request:attempt, tokens, block_size, reserve_tokens, ttl_ms, cut_over_tokens, kind, ",excluded,", now_ms, protocol,
--       digest, ...)
-- -> {prefill, incarnation, matched blocks there, matched blocks at the first decode candidate, reason, costs, decode, ...}
-- cut_over_tokens: an uncached rest up to this is prefilled by the decode worker; below 0: whenever the costs say so.
-- costs: "name=value ..." of what was compared; -1: unknown. "pull_from:id=blocks": from whom that worker should pull, and how
-- many of the prompt's blocks that one has. No decode worker is listed when one worker does both.
-- A second call for the same attempt gives the charges of the first one back.
local function place(args)
  local request, ttl, now = args[1], number(args[5], 1, 1), clock(args[9])
  local prompt = {
    tokens = number(args[2], 1), block_size = number(args[3], 1, 1), reserve = number(args[4], 1),
    cut_over = number(args[6], -1, -1),
  }
  for _, stage in ipairs(STAGES) do
    local worker = discharge(request, stage, now)
    if worker then rescore(stage, worker) end
  end
  local search = search_of(args, 11, args[7], args[8], number(args[10], 0))
  local workers, young = candidates(search, now % 16 == 0), is_young(now) -- one call in 16 renews the index
  local assumed = assume(workers)
  for _, worker in ipairs(workers) do
    worker.uncached = math.max(prompt.tokens - worker.matched * prompt.block_size, 1)
    worker.effort = effort(worker, worker.uncached, prompt.tokens)
    worker.loading = loading_ms(worker)
    worker.doubted = young and not worker.known
  end
  local prefill, weight = rank_prefill(workers, assumed, prompt, now)
  local first = prefill[1]
  local decode = rank_decode(workers, prompt, first and first.work or 0, first and first.worker.link_bytes_per_s or 0)
  if #decode == 0 then return { '', '0', 0, 0, 'no decode worker', '' } end

  local nearby = cheapest_local(decode, assumed, first, prompt, weight, now)
  local transfer = POLICY.handoff.fixed_ms + decode[1].unhidden
  local share = first and busy_share(first.id, now) or 0
  local crowding = first and crowding_ms(share, first.work, #prefill) or 0
  local choice = decide(prefill, decode, nearby, prompt, crowding, transfer)
  local chosen, best = choice.prefill, choice.decode
  if chosen.id ~= best.id and assumed > 0 then note_busy(chosen.id, share + first.work / POLICY.prefill.busy_window_ms, now) end
  local pull = first and chosen.id == first.id and first.pull
  charge('prefill', chosen.id, request, pull and pull.effort or chosen.effort, now, ttl)
  charge('decode', best.id, request, prompt.reserve, now, ttl)

  local predicted = choice.predicted or first and first.ms or nearby and nearby.ms or -1
  local costs = string.format('predicted_ms=%.1f prefill_ms=%.1f local_ms=%.1f transfer_ms=%.1f crowding_ms=%.1f '
    .. 'matched_tokens=%d loading_ms=%.1f candidates=%d', assumed > 0 and predicted or -1, assumed > 0 and first and first.ms or -1,
    nearby and nearby.ms or -1, transfer, crowding, chosen.matched * prompt.block_size, chosen.loading, #workers)
  if pull then costs = costs .. string.format(' pull_ms=%.1f pull_from:%s=%d', pull.ms, pull.id, pull.blocks) end
  local given = best.matched - (chosen.id == best.id and 0 or best.below)
  local answer = { chosen.id, chosen.incarnation, chosen.matched, given, choice.reason, costs }
  return chosen.id == best.id and answer or listed(answer, decode, chosen)
end

serve('baton4_place', place)
