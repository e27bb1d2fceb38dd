"use strict";
// Workers for `oncegate run --handler-exec`. The types, with what each item means, are in index.d.ts.
const { inspect } = require("node:util");
const { program } = require("./program.js");
const { Streams } = require("./streams.js");

/** The version of the protocol, see `docs/RUN.md` of oncegate. */
const PROTOCOL = 1;
/** How many messages a process handles at a time, unless told otherwise. */
const MAX_IN_FLIGHT = 16;
/** The longest reason that is sent, in UTF-16 units. Reasons end up in logs and in headers of dead letters. */
const REASON_MAX_UNITS = 1024;
/** The longest delay, in milliseconds: 365 days. */
const DELAY_MAX_MS = 365 * 24 * 3600 * 1000;

class Retry extends Error {
  name = "Retry";

  constructor(reason, { delayMs } = {}) {
    super(reason);
    if (delayMs !== undefined && !(delayMs >= 0 && delayMs <= DELAY_MAX_MS)) {
      throw new RangeError(`delayMs is ${delayMs}; it is a number of milliseconds from 0 to ${DELAY_MAX_MS}`);
    }
    this.delayMs = delayMs;
  }
}

class DeadLetter extends Error {
  name = "DeadLetter";
}

class Message {
  constructor({
    payload,
    idempotencyKey = "00000000-0000-0000-0000-000000000000",
    attempt = 1,
    recovered = false,
    leaseMs = 30000,
    fencingToken = null,
    origin = {},
    key = null,
    headers = [],
    headersLeftOut = 0,
    signal = new AbortController().signal,
  }) {
    Object.assign(this, { payload, idempotencyKey, attempt, recovered, leaseMs, fencingToken, origin, key });
    Object.assign(this, { headers, headersLeftOut, signal });
    Object.freeze(this);
  }

  text() {
    return this.payload === null ? "" : this.payload.toString("utf8");
  }

  json() {
    try {
      return JSON.parse(this.text());
    } catch (cause) {
      // Without the payload itself, which the message of the SyntaxError has: reasons are logged.
      throw new DeadLetter("the payload is no JSON", { cause });
    }
  }

  header(name) {
    const found = this.headers.filter(([other]) => other === name);
    return found.length > 0 ? found[found.length - 1][1] : null;
  }
}

/** A field that is text when it is UTF-8, and base64 under another name when it is not. */
function bytes(text, base64) {
  if (base64 !== undefined) return Buffer.from(base64, "base64");
  return text === undefined || text === null ? null : Buffer.from(text, "utf8");
}

/** The message of a line of the protocol. Fields that this version does not know are ignored. */
function parse(line, signal) {
  const value = (header) => bytes(typeof header === "string" ? header : null, header?.base64);
  return new Message({
    payload: bytes(line.payload, line.payload_base64),
    idempotencyKey: line.idempotency_key,
    attempt: line.attempt,
    recovered: line.recovered,
    leaseMs: line.lease_ms,
    fencingToken: line.fencing_token ?? null,
    origin: line.origin,
    key: bytes(line.key, line.key_base64),
    headers: line.headers.map(([name, header]) => [name, value(header)]),
    headersLeftOut: line.headers_left_out ?? 0,
    signal,
  });
}

/** The beginning of a reason, without half of a character. */
function sendable(reason) {
  return Buffer.from(String(reason).slice(0, REASON_MAX_UNITS)).toString();
}

function failed(error) {
  if (error instanceof DeadLetter) return { outcome: "dead-letter", reason: sendable(error.message) };
  if (error instanceof Retry) {
    const delay = error.delayMs === undefined ? {} : { delay_ms: Math.round(error.delayMs) };
    return { outcome: "retry", reason: sendable(error.message), ...delay };
  }
  console.error(error);
  const reason = error instanceof Error ? `${error.name}: ${error.message}` : inspect(error);
  return { outcome: "retry", reason: sendable(reason) };
}

function reply(streams, id, answer) {
  try {
    streams.write({ id, ...answer });
  } catch (error) {
    // The effect has happened, so the message must not run again because of its result.
    console.error(`the result cannot be kept, the message is completed without it: ${error.message}`);
    streams.write({ id, outcome: answer.outcome });
  }
}

async function handle(streams, handler, id, message) {
  let answer;
  try {
    const result = await handler(message);
    answer = { outcome: "complete", ...(result === null || result === undefined ? {} : { result }) };
  } catch (error) {
    // A cancelled message is answered, too: until then it counts as one of `max_in_flight`.
    const cancelled = message.signal.aborted && error?.name === "AbortError";
    answer = cancelled ? { outcome: "retry", reason: "cancelled" } : failed(error);
  }
  reply(streams, id, answer);
}

async function worker(handler, { maxInFlight = MAX_IN_FLIGHT } = {}) {
  if (typeof handler !== "function") throw new TypeError("the first argument of worker() is a function");
  if (!Number.isSafeInteger(maxInFlight) || maxInFlight < 1) {
    throw new RangeError(`maxInFlight is ${maxInFlight}; it is a whole number, 1 or more`);
  }
  if (process.stdin.isTTY) {
    console.error(
      `This is a worker of oncegate, which starts it: oncegate run --handler-exec 'node ${process.argv[1]}' …`,
    );
    process.exitCode = 1;
    return;
  }
  const streams = Streams.takeOver();
  const inFlight = new Map();
  streams.write({ type: "ready", v: PROTOCOL, max_in_flight: maxInFlight });
  for await (const line of streams.read()) {
    if (line.type === "message") {
      const cancel = new AbortController();
      const handling = handle(streams, handler, line.id, parse(line, cancel.signal));
      inFlight.set(line.id, { cancel, handling: handling.finally(() => inFlight.delete(line.id)) });
    } else if (line.type === "cancel") {
      inFlight.get(line.id)?.cancel.abort();
    }
  }
  await Promise.all([...inFlight.values()].map(({ handling }) => handling));
}

module.exports = { worker, Message, Retry, DeadLetter, program };
