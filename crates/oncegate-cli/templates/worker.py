# A worker of oncegate. It gets each order once, as a line of JSON on standard input, and answers with a line of JSON.
import json
import os
import sys
import traceback
import urllib.request

# Set by `oncegate prove`, which tries this worker: the address of what stands for your bank.
DOWNSTREAM = os.environ.get("ONCEGATE_DOWNSTREAM")


def charge(order, idempotency_key):
    # Your effect. The key is the same in every attempt for this order: pass it to the systems that you call.
    if DOWNSTREAM:
        headers = {"Content-Type": "application/json", "Idempotency-Key": idempotency_key}
        request = urllib.request.Request(f"{DOWNSTREAM}/effects", json.dumps(order).encode(), headers)
        with urllib.request.urlopen(request, timeout=10) as response:
            return json.load(response)
    with open("charges.txt", "a") as charges:
        charges.write(f"{order['order_id']} {order['amount']}\n")
    return {"charged": order["order_id"]}


def answer(message):
    try:
        order = json.loads(message["payload"])
        order = {"order_id": order["order_id"], "amount": order["amount"]}
    except (ValueError, KeyError, TypeError) as error:
        return {"outcome": "dead-letter", "reason": f"it is no order: {error!r}"}
    try:
        return {"outcome": "complete", "result": charge(order, message["idempotency_key"])}
    except Exception as error:
        traceback.print_exc()
        return {"outcome": "retry", "reason": type(error).__name__}


# The answers keep standard output for themselves. What else is printed goes to standard error, and oncegate writes
# that into its log.
answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
os.dup2(2, 1)


def say(line):
    text = json.dumps(line, allow_nan=False)
    print(text, file=answers, flush=True)


say({"type": "ready", "v": 1})
for line in sys.stdin.buffer:
    message = json.loads(line)
    # The other type is "cancel": this worker handles one message at a time, so it has answered by then.
    if message["type"] == "message":
        outcome = answer(message)
        try:
            say({"id": message["id"], **outcome})
        except Exception:
            # The order is charged, so it must not run again because its result is no JSON.
            traceback.print_exc()
            say({"id": message["id"], "outcome": outcome["outcome"]})
