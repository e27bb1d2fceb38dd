-- Keeps completions without a result in buckets: hashes of many keys each. This is not a script of its own. It is
-- prepended to each script, which then calls `redis.call` as if every record had its own key.
--
-- KEYS[1]  the record's own key, for every state but a completion without a result
-- KEYS[2]  the bucket; both keys are in one slot
-- ARGV[1]  the record's field in the bucket: the digest (16 bytes); the script's own arguments follow
--
-- A field holds the tag (4 bytes), the fingerprint (7) if there is one, and the end of the retention: milliseconds
-- since 1970 (6 bytes, big-endian). A record is either in its bucket or under its own key.

local server, bucket, field = redis, KEYS[2], table.remove(ARGV, 1)
local no_fingerprint = string.rep('\0', 7)
-- Set by `find` and `keep`: the record in the form that the scripts expect, when it expires, and the current time.
local kept, ends, now
-- Set by `find`: whether the bucket has the record and it has expired.
local expired = false

local function read_clock()
  local time = server.call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end

-- Returns the record in the bucket; false when there is none or it has expired.
local function find()
  local value = server.call('HGET', bucket, field)
  if not value then
    return false
  end
  read_clock()
  if #value ~= 10 and #value ~= 17 then
    -- Every script refuses an empty record as unreadable.
    kept, ends = '', now
    return kept
  end
  ends = struct.unpack('>I6', value, #value - 5)
  if now > ends then
    expired = true
    return false
  end
  kept = 'C' .. string.sub(value, 1, 4) .. (#value == 17 and string.sub(value, 5, 11) or no_fingerprint)
  return kept
end

-- Deletes expired fields: the bucket itself expires only when it has not been written to for a long time.
local function tidy()
  local all = server.call('HGETALL', bucket)
  for place = 1, #all, 2 do
    local value = all[place + 1]
    if #value > 6 and now > struct.unpack('>I6', value, #value - 5) then
      server.call('HDEL', bucket, all[place])
    end
  end
end

local function keep(record, retention)
  read_clock()
  ends = now + retention
  local fingerprint = string.sub(record, 6, 12)
  local value = string.sub(record, 2, 5) .. (fingerprint ~= no_fingerprint and fingerprint or '') .. struct.pack('>I6', ends)
  local is_new = server.call('HSET', bucket, field, value) == 1
  if server.call('PEXPIRETIME', bucket) < ends then
    -- Later by an eighth, so that not every write has to move the expiry.
    server.call('PEXPIREAT', bucket, ends + math.floor(retention / 8))
  end
  if is_new then
    local count = server.call('HLEN', bucket)
    if count % (count < 1024 and 32 or 1024) == 0 then
      tidy()
    end
  end
end

-- Deletes the record from its bucket: it gets a key of its own.
local function leave()
  if kept or expired then
    server.call('HDEL', bucket, field)
  end
end

local function set(key, record, how, left, ...)
  if how == 'NX' then
    local found = find()
    if found then
      return found
    end
    leave()
    return server.pcall('SET', key, record, how, left, ...)
  end
  if how == 'KEEPTTL' then
    if kept then
      return server.call('PEXPIREAT', bucket, server.call('PEXPIRETIME', bucket))
    end
    return server.call('SET', key, record, how)
  end
  if #record == 12 and string.sub(record, 1, 1) == 'C' then
    keep(record, tonumber(left))
    return server.call('DEL', key)
  end
  leave()
  return server.call('SET', key, record, how, left)
end

local function call(verb, key, ...)
  if verb == 'GET' then
    return server.call('GET', key) or find()
  elseif verb == 'SET' then
    return set(key, ...)
  elseif not key then
    return server.call(verb)
  elseif not kept then
    return server.call(verb, key, ...)
  elseif verb == 'PTTL' then
    return ends - now
  elseif verb == 'PEXPIRETIME' then
    return ends
  elseif verb == 'PEXPIREAT' then
    return server.call('PEXPIREAT', bucket, server.call('PEXPIRETIME', bucket))
  end
  return server.call(verb, key, ...)
end

local redis = { call = call, pcall = call, error_reply = server.error_reply }
