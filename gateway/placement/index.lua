-- The prefix index: which worker holds which block.
--
--   baton:block:<digest>  set of "<worker>@<incarnation>", with a TTL

-- announce(worker@incarnation, number added, digest, ...): the first digests came into the worker's pool, the rest left it
local function announce(_, args)
  local member, added = args[1], tonumber(args[2])
  for i = 3, #args do
    local key = 'baton:block:' .. args[i]
    if i - 2 <= added then
      redis.call('SADD', key, member)
      redis.call('EXPIRE', key, POLICY.index.block_ttl_s)
    else
      redis.call('SREM', key, member)
    end
  end
  return #args - 2
end

redis.register_function('baton3_announce', announce)
