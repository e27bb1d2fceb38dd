// A worker of `oncegate run --handler-exec 'node worker_stdio.js LEDGER'`, without a library; worker.js uses one.
const fs = require("node:fs");
const say = (line) => process.stdout.write(JSON.stringify(line) + "\n");

say({ type: "ready", v: 1, max_in_flight: 8 });
function handle(message) {
  const { id } = message;
  try {
    const order = JSON.parse(message.payload);
    fs.appendFileSync(process.argv[2], `${order.order_id}\n`);
    say({ id, outcome: "complete", result: { charged: order.order_id } });
  } catch (error) {
    const outcome = error instanceof SyntaxError ? "dead-letter" : "retry";
    say({ id, outcome, reason: error.message });
  }
}

let begun = "";
process.stdin.setEncoding("utf8").on("data", (chunk) => {
  // Only a line feed ends a line: node:readline ends one at U+2028, too, which may be in a payload.
  const lines = chunk.split("\n");
  lines[0] = begun + lines[0];
  begun = lines.pop();
  const messages = lines.map((line) => JSON.parse(line));
  messages.filter(({ type }) => type === "message").forEach(handle);
});
