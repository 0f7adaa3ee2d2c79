#!/usr/bin/env bash
# Runs a script with the built program, the small model and a folder of its own.
# usage: run.sh SCRIPT.py ARGUMENT...
set -uo pipefail
root=$(realpath "$(dirname "$0")/../..")
export IMPRESS=${IMPRESS:-$root/build/impress} OMP_WAIT_POLICY=passive
IMPRESS_MODEL=${IMPRESS_MODEL:-$("$root/scripts/get-model.sh" --find)} || { echo "run.sh: no model (make model gets it)" >&2; exit 1; }
export IMPRESS_MODEL
tmp=$(mktemp -d "${TMPDIR:-/tmp}/impress-soak-XXXXXX")
export tmp HOME=$tmp XDG_CACHE_HOME=$tmp/cache XDG_CONFIG_HOME=$tmp/config
trap 'chattr -i "$tmp/store/segments" 2>/dev/null; chmod -R u+rwX "$tmp"; rm -rf "$tmp"' EXIT
rc=0
python3 "$@" || rc=$?
if [ $rc -ne 0 ]; then
    for log in "$tmp"/log-*; do
        [ -f "$log" ] && { echo "-- the end of $(basename "$log")"; tail -n 5 "$log"; } >&2
    done
fi
exit $rc
