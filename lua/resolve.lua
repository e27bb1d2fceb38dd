#!lua flags=allow-oom
-- Ends a key for an operator who knows what has become of its message, if its record is still the one that the operator
-- has read, and no attempt runs.
--
-- KEYS[1]  the record
-- ARGV[1]  the record that the operator has read
-- ARGV[2]  the completed or failed record that replaces it, with a tag of its own
-- ARGV[3]  retention in milliseconds
-- Reply    "H" applied, by this call or by an earlier one with this tag, "L" the record is another one, runs, or is
--          final: nothing changed
--          -UNREADABLE: the key holds no record of this format; nothing was written

local state = string.sub(ARGV[2], 1, 1)
if (state ~= 'C' or #ARGV[2] < 12) and (state ~= 'F' or #ARGV[2] < 13) then
  return redis.error_reply('UNREADABLE a resolved record is completed or failed')
end

local old = redis.call('GET', KEYS[1])
if not old then
  return 'L'
end

-- include lib/record.lua

local kind = kind_of(old)
if not kind then
  return unreadable()
end
if old == ARGV[1] then
  local open = kind == 'released' or (kind == 'failed' and state == 'C')
  if kind == 'pending' then
    -- A record is kept for 30 days after its lease has ended.
    local left = redis.call('PTTL', KEYS[1])
    if left == -1 then
      return redis.error_reply('UNREADABLE a record without expiry')
    end
    open = left < 2592000000
  end
  if open then
    redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
    return 'H'
  end
end
local wanted = state == 'C' and 'completed' or 'failed'
if kind == wanted and string.sub(old, 2, 5) == string.sub(ARGV[2], 2, 5) then
  -- Written again, because WAIT covers only writes of its own connection.
  redis.call('SET', KEYS[1], old, 'KEEPTTL')
  return 'H'
end
return 'L'
