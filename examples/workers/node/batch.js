// A worker with the library of the package `oncegate`, for batches:
// oncegate run --batch-messages 100 --handler-exec 'node batch.js LEDGER'
const { appendFile } = require("node:fs/promises");
const { DeadLetter, batchWorker } = require("oncegate");

function charged(message) {
  try {
    const { order_id } = message.json();
    if (typeof order_id === "string") return { charged: order_id };
  } catch {}
  return new DeadLetter("it is no order");
}

batchWorker(async (messages) => {
  const outcomes = messages.map(charged);
  const rows = outcomes.filter((outcome) => outcome.charged).map((outcome) => `${outcome.charged}\n`);
  await appendFile(process.argv[2], rows.join("")); // one write for the whole batch
  return outcomes;
});
