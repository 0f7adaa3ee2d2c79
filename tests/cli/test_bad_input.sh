#!/usr/bin/env bash
# Things in the world that are not as they should be: one line that says what and where, exit code 1, nothing lost.
. "$(dirname "$0")/lib.sh"
need_model
words 300 >"$tmp/prefix.txt"
: >"$tmp/empty.txt"
run=("$IMPRESS" run -p question -n 4 --store "$tmp/store")
ok=("${run[@]}" -m "$IMPRESS_MODEL" -f "$tmp/prefix.txt")

# The model.
expect 1 "$tmp/no.gguf: No such file" "${run[@]}" -m "$tmp/no.gguf" -f "$tmp/prefix.txt"
expect 1 'not a GGUF file' "${run[@]}" -m "$tmp/prefix.txt" -f "$tmp/prefix.txt"
expect 1 'not a file' "${run[@]}" -m "$tmp" -f "$tmp/prefix.txt"
head -c 1000000 "$IMPRESS_MODEL" >"$tmp/cut.gguf"
expect 1 "cut.gguf can't be loaded" "${run[@]}" -m "$tmp/cut.gguf" -f "$tmp/prefix.txt"

# The prefix.
expect 1 "$tmp/no.txt: No such file" "${run[@]}" -m "$IMPRESS_MODEL" -f "$tmp/no.txt"
expect 1 "$tmp/empty.txt is empty" "${run[@]}" -m "$IMPRESS_MODEL" -f "$tmp/empty.txt"
expect 1 "can't read $tmp: " "${run[@]}" -m "$IMPRESS_MODEL" -f "$tmp"
expect 1 'more than --ctx-size 128' "${ok[@]}" -c 128
printf 'A text that \xf4\x90\x80\x80 ends' >"$tmp/odd.txt" # one after the last of Unicode
printf 'caf\xe9, in Latin 1' >"$tmp/latin.txt"
for file in odd latin; do
    for command in "run -p question" warm; do
        expect 1 "$tmp/$file.txt isn't UTF-8 at byte [0-9]+" "$IMPRESS" $command -m "$IMPRESS_MODEL" -f "$tmp/$file.txt" --store "$tmp/store"
    done
    expect 2 "$tmp/$file.txt isn't UTF-8" "$IMPRESS" diff "$tmp/prefix.txt" "$tmp/$file.txt" -m "$IMPRESS_MODEL"
    expect 2 "run: -p isn't UTF-8" "$IMPRESS" run -m "$IMPRESS_MODEL" -f "$tmp/prefix.txt" -p "$(cat "$tmp/$file.txt")"
done
words 9000 >"$tmp/long.txt"
expect 1 "long.txt: prompt of [0-9]+ tokens.*model's context of [0-9]+" "${run[@]}" -m "$IMPRESS_MODEL" -f "$tmp/long.txt"

# The store.
echo file >"$tmp/file"
expect 1 "$tmp/file" "${ok[@]}" --store "$tmp/file"
expect 1 "$tmp/missing/deep" "$IMPRESS" ls "$tmp/missing/deep"
expect 1 "$tmp/missing" "$IMPRESS" verify "$tmp/missing"
[ ! -e "$tmp/missing" ] || fail "looking at a store made it"
"${ok[@]}" >/dev/null 2>&1 || fail "a plain run failed"
"$IMPRESS" verify "$tmp/store" >/dev/null || fail "the store of a plain run isn't clean"
if [ "$(id -u)" -ne 0 ]; then
    mkdir -m 0500 "$tmp/locked"
    expect 1 "$tmp/locked" "${ok[@]}" --store "$tmp/locked/store"
fi
expect 1 '999' "$IMPRESS" rm "$tmp/store" 999
before=$("$IMPRESS" ls "$tmp/store" --json | json /dev/stdin 'len(d)')

# A newer format is left alone.
cp -a "$tmp/store" "$tmp/newer"
python3 - "$tmp/newer/catalogue.db" <<'PY'
import sqlite3, sys
c = sqlite3.connect(sys.argv[1])
word = 99 | (~99 & 0xffff) << 16  # a version and its complement: docs/format.md
c.execute("pragma user_version = %d" % (word - (1 << 32)))
c.commit()
c.close()
PY
sum_before=$(cat "$tmp"/newer/segments/* | md5sum)
expect 1 'newer|version|format' "$IMPRESS" ls "$tmp/newer"
expect 1 'newer|version|format' "${ok[@]}" --store "$tmp/newer"
[ "$(cat "$tmp"/newer/segments/* | md5sum)" = "$sum_before" ] || fail "a store of a newer format was changed"

# Symbolic links inside a store are not followed.
cp -a "$tmp/store" "$tmp/linked"
segment=$(ls "$tmp/linked/segments" | head -1)
cp "$tmp/linked/segments/$segment" "$tmp/elsewhere"
ln -sf "$tmp/elsewhere" "$tmp/linked/segments/$segment"
"$IMPRESS" verify "$tmp/linked" >"$tmp/out" 2>&1 && fail "a segment that is a symbolic link was accepted"
"${ok[@]}" --store "$tmp/linked" >/dev/null 2>"$tmp/err" || fail "a symbolic link in the store made a request fail"
[ -f "$tmp/elsewhere" ] || fail "the target of a symbolic link was removed"

# A full disk, as far as one can be made: a tmpfs of 1 MiB.
if [ "$(id -u)" -eq 0 ] && mkdir "$tmp/small" && mount -t tmpfs -o size=1m tmpfs "$tmp/small" 2>/dev/null; then
    "${ok[@]}" --store "$tmp/small/store" >"$tmp/out" 2>"$tmp/err" || fail "a full disk made a request fail: $(tail -1 "$tmp/err")"
    [ -s "$tmp/out" ] || fail "no answer on a full disk"
    grep -qi 'space\|full\|room' "$tmp/err" || fail "a full disk was not mentioned: $(cat "$tmp/err")"
    umount "$tmp/small"
fi

[ "$("$IMPRESS" ls "$tmp/store" --json | json /dev/stdin 'len(d)')" = "$before" ] || fail "bad input lost a stored node"
finish
