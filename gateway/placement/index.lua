-- The prefix index: which worker holds which block.
--
--   baton:block:<digest>  set of "<worker>@<incarnation>", with a TTL
--   baton:block:<digest><tier>  the same for workers that have the block in this tier or below it alone: byte 1 is host memory, 2 files
--   baton:news:<id>       what a worker has to say of its blocks: "<incarnation>:<number>:<digests added>:<bytes of a digest>:", the
--                         added ones and those that left its pool. The only key that its user may write
--   baton:told:<id>       "<incarnation>:<number>" of the news that is in the index, with a TTL; its user may read it

local TOLD_MS = 60000
local LONGEST_NEWS, LONGEST_DIGEST = 65536, 64 -- bytes
local MOST_DIGESTS = 1000 -- of one worker's news, about 2 ms

-- Keep the number of the last news; an incarnation without one begins at 0, and says everything.
function keep_news(worker, incarnation)
  local key = 'baton:told:' .. worker
  local told = text(key)
  if told and string.match(told, '^(%d+):%d+$') == incarnation then
    write('PEXPIRE', key, TOLD_MS)
  else
    write('SET', key, incarnation .. ':0', 'PX', TOLD_MS)
  end
end

local function unpacked_news(packed)
  if #packed > LONGEST_NEWS then return nil end
  local incarnation, turn, added, size, rest = string.match(packed, '^(%d+):(%d+):(%d+):(%d+):()')
  turn, added, size = number(turn), number(added), number(size)
  if not is_incarnation(incarnation) or not turn or not added or not size then return nil end
  local count = (#packed - rest + 1) / math.max(size, 1)
  if size < 1 or size > LONGEST_DIGEST or count > MOST_DIGESTS or count % 1 ~= 0 then return nil end
  return { incarnation = incarnation, turn = turn, added = added, first = rest, count = count, size = size }
end

-- Bring one worker's news into the index. Returns whether there were any. Those of another incarnation, and nonsense, are dropped.
local function take_news(worker)
  local packed, told = read('GETRANGE', 'baton:news:' .. worker, 0, LONGEST_NEWS), text('baton:told:' .. worker)
  if not packed or packed == '' or not told then return false end
  write('DEL', 'baton:news:' .. worker)
  local news = unpacked_news(packed)
  if not news or string.match(told, '^(%d+):') ~= news.incarnation then return true end
  local member = worker .. '@' .. news.incarnation
  for at = 1, news.count do
    local begin = news.first + (at - 1) * news.size
    local key = 'baton:block:' .. string.sub(packed, begin, begin + news.size - 1)
    if at <= news.added then
      write('SADD', key, member)
      write('EXPIRE', key, POLICY.index.block_ttl_s)
    else
      write('SREM', key, member)
    end
  end
  write('SET', 'baton:told:' .. worker, news.incarnation .. ':' .. whole(news.turn), 'PX', TOLD_MS)
  return true
end

-- news(worker, ...) -> how many of them had some. A call takes a few; the others' come with the next one.
local function all_news(args)
  local taken = 0
  for at = 1, math.min(#args, POLICY.registry.max_listened) do
    if taken < POLICY.registry.max_news and is_id(args[at]) and take_news(args[at]) then taken = taken + 1 end
  end
  return taken
end

serve('baton4_news', all_news)
