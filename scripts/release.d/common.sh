# Shared by the parts of scripts/release.

step() { printf '\n==> [%s s] %s\n' "$SECONDS" "$*"; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }
has() { command -v "$1" >/dev/null; }

as_root() {
    if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo "$@"; fi
}

# Installs Debian's packages when a program of them is missing: needs PROGRAM PACKAGE…
needs() {
    local program=$1
    shift
    if has "$program" || [ -x "/usr/sbin/$program" ]; then return; fi
    as_root apt-get update -qq
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "$@" >/dev/null
}

VERSION=$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' Cargo.toml)
ARCHITECTURE=$(dpkg --print-architecture)
case "$ARCHITECTURE" in
amd64) NODE_PLATFORM=linux-x64 ;;
arm64) NODE_PLATFORM=linux-arm64 ;;
*) die "there is no release for $ARCHITECTURE" ;;
esac

BUILD=$PWD/target/release-build
ARTEFACTS=$PWD/target/artefacts
# What the artefacts are made of.
STAGE=$BUILD/stage
TOOLS=$BUILD/tools
PROGRAM=$BUILD/dist/oncegate
# Debian's packages that are unpacked into clean roots.
PACKAGES=$STAGE/packages
# Options of dpkg-deb: none, so it compresses well.
DEB_COMPRESSION=()

# The same commit gives the same archives. With the value of an earlier build, no C library is built again.
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
export SOURCE_DATE_EPOCH

# Tools that decide what passes.
CARGO_DENY=0.20.2
CARGO_HACK=0.6.46
CARGO_SEMVER_CHECKS=0.49.0
HELM=v3.19.2
MDBOOK=0.5.4

# An archive whose files depend on nothing but their content: pack FILE.tar.gz FOLDER NAME
pack() {
    tar --create --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner \
        --directory "$2" "$3" | gzip --no-name --best >"$1"
}

# The newest version of glibc whose symbols the program uses: 2.34
glibc_needed() {
    objdump --dynamic-syms "$PROGRAM" | grep -o 'GLIBC_[0-9.]*' | sort -Vu | tail -n 1 | cut -d_ -f2
}

# The packages of Debian with the libraries that the program is linked to, a line for each: libc6 libgcc-s1
packages_needed() {
    local library
    for library in $(objdump --private-headers "$PROGRAM" | sed -n 's/^ *NEEDED *//p'); do
        dpkg-query --search "*/$(uname -m)-linux-gnu/$library"
    done | cut -d: -f1 | sort --unique
}

# Downloads a package of Debian unless it is there, and prints its path: package NAME
package() {
    local options=(-qq -o APT::Sandbox::User=)
    mkdir -p "$PACKAGES"
    if ! compgen -G "$PACKAGES/$1_*.deb" >/dev/null; then
        (cd "$PACKAGES" && { apt-get "${options[@]}" download "$1" ||
            { as_root apt-get update -qq && apt-get "${options[@]}" download "$1"; }; }) >&2
    fi
    compgen -G "$PACKAGES/$1_*.deb"
}

# A folder with what every Debian has, and dpkg's word for it: clean_root FOLDER
clean_root() {
    local name file
    as_root rm -rf "$1"
    mkdir -p "$1"/{var/lib/dpkg/info,var/lib/dpkg/updates,etc,tmp}
    : >"$1/var/lib/dpkg/status"
    for name in $(packages_needed); do
        file=$(package "$name")
        dpkg-deb --extract "$file" "$1"
        # Without their own dependencies: none of those is a library that a program loads.
        dpkg-deb --field "$file" Package Version Architecture Maintainer Description |
            sed '/^Architecture:/a Status: install ok installed' >>"$1/var/lib/dpkg/status"
        echo >>"$1/var/lib/dpkg/status"
    done
}

install_deb() { # FOLDER [OPTIONS OF dpkg]
    as_root dpkg --root="$1" --log=/dev/null "${@:2}" --install "$ARTEFACTS/oncegate_${VERSION}_$ARCHITECTURE.deb"
}

# Images of this release only, in a folder of their own.
image() {
    as_root env BUILDAH_FORMAT=docker buildah --root "$BUILD/containers" --runroot "$BUILD/containers-run" --storage-driver vfs "$@"
}
