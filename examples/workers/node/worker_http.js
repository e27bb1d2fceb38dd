// A worker of `oncegate run --handler http://127.0.0.1:PORT/`: node worker_http.js PORT LEDGER
const fs = require("node:fs"), http = require("node:http");

const worker = http.createServer(async (request, response) => {
  const chunks = [];
  for await (const chunk of request) chunks.push(chunk);
  const order = JSON.parse(Buffer.concat(chunks).toString());
  fs.appendFileSync(process.argv[3], `${order.order_id}\n`);
  response.writeHead(200, { "content-type": "application/json" });
  response.end(JSON.stringify({ charged: order.order_id }));
});
worker.listen(Number(process.argv[2]), "127.0.0.1");
