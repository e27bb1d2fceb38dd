#!lua flags=allow-oom
-- Completes many keys in one call, if their records are of first attempts, with or without a fencing token.
--
-- KEYS     the records
-- ARGV[1]  retention in milliseconds
-- ARGV[2n] and ARGV[2n + 1], for KEYS[n]: the record of the caller's first attempt and the completed record, as
--          complete.lua takes them
-- Reply    nil                      all are applied
--          a list                   the numbers of the keys for which the caller must call complete.lua; nothing
--                                   was written to them

local call = redis.pcall
local find = string.find
local retention = ARGV[1]
local others = false
for n, key in ipairs(KEYS) do
  local first = ARGV[2 * n]
  local old = call('GET', key)
  local is_first = old == first
    or (type(old) == 'string' and #old == 41 and find(old, first, 1, true) == 1)
  if not is_first or call('SET', key, ARGV[2 * n + 1], 'PX', retention).err then
    others = others or {}
    others[#others + 1] = n
  end
end
return others
