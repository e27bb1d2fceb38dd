# Steps with the seconds that each took, for .ci/run and scripts/nightly, which source this. At the end, and at a failure,
# they are shown as a table.

STEPS=()
# How many have failed, where the others are taken all the same.
FAILED=0
STEP_BEGAN=$SECONDS

# Ends the step before, and begins one: step WORDS…
step() {
    end_step
    STEPS+=("$*")
    printf '\n==> [%s s] %s\n' "$SECONDS" "$*"
}

end_step() {
    [ "${#STEPS[@]}" -eq 0 ] || STEPS[-1]="| ${STEPS[-1]} | $((SECONDS - STEP_BEGAN)) |"
    STEP_BEGAN=$SECONDS
}

table_of_steps() {
    local code=$?
    [ "${#STEPS[@]}" -gt 0 ] || exit "$code"
    [ "$code" -eq 0 ] || [ "$FAILED" -gt 0 ] || STEPS[-1]+=': not passed'
    end_step
    printf '\n| step | seconds |\n|---|---|\n'
    printf '%s\n' "${STEPS[@]}" "| in all | $SECONDS |"
    # A linker that finds no room on the disk ends with a bus error, and says no more.
    printf '\nleft on the disk: %s\n' "$(df --human-readable --output=avail . | tail -n 1 | tr -d ' ')"
    exit "$code"
}
trap table_of_steps EXIT

as_root() {
    if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo "$@"; fi
}
