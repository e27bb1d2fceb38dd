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

/** The delay, if it is one. */
function checked(delayMs) {
  if (delayMs !== undefined && !(delayMs >= 0 && delayMs <= DELAY_MAX_MS)) {
    throw new RangeError(`delayMs is ${delayMs}; it is a number of milliseconds from 0 to ${DELAY_MAX_MS}`);
  }
  return delayMs;
}

class Retry extends Error {
  name = "Retry";

  constructor(reason, { delayMs } = {}) {
    super(reason);
    this.delayMs = checked(delayMs);
  }
}

class Later extends Error {
  name = "Later";

  constructor(reason, { delayMs } = {}) {
    super(reason);
    this.delayMs = checked(delayMs);
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

/** The answer to a message whose handler has returned this. */
function completed(result) {
  return { outcome: "complete", ...(result === null || result === undefined ? {} : { result }) };
}

/** The answer to a message whose handler has thrown this. A message must be answered, whatever the error's own code does. */
function failed(error, signal) {
  try {
    return told(error, signal);
  } catch {
    console.error("the handler has failed with an error that cannot be printed");
    return { outcome: "retry", reason: "the handler has failed with an error that cannot be printed" };
  }
}

/** The same, as far as the error can be read. It is printed unless it is an outcome. */
function told(error, signal) {
  // A cancelled message is answered, too: until then it counts as one of `max_in_flight`.
  if (signal.aborted && error?.name === "AbortError") return { outcome: "retry", reason: "cancelled" };
  if (error instanceof DeadLetter) return { outcome: "dead-letter", reason: sendable(error.message) };
  if (error instanceof Retry || error instanceof Later) {
    const delay = error.delayMs === undefined ? {} : { delay_ms: Math.round(error.delayMs) };
    return { outcome: error instanceof Retry ? "retry" : "later", reason: sendable(error.message), ...delay };
  }
  console.error(error);
  const reason = error instanceof Error ? `${error.name}: ${error.message}` : inspect(error);
  return { outcome: "retry", reason: sendable(reason) };
}

/** The answers to so many messages of a batch whose handler has returned this. Throws when none can be told from it. */
async function ofEach(outcomes, messages, signal) {
  if (outcomes === undefined || outcomes === null) return Array(messages).fill(completed());
  if (!Array.isArray(outcomes)) {
    throw new TypeError("the handler returns an array with an outcome for each message, or nothing when each is completed");
  }
  if (outcomes.length !== messages) {
    throw new RangeError(`the handler returned ${outcomes.length} outcomes for ${messages} messages`);
  }
  const settled = await Promise.allSettled(outcomes);
  return settled.map(({ status, value, reason }) => {
    if (status === "rejected") return failed(reason, signal);
    return value instanceof Error ? failed(value, signal) : completed(value);
  });
}

/**
 * The answers to so many messages whose handler has thrown this. A dead letter that is thrown for several messages gives
 * none of them up: at most one of them is meant.
 */
function ofAll(error, messages, signal) {
  const answer = failed(error, signal);
  if (messages > 1 && answer.outcome === "dead-letter") {
    answer.outcome = "retry";
    const advice = "each is tried again; to give up one of them, put the error into the array that is returned";
    console.error(`DeadLetter was thrown for a batch of ${messages} messages, ${advice}`);
  }
  return Array(messages).fill(answer);
}

function reply(streams, id, answer) {
  try {
    streams.write({ id, ...answer });
  } catch (error) {
    // The effect has happened, so the message must not run again because of its result.
    const { reason } = failed(error, { aborted: false });
    console.error(`the result cannot be kept, the message is completed without it: ${reason}`);
    streams.write({ id, outcome: answer.outcome });
  }
}

/** How a handler is called for the messages of one line: a message, or a batch. */
const ONE = {
  ready: {},
  call: (handler, messages) => handler(messages[0]),
  answers: (result) => [completed(result)],
};
const BATCH = { ready: { batches: true }, call: (handler, messages) => handler(messages), answers: ofEach };

async function handle(streams, kind, handler, { ids, messages, cancel: { signal } }) {
  let answers;
  try {
    answers = await kind.answers(await kind.call(handler, messages), messages.length, signal);
  } catch (error) {
    answers = ofAll(error, messages.length, signal);
  }
  ids.forEach((id, place) => reply(streams, id, answers[place]));
}

/** The messages of a line; `null` when it is another kind of line, which this version need not know. */
function taken(line) {
  const lines = { message: [line], batch: line.messages }[line.type];
  if (!lines) return null;
  const cancel = new AbortController();
  const ids = lines.map(({ id }) => id);
  const messages = lines.map((message) => parse(message, cancel.signal));
  return { ids, messages, cancel, notCancelled: new Set(ids) };
}

function check(handler, maxInFlight) {
  if (typeof handler !== "function") throw new TypeError("the first argument of a worker is a function");
  if (!Number.isSafeInteger(maxInFlight) || maxInFlight < 1) {
    throw new RangeError(`maxInFlight is ${maxInFlight}; it is a whole number, 1 or more`);
  }
}

async function run(kind, handler, { maxInFlight = MAX_IN_FLIGHT } = {}) {
  check(handler, maxInFlight);
  if (process.stdin.isTTY) {
    const flags = `${kind === BATCH ? "--batch-messages 100 " : ""}--handler-exec 'node ${process.argv[1]}'`;
    console.error(`This is a worker of oncegate, which starts it: oncegate run ${flags} …`);
    process.exitCode = 1;
    return;
  }
  const streams = Streams.takeOver();
  const inFlight = new Map();
  const handling = new Set();
  streams.write({ type: "ready", v: PROTOCOL, max_in_flight: maxInFlight, ...kind.ready });
  for await (const line of streams.read()) {
    const job = taken(line);
    if (job !== null) {
      job.ids.forEach((id) => inFlight.set(id, job));
      const answered = handle(streams, kind, handler, job).finally(() => {
        job.ids.forEach((id) => inFlight.delete(id));
        handling.delete(answered);
      });
      handling.add(answered);
    } else if (line.type === "cancel") {
      const job = inFlight.get(line.id);
      // The others of a batch go on until the last one of them is cancelled.
      if (job?.notCancelled.delete(line.id) && job.notCancelled.size === 0) job.cancel.abort();
    }
  }
  await Promise.all(handling);
}

const worker = (handler, options) => run(ONE, handler, options);
const batchWorker = (handler, options) => run(BATCH, handler, options);

module.exports = { worker, batchWorker, Message, Retry, Later, DeadLetter, program };
