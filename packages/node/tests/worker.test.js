"use strict";
// Workers in processes of their own, spoken to as `oncegate run` speaks to them.
const assert = require("node:assert/strict");
const { spawn } = require("node:child_process");
const { once } = require("node:events");
const { chmodSync, cpSync, mkdirSync, mkdtempSync, rmSync, symlinkSync, writeFileSync } = require("node:fs");
const { tmpdir } = require("node:os");
const { join, resolve } = require("node:path");
const test = require("node:test");
const { DeadLetter, Later, Message, Retry, batchWorker, worker } = require("..");

const PACKAGE = resolve(__dirname, "..");

/** A process with its standard output as lines, and its standard error as text. */
class Process {
  constructor(context, program, ...args) {
    this.child = spawn(program, args, { stdio: "pipe" });
    context.after(() => this.child.kill("SIGKILL"));
    this.err = "";
    this.out = "";
    this.child.stderr.setEncoding("utf8").on("data", (text) => (this.err += text));
    this.child.stdout.setEncoding("utf8").on("data", (text) => (this.out += text));
    this.ended = once(this.child, "close");
  }

  /** A worker with this handler. */
  static async worker(context, handler, options = "{}", make = "worker") {
    const library = JSON.stringify(PACKAGE);
    const prelude = `const { DeadLetter, Later, Message, Retry, batchWorker, worker } = require(${library});`;
    const started = new Process(context, process.execPath, "-e", `${prelude} ${make}(${handler}, ${options});`);
    started.ready = await started.read();
    return started;
  }

  async line() {
    for (;;) {
      const end = this.out.indexOf("\n");
      if (end >= 0) {
        const line = this.out.slice(0, end);
        this.out = this.out.slice(end + 1);
        return line;
      }
      await once(this.child.stdout, "data");
    }
  }

  async read() {
    return JSON.parse(await this.line());
  }

  send(line) {
    this.child.stdin.write(`${JSON.stringify(line)}\n`);
  }

  static message(id, payload = "{}", fields = {}) {
    const origin = { kafka: { topic: "orders", partition: 3, offset: 42 } };
    const numbers = { attempt: 1, recovered: false, lease_ms: 30000 };
    const line = { type: "message", v: 1, id, idempotency_key: "8e03978e", ...numbers, origin, headers: [], payload };
    return { ...line, ...fields };
  }

  give(id, payload, fields) {
    this.send(Process.message(id, payload, fields));
  }

  /** The answers to a batch, in their order. The messages' ids are "a", "b" … */
  async outcomes(...payloads) {
    const messages = payloads.map((payload, place) => Process.message(String.fromCharCode(97 + place), payload));
    this.send({ type: "batch", v: 1, messages });
    const answers = [];
    for (const { id: expected } of messages) {
      const { id, ...answer } = await this.read();
      assert.equal(id, expected);
      answers.push(answer);
    }
    return answers;
  }

  async answer(payload, fields) {
    this.give("17", payload, fields);
    const { id, ...answer } = await this.read();
    assert.equal(id, "17");
    return answer;
  }

  /** The exit code, or the signal, after the end of its input. */
  async end() {
    this.child.stdin.end();
    const [code, signal] = await this.ended;
    return code ?? signal;
  }
}

test("each outcome is answered", async (context) => {
  const process = await Process.worker(
    context,
    `(message) => {
      const order = message.json();
      if (order === "retry") throw new Retry("busy", { delayMs: 500 });
      if (order === "soon") throw new Retry("busy");
      if (order === "later") throw new Later("it opens at nine", { delayMs: 30000 });
      if (order === "sometime") throw new Later("not ready");
      if (order === "dead") throw new DeadLetter("no such account");
      if (order === "bug") throw new TypeError("it is no order");
      if (order === "text") throw "it is no error";
      return order;
    }`,
  );
  assert.deepEqual(process.ready, { type: "ready", v: 1, max_in_flight: 16 });
  for (const [payload, answer] of [
    ['{"a":1}', { outcome: "complete", result: { a: 1 } }],
    ["null", { outcome: "complete" }],
    ['"retry"', { outcome: "retry", reason: "busy", delay_ms: 500 }],
    ['"soon"', { outcome: "retry", reason: "busy" }],
    ['"later"', { outcome: "later", reason: "it opens at nine", delay_ms: 30000 }],
    ['"sometime"', { outcome: "later", reason: "not ready" }],
    ['"dead"', { outcome: "dead-letter", reason: "no such account" }],
    ['"bug"', { outcome: "retry", reason: "TypeError: it is no order" }],
    ['"text"', { outcome: "retry", reason: "'it is no error'" }],
    ["{", { outcome: "dead-letter", reason: "the payload is no JSON" }],
  ]) {
    assert.deepEqual(await process.answer(payload), answer, payload);
  }
  assert.equal(await process.end(), 0);
  assert.equal(process.out, "");
  assert.match(process.err, /TypeError: it is no order/);
});

test("a message has what the line has", async (context) => {
  const process = await Process.worker(
    context,
    `(m) => {
      const hex = (bytes) => bytes?.toString("hex") ?? null;
      const first = [hex(m.payload), m.idempotencyKey, m.attempt, m.recovered, m.leaseMs, m.fencingToken, m.origin];
      return [...first, hex(m.key), m.headers.map(([n, v]) => [n, hex(v)]), m.headersLeftOut, hex(m.header("a"))];
    }`,
  );
  const headers = [["a", "x"], ["a", { base64: "/g==" }], ["b", null]];
  const fields = { payload: undefined, payload_base64: "/w==", key_base64: "/w==", headers, headers_left_out: 1 };
  const origin = { kafka: { topic: "orders", partition: 3, offset: 42 } };
  const values = [["a", "78"], ["a", "fe"], ["b", null]];
  assert.deepEqual(await process.answer("", { ...fields, attempt: 2, recovered: true, fencing_token: 7 }), {
    outcome: "complete",
    result: ["ff", "8e03978e", 2, true, 30000, 7, origin, "ff", values, 1, "fe"],
  });
  const tombstone = (await process.answer(null)).result;
  assert.deepEqual([tombstone[0], tombstone[5], tombstone[7], tombstone[10]], [null, null, null, null]);
  assert.equal((await process.answer("")).result[0], "");
});

test("line separators of Unicode end no line", async (context) => {
  const process = await Process.worker(context, "(message) => message.text()");
  for (const payload of ["a\u2028b", "a\u2029b", "a\u0085b", "a\rb", "ü\n".repeat(100_000)]) {
    assert.deepEqual(await process.answer(payload), { outcome: "complete", result: payload });
  }
});

test("what is printed does not reach the protocol", async (context) => {
  const process = await Process.worker(context, "() => { console.log('charging'); process.stdout.write('written'); }");
  assert.deepEqual(await process.answer(), { outcome: "complete" });
  assert.equal(await process.end(), 0);
  assert.equal(process.out, "");
  assert.match(process.err, /charging\nwritten/);
});

test("a result that cannot be kept is left out", async (context) => {
  const process = await Process.worker(context, "(message) => eval(message.text())");
  for (const result of ["1n", "(() => { const a = []; a.push(a); return a; })()", "'x'.repeat(17_000_000)"]) {
    assert.deepEqual(await process.answer(result), { outcome: "complete" }, result);
  }
  const large = await process.answer("'ü'.repeat(8_000_000)");
  assert.equal(large.result.length, 8_000_000);
  assert.equal(await process.end(), 0);
  assert.equal(process.err.match(/completed without it/g).length, 3);
});

test("whatever the result is, the message is completed", async (context) => {
  const nested = "(() => { let a = []; for (let n = 0; n < 10_000; n++) a = [a]; return a; })()";
  const process = await Process.worker(context, "(message) => eval(message.text())");
  for (const result of [`({ toJSON() { throw null; } })`, `({ toJSON() { throw { get message() { throw 1; } }; } })`]) {
    assert.deepEqual(await process.answer(`(${result})`), { outcome: "complete" }, result);
  }
  assert.equal((await process.answer(nested)).outcome, "complete");
  assert.equal(await process.end(), 0);
});

test("an error without a text is an answer", async (context) => {
  const process = await Process.worker(context, "(message) => { throw eval(message.text()); }");
  for (const error of [
    "Object.create(null)",
    "({ [Symbol.for('nodejs.util.inspect.custom')]() { throw 1; } })",
    "Object.defineProperty(new Error(), 'message', { get() { throw 1; } })",
    "Object.assign(new Retry('x'), { message: { toString() { throw 1; } } })",
  ]) {
    assert.equal((await process.answer(error)).outcome, "retry", error);
  }
  assert.equal(await process.end(), 0);
});

test("messages run at the same time", async (context) => {
  const handler = `(() => {
    const waiting = [];
    return (message) => new Promise((resolve) => {
      waiting.push(resolve);
      if (waiting.length === 3) waiting.forEach((go) => go());
    });
  })()`;
  const process = await Process.worker(context, handler, "{ maxInFlight: 3 }");
  assert.equal(process.ready.max_in_flight, 3);
  for (const id of ["1", "2", "3"]) process.give(id);
  const ids = [await process.read(), await process.read(), await process.read()].map(({ id }) => id);
  assert.deepEqual(ids.sort(), ["1", "2", "3"]);
  assert.equal(await process.end(), 0);
});

test("a cancelled message is answered", async (context) => {
  const handler = `async (message) => {
    const { once } = require("node:events");
    if (!message.signal.aborted) await once(message.signal, "abort");
    message.signal.throwIfAborted();
  }`;
  const process = await Process.worker(context, handler);
  process.give("17");
  process.send({ type: "cancel", id: "17" });
  assert.deepEqual(await process.read(), { id: "17", outcome: "retry", reason: "cancelled" });
  // Too late, or never there.
  process.send({ type: "cancel", id: "17" });
  process.send({ type: "something-new", id: "18" });
  assert.equal(await process.end(), 0);
  assert.equal(process.out, "");
});

test("what runs at the end of input is finished", async (context) => {
  const process = await Process.worker(context, "() => new Promise((resolve) => setImmediate(() => resolve(1)))");
  process.give("17");
  assert.equal(await process.end(), 0);
  assert.deepEqual(JSON.parse(process.out), { id: "17", outcome: "complete", result: 1 });
});

test("SIGTERM ends it", async (context) => {
  const process = await Process.worker(context, "() => new Promise(() => {})");
  process.give("17");
  process.child.kill("SIGTERM");
  assert.equal(await process.end(), "SIGTERM");
});

test("each message of a batch has its own outcome", async (context) => {
  const handler = `async (messages) => {
    const one = async (message) => {
      const order = message.json();
      if (order === "retry") return new Retry("busy", { delayMs: 500 });
      if (order === "later") return new Later("not ready", { delayMs: 1500 });
      if (order === "bug") throw new TypeError("it is no order");
      if (order === "text") throw "it is no error";
      if (order === "big") return 1n;
      return order;
    };
    return messages.map(one);
  }`;
  const process = await Process.worker(context, handler, "{ maxInFlight: 3 }", "batchWorker");
  assert.deepEqual(process.ready, { type: "ready", v: 1, max_in_flight: 3, batches: true });
  assert.deepEqual(await process.outcomes('{"n":1}', '"retry"', '"later"', "{", '"bug"', '"text"', '"big"', "null"), [
    { outcome: "complete", result: { n: 1 } },
    { outcome: "retry", reason: "busy", delay_ms: 500 },
    { outcome: "later", reason: "not ready", delay_ms: 1500 },
    { outcome: "dead-letter", reason: "the payload is no JSON" },
    { outcome: "retry", reason: "TypeError: it is no order" },
    { outcome: "retry", reason: "'it is no error'" },
    { outcome: "complete" },
    { outcome: "complete" },
  ]);
  // What `oncegate run` gives without `batch`, and `worker-test` always.
  assert.deepEqual(await process.answer("1"), { outcome: "complete", result: 1 });
  assert.equal(await process.end(), 0);
  assert.equal(process.out, "");
});

test("what concerns the batch is the outcome of each", async (context) => {
  for (const [handler, outcome, reason] of [
    ["() => { throw new Error('the database is away'); }", "retry", /^Error: the database is away$/],
    ["async () => { throw new Later('not yet'); }", "later", /^not yet$/],
    ["() => { throw new DeadLetter('no'); }", "retry", /^no$/],
    ["() => [1, 2, 3]", "retry", /^RangeError: the handler returned 3 outcomes for 2 messages$/],
    ["() => ({ a: 1, b: 2 })", "retry", /^TypeError: the handler returns an array/],
    ["() => [, ,]", "complete", /^undefined$/],
    ["() => {}", "complete", /^undefined$/],
  ]) {
    const process = await Process.worker(context, handler, "{}", "batchWorker");
    const answers = await process.outcomes("1", "2");
    for (const answer of answers) {
      assert.equal(answer.outcome, outcome, handler);
      assert.match(String(answer.reason), reason);
    }
    // The process goes on, and an error of one message is its own.
    const [alone] = await process.outcomes("3");
    assert.equal(alone.outcome, handler.includes("DeadLetter") ? "dead-letter" : handler === "() => [, ,]" ? "retry" : outcome);
    assert.equal(await process.end(), 0);
  }
});

test("a batch is cancelled when each of its messages is", async (context) => {
  const handler = `async ([first, second]) => {
    const { once } = require("node:events");
    console.log(first.signal === second.signal);
    await once(first.signal, "abort");
    first.signal.throwIfAborted();
  }`;
  const process = await Process.worker(context, handler, "{ maxInFlight: 2 }", "batchWorker");
  process.send({ type: "batch", v: 1, messages: [Process.message("a"), Process.message("b")] });
  process.send({ type: "cancel", id: "a" });
  process.send({ type: "cancel", id: "a" });
  // A batch that begins later shows that the first cancellation was read.
  process.send({ type: "batch", v: 1, messages: [Process.message("c"), Process.message("d")] });
  while (process.err.split("true").length < 3) await once(process.child.stderr, "data");
  assert.equal(process.out, "");
  for (const id of ["b", "c", "d"]) process.send({ type: "cancel", id });
  const ids = [];
  for (let left = 4; left > 0; left--) {
    const { id, ...answer } = await process.read();
    assert.deepEqual(answer, { outcome: "retry", reason: "cancelled" });
    ids.push(id);
  }
  assert.deepEqual(ids.sort(), ["a", "b", "c", "d"]);
  assert.equal(await process.end(), 0);
  assert.equal(process.out, "");
});

test("a handler can be tested as a function", () => {
  const charge = (message) => message.json().order_id;
  assert.equal(charge(new Message({ payload: Buffer.from('{"order_id":"A-7"}') })), "A-7");
  for (const payload of [null, Buffer.from("{"), Buffer.from([0xff])]) {
    assert.throws(() => charge(new Message({ payload })), DeadLetter);
  }
});

test("wrong arguments are refused", async () => {
  for (const delayMs of [-1, NaN, Infinity]) {
    for (const Outcome of [Retry, Later]) assert.throws(() => new Outcome("busy", { delayMs }), RangeError);
  }
  for (const make of [worker, batchWorker]) {
    await assert.rejects(make(() => {}, { maxInFlight: 0 }), RangeError);
    await assert.rejects(make("charge"), TypeError);
  }
});

/** The launcher in a folder of packages, where the platform's program is a shell script. */
function installed(context, script) {
  const folder = mkdtempSync(join(tmpdir(), "oncegate-"));
  context.after(() => rmSync(folder, { recursive: true }));
  const modules = join(folder, "node_modules");
  const platform = join(modules, `oncegate-${process.platform}-${process.arch}`);
  mkdirSync(platform, { recursive: true });
  // A copy would do as well; a link is resolved to the sources, which have no packages beside them.
  mkdirSync(join(modules, "oncegate"));
  for (const name of ["program.js", "bin"]) {
    cpSync(join(PACKAGE, name), join(modules, "oncegate", name), { recursive: true });
  }
  if (script) {
    writeFileSync(join(platform, "oncegate"), `#!/bin/sh\n${script}\n`);
    chmodSync(join(platform, "oncegate"), 0o755);
  }
  return join(modules, "oncegate", "bin", "oncegate.js");
}

test("the command passes on arguments, standard input and the exit code", async (context) => {
  const launcher = installed(context, 'echo "$@"; cat; exit 65');
  const started = new Process(context, process.execPath, launcher, "key", "--json");
  started.child.stdin.write("payload\n");
  assert.equal(await started.end(), 65);
  assert.equal(started.out, "key --json\npayload\n");
});

test("the command passes SIGTERM on, and ends when the program has ended", async (context) => {
  const script = 'trap "echo terminated; exit 0" TERM; echo started; while :; do sleep 0.01; done';
  const started = new Process(context, process.execPath, installed(context, script), "run");
  assert.equal(await started.line(), "started");
  // In a terminal the program gets this one by itself.
  started.child.kill("SIGINT");
  started.child.kill("SIGTERM");
  assert.equal(await started.line(), "terminated");
  assert.equal(await started.end(), 0);
});

/** A folder of PATH that has this launcher as npm puts it there, and nothing else. */
function folderWith(context, launcher) {
  const folder = mkdtempSync(join(tmpdir(), "oncegate-"));
  context.after(() => rmSync(folder, { recursive: true }));
  symlinkSync(launcher, join(folder, "oncegate"));
  return folder;
}

test("without a program the command says so", async (context) => {
  const launcher = installed(context, null);
  const path = `PATH=${folderWith(context, launcher)}`;
  const started = new Process(context, "env", path, process.execPath, launcher, "run");
  assert.equal(await started.end(), 78);
  assert.match(started.err, /oncegate-.* is not installed/);
});

test("without the platform's package the program is the one in PATH", async (context) => {
  const launcher = installed(context, null);
  const folder = mkdtempSync(join(tmpdir(), "oncegate-"));
  context.after(() => rmSync(folder, { recursive: true }));
  writeFileSync(join(folder, "oncegate"), '#!/bin/sh\necho "$@"\n');
  chmodSync(join(folder, "oncegate"), 0o755);
  const path = `PATH=${folderWith(context, launcher)}:${folder}`;
  const started = new Process(context, "env", path, process.execPath, launcher, "key", "--json");
  assert.equal(await started.end(), 0);
  assert.equal(started.out, "key --json\n");
});
