#!lua flags=allow-oom
-- Reads a record together with its expiry and the time.
--
-- KEYS[1]  the record
-- Reply    nil     nothing there
--          otherwise the time (microseconds since 1970), a blank, the record's expiry (milliseconds since
--          1970; -1 for never), a blank, and the record
--
-- It is not marked no-writes: a primary that was demoted refuses it, instead of showing what it once knew.

local record = redis.call('GET', KEYS[1])
if not record then
  return record
end
local time = redis.call('TIME')
local expires_at = string.format(' %d ', redis.call('PEXPIRETIME', KEYS[1]))
return time[1] .. string.sub('00000' .. time[2], -6) .. expires_at .. record
