// A worker of `oncegate run --handler-exec 'node worker_stdio.js LEDGER'`, without a library; worker.js uses one.
const fs = require("node:fs"), readline = require("node:readline");
const say = (line) => process.stdout.write(JSON.stringify(line) + "\n");

say({ type: "ready", v: 1, max_in_flight: 8 });
readline.createInterface({ input: process.stdin }).on("line", (line) => {
  const message = JSON.parse(line), { id } = message;
  if (message.type !== "message") return;
  try {
    const order = JSON.parse(message.payload);
    fs.appendFileSync(process.argv[2], `${order.order_id}\n`);
    say({ id, outcome: "complete", result: { charged: order.order_id } });
  } catch (error) {
    const outcome = error instanceof SyntaxError ? "dead-letter" : "retry";
    say({ id, outcome, reason: error.message });
  }
});
