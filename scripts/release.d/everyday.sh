# What needs no release build: a part of .ci/run, and the packages of a debug build.

# What takes seconds, and needs no program. The libraries of the packages are tested by `cargo test`, with the program of
# the test run.
everyday() {
    step "what the crates would be published with"
    package_lists
    step "each crate is packed as it would be published"
    # Not built from there: that is the step `crates` of the check.
    cargo publish --quiet --locked --workspace --dry-run --no-verify --allow-dirty
    step "SBOM"
    scripts/sbom --self-test
    step "licences and sources of the dependencies, requirements without a version"
    scripts/dependencies --self-test
    scripts/dependencies
}

# What links must have become, and what every crate has.
package_lists() {
    local crate name list file files entry
    for crate in crates/*/; do
        name=$(basename "$crate")
        list=$(cargo package --locked --list --allow-dirty --package "$name" 2>&1)
        files=(README.md LICENSE-MIT LICENSE-APACHE src/)
        [ "$name" != oncegate-redis ] || files+=(lua/*.lua)
        for file in "${files[@]}"; do
            grep -q "^$file" <<<"$list" || die "$name would be published without $file"
        done
        for file in LICENSE-MIT LICENSE-APACHE; do
            cmp --silent "$crate$file" "$file" || die "$crate$file is not the licence: make it a link to ../../$file"
        done
        for entry in '^documentation = ' '^categories' '^\[package.metadata.docs.rs\]'; do
            grep -q "$entry" "$crate/Cargo.toml" || die "$crate/Cargo.toml has no $entry"
        done
    done
}

# Chart, Debian package and image, with the program of the test run in place of the released one: made and tested by the
# same functions. Exits with 3 where a process may not get another root, after the chart.
everyday_packages() {
    if [ "$(id -u)" -ne 0 ] && sudo -n true 2>/dev/null; then
        exec sudo -n env "PATH=$PATH" "HOME=$HOME" "CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-target}" scripts/release --debug
    fi
    BUILD=$PWD/target/debug-packages
    ARTEFACTS=$BUILD/artefacts
    STAGE=$BUILD/stage
    # Kept, so that a machine that has run this once needs no network.
    PACKAGES=$TOOLS/packages
    PROGRAM=$STAGE/oncegate
    # Compressing a program that is not downloaded takes longer than its tests.
    DEB_COMPRESSION=(-Zgzip -z1)
    rm -rf "$BUILD"
    mkdir -p "$ARTEFACTS" "$STAGE"
    step "make: the program of the test run"
    # Beside its tests: built alone, it would have other features, and all dependencies be built once more. Without the
    # variable that would build C libraries again.
    env --unset=SOURCE_DATE_EPOCH cargo test --quiet --locked --workspace --all-features --no-run --test run
    strip -o "$PROGRAM" "${CARGO_TARGET_DIR:-target}/debug/oncegate"
    if can_have_helm; then
        made_and_checked chart
    else
        printf '\n    !!! NOT TESTED: the Helm chart. Helm needs Go 1.21 or newer to be compiled.\n'
    fi
    if [ "$(id -u)" -ne 0 ] || ! unshare --mount chroot / true; then
        echo "error: this user may not mount, and change the root of a process" >&2
        exit 3
    fi
    make_manuals
    step "make: licences"
    make_licences
    made_and_checked deb image
    step "all passed"
}

made_and_checked() { # PARTS…
    local part
    for part in "$@"; do
        step "make: $part"
        "make_$part"
        step "check: $part"
        "check_$part"
    done
}
