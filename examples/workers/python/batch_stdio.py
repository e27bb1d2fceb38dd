# A worker of `oncegate run --batch-messages 100 --handler-exec 'python3 batch_stdio.py LEDGER'`
import json, sys

def order_id(message):
    found = json.loads(message["payload"])["order_id"]
    if not isinstance(found, str):
        raise TypeError(found)
    return found

print(json.dumps({"type": "ready", "v": 1, "batches": True}), flush=True)
for line in sys.stdin:
    batch = json.loads(line)
    if batch["type"] == "batch":
        rows, answers = [], []
        for message in batch["messages"]:
            try:
                rows.append(order_id(message))
                answers.append({"id": message["id"], "outcome": "complete"})
            except (ValueError, KeyError, TypeError):
                answers.append({"id": message["id"], "outcome": "dead-letter", "reason": "it is no order"})
        with open(sys.argv[1], "a") as ledger:  # one write for the whole batch
            ledger.write("".join(f"{row}\n" for row in rows))
        print(json.dumps(answers), flush=True)
