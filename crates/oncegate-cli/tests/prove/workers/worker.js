// A worker of `oncegate prove` with one of several planted bugs: node worker.js BUG
const readline = require("readline");
const { randomUUID } = require("crypto");

const bug = process.argv[2];
const cancelled = new Set();
let current = null;

async function post(order, key, step = "") {
  const headers = { "content-type": "application/json" };
  if (key !== undefined) headers["idempotency-key"] = key;
  const body = JSON.stringify({ order: order.order_id, amount: order.amount, currency: order.currency });
  const answer = await fetch(`${process.env.ONCEGATE_DOWNSTREAM}/effects${step}`, { method: "POST", headers, body });
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  return (await answer.json()).receipt;
}

const handlers = {
  right: async (order, message) => ({ receipt: await post(order, message.idempotency_key) }),

  twoSteps: async (order, message) => {
    const receipt = await post(order, `${message.idempotency_key}-charge`, "/charge");
    await post(order, `${message.idempotency_key}-mail`, "/mail");
    return { receipt };
  },

  noDownstreamKey: async (order) => ({ receipt: await post(order) }),

  keyWithTime: async (order) => ({ receipt: await post(order, `${order.order_id}-${Date.now()}-${process.pid}`) }),

  randomKey: async (order) => ({ receipt: await post(order, randomUUID()) }),

  oneKeyForTwoSteps: async (order, message) => {
    const receipt = await post(order, message.idempotency_key, "/charge");
    await post(order, message.idempotency_key, "/mail");
    return { receipt };
  },

  forgetsToAwait: async (order, message) => {
    setTimeout(() => post(order, message.idempotency_key).catch(() => {}), 20);
    return { accepted: true };
  },

  ignoresTheStatus: async (order, message) => {
    const receipt = await post(order, message.idempotency_key).catch(() => null);
    return { done: receipt !== undefined };
  },

  sharesAVariable: async (order, message) => {
    current = order;
    await new Promise((resume) => setTimeout(resume, 20));
    return { receipt: await post(current, message.idempotency_key) };
  },

  chargesAfterCancel: async (order, message) => {
    await post(order, undefined, "/reserve");
    if (cancelled.has(message.id)) return { receipt: await post(order, undefined, "/late") };
    return { receipt: await post(order, undefined, "/capture") };
  },

  returnsTheTime: async (order, message) => ({
    receipt: await post(order, message.idempotency_key),
    at: `${process.hrtime.bigint()}`,
  }),
};

async function answer(message) {
  let order;
  try {
    order = JSON.parse(message.payload);
  } catch {
    return { outcome: "dead-letter", reason: "no JSON" };
  }
  try {
    return { outcome: "complete", result: await handlers[bug](order, message) };
  } catch (error) {
    return { outcome: "retry", reason: "the call failed", delay_ms: 50 };
  }
}

console.log(JSON.stringify({ type: "ready", v: 1, max_in_flight: 4 }));
readline.createInterface({ input: process.stdin }).on("line", async (line) => {
  const message = JSON.parse(line);
  if (message.type === "cancel") cancelled.add(message.id);
  if (message.type !== "message") return;
  console.log(JSON.stringify({ id: message.id, ...(await answer(message)) }));
});
