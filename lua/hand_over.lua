#!lua flags=allow-oom
-- Marks a failed key as handed over: its message is durably stored as a dead letter.
--
-- KEYS[1]  the record
-- Reply    "H" applied, "L" the key is not failed: nothing changed
--          -UNREADABLE: the key holds no record of this format; nothing was written

local old = redis.call('GET', KEYS[1])
if not old then
  return 'L'
end

local state = string.sub(old, 1, 1)
if state == 'F' and #old >= 13 then
  redis.call('SET', KEYS[1], 'G' .. string.sub(old, 2), 'KEEPTTL')
  return 'H'
end
if state == 'G' and #old >= 13 then
  -- Written again, because WAIT covers only writes of its own connection.
  redis.call('SET', KEYS[1], old, 'KEEPTTL')
  return 'H'
end
if (state == 'C' and #old >= 12) or ((state == 'S' or state == 'T') and #old >= 29)
    or ((state == 'P' or state == 'Q' or state == 'R') and (#old == 25 or #old == 41)) then
  return 'L'
end
return redis.error_reply('UNREADABLE no record of format 1')
