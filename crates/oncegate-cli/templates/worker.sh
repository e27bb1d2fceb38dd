#!/usr/bin/env bash
# A worker of oncegate: it is called once for each order. The payload is its standard input.
# Exit code 0: done, and standard output is the result. 65: the order is given up. Any other: it is tried again.
set -euo pipefail
order=$(cat)

# Your effect. $ONCEGATE_IDEMPOTENCY_KEY is the same in every attempt for this order: pass it to the systems that you call.
if [ -n "${ONCEGATE_DOWNSTREAM:-}" ]; then # set by `oncegate prove`, which tries this worker: what stands for your bank
    # By standard input: arguments have a limit, and one that begins with @ would name a file.
    printf '%s' "$order" | curl --fail --silent --show-error --max-time 10 --output /dev/null --data-binary @- \
        --header 'Content-Type: application/json' --header "Idempotency-Key: $ONCEGATE_IDEMPOTENCY_KEY" \
        "$ONCEGATE_DOWNSTREAM/effects"
else
    printf '%s\n' "$order" >>charges.txt
fi

printf 'charged under %s' "$ONCEGATE_IDEMPOTENCY_KEY"
