// A worker of oncegate. It gets each order once, as a line of JSON on standard input, and answers with a line of JSON.
const fs = require("node:fs");

// Set by `oncegate prove`, which tries this worker: the address of what stands for your bank.
const downstream = process.env.ONCEGATE_DOWNSTREAM;

async function charge(order, idempotencyKey) {
  // Your effect. The key is the same in every attempt for this order: pass it to the systems that you call.
  if (downstream) {
    const headers = { "Content-Type": "application/json", "Idempotency-Key": idempotencyKey };
    const response = await fetch(`${downstream}/effects`, { method: "POST", headers, body: JSON.stringify(order) });
    if (!response.ok) throw new Error(`the bank answers with status ${response.status}`);
    return response.json();
  }
  await fs.promises.appendFile("charges.txt", `${order.order_id} ${order.amount}\n`);
  return { charged: order.order_id };
}

async function answer(message) {
  let order;
  try {
    order = JSON.parse(message.payload);
  } catch (error) {
    return { outcome: "dead-letter", reason: `it is no order: ${error.name}` };
  }
  try {
    return { outcome: "complete", result: await charge(order, message.idempotency_key) };
  } catch (error) {
    console.error(error);
    return { outcome: "retry", reason: String(error?.message) };
  }
}

// The answers keep standard output for themselves. What else is printed goes to standard error, and oncegate writes
// that into its log.
const write = process.stdout.write.bind(process.stdout);
process.stdout.write = process.stderr.write.bind(process.stderr);
const say = (line) => write(JSON.stringify(line) + "\n");

async function handle(message) {
  const outcome = await answer(message);
  try {
    say({ id: message.id, ...outcome });
  } catch (error) {
    // The order is charged, so it must not run again because its result is no JSON.
    console.error(error);
    say({ id: message.id, outcome: outcome.outcome });
  }
}

say({ type: "ready", v: 1, max_in_flight: 8 });
let begun = "";
process.stdin.setEncoding("utf8").on("data", (chunk) => {
  // Only a line feed ends a line: node:readline ends one at U+2028, too, which may be in a payload.
  const lines = chunk.split("\n");
  lines[0] = begun + lines[0];
  begun = lines.pop();
  for (const line of lines) {
    const message = JSON.parse(line);
    // The other type is "cancel": the answer to a cancelled message is ignored.
    if (message.type === "message") handle(message);
  }
});
