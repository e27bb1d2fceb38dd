# A worker of `oncegate run --handler http://127.0.0.1:PORT/`: python3 worker_http.py PORT LEDGER
import http.server, json, sys

class Worker(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        try:
            order = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["order_id"]
        except (ValueError, KeyError, TypeError):
            return self.answer(400, {"title": "It is no order"})  # given up: it will never be one
        with open(sys.argv[2], "a") as ledger:
            ledger.write(f"{order}\n")
        self.answer(200, {"charged": order})
    def answer(self, status, body):
        body = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json" if status == 200 else "application/problem+json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass

http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Worker).serve_forever()
