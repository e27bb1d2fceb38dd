#!/usr/bin/env bash
# A worker of oncegate: it is called once for each order. The payload is its standard input.
# Exit code 0: done, and standard output is the result. 65: the order is given up. Any other: it is tried again.
set -euo pipefail
order=$(cat)

# Your effect. $ONCEGATE_IDEMPOTENCY_KEY is the same in every attempt for this order: pass it to the systems that you call.
printf '%s\n' "$order" >>charges.txt

printf 'charged under %s' "$ONCEGATE_IDEMPOTENCY_KEY"
