# A worker of `oncegate prove` that takes batches, with one of several planted bugs: python3 batches.py BUG
import json, os, sys, urllib.request
from concurrent.futures import ThreadPoolExecutor, as_completed

DOWNSTREAM = os.environ["ONCEGATE_DOWNSTREAM"]
RETRY = {"outcome": "retry", "reason": "a call failed", "delay_ms": 50}
pool = ThreadPoolExecutor(8)


def post(order, key):
    body = json.dumps({"order": order["order_id"], "amount": order["amount"], "currency": order["currency"]})
    request = urllib.request.Request(DOWNSTREAM + "/effects", data=body.encode(), method="POST")
    request.add_header("Content-Type", "application/json")
    if key is not None:
        request.add_header("Idempotency-Key", key)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["receipt"]


def outcome(message, key):
    try:
        return {"outcome": "complete", "result": {"receipt": post(json.loads(message["payload"]), key)}}
    except (json.JSONDecodeError, KeyError) as error:
        return {"outcome": "dead-letter", "reason": type(error).__name__}
    except Exception:
        return RETRY


def charged(message):
    return outcome(message, message["idempotency_key"])


def right(batch):
    return pool.map(charged, batch)


def one_after_the_other(batch):
    return map(charged, batch)


def whole_batch_again_with_keys(batch):
    outcomes = list(pool.map(charged, batch))
    return [RETRY] * len(batch) if RETRY in outcomes else outcomes


def whole_batch_again_without_keys(batch):
    outcomes = list(pool.map(lambda message: outcome(message, None), batch))
    return [RETRY] * len(batch) if RETRY in outcomes else outcomes


def one_key_for_the_batch(batch):
    return pool.map(lambda message: outcome(message, batch[0]["idempotency_key"]), batch)


def first_outcome_for_all(batch):
    outcomes = list(pool.map(charged, batch))
    return [outcomes[0]] * len(batch)


def outcomes_in_order_of_completion(batch):
    calls = [pool.submit(charged, message) for message in batch]
    return [call.result() for call in as_completed(calls)]


handle = globals()[sys.argv[1]]
print(json.dumps({"type": "ready", "v": 1, "batches": True}), flush=True)
for line in sys.stdin:
    line = json.loads(line)
    if line["type"] == "batch":
        answers = [{"id": message["id"], **answer} for message, answer in zip(line["messages"], handle(line["messages"]))]
        print(json.dumps(answers), flush=True)
