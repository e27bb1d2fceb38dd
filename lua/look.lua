#!lua flags=allow-oom
-- Reads a record together with the time it has left.
--
-- KEYS[1]  the record
-- Reply    nil     nothing there
--          otherwise the milliseconds left, a blank, and the record; -1 when it would never expire
--
-- It is not marked no-writes: a primary that was demoted refuses it, instead of showing what it once knew.

local record = redis.call('GET', KEYS[1])
return record and string.format('%d ', redis.call('PTTL', KEYS[1])) .. record
