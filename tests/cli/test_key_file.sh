#!/usr/bin/env bash
# An encrypted store from outside: what each command does with its key, another one or none, and what lies on disk.
. "$(dirname "$0")/lib.sh"
need_model
words 200 5 >"$tmp/text.txt"
python3 -c 'print("ab" * 32)' >"$tmp/key" && python3 -c 'print("cd" * 32)' >"$tmp/other"
head -c 32 /dev/urandom >"$tmp/raw" && chmod 600 "$tmp/key" "$tmp/other" "$tmp/raw"
store=$tmp/store
run() { # run NAME OPTION...: a request, its report in NAME.json
    local name=$1
    shift
    "$IMPRESS" run -m "$IMPRESS_MODEL" -f "$tmp/text.txt" -n 2 --raw -p 'And so?' --json "$@" >"$tmp/$name.json" 2>"$tmp/err"
}
keyed=(--store "$store" --key-file "$tmp/key")

# Key files that are none, before anything is made.
expect 1 "can't read the key in .*: No such file" "$IMPRESS" run -m "$IMPRESS_MODEL" -f "$tmp/text.txt" -p x --store "$store" --key-file "$tmp/none"
cp "$tmp/key" "$tmp/open"
for mode in 604 640 660 602; do
    chmod $mode "$tmp/open"
    expect 1 'others may use the key in .*chmod 600' "$IMPRESS" ls --store "$store" --key-file "$tmp/open"
done
expect 1 'not a plain file' "$IMPRESS" ls --store "$store" --key-file "$tmp"
for bad in '' abab "$(python3 -c 'print("ab" * 33)')" "$(python3 -c 'print("xy" * 32)')"; do
    printf '%s' "$bad" >"$tmp/bad" && chmod 600 "$tmp/bad"
    expect 1 'holds no key: it has to be 32 bytes, or 64 hex digits' "$IMPRESS" ls --store "$store" --key-file "$tmp/bad"
done
[ ! -e "$store" ] || fail "a bad key made a store"

# Written with the key, and read with it: the same answer.
run plain --store none || fail "run: $(cat "$tmp/err")"
run cold "${keyed[@]}" || fail "run: $(cat "$tmp/err")"
run warm "${keyed[@]}" || fail "run: $(cat "$tmp/err")"
answer=$(json "$tmp/plain.json" 'd["answer"]')
json_ok "$tmp/cold.json" 'd["matched_tokens"] == 0'
json_ok "$tmp/warm.json" 'd["matched_tokens"] > 100'
[ "$(json "$tmp/cold.json" 'd["answer"]')" = "$answer" ] || fail "encrypting changes the answer"

# All looks and changes take the key: as an option, from the environment, from the configuration.
"$IMPRESS" ls "$store" --key-file "$tmp/key" --json >"$tmp/ls.json" || fail "ls"
json_ok "$tmp/ls.json" 'len(d) >= 1 and d[0]["n_tokens"] > 100'
node=$(json "$tmp/ls.json" 'd[0]["node"]')
IMPRESS_KEY_FILE="$tmp/key" "$IMPRESS" stat "$store" --json >"$tmp/stat.json" || fail "stat"
json_ok "$tmp/stat.json" "d['tokens'] > 100 and abs(d['disk_bytes'] - $(du -s --block-size=1 "$store" | cut -f1)) <= 65536"
echo "key-file = $tmp/key" >"$tmp/conf"
[ "$("$IMPRESS" verify "$store" --config "$tmp/conf")" = clean ] || fail "verify by the configuration"
"$IMPRESS" pin "$store" "$node" --key-file "$tmp/key" || fail "pin"
"$IMPRESS" pin "$store" "$node" --off --key-file "$tmp/key" || fail "pin --off"
"$IMPRESS" gc "$store" --reorder --key-file "$tmp/key" >/dev/null || fail "gc --reorder"
"$IMPRESS" diff "$tmp/text.txt" "$tmp/text.txt" --raw -m "$IMPRESS_MODEL" "${keyed[@]}" --json >"$tmp/diff.json" || fail "diff"
json_ok "$tmp/diff.json" 'd["files"][0]["stored_tokens"] > 100'

# Without it, or with another: one line, nothing changed, nothing shown.
state() { (cd "$store" && find . -type f -exec sha256sum {} + | sort -k 2); }
before=$(state)
for key in '' "--key-file=$tmp/other" "--key-file=$tmp/raw"; do
    said='is encrypted: it takes its key file'
    [ -z "$key" ] || said='is encrypted with another key'
    for command in ls stat verify 'verify --repair' 'verify --rebuild' gc 'gc --reorder'; do
        # shellcheck disable=SC2086
        expect 1 "$said" "$IMPRESS" $command --store "$store" ${key:+"$key"}
    done
    expect 1 "$said" "$IMPRESS" rm "$store" "$node" ${key:+"$key"}
    expect 1 "$said" "$IMPRESS" rm "$store" --all ${key:+"$key"}
    expect 1 "$said" "$IMPRESS" pin "$store" "$node" ${key:+"$key"}
done
expect 1 'is encrypted: it takes its key file' "$IMPRESS" run -m "$IMPRESS_MODEL" -f "$tmp/text.txt" -p x --store "$store"
[ "$(state)" = "$before" ] || fail "a wrong key changed the store"

# Its mark and its catalogue lost, the key still decides, and brings the prefix back.
rm "$store"/encrypted "$store"/catalogue.db*
expect 1 "isn't encrypted with this key" "$IMPRESS" ls "$store" --key-file "$tmp/other"
"$IMPRESS" verify "$store" --rebuild --key-file "$tmp/key" >"$tmp/out" || fail "rebuild: $(cat "$tmp/out")"
run again "${keyed[@]}" || fail "run: $(cat "$tmp/err")"
json_ok "$tmp/again.json" 'd["matched_tokens"] > 100'
expect 1 'is encrypted' "$IMPRESS" ls "$store"

# On disk: no text, no tokens, no rows. The same prefix in the clear shows that the search finds them.
run clear --store "$tmp/clear" || fail "run: $(cat "$tmp/err")"
expect 1 "isn't encrypted" "$IMPRESS" ls "$tmp/clear" --key-file "$tmp/key"
cat >"$tmp/look.py" <<'PY'
"""Runs of 64 bytes, rows of KV above all, that two stores have in common; and blocks that compress, as those in the clear do."""
import os, sys, zlib


def files(store):
    for name in sorted(os.listdir(os.path.join(store, "segments"))):
        with open(os.path.join(store, "segments", name), "rb") as f:
            yield f.read()


def runs(data):
    return {data[i:i + 64] for i in range(0, len(data) - 63, 64)} - {bytes(64)}


def squeezed(store):  # blocks of 4 KiB that a compressor makes a twentieth smaller
    return sum(len(zlib.compress(d[i:i + 4096], 1)) < 3890 for d in files(store) for i in range(4096, len(d) - 4095, 4096))


a, b = ({r for d in files(s) for r in runs(d)} for s in sys.argv[1:3])
print(len(a & b), squeezed(sys.argv[1]), squeezed(sys.argv[2]))
PY
read -r shared _ blocks <<<"$(python3 "$tmp/look.py" "$tmp/clear" "$tmp/clear")"
{ [ "$shared" -gt 1000 ] && [ "$blocks" -gt 10 ]; } || fail "in the clear: $shared runs, $blocks blocks that compress"
read -r shared blocks _ <<<"$(python3 "$tmp/look.py" "$store" "$tmp/clear")"
{ [ "$shared" -eq 0 ] && [ "$blocks" -eq 0 ]; } || fail "encrypted: $shared runs in common, $blocks blocks that compress"
word=$(cut -d ' ' -f 3-5 "$tmp/text.txt")
grep -rqaF -- "$word" "$store" && fail "text of the prompt lies on disk"
grep -rqaF -- "$(head -c 32 "$tmp/key")" "$store" && fail "the key lies on disk"
[ -z "$(find "$store" \( -type f -perm /077 \) -o \( -type d -perm /077 \))" ] || fail "others may read the store"

# A key is changed by filling a new store (docs/reliability.md); the old key opens the old one alone.
run new --store "$tmp/new" --key-file "$tmp/raw" || fail "run: $(cat "$tmp/err")"
expect 1 'is encrypted with another key' "$IMPRESS" ls "$tmp/new" --key-file "$tmp/key"
"$IMPRESS" rm "$store" --all --key-file "$tmp/key" || fail "rm --all"
[ "$("$IMPRESS" ls "$store" --key-file "$tmp/key")" = 'the store is empty' ] || fail "rm --all left something"
finish
