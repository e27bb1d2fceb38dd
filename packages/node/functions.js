"use strict";
// Runs functions once for a key, by claims of a server of oncegate. The types, with what each item means, are in
// functions.d.ts.
const { randomUUID } = require("node:crypto");
const { readFileSync } = require("node:fs");
const path = require("node:path");
const { Worker } = require("node:worker_threads");
const { DeadLetter, Later, Retry } = require("./index.js");

/** The delays before a request without an answer, or for a busy key, is sent again, in milliseconds. */
const FIRST_PAUSE_MS = 20;
const LONGEST_PAUSE_MS = 1000;
/** The longest wait at the server for a result, in milliseconds. */
const LONGEST_WAIT_MS = 20_000;
/** The answers that may be other ones later: the caller has reached a limit, and the store does not answer. */
const AGAIN = new Set([0, 408, 429, 502, 503, 504]);
/** The same for the end of a claim: the work has happened, and a token that is rotated or a server that is moved comes back. */
const AGAIN_AT_THE_END = new Set([...AGAIN, 401, 403, 404, 500]);
/** Halves of surrogate pairs, which are no text for the server. */
const HALVES = /[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;
/** The longest reason that is sent, in UTF-16 units. */
const REASON_MAX_UNITS = 1000;

class OnceError extends Error {
  name = this.constructor.name;
}
class Unavailable extends OnceError {}
class Refused extends OnceError {}
class GivenUp extends OnceError {}
class Mismatch extends OnceError {}
class LeaseLost extends OnceError {}
class OutcomeUnknown extends OnceError {}
class ResultLost extends OnceError {}
class Busy extends OnceError {
  constructor(retryInMs) {
    super(`another call has the key, or its next attempt is not due: call again in ${retryInMs} ms`);
    this.retryInMs = retryInMs;
  }
}

/** Milliseconds of the process's monotonic clock, which is the same in all its threads. */
const now = () => Number(process.hrtime.bigint()) / 1e6;
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const warn = (what) => process.emitWarning(what, "OncegateWarning");

/** The first token of a file, which may be rotated. */
function tokenOf(file) {
  return readFileSync(file, "utf8").split("\n").map((line) => line.trim()).find(Boolean) ?? "";
}

/** Sends a request. Resolves to its status, 0 without an answer, and its answer. */
async function post({ url, token, tokenFile }, where, body, timeoutMs) {
  try {
    const response = await fetch(url + where, {
      method: "POST",
      headers: { "content-type": "application/json", authorization: `Bearer ${token ?? tokenOf(tokenFile)}` },
      body: JSON.stringify(body),
      signal: AbortSignal.timeout(Math.ceil(timeoutMs)),
    });
    const text = await response.text();
    const answer = isJson(text) ? JSON.parse(text) : null;
    if (answer === null || typeof answer !== "object") {
      // Of something in between: only its refusal counts.
      return { status: response.status >= 400 ? response.status : 0, answer: { detail: `HTTP status ${response.status}` } };
    }
    return { status: response.status, answer };
  } catch (error) {
    return { status: 0, answer: { detail: `${error.name}: ${error.cause?.message ?? error.message}` } };
  }
}

function isJson(text) {
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}

class Attempt {
  #controller = new AbortController();

  constructor(answer) {
    this.number = answer.attempt;
    this.recovered = answer.recovered;
    this.fencingToken = answer.fencing_token ?? null;
    Object.defineProperty(this, "claim", { value: answer.claim });
  }

  get signal() {
    return this.#controller.signal;
  }

  lose() {
    this.#controller.abort(new LeaseLost("the claim was lost: another process may have taken over"));
  }
}

class Client {
  #server;
  #scope;
  #patienceMs;
  #settleMs;
  #worker = null;
  #held = new Map();
  #closed = null;
  #isOver = false;

  constructor({ url = process.env.ONCEGATE_URL, token, tokenFile, scope, patienceMs = 10_000, settleMs = 300_000 }) {
    if (!tokenFile) token ??= process.env.ONCEGATE_TOKEN;
    if (!url || !(token || tokenFile)) {
      throw new TypeError("the client needs the URL of the server and a token: set ONCEGATE_URL and ONCEGATE_TOKEN");
    }
    if (typeof scope !== "string") throw new TypeError("the client needs a scope");
    this.#server = { url: new URL(url).href.replace(/\/+$/, ""), token, tokenFile };
    this.#scope = scope;
    this.#patienceMs = patienceMs;
    this.#settleMs = settleMs;
  }

  async once(key, work, options = {}) {
    const claimed = await this.#claim(key, options);
    if (!(claimed instanceof Attempt)) return claimed.result;
    if (this.#isOver) {
      this.#release(claimed);
      const body = { claim: claimed.claim, counted: false, reason: "the client is closed" };
      await this.#end("/v1/claims/release", body, this.#patienceMs);
      throw new Unavailable("the client is closed: nothing was run");
    }
    try {
      let result;
      try {
        result = await work(claimed);
      } catch (error) {
        if (claimed.signal.aborted) throw claimed.signal.reason;
        await this.#fail(claimed, error, options.permanent);
        throw error;
      }
      await this.#complete(claimed, result);
      return result;
    } finally {
      this.#release(claimed);
    }
  }

  async close(timeoutMs = 30_000) {
    this.#closed ??= Promise.withResolvers?.() ?? deferred();
    if (this.#held.size === 0) this.#closed.resolve();
    const timer = setTimeout(this.#closed.resolve, timeoutMs);
    await this.#closed.promise;
    clearTimeout(timer);
    const ended = this.#held.size === 0;
    this.#isOver = true;
    for (const held of this.#held.values()) held.lose(); // nothing extends them any more
    await this.#worker?.terminate();
    return ended;
  }

  async #claim(key, { function: name, arguments: args, waitMs = Infinity, leaseMs, retentionMs }) {
    if (this.#closed) throw new Unavailable("the client is closed: nothing was run");
    const request = {
      scope: this.#scope,
      key: key ?? null,
      function: name,
      arguments: args,
      lease_ms: leaseMs,
      retention_ms: retentionMs,
      nonce: randomUUID(),
    };
    const began = now();
    let answeredAt = began;
    let pause = FIRST_PAUSE_MS;
    // Before any request that may have been granted: a repeat gets the same grant, and not a new lease.
    let since = null;
    for (;;) {
      const left = Math.min(Math.max(0, began + waitMs - now()), LONGEST_WAIT_MS);
      const sentAt = now();
      since ??= sentAt;
      const body = { ...request, wait_ms: Math.round(left) };
      const { status, answer } = await post(this.#server, "/v1/claims", body, left + this.#patienceMs);
      if (status === 200 && answer.state === "completed") return { result: resultOf(answer) };
      if (status === 201 && answer.state === "granted") {
        if (now() < since + answer.lease_ms / 3) return this.#hold(answer, since);
        // Much of its lease is over, by a wait or a lost answer: it begins under a fresh one.
        const extendedAt = now();
        const extended = await post(this.#server, "/v1/claims/extend", { claims: [answer.claim] }, this.#patienceMs);
        const state = (extended.status === 200 && extended.answer.claims?.[0]?.state) || "unknown";
        if (state === "extended" && now() < extendedAt + answer.lease_ms / 3) return this.#hold(answer, extendedAt);
        if (state !== "unknown") answeredAt = now();
        if (state !== "extended" && state !== "unknown") {
          // Another one has taken over, and nothing was run.
          request.nonce = randomUUID();
          since = null;
        }
        if (now() - answeredAt >= this.#patienceMs) throw new Unavailable("nothing was run, because the claim was not confirmed");
        await sleep(pause);
        continue;
      }
      const detail = answer.detail ?? `HTTP status ${status}`;
      if (answer.state === "given-up") throw new GivenUp(answer.reason ?? detail);
      if (answer.state === "mismatch") throw new Mismatch(detail);
      if (answer.state === "busy") {
        const retryInMs = answer.retry_in_ms;
        answeredAt = now();
        since = sentAt;
        if (answeredAt + Math.min(retryInMs, FIRST_PAUSE_MS) >= began + waitMs) throw new Busy(retryInMs);
        await sleep(Math.min(retryInMs, pause));
        pause = Math.min(pause * 2, LONGEST_PAUSE_MS / 2);
      } else if (!AGAIN.has(status)) {
        throw new Refused(`${answer.state ?? status}: ${detail}`);
      } else if (now() - answeredAt >= this.#patienceMs) {
        throw new Unavailable(`nothing was run, because the claim was not answered: ${detail}`);
      } else {
        // It may have been granted: the same nonce gets the same grant.
        await sleep(pause);
        pause = Math.min(pause * 2, LONGEST_PAUSE_MS);
      }
    }
  }

  #hold(answer, sentAt) {
    const attempt = new Attempt(answer);
    this.#held.set(attempt.claim, attempt);
    if (!this.#worker && !this.#isOver) {
      // A thread of its own: a function that computes holds up this one's timers.
      this.#worker = new Worker(path.join(__dirname, "heartbeats.js"), { workerData: this.#server });
      this.#worker.on("message", (claim) => this.#held.get(claim)?.lose());
      this.#worker.on("error", (error) => {
        warn(`the heartbeats have failed: ${error}`);
        this.#worker = null;
        for (const held of this.#held.values()) held.lose();
      });
      this.#worker.unref();
    }
    this.#worker?.postMessage({ add: attempt.claim, leaseMs: answer.lease_ms, sentAt });
    return attempt;
  }

  #release(attempt) {
    this.#worker?.postMessage({ remove: attempt.claim });
    this.#held.delete(attempt.claim);
    if (this.#held.size === 0) this.#closed?.resolve();
  }

  /** Repeats the end of a claim until its outcome is known. The status is 0 if it stays unknown. */
  async #end(where, body, patienceMs) {
    const began = now();
    for (let pause = FIRST_PAUSE_MS; ; pause = Math.min(pause * 2, LONGEST_PAUSE_MS)) {
      const { status, answer } = await post(this.#server, where, body, 10_000);
      if (!AGAIN_AT_THE_END.has(status) && (status !== 200 || answer.state)) return { status, answer };
      if (now() - began >= patienceMs) return { status: 0, answer };
      await sleep(pause);
    }
  }

  async #complete(attempt, result) {
    let form = { result: result ?? null };
    if (result instanceof Uint8Array) {
      form = { result_base64: Buffer.from(result.buffer, result.byteOffset, result.byteLength).toString("base64") };
    }
    try {
      if (JSON.stringify(form.result) === undefined && !form.result_base64) form = { result: null };
    } catch (error) {
      warn(`the work is recorded without its result, which is no JSON: ${error.message}`);
      form = { without_result: true };
    }
    const complete = (form) => this.#end("/v1/claims/complete", { claim: attempt.claim, ...form }, this.#settleMs);
    let { status, answer } = await complete(form);
    if (status === 400 || status === 413) {
      warn("the work is recorded without its result, which is too large or no JSON");
      ({ status, answer } = await complete({ without_result: true }));
    }
    if (status === 200) return;
    if (answer.state === "lease-lost") {
      throw new LeaseLost("the function has run, and another process has taken over: its result counts");
    }
    throw new OutcomeUnknown(`the function has run, and that is not recorded: ${answer.detail}`);
  }

  async #fail(attempt, error, permanent = () => false) {
    const reason = String(error?.message ?? error).slice(0, REASON_MAX_UNITS);
    const body = { claim: attempt.claim, reason: `${error?.name ?? "thrown"}: ${reason}`.replace(HALVES, "\ufffd") };
    let where = "/v1/claims/release";
    if (error instanceof DeadLetter || permanent(error)) {
      where = "/v1/claims/fail";
    } else {
      body.counted = !(error instanceof Later);
      if (error instanceof Retry || error instanceof Later) {
        body.retry_in_ms = error.delayMs === undefined ? undefined : Math.round(error.delayMs);
      }
    }
    const { status, answer } = await this.#end(where, body, this.#patienceMs);
    if (status !== 200) warn(`the failed attempt was not released, so its lease lapses: ${answer.detail}`);
  }
}

function deferred() {
  const made = {};
  made.promise = new Promise((resolve) => (made.resolve = resolve));
  return made;
}

function resultOf(answer) {
  if (answer.result_lost !== undefined) {
    throw new ResultLost(`the work is done, and its result is lost: ${answer.result_lost}`);
  }
  if (answer.result_base64 !== undefined) return Buffer.from(answer.result_base64, "base64");
  return answer.result ?? null;
}

module.exports = {
  Busy,
  Client,
  DeadLetter,
  GivenUp,
  Later,
  LeaseLost,
  Mismatch,
  OnceError,
  OutcomeUnknown,
  Refused,
  ResultLost,
  Retry,
  Unavailable,
};
// For the thread of the heartbeats.
Object.defineProperty(module.exports, "internal", { value: { now, post } });
