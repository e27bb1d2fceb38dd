-- Claims a key: requests the right to run its handler once.
--
-- KEYS[1]  the record
-- ARGV[1]  the record of a first attempt: "P", token (16 bytes), fingerprint (7), attempt 1 (1 byte);
--          the attempt is omitted when a fencing token is requested
-- ARGV[2]  lease + 30 days, in milliseconds
-- ARGV[3]  the longest lease of any owner in the scope + 30 days, in milliseconds: what is left of another owner's
--          lease is cut to it, because the server's clock has gone back if more is left
-- ARGV[4]  "1" when the reply must be as durable as a write: the expiry of a completed or failed record is written
--          again, so that WAIT has a write to wait for; absent otherwise
-- Reply    the claim's record       granted; its first byte is the recovery, or "N" for the first attempt
--                                  after a reopen, whose record begins with "P"
--          "C" result               completed
--          "B" milliseconds         busy; how long to wait before the next claim
--          "F" or "G" tag reason    failed; "G" when handed over; the tag (4 bytes) is that of the owner that failed it
--          "M"                      mismatch: another fingerprint
--          The first letter is lower-case when the fingerprints are of different specifications and were not
--          compared.
--          -UNREADABLE              the key holds no record of this format; nothing was written
--
-- Without a shebang line, the script runs at maxmemory too: it still replies for completed and failed records, and
-- refuses new claims.

local claim = ARGV[1]
local fenced = #claim == 24
if not fenced and #claim ~= 25 then
  return redis.error_reply('UNREADABLE a claim is 24 or 25 bytes')
end

local new = claim
if fenced then
  local time = redis.call('TIME')
  local micros = time[2]
  -- Nine times in ten no padding is needed, and the length check costs less than padding.
  new = claim .. '\1' .. time[1] .. (#micros == 6 and micros or string.sub('00000' .. micros, -6))
end

-- Most keys are new: the write alone decides them. Only the others are read.
local old = redis.pcall('SET', KEYS[1], new, 'NX', 'GET', 'PX', ARGV[2])
if not old then
  return new
end
if type(old) == 'table' then
  local refusal = old
  if string.sub(refusal.err, 1, 3) ~= 'OOM' then
    return refusal
  end
  old = redis.call('GET', KEYS[1])
  if not old then
    return refusal
  end
end

-- include lib/record.lua

local kind = kind_of(old)
if not kind then
  return unreadable()
end
local state = string.sub(old, 1, 1)
local pending, failed = kind == 'pending', kind == 'failed'

local theirs = pending and string.sub(old, 18, 24) or string.sub(old, 6, 12)
local ours = string.sub(claim, 18, 24)
local compared = theirs == ours
if not compared and string.byte(ours) ~= 0 and string.byte(ours) == string.byte(theirs) then
  return 'M'
end
local function say(letter, rest)
  return (compared and letter or string.lower(letter)) .. rest
end

if ARGV[4] and (state == 'C' or failed) then
  local expires_at = redis.call('PEXPIRETIME', KEYS[1])
  -- Unlike SET, this is allowed at maxmemory. A record without an expiry gets one that no clock reaches: the end of
  -- the year 9999.
  redis.call('PEXPIREAT', KEYS[1], expires_at > 0 and expires_at or 253402300799000)
end
if state == 'C' then
  return say('C', string.sub(old, 13))
end
if failed then
  return say(state, string.sub(old, 2, 5) .. string.sub(old, 14))
end

-- A repeat by the owner: the first reply was lost, or the lease expired and no other owner took over.
if pending and string.sub(old, 2, 17) == string.sub(claim, 2, 17) then
  return say(state, string.sub(old, 2))
end

-- A record is kept for 30 days after its lease has ended or its retry is due.
local left = redis.call('PTTL', KEYS[1]) - 2592000000
local longest = ARGV[3] - 2592000000
if pending and left > longest then
  redis.call('PEXPIRE', KEYS[1], ARGV[3])
  left = longest
end
if left >= 0 then
  return say('B', string.format('%d', left + 1))
end
if left == -2592000001 then
  return redis.error_reply('UNREADABLE a record without expiry')
end

local attempt = math.min(string.byte(old, pending and 25 or 13) + 1, 255)
local next_state = ((pending or state == 'U') and 'R') or (state == 'T' and 'Q') or 'P'
local fencing_token = ''
if fenced then
  local last = pending and string.sub(old, 26) or string.sub(old, 14, 29)
  -- From 2^53 on, Lua cannot increment a number exactly.
  if string.find(last, '%D') or last >= '9007199254740991' then
    return redis.error_reply('UNREADABLE a fencing token that is no number')
  end
  -- After the clock went back, the fencing token must still grow.
  fencing_token = string.sub(new, 26)
  if last >= fencing_token then
    fencing_token = string.format('%016.0f', tonumber(last) + 1)
  end
end
local rest = string.sub(claim, 2, 24) .. string.char(attempt) .. fencing_token
redis.call('SET', KEYS[1], next_state .. rest, 'PX', ARGV[2])
-- An empty tag: an operator reopened the record, no attempt released it.
if state == 'S' and string.sub(old, 2, 5) == '\0\0\0\0' then
  return say('N', rest)
end
return say(next_state, rest)
