# A worker of `oncegate run --handler-exec 'python3 worker_stdio.py LEDGER'`, without a library; worker.py uses one.
import json, sys

print(json.dumps({"type": "ready", "v": 1}), flush=True)
for line in sys.stdin:
    message = json.loads(line)
    if message["type"] == "message":
        try:
            order = json.loads(message["payload"])["order_id"]
            with open(sys.argv[1], "a") as ledger:
                ledger.write(f"{order}\n")
            answer = {"outcome": "complete", "result": {"charged": order}}
        except (ValueError, KeyError, TypeError):
            answer = {"outcome": "dead-letter", "reason": "it is no order"}
        print(json.dumps({"id": message["id"], **answer}), flush=True)
