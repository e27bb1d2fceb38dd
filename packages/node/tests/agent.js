"use strict";
// Does what scripts/clients says, with the client of this package: commands and events are lines of JSON.
const fs = require("node:fs");
const readline = require("node:readline");
const { Client, DeadLetter, Later, OnceError } = require("../functions.js");

const [scope, ledgerPath] = process.argv.slice(2);
const ledger = fs.openSync(ledgerPath, "a");
const patienceMs = 1000 * Number(process.env.AGENT_PATIENCE ?? "10");
const client = new Client({ scope, patienceMs });
const sleep = (ms = 0) => new Promise((resolve) => setTimeout(resolve, ms));
const say = (command, event) => process.stdout.write(`${JSON.stringify({ id: command.id, ...event })}\n`);

async function work(command, attempt) {
  const { number, recovered, signal } = attempt;
  say(command, { began: true, attempt: number, recovered, fenced: attempt.fencingToken !== null });
  await sleep(command.ms);
  const entry = { effect: command.id, pid: process.pid, attempt: number, key: command.key };
  fs.writeSync(ledger, `\n${JSON.stringify(entry)}\n`);
  fs.fsyncSync(ledger);
  while (command.until && !fs.existsSync(command.until)) {
    if (signal.aborted && !command.ignores) {
      say(command, { cancelled: true });
      throw signal.reason;
    }
    if (command.work !== "compute") await sleep(10);
  }
  await sleep(command.ms);
  if (command.work === "raise") throw new TypeError("the bank is closed");
  if (command.work === "permanent") throw new DeadLetter("no such user");
  if (command.work === "later") throw new Later("not yet", { delayMs: 0 });
  return command.bytes === undefined ? command.result : Buffer.from(command.bytes, "base64");
}

async function call(command) {
  const { arguments: args, function: name, wait_ms: waitMs, lease_ms: leaseMs } = command;
  const options = { arguments: args, function: name, waitMs, leaseMs };
  try {
    const result = await client.once(command.key, (attempt) => work(command, attempt), options);
    say(command, Buffer.isBuffer(result) ? { bytes: result.toString("base64") } : { done: result ?? null });
  } catch (error) {
    say(command, { error: error instanceof OnceError ? error.name : "thrown", detail: error.message });
  }
}

const running = [];
const lines = readline.createInterface({ input: process.stdin });
lines.on("line", (line) => running.push(call(JSON.parse(line))));
lines.on("close", async () => {
  await Promise.all(running);
  await client.close();
});
