#!lua flags=allow-oom
-- Extends a lease. Never shortens it.
--
-- KEYS[1]  the record
-- ARGV[1]  the owner's token (16 bytes)
-- ARGV[2]  lease + 30 days, in milliseconds
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
  redis.call('PEXPIRE', KEYS[1], ARGV[2], 'GT')
  return 'H'
end
if kind then
  -- A heartbeat that arrives after the end of its own attempt is not a lost lease.
  return string.sub(old, 2, 5) == string.sub(ARGV[1], 1, 4) and 'H' or 'L'
end
return unreadable()
