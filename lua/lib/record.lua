-- Tells what a key holds. This is not a script of its own: it is inserted in the scripts that need it, in place of their
-- line `-- include lib/record.lua`. A script that returns before that line does not pay for it.

-- Returns 'pending', 'released', 'completed' or 'failed'; nil when the key holds no record of format 1.
local function kind_of(record)
  local state = string.sub(record, 1, 1)
  if state == 'P' or state == 'Q' or state == 'R' then
    return (#record == 25 or #record == 41) and 'pending' or nil
  elseif state == 'S' or state == 'T' or state == 'U' then
    return #record >= 29 and 'released' or nil
  elseif state == 'C' then
    return #record >= 12 and 'completed' or nil
  elseif state == 'F' or state == 'G' then
    return #record >= 13 and 'failed' or nil
  end
end

local function unreadable()
  return redis.error_reply('UNREADABLE no record of format 1')
end
