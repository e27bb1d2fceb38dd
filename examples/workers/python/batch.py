# A worker with the library of the package `oncegate`, for batches:
# oncegate run --batch-messages 100 --handler-exec 'python3 batch.py LEDGER'
from __future__ import annotations

import sys

from oncegate import DeadLetter, Message, batch_worker

def charged(message: Message) -> dict[str, str] | DeadLetter:
    try:
        order_id = message.json()["order_id"]
    except (DeadLetter, KeyError, TypeError):
        order_id = None
    return {"charged": order_id} if isinstance(order_id, str) else DeadLetter("it is no order")

@batch_worker
def charge(batch: list[Message]) -> list[dict[str, str] | DeadLetter]:
    outcomes = [charged(message) for message in batch]
    rows = [outcome["charged"] for outcome in outcomes if not isinstance(outcome, DeadLetter)]
    with open(sys.argv[1], "a") as ledger:  # one write for the whole batch
        ledger.write("".join(f"{row}\n" for row in rows))
    return outcomes

charge.run()
