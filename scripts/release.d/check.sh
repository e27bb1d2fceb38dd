# Tests the artefacts, and the crates as they would be published.

CHECKS=(licences advisories crates consumers oldest_rust minimal semver deb wheel npm image chart site)

# Built without optimisation, which would take longer than it saves.
cargo_tool() { # NAME VERSION
    "$TOOLS/bin/cargo-$1" "$1" --version 2>/dev/null | grep -qF " $2" ||
        cargo install --quiet --locked --debug --root "$TOOLS" "cargo-$1@$2"
}

check_licences() {
    cargo_tool deny "$CARGO_DENY"
    "$TOOLS/bin/cargo-deny" --locked check licenses bans sources
    environment sbom
    "$TOOLS/sbom/bin/pip" install --quiet --disable-pip-version-check 'cyclonedx-python-lib[json-validation]==11.0.0'
    "$TOOLS/sbom/bin/python3" - "$ARTEFACTS/oncegate-$VERSION.cdx.json" <<'END'
import sys
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

error = JsonStrictValidator(SchemaVersion.V1_5).validate_str(open(sys.argv[1]).read())
sys.exit(f"the SBOM is invalid: {error}" if error else 0)
END
}

# Fetches the database of RustSec. What was fine yesterday may fail today, so it is no part of .ci/run.
check_advisories() {
    cargo_tool deny "$CARGO_DENY"
    "$TOOLS/bin/cargo-deny" --locked check advisories
}

# Each crate as the others get it from the registry: packed, unpacked and built.
check_crates() {
    cargo publish --locked --workspace --dry-run
    grep -q '^repository = ' Cargo.toml ||
        printf '\n    !!! NOT SET: `repository`. Before the first publication it must be, see docs/RELEASING.md.\n'
}

# Programs with dependencies of their own, which the workspace's lock file does not speak for. The README's ends when it is
# stopped: here it is built, and a test of the workspace runs it.
check_consumers() {
    local consumer action
    for consumer in tests/consumers/*/; do
        if [ "$consumer" = tests/consumers/readme/ ]; then action=build; else action=run; fi
        CARGO_TARGET_DIR=$BUILD/consumers cargo "$action" --quiet --locked --manifest-path "$consumer/Cargo.toml"
    done
}

# The Rust that the manifests promise, with the dependencies of the lock file: what a release is built from.
check_oldest_rust() {
    local rust
    oldest_rust
    CARGO_TARGET_DIR=$BUILD/oldest-rust rustup run "$rust" \
        cargo check --locked --package oncegate-cli --package oncegate --all-features
}

# Sets `rust`, and has rustup get it.
oldest_rust() {
    rust=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
    has rustup || die "rustup is needed to get Rust $rust"
    rustup run "$rust" rustc --version >/dev/null 2>&1 || rustup toolchain install --profile minimal "$rust"
}

# A copy with the oldest versions that the requirements of the manifests allow. `-Z` is unstable in cargo, not in what it
# builds: minimal_copy FOLDER
minimal_copy() {
    rm -rf "$1" && mkdir -p "$1"
    git archive HEAD | tar --extract --directory "$1"
    (cd "$1" && RUSTC_BOOTSTRAP=1 cargo -Z direct-minimal-versions generate-lockfile)
}

# Each crate with each of its features alone, and with none: by the oldest Rust, with the oldest versions. What compiles
# with all three compiles for everybody.
check_minimal() {
    local crate crates=()
    for crate in crates/*/; do crates+=(--package "$(basename "$crate")"); done
    minimal --each-feature "${crates[@]}"
}

# The part of it in .ci/run: nothing is compiled.
check_minimal_resolves() {
    minimal_copy "$BUILD/minimal"
}

minimal() { # ARGUMENTS of cargo hack check
    local rust
    oldest_rust
    has cargo-hack || cargo install --quiet --locked --debug "cargo-hack@$CARGO_HACK"
    minimal_copy "$BUILD/minimal"
    (
        cd "$BUILD/minimal"
        RUSTFLAGS="-D warnings" CARGO_TARGET_DIR=$BUILD/minimal-target rustup run "$rust" cargo hack check --locked "$@"
    )
}

# Against the last version that has a tag; the first version has none.
check_semver() {
    local last
    last=$(git describe --tags --abbrev=0 --match 'v*' 2>/dev/null) || { echo "no tag yet: nothing to compare with"; return; }
    cargo_tool semver-checks "$CARGO_SEMVER_CHECKS"
    "$TOOLS/bin/cargo-semver-checks" semver-checks --workspace --baseline-rev "$last"
}

# `oncegate run` and a replay, on a real broker, by the program that the command line names.
main_job() {
    [ "$(id -u)" -eq 0 ] || die "this check changes the root of a process: run it as root"
    local launcher=$STAGE/launcher
    printf '#!/bin/sh\nexec %s "$@"\n' "$*" >"$launcher"
    chmod 755 "$launcher"
    # Build scripts of C libraries run again when this variable comes or goes. Of the servers, it needs Kafka and Redis.
    env --unset=SOURCE_DATE_EPOCH ONCEGATE_PROGRAM="$launcher" \
        ONCEGATE_TEST_POSTGRES=none ONCEGATE_TEST_SQS=none ONCEGATE_TEST_MOTO=none \
        scripts/test --locked --test run -- a_python_worker_behind_http
}

check_deb() {
    local root=$STAGE/root
    clean_root "$root"
    install_deb "$root"
    as_root chroot "$root" /usr/bin/oncegate --version
    if has systemd-analyze; then
        local unit=$STAGE/oncegate.service wrong
        sed "s:/usr/bin/oncegate:$PROGRAM:" deploy/debian/oncegate.service >"$unit"
        # Its exit code is 0 even for an unknown setting.
        wrong=$(systemd-analyze verify --man=no "$unit" 2>&1) || true
        [ -z "$wrong" ] || die "$wrong"
    fi
    main_job chroot "$root" /usr/bin/oncegate
}

# A worker with the library of the package, called by the program of the package: worker_passes ONCEGATE COMMAND
worker_passes() {
    local folder=$STAGE/worker
    rm -rf "$folder" && mkdir -p "$folder"
    echo '{"order_id":"A-7"}' >"$folder/order.json"
    $1 --version | grep -qx "oncegate $VERSION" || die "$1 is not version $VERSION"
    $1 worker-test --handler-exec "$2 $folder/ledger" "$folder/order.json"
    grep -qx A-7 "$folder/ledger"
}

check_wheel() {
    local environment=$STAGE/wheel
    rm -rf "$environment"
    python3 -m venv "$environment"
    "$environment/bin/pip" install --quiet --disable-pip-version-check --no-index --find-links "$ARTEFACTS" oncegate
    worker_passes "$environment/bin/oncegate" "$environment/bin/python3 $PWD/examples/workers/python/worker.py"
    environment mypy
    "$TOOLS/mypy/bin/pip" install --quiet --disable-pip-version-check mypy==1.18.2
    "$TOOLS/mypy/bin/mypy" --config-file packages/python/pyproject.toml packages/python/src
    (cd examples/workers/python && "$TOOLS/mypy/bin/mypy" --strict --python-executable "$environment/bin/python3" worker.py batch.py)
}

check_npm() {
    needs npm npm
    local folder=$STAGE/npm/installed
    rm -rf "$folder" && mkdir -p "$folder"
    cp examples/workers/node/worker.js packages/node/tests/types.ts "$folder"
    (
        cd "$folder"
        npm init --yes >/dev/null
        npm install --silent --no-audit --no-fund \
            "$ARTEFACTS/oncegate-$NODE_PLATFORM-$VERSION.tgz" "$ARTEFACTS/oncegate-$VERSION.tgz" \
            typescript@5.9.3 @types/node@18.19.130
        npx --no-install tsc --strict --noEmit --module node16 --target es2022 types.ts
        worker_passes "npx --no-install oncegate" "node $folder/worker.js"
        node -e "require('node:child_process').execFileSync(require('oncegate').program(), ['--version'])"
        echo "import { batchWorker, worker } from 'oncegate';" >import.mjs
        echo "if ([batchWorker, worker].some((made) => typeof made !== 'function')) process.exit(1);" >>import.mjs
        node import.mjs
    )
}

check_image() {
    local container root setting
    container=$(image from "docker-archive:$ARTEFACTS/oncegate-$VERSION-image.tar")
    root=$(image mount "$container")
    for setting in '"User": "65532:65532"' '"/usr/bin/oncegate"' '"StopSignal": "SIGTERM"' '"oncegate", *"status", *"--probe"'; do
        image inspect "$container" | tr '\n' ' ' | tr --squeeze-repeats ' ' | grep -q "$setting" ||
            die "the image does not say $setting"
    done
    image run --isolation chroot "$container" -- /usr/bin/oncegate --version
    local code=0
    image run --isolation chroot "$container" -- /usr/bin/oncegate status --probe || code=$?
    [ "$code" -eq 69 ] || die "the health check answers $code where nothing runs"
    main_job "$PWD/scripts/release.d/run-image" "$root"
    image rm "$container" >/dev/null
}

# With these values, the chart that `check_chart` renders says what is wrong: chart_refuses WORDS [arguments of helm]
chart_refuses() {
    local told
    if told=$("${template[@]}" "${@:2}" 2>&1); then die "the chart accepts what it should refuse: $1"; fi
    grep -qF "$1" <<<"$told" || die "the chart does not say that $1 is wrong: $told"
}

# Helm is compiled by a Go that it names itself, which versions of Go before 1.21 do not fetch.
can_have_helm() {
    [ -x "$TOOLS/bin/helm" ] || [ "$(go env GOVERSION 2>/dev/null | sed -n 's/^go1\.\([0-9]*\).*/\1/p')" -ge 21 ] 2>/dev/null
}

check_chart() {
    local helm=$TOOLS/bin/helm
    if [ ! -x "$helm" ]; then
        needs go golang-go
        can_have_helm || die "Helm needs Go 1.21 or newer, and this is $(go version): install a newer one from https://go.dev/dl"
        GOBIN=$TOOLS/bin go install "helm.sh/helm/v3/cmd/helm@$HELM"
    fi
    local chart=$ARTEFACTS/oncegate-chart-$VERSION.tgz values=deploy/helm/oncegate/ci.yaml
    local template=("$helm" template billing "$chart" --namespace payments --kube-version 1.34.0)
    "$helm" lint --strict --kube-version 1.34.0 --values "$values" "$chart"
    chart_refuses image.repository
    chart_refuses 'config is' --set image.repository=registry.example/oncegate
    # From zero it could not scale up.
    chart_refuses scaling.minReplicas --values "$values" --set scaling.minReplicas=0
    # A misspelled value would be ignored.
    chart_refuses "'worker'" --values "$values" --set 'worker[0].name=worker'
    chart_refuses /image/tag --values "$values" --set image.tag=20261129
    "${template[@]}" --values "$values" >"$STAGE/rendered.yaml"
    environment yaml
    "$TOOLS/yaml/bin/pip" install --quiet --disable-pip-version-check pyyaml==6.0.3
    "$TOOLS/yaml/bin/python3" scripts/release.d/rendered.py "$STAGE/rendered.yaml" "$PROGRAM"
}

# The site of the documents. A part of .ci/run.
check_site() {
    "$TOOLS/bin/mdbook" --version 2>/dev/null | grep -qF "v$MDBOOK" ||
        cargo install --quiet --locked --debug --root "$TOOLS" "mdbook@$MDBOOK"
    PATH=$TOOLS/bin:$PATH scripts/site
}
