-- Claims many keys in one call, as first attempts without a fencing token: `SET … NX GET` for each key.
--
-- KEYS     the records
-- ARGV[1]  lease + 30 days, in milliseconds
-- ARGV[n]  the record of a first attempt, for KEYS[n - 1], as claim.lua takes it
-- Reply    nil                      all are granted
--          a list                   one item for each key: nil when granted, else the existing record; 0 when the
--                                   caller must call claim.lua
--
-- There is no shebang line, for the same reason as in claim.lua.

local call = redis.pcall
local lease = ARGV[1]
local found = false
for n, key in ipairs(KEYS) do
  local old = call('SET', key, ARGV[n + 1], 'NX', 'GET', 'PX', lease)
  if old and not found then
    found = {}
    for granted = 1, n - 1 do
      found[granted] = false
    end
  end
  if found then
    found[n] = type(old) == 'table' and 0 or old
  end
end
return found
