# A worker of `oncegate run --handler-exec 'python3 worker_stdio.py LEDGER'`
import json, sys

print(json.dumps({"type": "ready", "v": 1}), flush=True)
for line in sys.stdin:
    message = json.loads(line)
    if message["type"] == "message":
        order = json.loads(message["payload"])
        with open(sys.argv[1], "a") as ledger:
            ledger.write(f"{order['order_id']}\n")
        receipt = {"charged": order["order_id"]}
        print(json.dumps({"id": message["id"], "outcome": "complete", "result": receipt}), flush=True)
