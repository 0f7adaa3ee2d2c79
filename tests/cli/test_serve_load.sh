#!/usr/bin/env bash
# The load generator of bench/, for some seconds: eight clients at once get whole answers, each as it would be alone.
. "$(dirname "$0")/lib.sh"
need_model
load=../../bench/serve_load.py
ours="$IMPRESS serve -m $IMPRESS_MODEL --port {port} --store {dir}/store --slots 4 -c 1024 --min-store 32 --host-cache 4M"
timeout 500 python3 "$load" --clients 8 --prefixes 3 --words 50 80 --questions 3 --duration 3 --tokens 6 --check 3 --runs 1 \
    --decode-tokens 8 --settle 1 --json "$tmp/load.json" "impress=$ours --system as" >"$tmp/table" 2>"$tmp/err" ||
    fail "serve_load.py: $(tail -3 "$tmp/err")"
json_ok "$tmp/load.json" '(lambda r: r["errors"] == 0 and r["answers_wrong"] == 0 and r["requests"] >= 8 and r["answers_checked"] > 0)(d["results"][0])'
json_ok "$tmp/load.json" 'd["results"][0]["cached_share"] > 0.3'
finish
