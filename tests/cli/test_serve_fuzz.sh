#!/usr/bin/env bash
# Some hundred broken requests to a whole server; `make fuzz-http` sends more.
. "$(dirname "$0")/lib.sh"
need_model
export tmp IMPRESS IMPRESS_MODEL
timeout 300 python3 ../fuzz/serve_fuzz.py 100 || failures=1
finish
