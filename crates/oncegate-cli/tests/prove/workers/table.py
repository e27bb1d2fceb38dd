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
    bank.execute("BEGIN IMMEDIATE")
    is_new = bank.execute("INSERT OR IGNORE INTO keys VALUES (?)", (key,)).rowcount == 1
    if is_new or BUG == "without_unique_key":
        bank.execute("INSERT INTO charges VALUES (?, ?)", (key, effect))
    bank.execute("COMMIT")


print(json.dumps({"type": "ready", "v": 1}), flush=True)
for line in sys.stdin:
    message = json.loads(line)
    if message["type"] != "message":
        continue
    try:
        charge(json.loads(message["payload"]), message["idempotency_key"])
        answer = {"outcome": "complete"}
    except (json.JSONDecodeError, KeyError) as error:
        answer = {"outcome": "dead-letter", "reason": type(error).__name__}
    print(json.dumps({"id": message["id"], **answer}), flush=True)
