# A worker with the library of the package `oncegate`: oncegate run --handler-exec 'python3 worker.py LEDGER'
import sys

from oncegate import DeadLetter, Message, worker

@worker
def charge(message: Message) -> dict[str, str]:
    order = message.json()
    if not isinstance(order, dict) or "order_id" not in order:
        raise DeadLetter("it is no order")
    with open(sys.argv[1], "a") as ledger:
        ledger.write(f"{order['order_id']}\n")
    return {"charged": order["order_id"]}

charge.run()
