#!lua flags=allow-oom
-- Completes a key: its handler has succeeded.
--
-- KEYS[1]  the record
-- ARGV[1]  the record of the caller's first attempt: "P", token (16 bytes), fingerprint (7), attempt 1
-- ARGV[2]  the completed record: "C", the token's tag (4 bytes), fingerprint (7), result
-- ARGV[3]  retention in milliseconds
-- Reply    "H" applied, "A" applied before by this token, "R" applied and the record recreated, because the store had lost the claim,
--          "L" not the owner: nothing changed
--          -UNREADABLE: the key holds no record of this format; nothing was written

local old = redis.call('GET', KEYS[1])

-- Fast path: nearly every record is of a first attempt, and all its bytes except the fencing token are known.
if old == ARGV[1] or (old and #old == 41 and string.find(old, ARGV[1], 1, true) == 1) then
  redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
  return 'H'
end
if #ARGV[1] ~= 25 or #ARGV[2] < 12 then
  return redis.error_reply('UNREADABLE a completion is at least 12 bytes')
end
-- The effect has happened. Without a record it would happen again.
if not old then
  redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
  return 'R'
end

-- include lib/record.lua

local kind = kind_of(old)
if kind == 'pending' then
  if string.sub(old, 2, 17) ~= string.sub(ARGV[1], 2, 17) then
    return 'L'
  end
  -- The record keeps the fingerprint of its claim.
  local new = string.sub(ARGV[2], 1, 5) .. string.sub(old, 18, 24) .. string.sub(ARGV[2], 13)
  redis.call('SET', KEYS[1], new, 'PX', ARGV[3])
  return 'H'
end
if kind == 'completed' then
  -- Written again, because WAIT covers only writes of its own connection.
  redis.call('SET', KEYS[1], old, 'KEEPTTL')
  return string.sub(old, 2, 5) == string.sub(ARGV[2], 2, 5) and 'A' or 'L'
end
return kind and 'L' or unreadable()
