// A worker of oncegate. It gets each order once, as a line of JSON on standard input, and answers with a line on
// standard output. So print to standard error; oncegate writes that into its log.
const fs = require("node:fs");
const readline = require("node:readline");

async function charge(order, idempotencyKey) {
  // Your effect. The key is the same in every attempt for this order: pass it to the systems that you call.
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
    return { outcome: "retry", reason: error.message };
  }
}

const say = (line) => process.stdout.write(JSON.stringify(line) + "\n");
say({ type: "ready", v: 1, max_in_flight: 8 });
readline.createInterface({ input: process.stdin }).on("line", async (line) => {
  const message = JSON.parse(line);
  // The other type is "cancel": the answer to a cancelled message is ignored.
  if (message.type === "message") say({ id: message.id, ...(await answer(message)) });
});
