// A worker with an empty effect, behind HTTP: node worker.js PORT
const http = require("node:http");

const worker = http.createServer(async (request, response) => {
  const chunks = [];
  for await (const chunk of request) chunks.push(chunk);
  response.end();
});
worker.listen(Number(process.argv[2]), "127.0.0.1");
