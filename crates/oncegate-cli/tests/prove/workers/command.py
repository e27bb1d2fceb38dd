# A right command of `oncegate prove --handler-command`.
import json, os, sys, urllib.request

order = json.load(sys.stdin)
body = json.dumps({"order": order["order_id"], "amount": order["amount"], "currency": order["currency"]})
request = urllib.request.Request(os.environ["ONCEGATE_DOWNSTREAM"] + "/effects", data=body.encode(), method="POST")
request.add_header("Idempotency-Key", os.environ["ONCEGATE_IDEMPOTENCY_KEY"])
try:
    with urllib.request.urlopen(request) as answer:
        print(json.load(answer)["receipt"])
except OSError:
    sys.exit(75)
