#!lua flags=allow-oom
-- Marks a failed key as handed over: its message is durably stored as a dead letter.
--
-- KEYS[1]  the record
-- ARGV[1]  the tag (4 bytes) of the owner that failed the key: another failure has a dead letter of its own
-- Reply    "H" applied, "L" the key is not failed, or by another owner: nothing changed
--          -UNREADABLE: the key holds no record of this format; nothing was written

if #ARGV[1] ~= 4 then
  return redis.error_reply('UNREADABLE a tag is 4 bytes')
end

local old = redis.call('GET', KEYS[1])
if not old then
  return 'L'
end

-- include lib/record.lua

local kind = kind_of(old)
if kind ~= 'failed' then
  return kind and 'L' or unreadable()
end
if string.sub(old, 2, 5) ~= ARGV[1] then
  return 'L'
end
if string.sub(old, 1, 1) == 'F' then
  redis.call('SET', KEYS[1], 'G' .. string.sub(old, 2), 'KEEPTTL')
  return 'H'
end
-- Written again, because WAIT covers only writes of its own connection.
redis.call('SET', KEYS[1], old, 'KEEPTTL')
return 'H'
