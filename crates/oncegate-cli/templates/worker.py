# A worker of oncegate. It gets each order once, as a line of JSON on standard input, and answers with a line on
# standard output. So print to standard error; oncegate writes that into its log.
import json
import sys


def charge(order, idempotency_key):
    # Your effect. The key is the same in every attempt for this order: pass it to the systems that you call.
    with open("charges.txt", "a") as charges:
        charges.write(f"{order['order_id']} {order['amount']}\n")
    return {"charged": order["order_id"]}


def answer(message):
    try:
        order = json.loads(message["payload"])
        return {"outcome": "complete", "result": charge(order, message["idempotency_key"])}
    except OSError as error:
        return {"outcome": "retry", "reason": str(error)}
    except (ValueError, KeyError, TypeError) as error:
        return {"outcome": "dead-letter", "reason": f"it is no order: {error!r}"}


print(json.dumps({"type": "ready", "v": 1}), flush=True)
for line in sys.stdin:
    message = json.loads(line)
    # The other type is "cancel": this worker handles one message at a time, so it has answered by then.
    if message["type"] == "message":
        print(json.dumps({"id": message["id"], **answer(message)}), flush=True)
