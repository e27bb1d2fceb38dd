# A worker of `oncegate prove --handler`: python3 http.py PORT BUG
import http.server, json, os, sys, urllib.request


class Worker(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            if "Oncegate-Batch" in self.headers:
                self.reply(200, json.dumps([self.outcome(message) for message in body]).encode())
            else:
                self.reply(200, self.charge(body, self.headers["Idempotency-Key"]))
        except OSError:
            # Its own word: without it, a gateway may have said 503.
            self.reply(503, b"{}", "retry")

    def outcome(self, message):
        try:
            result = json.loads(self.charge(json.loads(message["payload"]), message["idempotency_key"]))
            return {"id": message["id"], "outcome": "complete", "result": result}
        except OSError:
            return {"id": message["id"], "outcome": "retry"}

    def charge(self, order, key):
        body = json.dumps({"order": order["order_id"], "amount": order["amount"], "currency": order["currency"]})
        url = os.environ["ONCEGATE_DOWNSTREAM"] + "/effects"
        request = urllib.request.Request(url, data=body.encode(), method="POST")
        if sys.argv[2] == "right":
            request.add_header("Idempotency-Key", key)
        with urllib.request.urlopen(request) as answer:
            return answer.read()

    def reply(self, status, body, outcome=None):
        self.send_response(status)
        if outcome:
            self.send_header("Oncegate-Outcome", outcome)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Worker).serve_forever()
