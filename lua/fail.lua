#!lua flags=allow-oom
-- Fails a key: its message has failed permanently.
--
-- KEYS[1]  the record
-- ARGV[1]  the owner's token (16 bytes)
-- ARGV[2]  retention in milliseconds
-- ARGV[3]  the reason as text
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
  local new = 'F' .. string.sub(old, 2, 5) .. string.sub(old, 18, 25) .. ARGV[3]
  redis.call('SET', KEYS[1], new, 'PX', ARGV[2])
  return 'H'
end
if kind == 'failed' then
  -- Written again, because WAIT covers only writes of its own connection.
  redis.call('SET', KEYS[1], old, 'KEEPTTL')
  return string.sub(old, 2, 5) == string.sub(ARGV[1], 1, 4) and 'H' or 'L'
end
return kind and 'L' or unreadable()
