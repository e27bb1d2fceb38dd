# Makes the artefacts.

make_all() {
    rm -rf "$ARTEFACTS" "$STAGE"
    mkdir -p "$ARTEFACTS" "$STAGE"
    for part in program licences tarball deb wheel npm chart image checksums; do
        step "make: $part"
        "make_$part"
    done
    (cd "$ARTEFACTS" && ls -l)
}

# OpenSSL and zlib are linked statically. OpenSSL is that of Debian, which its security team keeps: a feature with the
# sources of OpenSSL would be one more of `--all-features`, which every test run and every user of it would compile.
make_program() {
    needs pkg-config pkg-config libssl-dev
    local libraries home=${CARGO_HOME:-$HOME/.cargo}
    libraries=$(pkg-config --variable=libdir openssl)
    # Both folders are named because libraries of the system that pkg-config finds are always linked dynamically.
    # The macro tells librdkafka that OpenSSL is static: it looks for the certificate authorities where distributions
    # keep them, and not only where Debian does. No path of this machine is in the program.
    OPENSSL_STATIC=1 OPENSSL_LIB_DIR=$libraries OPENSSL_INCLUDE_DIR=$(pkg-config --variable=includedir openssl) \
        LIBZ_SYS_STATIC=1 CPPFLAGS=-DWITH_STATIC_LIB_libcrypto=1 \
        RUSTFLAGS="--remap-path-prefix=$home=/cargo --remap-path-prefix=$PWD=/oncegate" \
        cargo build --locked --profile dist --package oncegate-cli --all-features --target-dir "$BUILD"
    local needed
    needed=$(objdump --private-headers "$PROGRAM" | sed -n 's/^ *NEEDED *//p' | sort | tr '\n' ' ')
    for library in $needed; do
        case "$library" in
        libc.so.6 | libm.so.6 | libgcc_s.so.1 | ld-linux-*) ;;
        *) die "the program is linked to $library, which is no part of glibc and not in every image" ;;
        esac
    done
    echo "oncegate $VERSION needs $needed(glibc $(glibc_needed)); $(du -h "$PROGRAM" | cut -f1)"
    make_manuals
}

make_manuals() {
    "$PROGRAM" generate man --folder "$STAGE/man1"
    mkdir -p "$STAGE/completions"
    for shell in bash zsh fish; do "$PROGRAM" generate completions "$shell" >"$STAGE/completions/oncegate.$shell"; done
}

make_licences() {
    scripts/sbom "$STAGE"
    cp "$STAGE/sbom.cdx.json" "$ARTEFACTS/oncegate-$VERSION.cdx.json"
}

make_tarball() {
    local name=oncegate-$VERSION-$NODE_PLATFORM
    local folder=$STAGE/tarball/$name
    mkdir -p "$folder"
    install -m 755 "$PROGRAM" "$folder/oncegate"
    cp -r "$STAGE/man1" "$STAGE/completions" "$folder"
    cp LICENSE-* "$STAGE/THIRD-PARTY-LICENSES.txt" deploy/debian/oncegate.service examples/workers/oncegate.toml "$folder"
    pack "$ARTEFACTS/$name.tar.gz" "$STAGE/tarball" "$name"
}

make_deb() {
    local root=$STAGE/deb
    local share=$root/usr/share
    install -D -m 755 "$PROGRAM" "$root/usr/bin/oncegate"
    install -D -m 644 deploy/debian/oncegate.service "$root/usr/lib/systemd/system/oncegate.service"
    install -D -m 644 "$STAGE/completions/oncegate.bash" "$share/bash-completion/completions/oncegate"
    install -D -m 644 "$STAGE/completions/oncegate.zsh" "$share/zsh/vendor-completions/_oncegate"
    install -D -m 644 "$STAGE/completions/oncegate.fish" "$share/fish/vendor_completions.d/oncegate.fish"
    for page in "$STAGE"/man1/*.1; do
        install -d "$share/man/man1"
        gzip --no-name --best --stdout "$page" >"$share/man/man1/$(basename "$page").gz"
    done
    local doc=$share/doc/oncegate
    install -D -m 644 examples/workers/oncegate.toml "$doc/examples/oncegate.toml"
    install -m 644 "$STAGE/THIRD-PARTY-LICENSES.txt" LICENSE-* "$doc"
    gzip --no-name --best "$doc/THIRD-PARTY-LICENSES.txt"
    printf 'oncegate is licensed under MIT or Apache-2.0, see the files beside this one.\n' >"$doc/copyright"
    install -d "$root/DEBIAN"
    cat >"$root/DEBIAN/control" <<END
Package: oncegate
Version: $VERSION
Architecture: $ARCHITECTURE
Maintainer: The contributors of oncegate
Section: net
Priority: optional
Depends: $(packages_needed | sed "s/^libc6$/& (>= $(glibc_needed))/" | paste --serial --delimiters=, | sed 's/,/, /g')
Recommends: ca-certificates
Installed-Size: $(du --apparent-size --summarize --block-size=1K "$root/usr" | cut -f1)
Description: makes Kafka and SQS consumers safe against duplicates
 oncegate consumes a topic or a queue, calls a worker in any language once for
 each message, and answers duplicates from Redis, PostgreSQL or SQLite.
END
    dpkg-deb --root-owner-group "${DEB_COMPRESSION[@]}" --build "$root" "$ARTEFACTS/oncegate_${VERSION}_$ARCHITECTURE.deb" >/dev/null
}

# A Python environment for building and testing: environment NAME
environment() {
    [ -x "$TOOLS/$1/bin/pip" ] || python3 -m venv "$TOOLS/$1"
}

make_wheel() {
    environment build
    ONCEGATE_BINARY=$PROGRAM ONCEGATE_NOTICES=$STAGE/THIRD-PARTY-LICENSES.txt \
        ONCEGATE_WHEEL_PLATFORM=manylinux_$(glibc_needed | tr . _)_$(uname -m) \
        "$TOOLS/build/bin/pip" wheel --quiet --disable-pip-version-check --no-deps \
        --wheel-dir "$ARTEFACTS" packages/python
}

# An npm package is a tarball of a folder `package`: no npm is needed to make one.
make_npm() {
    local library=$STAGE/npm/library platform=$STAGE/npm/platform
    mkdir -p "$library" "$platform/package"
    git archive HEAD packages/node | tar --extract --directory "$library"
    mv "$library/packages/node" "$library/package"
    rm -r "$library/package/tests"
    cp LICENSE-* "$library/package"
    cp LICENSE-* "$STAGE/THIRD-PARTY-LICENSES.txt" "$platform/package"
    install -m 755 "$PROGRAM" "$platform/package/oncegate"
    cat >"$platform/package/package.json" <<END
{
  "name": "oncegate-$NODE_PLATFORM",
  "version": "$VERSION",
  "description": "The program of the package oncegate, for $NODE_PLATFORM",
  "license": "MIT OR Apache-2.0",
  "os": ["linux"],
  "cpu": ["${NODE_PLATFORM#linux-}"],
  "libc": ["glibc"]
}
END
    pack "$ARTEFACTS/oncegate-$VERSION.tgz" "$library" package
    pack "$ARTEFACTS/oncegate-$NODE_PLATFORM-$VERSION.tgz" "$platform" package
}

make_chart() {
    mkdir -p "$STAGE/chart"
    git archive HEAD deploy/helm/oncegate | tar --extract --directory "$STAGE/chart"
    sed -i "s/^version: .*/version: $VERSION/; s/^appVersion: .*/appVersion: \"$VERSION\"/" \
        "$STAGE/chart/deploy/helm/oncegate/Chart.yaml"
    pack "$ARTEFACTS/oncegate-chart-$VERSION.tgz" "$STAGE/chart/deploy/helm" oncegate
}

# What the program needs, and nothing else: no shell, no packages. Workers run in containers of their own.
make_image() {
    needs buildah buildah
    local root=$STAGE/image certificates=$STAGE/certificates container
    clean_root "$root"
    install_deb "$root" --path-exclude='/usr/share/*' --path-include='/usr/share/doc/*' --path-exclude='/usr/lib/systemd/*'
    rm -rf "$root"/usr/share/{lintian,man,locale}
    mkdir -p "$root"/{etc/ssl/certs,dev,proc,sys,tmp}
    chmod 1777 "$root/tmp"
    printf 'root:x:0:0::/:/sbin/nologin\noncegate:x:65532:65532::/:/sbin/nologin\n' >"$root/etc/passwd"
    printf 'root:x:0:\noncegate:x:65532:\n' >"$root/etc/group"
    rm -rf "$certificates"
    dpkg-deb --extract "$(package ca-certificates)" "$certificates"
    find "$certificates" -name '*.crt' -print0 | sort --zero-terminated | xargs --null cat \
        >"$root/etc/ssl/certs/ca-certificates.crt"
    container=$(image from scratch)
    image copy --quiet "$container" "$root" / >/dev/null
    # A number, so that Kubernetes knows it is not root. `oncegate status --probe` asks the status page on loopback.
    image config --user 65532:65532 --workingdir / --entrypoint '["/usr/bin/oncegate"]' --cmd '' --port 9464 \
        --env PATH=/usr/bin --stop-signal SIGTERM --healthcheck 'CMD oncegate status --probe' --healthcheck-interval 10s \
        --healthcheck-start-period 60s --label org.opencontainers.image.title=oncegate \
        --label "org.opencontainers.image.version=$VERSION" \
        --label 'org.opencontainers.image.licenses=MIT OR Apache-2.0' "$container"
    # The format of Docker, because that of OCI has no health check.
    image commit --quiet --rm --format docker --timestamp "$SOURCE_DATE_EPOCH" "$container" "oncegate:$VERSION" >/dev/null
    rm -f "$ARTEFACTS/oncegate-$VERSION-image.tar"
    image push --quiet "oncegate:$VERSION" "docker-archive:$ARTEFACTS/oncegate-$VERSION-image.tar:oncegate:$VERSION"
}

make_checksums() {
    (cd "$ARTEFACTS" && find . -maxdepth 1 -type f ! -name SHA256SUMS -printf '%P\n' | sort | xargs sha256sum >SHA256SUMS)
}
