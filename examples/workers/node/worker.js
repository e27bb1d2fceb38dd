// A worker with the library of the package `oncegate`: oncegate run --handler-exec 'node worker.js LEDGER'
const { appendFile } = require("node:fs/promises");
const { DeadLetter, worker } = require("oncegate");

worker(async (message) => {
  const order = message.json();
  if (!order?.order_id) throw new DeadLetter("it is no order");
  await appendFile(process.argv[2], `${order.order_id}\n`);
  return { charged: order.order_id };
});
