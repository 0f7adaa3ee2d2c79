#!/usr/bin/env bash
# Installs the Debian packages that building, testing and the demo need and that are missing.
# As root it installs them; as another user it says which ones to install, and exits 1.
# usage: deps.sh [--check] [--ui]      --check: never install, only say what is missing
#                                      --ui: also the browser that tests the server's page
set -euo pipefail

check_only=0
browser=0
for argument; do
    case $argument in
        --check) check_only=1 ;;
        --ui) browser=1 ;;
        *) sed -n 2,5p "$0"; exit 2 ;;
    esac
done

missing=()
need() { # package command...: the package is needed unless the command succeeds
    local package=$1
    shift
    "$@" >/dev/null 2>&1 || missing+=("$package")
}
compiles() { # FLAGS, reads a C file
    local out rc=0
    out=$(mktemp)
    "${CC:-clang}" "$@" -x c - -o "$out" || rc=$?
    rm -f "$out"
    return $rc
}
cmake_new_enough() { # 3.25
    local major minor
    read -r major minor < <(cmake --version 2>/dev/null | sed -nE '1s/.* ([0-9]+)\.([0-9]+).*/\1 \2/p') || return 1
    [ "$major" -gt 3 ] || { [ "$major" -eq 3 ] && [ "$minor" -ge 25 ]; }
}

need gcc command -v gcc
need g++ command -v g++
need libc6-dev test -e /usr/include/stdio.h
need make command -v make
need cmake cmake_new_enough
need ninja-build command -v ninja
need pkg-config command -v pkg-config
need liburing-dev pkg-config --exists liburing
need libsqlite3-dev pkg-config --exists sqlite3
need libxxhash-dev pkg-config --exists libxxhash
need libjansson-dev pkg-config --exists jansson
need libmicrohttpd-dev pkg-config --exists libmicrohttpd
need libssl-dev pkg-config --exists libcrypto
need libcmocka-dev pkg-config --exists cmocka
need clang command -v clang
need python3 command -v python3
need python3-pip python3 -c 'import pip'
need ca-certificates test -e /etc/ssl/certs/ca-certificates.crt
# clang's sanitizers are a package of their own, recommended by clang but not always installed with it
sanitizer_package() {
    local v
    v=$(clang -dumpversion 2>/dev/null | cut -d. -f1) || v=
    echo "libclang-rt-${v:-14}-dev"
}
need "$(sanitizer_package)" compiles -fsanitize=address <<<'int main(void) { return 0; }'

# type -P, not command -v, which would also find a function of that name
a_browser() { [ -n "$(type -P chromium-headless-shell chromium chromium-browser)" ]; }
[ $browser -eq 0 ] || need chromium-headless-shell a_browser

if [ ${#missing[@]} -eq 0 ]; then
    echo "== system packages: all there"
    exit 0
fi
if [ "$(id -u)" -ne 0 ] || [ $check_only -eq 1 ] || ! command -v apt-get >/dev/null; then
    {
        echo "deps.sh: these packages (Debian names) are missing: ${missing[*]}"
        echo "deps.sh: as root, run:  apt-get install ${missing[*]}"
    } >&2
    exit 1
fi

echo "== system packages: installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
trap 'rm -f "$log"' EXIT
update() {
    echo "   apt-get update"
    apt-get update -q >"$log" 2>&1 || { tail -n 5 "$log" >&2; echo "deps.sh: apt-get update failed" >&2; exit 1; }
}
install_missing() { apt-get install -q -y --no-install-recommends "${missing[@]}" >"$log" 2>&1; }

# Lists older than a day may name versions that the mirror has dropped. (The lists carry the mirror's times, so it is the
# folder that tells when they were last brought up to date.)
fresh=
if compgen -G '/var/lib/apt/lists/*_Packages*' >/dev/null; then
    fresh=$(find /var/lib/apt/lists/partial -maxdepth 0 -mtime -1 2>/dev/null || true)
fi
[ -n "$fresh" ] || update
echo "   apt-get install"
if ! install_missing; then
    [ -z "$fresh" ] || { update; install_missing; } || {
        tail -n 15 "$log" >&2
        echo "deps.sh: apt-get could not install: ${missing[*]}" >&2
        exit 1
    }
fi
echo "== system packages: done"
