#!lua flags=allow-oom
-- Sets a scope's descriptor if it equals the one that the caller expects (compare-and-set).
--
-- KEYS[1]  the descriptor; it never expires
-- ARGV[1]  the proposed descriptor
-- ARGV[2]  the expected one; absent when the caller expects none, and empty when it only reads
-- Reply    the descriptor afterwards; nil when there still is none
--
-- The script is not marked no-writes: a replica refuses it instead of returning an earlier descriptor.

local old = redis.call('GET', KEYS[1])
if (old or nil) == ARGV[2] then
  redis.call('SET', KEYS[1], ARGV[1])
  return ARGV[1]
end
return old
