"use strict";
// The thread of a client in functions.js that extends its claims: a function that computes does not hold it up.
const { parentPort, workerData } = require("node:worker_threads");
const { now, post } = require("./functions.js").internal;

/** The parts of a lease after which it is extended, and for which it must not be used any more at its end. */
const EXTENDS = 3;
const MARGINS = 6;
/** The most claims in one request. */
const MOST = 1000;

/** The claims, each with its lease and the times of this thread. */
const held = new Map();
let timer;

parentPort.on("message", ({ add, remove, leaseMs, sentAt }) => {
  held.delete(remove);
  if (add) {
    held.set(add, { leaseMs, validUntil: sentAt + leaseMs, extendAt: sentAt + leaseMs / EXTENDS, isLost: false });
  }
  schedule();
});

function schedule() {
  clearTimeout(timer);
  if (held.size === 0) return;
  const next = Math.min(...[...held.values()].map(nextOf));
  if (next < Infinity) timer = setTimeout(round, Math.max(1, next - now()));
}

/** When a claim is to be extended, or to be told of as lost. */
function nextOf({ leaseMs, validUntil, extendAt, isLost }) {
  return isLost ? extendAt : Math.min(extendAt, validUntil - leaseMs / MARGINS);
}

function lose(claim, of) {
  if (of.isLost) return;
  of.isLost = true;
  parentPort.postMessage(claim);
}

async function round() {
  const sentAt = now();
  for (const [claim, of] of held) {
    if (sentAt >= of.validUntil - of.leaseMs / MARGINS) lose(claim, of);
  }
  const due = [...held].filter(([, { extendAt }]) => extendAt <= sentAt).slice(0, MOST);
  if (due.length > 0) {
    const shortest = Math.min(...due.map(([, { leaseMs }]) => leaseMs));
    const claims = due.map(([claim]) => claim);
    // Until it is answered, it is not sent again, and its loss is told in time.
    for (const [, of] of due) of.extendAt = Infinity;
    schedule();
    const { status, answer } = await post(workerData, "/v1/claims/extend", { claims }, Math.max(50, shortest / EXTENDS));
    due.forEach(([claim, of], at) => {
      const state = status === 200 ? answer.claims?.[at]?.state : "unknown";
      if (state === "extended") {
        of.validUntil = sentAt + of.leaseMs;
        of.extendAt = sentAt + of.leaseMs / EXTENDS;
      } else if (state === "unknown" || state === undefined) {
        of.extendAt = now() + of.leaseMs / 20;
      } else {
        of.extendAt = Infinity;
        lose(claim, of);
      }
    });
  }
  schedule();
}
