# A worker of `oncegate prove` whose effects are rows of a table: python3 table.py right|without_unique_key, and the
# witness, which lists them: python3 table.py list
import json, os, sqlite3, sys

BUG = sys.argv[1]
# All rounds may share a table, too.
folder = os.environ["ONCEGATE_TRIAL_DIR"] if len(sys.argv) < 3 else sys.argv[2]
bank = sqlite3.connect(os.path.join(folder, "bank.db"), timeout=60, isolation_level=None)
bank.execute("CREATE TABLE IF NOT EXISTS charges (key TEXT, effect TEXT)")
bank.execute("CREATE TABLE IF NOT EXISTS keys (key TEXT PRIMARY KEY)")

if BUG == "list":
    for (effect,) in bank.execute("SELECT effect FROM charges"):
        print(effect)
    sys.exit()


def charge(order, key):
    effect = json.dumps({"order": order["order_id"], "amount": order["amount"], "currency": order["currency"]})
    is_new = bank.execute("INSERT OR IGNORE INTO keys VALUES (?)", (key,)).rowcount == 1
    if is_new or BUG == "without_unique_key":
        bank.execute("INSERT INTO charges VALUES (?, ?)", (key, effect))


def answer(message):
    try:
        charge(json.loads(message["payload"]), message["idempotency_key"])
        return {"id": message["id"], "outcome": "complete"}
    except (json.JSONDecodeError, KeyError) as error:
        return {"id": message["id"], "outcome": "dead-letter", "reason": type(error).__name__}


print(json.dumps({"type": "ready", "v": 1, "batches": True}), flush=True)
for line in sys.stdin:
    line = json.loads(line)
    messages = {"message": [line], "batch": line.get("messages")}.get(line["type"])
    if messages:
        # A batch is one transaction.
        bank.execute("BEGIN IMMEDIATE")
        answers = [answer(message) for message in messages]
        bank.execute("COMMIT")
        print(json.dumps(answers), flush=True)
