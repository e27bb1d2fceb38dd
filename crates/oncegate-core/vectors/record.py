#!/usr/bin/env python3
"""A worker in another language: claims and completes records in Redis, and reads them, by docs/RECORD_FORMAT.md alone.

    record.py HOST PORT SCRIPTS read  SCOPE:DIGEST
    record.py HOST PORT SCRIPTS claim SCOPE:DIGEST LEASE_MS
    record.py HOST PORT SCRIPTS run   SCOPE:DIGEST LEASE_MS RETENTION_MS RESULT_AS_JSON

SCRIPTS is the folder `lua/` of the repository. The answer is one line of JSON. It is there to prove that the document is
enough, and as a start; it needs nothing but Python. How a key is made: check.py. A worker that runs for longer than its
lease has to extend it; this one does not.
"""

import json
import os
import socket
import sys
from pathlib import Path

TAIL_MS = 30 * 86_400_000
NO_LONGEST_MS = 10_000_000_000_000  # of a worker that cuts no lease of another one
STATES = {"P": "pending", "Q": "pending", "R": "pending", "S": "released", "T": "released",
          "C": "completed", "F": "failed", "G": "failed"}
NO_FINGERPRINT = bytes(7)
JSON = b"\x01"
INCLUDE = b"-- include lib/record.lua\n"


class Redis:
    """As much of Redis's protocol as scripts need."""

    def __init__(self, host, port):
        self.stream = socket.create_connection((host, port), timeout=30).makefile("rwb")

    def call(self, *words):
        words = [word if isinstance(word, bytes) else str(word).encode() for word in words]
        self.stream.write(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words))
        self.stream.flush()
        return self.reply()

    def reply(self):
        line = self.stream.readline()
        kind, rest = line[:1], line[1:-2]
        if kind == b"-":
            raise RuntimeError(rest.decode())
        if kind == b":":
            return int(rest)
        if kind == b"$":
            length = int(rest)
            return None if length < 0 else self.stream.read(length + 2)[:-2]
        if kind == b"*":
            return [self.reply() for _ in range(int(rest))]
        return rest

    def script(self, folder, verb, key, *arguments):
        text = (Path(folder) / f"{verb}.lua").read_bytes()
        text = text.replace(INCLUDE, (Path(folder) / "lib" / "record.lua").read_bytes())
        return self.call("EVAL", text, 1, key, *arguments)


def read(redis, key):
    redis.call("MULTI")
    redis.call("GET", key)
    redis.call("PTTL", key)
    record, left_ms = redis.call("EXEC")
    if record is None:
        return {"state": "absent"}
    state = chr(record[0]) if record else ""
    if state not in STATES:
        raise ValueError("no record of format 1")
    found = {"state": STATES[state], "recovered": state in "QRT", "expires_in_ms": left_ms}
    if state in "PQR":
        if len(record) not in (25, 41):
            raise ValueError("no record of format 1")
        found |= {"attempt": record[24], "lease_left_ms": left_ms - TAIL_MS}
    elif state in "ST":
        reason = record[29:].decode(errors="replace")
        found |= {"attempts": record[12], "due_in_ms": left_ms - TAIL_MS, "reason": reason}
    elif state == "C":
        found |= {"encoding": record[12] if len(record) > 12 else 0, "result": record[13:].decode(errors="replace")}
    else:
        found |= {"attempt": record[12], "handed_over": state == "G", "reason": record[13:].decode(errors="replace")}
    return found


def first_attempt(token):
    return b"P" + token + NO_FINGERPRINT + b"\x01"


def claim(redis, scripts, key, token, lease_ms):
    said = redis.script(scripts, "claim", key, first_attempt(token), lease_ms + TAIL_MS, NO_LONGEST_MS)
    letter, rest = said[:1].upper(), said[1:]
    if letter in b"PQRN":
        return {"verdict": "granted", "attempt": said[24], "reopened": letter == b"N"}
    if letter == b"C":
        return {"verdict": "completed", "result": rest[1:].decode(errors="replace")}
    if letter == b"B":
        return {"verdict": "busy", "retry_in_ms": int(rest)}
    if letter in b"FG":
        return {"verdict": "failed", "handed_over": letter == b"G", "reason": rest[4:].decode(errors="replace")}
    return {"verdict": "mismatch"}


def run(redis, scripts, key, lease_ms, retention_ms, result):
    token = os.urandom(16)
    verdict = claim(redis, scripts, key, token, lease_ms)
    if verdict["verdict"] != "granted":
        return verdict
    # … the effect …
    completed = b"C" + token[:4] + NO_FINGERPRINT + JSON + result.encode()
    held = redis.script(scripts, "complete", key, first_attempt(token), completed, retention_ms)
    # Whoever gets "L" has lost his lease, and acknowledges nothing.
    return verdict | {"held": held in (b"H", b"A", b"R")}


def main(host, port, scripts, verb, key, *rest):
    redis = Redis(host, int(port))
    if verb == "read":
        answer = read(redis, key)
    elif verb == "claim":
        answer = claim(redis, scripts, key, os.urandom(16), int(rest[0]))
    else:
        answer = run(redis, scripts, key, int(rest[0]), int(rest[1]), rest[2])
    print(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
