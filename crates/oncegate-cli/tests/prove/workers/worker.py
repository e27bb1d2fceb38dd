# A worker of `oncegate prove` with one of several planted bugs: python3 worker.py BUG
import json, os, sys, threading, time, urllib.error, urllib.request, uuid

DOWNSTREAM = os.environ["ONCEGATE_DOWNSTREAM"]
BUG = sys.argv[1]
seen, before = set(), []


def post(order, key=None, step=""):
    body = json.dumps({"order": order["order_id"], "amount": order["amount"], "currency": order["currency"]})
    request = urllib.request.Request(DOWNSTREAM + "/effects" + step, data=body.encode(), method="POST")
    request.add_header("Content-Type", "application/json")
    if key is not None:
        request.add_header("Idempotency-Key", key)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["receipt"]


def right(order, message):
    return {"receipt": post(order, message["idempotency_key"])}


def no_downstream_key(order, message):
    return {"receipt": post(order)}


def key_with_attempt(order, message):
    return {"receipt": post(order, f"{message['idempotency_key']}-{message['attempt']}")}


def key_with_time(order, message):
    return {"receipt": post(order, f"{order['order_id']}-{time.time()}")}


def random_key(order, message):
    return {"receipt": post(order, str(uuid.uuid4()))}


def key_of_position(order, message):
    position = message["origin"]["kafka"]
    return {"receipt": post(order, f"{position['topic']}-{position['offset']}")}


def body_with_attempt(order, message):
    return {"receipt": post({**order, "amount": order["amount"] + message["attempt"] - 1}, message["idempotency_key"])}


def slow_no_downstream_key(order, message):
    time.sleep(1)
    return {"receipt": post(order)}


def one_key_for_all(order, message):
    return {"receipt": post(order, "charge")}


def swallows_errors(order, message):
    try:
        return right(order, message)
    except Exception:
        return {"receipt": None}


def no_answer_is_success(order, message):
    try:
        post(order, message["idempotency_key"])
    except urllib.error.HTTPError:
        raise
    except Exception:
        pass
    return {"charged": True}


def gives_up(order, message):
    try:
        return right(order, message)
    except Exception as error:
        raise GiveUp(str(error))


def marks_before_effect(order, message):
    if message["idempotency_key"] in seen:
        return {"seen": True}
    seen.add(message["idempotency_key"])
    return right(order, message)


def answers_before_effect(order, message):
    threading.Timer(0.05, right, [order, message]).start()
    return {"accepted": True}


def random_result(order, message):
    return {**right(order, message), "id": str(uuid.uuid4())}


def message_before(order, message):
    before.append(order)
    return right(before[-2] if len(before) > 1 else order, message)


def retries_in_place(order, message):
    for _ in range(3):
        try:
            return {"receipt": post(order)}
        except Exception:
            pass
    raise RuntimeError("three calls failed")


def skips_older(order, message):
    if seen and order["order_id"] < max(seen):
        return {"older": True}
    seen.add(order["order_id"])
    return right(order, message)


def ignores_end_of_input(order, message):
    return right(order, message)


def of_topic_orders(order, message):
    if message["origin"]["kafka"]["topic"] != "orders":
        raise GiveUp("another topic")
    return right(order, message)


def silent(order, message):
    return {"receipt": "from elsewhere"}


class GiveUp(Exception):
    pass


def answer(message):
    try:
        order = json.loads(message["payload"])
        return {"outcome": "complete", "result": globals()[BUG](order, message)}
    except (GiveUp, json.JSONDecodeError, KeyError) as error:
        return {"outcome": "dead-letter", "reason": type(error).__name__}
    except Exception as error:
        return {"outcome": "retry", "reason": type(error).__name__, "delay_ms": 50}


print(json.dumps({"type": "ready", "v": 1}), flush=True)
for line in sys.stdin:
    message = json.loads(line)
    if message["type"] == "message":
        print(json.dumps({"id": message["id"], **answer(message)}), flush=True)
while BUG == "ignores_end_of_input":
    time.sleep(60)
