#!lua flags=allow-oom
-- Releases a key: its handler has not succeeded, and another attempt may follow.
--
-- KEYS[1]  the record
-- ARGV[1]  the owner's token (16 bytes)
-- ARGV[2]  delay + 30 days, in milliseconds
-- ARGV[3]  how the attempt has ended: "failed" and "discarded", which count; "interrupted", "not started" and
--          "abandoned", which do not. What an attempt has taken over that was not started is left to the next one to
--          take over. One that was discarded or abandoned has no outcome: its effect may have happened.
-- ARGV[4]  the reason as text
-- Reply    "H" applied, "L" not the owner: nothing changed
--          -UNREADABLE: the key holds no record of this format; nothing was written

if #ARGV[1] ~= 16 then
  return redis.error_reply('UNREADABLE a token is 16 bytes')
end

local old = redis.call('GET', KEYS[1])
if not old then
  return 'L'
end

-- include lib/record.lua

local kind = kind_of(old)
if kind == 'pending' then
  if string.sub(old, 2, 17) ~= ARGV[1] then
    return 'L'
  end
  local attempt = string.byte(old, 25)
  if ARGV[3] ~= 'failed' and ARGV[3] ~= 'discarded' and attempt > 0 then
    attempt = attempt - 1
  end
  local fencing_token = #old == 41 and string.sub(old, 26) or '0000000000000000'
  local state = string.sub(old, 1, 1)
  local left = state == 'R' and ARGV[3] == 'not started' and 'U'
  local has_outcome = state == 'P' and ARGV[3] ~= 'discarded' and ARGV[3] ~= 'abandoned'
  local new = (left or has_outcome and 'S' or 'T') .. string.sub(old, 2, 5) .. string.sub(old, 18, 24)
    .. string.char(attempt) .. fencing_token .. ARGV[4]
  redis.call('SET', KEYS[1], new, 'PX', ARGV[2])
  return 'H'
end
if kind == 'released' then
  return string.sub(old, 2, 5) == string.sub(ARGV[1], 1, 4) and 'H' or 'L'
end
return kind and 'L' or unreadable()
