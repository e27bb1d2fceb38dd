#!lua flags=allow-oom
-- Reopens a key, if its record is still the one that an operator has read.
--
-- KEYS[1]  the record
-- ARGV[1]  the record that the operator has read
-- ARGV[2]  the released record that replaces it
-- ARGV[3]  30 days minus one millisecond, in milliseconds: due at once
-- Reply    "H" applied, "L" the record is another one: nothing changed
--          -UNREADABLE: the key holds no record of this format; nothing was written

if string.sub(ARGV[2], 1, 1) ~= 'S' or #ARGV[2] < 29 then
  return redis.error_reply('UNREADABLE a released record is at least 29 bytes')
end

local old = redis.call('GET', KEYS[1])
if not old then
  return 'L'
end
if old == ARGV[1] then
  redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
  return 'H'
end

-- include lib/record.lua

return kind_of(old) and 'L' or unreadable()
