-- Keeps completions without a result in buckets, many keys in one hash. It is no verb: it goes before each of them, which
-- then calls `redis.call` as if every record were under a key of its own.
--
-- KEYS[1]  the record's own key, for every state but a completion without a result
-- KEYS[2]  the bucket; both lie in one slot
-- ARGV[1]  the record's field in the bucket: the digest (16 bytes); the verb's own arguments follow
--
-- A field holds the tag (4 bytes), the fingerprint (7) if there is one, and when the retention is over: milliseconds
-- since 1970 (6 bytes, the highest first). A record is either in its bucket or under its own key.

local server, bucket, field = redis, KEYS[2], table.remove(ARGV, 1)
local no_fingerprint = string.rep('\0', 7)
-- What the bucket has of this record, once it was looked for: the record as the verbs know it, when it is over, and now.
local kept, ends, now

local function look_at_the_clock()
  local time = server.call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end

-- The record in the bucket; false when there is none, or its time is over.
local function find()
  local value = server.call('HGET', bucket, field)
  if not value then
    return false
  end
  look_at_the_clock()
  if #value ~= 10 and #value ~= 17 then
    -- What is no record to any verb.
    kept, ends = '', now
    return kept
  end
  ends = struct.unpack('>I6', value, #value - 5)
  if now > ends then
    return false
  end
  kept = 'C' .. string.sub(value, 1, 4) .. (#value == 17 and string.sub(value, 5, 11) or no_fingerprint)
  return kept
end

-- Removes what is over from the bucket: it expires as a whole only when it has not been written to for long.
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
  look_at_the_clock()
  ends = now + retention
  local fingerprint = string.sub(record, 6, 12)
  local value = string.sub(record, 2, 5) .. (fingerprint ~= no_fingerprint and fingerprint or '') .. struct.pack('>I6', ends)
  local is_new = server.call('HSET', bucket, field, value) == 1
  if server.call('PEXPIRETIME', bucket) < ends then
    -- Later by an eighth, so that it need not be said again each time.
    server.call('PEXPIREAT', bucket, ends + math.floor(retention / 8))
  end
  if is_new then
    local count = server.call('HLEN', bucket)
    if count % (count < 1024 and 32 or 1024) == 0 then
      tidy()
    end
  end
end

local function set(key, record, how, left, ...)
  if how == 'NX' then
    return find() or server.pcall('SET', key, record, how, left, ...)
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
  if kept then
    server.call('HDEL', bucket, field)
  end
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
