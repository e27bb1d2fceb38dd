# A worker of `oncegate run --handler http://127.0.0.1:PORT/`: python3 worker_http.py PORT LEDGER
import http.server, json, sys

class Worker(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        order = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with open(sys.argv[2], "a") as ledger:
            ledger.write(f"{order['order_id']}\n")
        receipt = json.dumps({"charged": order["order_id"]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(receipt)))
        self.end_headers()
        self.wfile.write(receipt)
    def log_message(self, *_):
        pass

http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Worker).serve_forever()
