#!lua flags=allow-oom
-- Reads a record together with its expiry and the time.
--
-- KEYS[1]  the record
-- ARGV[1]  "1" when the reply must be as durable as a write: the expiry is written again, so that WAIT has a write
--          to wait for; absent otherwise
-- Reply    nil     no record
--          otherwise the time (microseconds since 1970), a blank, the record's expiry (milliseconds since
--          1970; -1 for never), a blank, and the record
--
-- The script is not marked no-writes: a demoted primary refuses it instead of returning stale data.

local record = redis.call('GET', KEYS[1])
if not record then
  return record
end
local time = redis.call('TIME')
local expires_at = redis.call('PEXPIRETIME', KEYS[1])
if ARGV[1] and expires_at > 0 then
  redis.call('PEXPIREAT', KEYS[1], expires_at)
elseif ARGV[1] and string.find(record, '^[CFG]') then
  -- A completed or failed record without an expiry gets one that no clock reaches: the end of the year 9999.
  redis.call('PEXPIREAT', KEYS[1], 253402300799000)
end
return time[1] .. string.sub('00000' .. time[2], -6) .. string.format(' %d ', expires_at) .. record
