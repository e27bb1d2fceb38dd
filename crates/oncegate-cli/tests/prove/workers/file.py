# A worker of `oncegate prove` whose effects are lines of a file: python3 file.py right|checks_then_writes
import fcntl, json, os, sys, time

BUG = sys.argv[1]
path = os.path.join(os.environ["ONCEGATE_TRIAL_DIR"], "charges.jsonl")
open(path, "a").close()


def write_once(line, seconds):
    with open(path) as file:
        if line in file.read().splitlines():
            return
    time.sleep(seconds)
    with open(path, "a") as file:
        file.write(line + "\n")


def charge(order):
    line = json.dumps({"order": order["order_id"], "amount": order["amount"], "currency": order["currency"]})
    if BUG == "checks_then_writes":
        return write_once(line, 0.15)
    with open(path + ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        write_once(line, 0.15)


def answer(message):
    try:
        charge(json.loads(message["payload"]))
        return {"id": message["id"], "outcome": "complete"}
    except (json.JSONDecodeError, KeyError) as error:
        return {"id": message["id"], "outcome": "dead-letter", "reason": type(error).__name__}


print(json.dumps({"type": "ready", "v": 1}), flush=True)
for line in sys.stdin:
    message = json.loads(line)
    if message["type"] == "message":
        print(json.dumps(answer(message)), flush=True)
