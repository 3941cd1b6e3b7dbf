-- How every function here touches Redis. Whoever has a user there may have stored anything under a name that is read here, so:
--   a read never fails on what is stored: a wrong type, or a text that is too long, is nothing;
--   writes wait until all is read and decided, so `FUNCTION KILL` ends a call at any time, and an error leaves nothing half done;
--   a key of a wrong type is replaced by what is written to it.
-- No loop is longer than a constant of this library, whatever was stored and whatever the caller sent.

local LONGEST_TEXT = 512 -- bytes of a word, a name or a number
local GREATEST = 1e15 -- of a number; exact as a float
local MOST_ARGUMENTS = 4200 -- of one call: a prompt's blocks are most

local pending = {} -- this call's writes
local seen = {} -- what this call read and changed; each part of the library has an entry of its own

local function is_damage(answer)
  return string.find(answer.err, 'WRONGTYPE', 1, true) or string.find(answer.err, 'not an integer', 1, true)
    or string.find(answer.err, 'not a valid float', 1, true)
end

-- What a command answers; nil for nothing, and for a key of a wrong type. Other errors (a permission) are the caller's.
local function read(...)
  local answer = redis.pcall(...)
  if type(answer) == 'table' and answer.err then
    if is_damage(answer) then return nil end
    error(answer)
  end
  return answer or nil
end

local function write(...)
  pending[#pending + 1] = { ... }
end

local function finish()
  for _, command in ipairs(pending) do
    local answer = redis.pcall(unpack(command))
    if type(answer) == 'table' and answer.err and is_damage(answer) then
      redis.call('DEL', command[2])
      answer = redis.pcall(unpack(command))
    end
    if type(answer) == 'table' and answer.err then error(answer) end
  end
end

-- A finite number, at least `least` (0); else `default`.
local function number(text, default, least)
  local value = tonumber(text)
  if value and value >= (least or 0) and value <= GREATEST then return value end -- NaN is neither
  return default
end

local function whole(value)
  return string.format('%.0f', value)
end

-- A key's text; nil if it is absent or of another type. The rest of one that is too long is cut off.
local function text(key)
  local found = read('GETRANGE', key, 0, LONGEST_TEXT - 1)
  return found ~= '' and found or nil
end

-- The fields of a hash, false where absent; none if one is longer than `longest` bytes.
local function fields(key, longest, ...)
  local found = read('HMGET', key, ...) or {}
  for _, value in ipairs(found) do
    if value and #value > longest then return {} end
  end
  return found
end

-- The time in ms: a virtual clock's where it is above 0, else this server's.
local function clock(given)
  local now = number(given, 0)
  if now > 0 then return now end
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- Register a function of its arguments.
local function serve(name, answer_to)
  redis.register_function(name, function(_, args)
    if #args > MOST_ARGUMENTS then return redis.error_reply('ERR ' .. name .. ': too many arguments') end
    pending, seen = {}, {}
    local answer = answer_to(args)
    finish()
    return answer
  end)
end
