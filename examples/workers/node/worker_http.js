// A worker of `oncegate run --handler http://127.0.0.1:PORT/`: node worker_http.js PORT LEDGER
const fs = require("node:fs"), http = require("node:http");

const worker = http.createServer(async (request, response) => {
  const answer = (status, body) =>
    response.writeHead(status, { "content-type": "application/json" }).end(JSON.stringify(body));
  try {
    const chunks = [];
    for await (const chunk of request) chunks.push(chunk);
    const order = JSON.parse(Buffer.concat(chunks).toString());
    fs.appendFileSync(process.argv[3], `${order.order_id}\n`);
    answer(200, { charged: order.order_id });
  } catch (error) {
    answer(error instanceof SyntaxError ? 400 : 500, { title: error.message }); // 400: it is given up
  }
});
worker.listen(Number(process.argv[2]), "127.0.0.1");
