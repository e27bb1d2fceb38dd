# A worker of `oncegate run --batch-messages 100 --handler http://127.0.0.1:PORT/`: python3 batch_http.py PORT LEDGER
import http.server, json, sys

def order_id(message):
    found = json.loads(message["payload"])["order_id"]
    if not isinstance(found, str):
        raise TypeError(found)
    return found

class Worker(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        messages = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        rows, answers = [], []
        for message in messages:
            try:
                rows.append(order_id(message))
                answers.append({"id": message["id"], "outcome": "complete"})
            except (ValueError, KeyError, TypeError):
                answers.append({"id": message["id"], "outcome": "dead-letter", "reason": "it is no order"})
        with open(sys.argv[2], "a") as ledger:  # one write for the whole batch
            ledger.write("".join(f"{row}\n" for row in rows))
        body = json.dumps(answers).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass

http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Worker).serve_forever()
