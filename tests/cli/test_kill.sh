#!/usr/bin/env bash
# kill -9 while a real model's KV is being stored, 20 times: one open is enough, verify is clean, no file is left over,
# the bytes reported are those that `du` finds, and an old prefix hits with the same answer. tests/fault/test_kill.c
# kills at chosen operations; here it is the whole program.
. "$(dirname "$0")/lib.sh"
need_model
rounds=${IMPRESS_KILL_ROUNDS_MODEL:-20}
seed=${IMP_TEST_SEED:-$RANDOM}
echo "seed: IMP_TEST_SEED=$seed" >&2
words 40 50 >"$tmp/old.txt"
asking=(run -m "$IMPRESS_MODEL" --raw --retention 1 --store "$tmp/store" -p 'And so?' --json)
ask() { "$IMPRESS" "${asking[@]}" -n 4 -f "$1"; }
ask "$tmp/old.txt" >"$tmp/first.json" 2>/dev/null || fail "first run"
answer=$(json "$tmp/first.json" 'repr(d["answer"])')

# The moments are what the kernel tells of the store's files, not times: so none is missed on a slow machine. The event
# is read a little later than it was: what was killed is looked at afterwards.
cat >"$tmp/kill.py" <<'PY'
"""kill.py STORE MOMENT N COMMAND...: start it, and kill it at the Nth event of a kind. Exit code: 0 killed, 3 it ended
by itself."""
import ctypes, os, select, signal, struct, subprocess, sys
MODIFY, MOVED_TO, CREATE = 0x2, 0x80, 0x100
store, moment, n, command = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:]
libc = ctypes.CDLL(None, use_errno=True)
watch = libc.inotify_init()
wanted = MODIFY | MOVED_TO | CREATE
if any(libc.inotify_add_watch(watch, d.encode(), wanted) < 0 for d in (store, store + "/segments")):
    sys.exit("kill.py: inotify: " + os.strerror(ctypes.get_errno()))
alive, child_end = os.pipe()  # at its end when the child is
child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                         pass_fds=[child_end])
os.close(child_end)
renamed = False
while n > 0 and watch in select.select([watch, alive], [], [])[0]:
    events = os.read(watch, 1 << 16)
    while events and n > 0:
        _, mask, _, n_name = struct.unpack_from("iIII", events)
        name = events[16:16 + n_name].rstrip(b"\0").decode()
        events = events[16 + n_name:]
        if moment == "reserving":  # room for it, in the catalogue
            n -= mask & MODIFY and name == "catalogue.db-wal"
        elif moment == "creating":
            n -= mask & CREATE and name.endswith(".tmp")
        elif moment == "writing":  # it may have fewer pieces, or be told of fewer: then with its end
            n -= mask & MODIFY and name.endswith(".tmp")
            n = 0 if mask & MOVED_TO and name.endswith(".seg") else n
        elif moment == "renaming":
            n -= mask & MOVED_TO and name.endswith(".seg")
        elif moment == "noting":  # what was renamed, in the catalogue
            n -= renamed and mask & MODIFY and name == "catalogue.db-wal"
        else:
            sys.exit("kill.py: no such moment: " + moment)
        renamed = renamed or bool(mask & MOVED_TO)
child.send_signal(signal.SIGKILL)
sys.exit(0 if child.wait() == -signal.SIGKILL else 3)
PY
moments=(creating writing reserving writing renaming writing noting)
declare -A found=([before]=0 [meanwhile]=0 [afterwards]=0)
RANDOM=$seed
killed=0
started=0 # rounds whose kill came when the file had been made
for i in $(seq "$rounds"); do
    words 40 "$i" >"$tmp/new.txt"
    had=$(find "$tmp/store/segments" -name '*.seg' | wc -l)
    moment=${moments[$((i % ${#moments[@]}))]} n=1
    case $moment in writing) n=$((1 + RANDOM % 40)) ;; noting) n=$((1 + RANDOM % 6)) ;; esac
    timeout 300 python3 "$tmp/kill.py" "$tmp/store" "$moment" $n "$IMPRESS" "${asking[@]}" -n 1 -f "$tmp/new.txt"
    case $? in
    0) killed=$((killed + 1)) ;;
    3) ;;
    *) fail "round $i ($moment $n): not run" ;;
    esac
    [ "$moment" = reserving ] || started=$((started + 1))
    if [ "$(find "$tmp/store/segments" -name '*.tmp' | wc -l)" -gt 0 ]; then
        found[meanwhile]=$((found[meanwhile] + 1))
    elif [ "$(find "$tmp/store/segments" -name '*.seg' | wc -l)" -gt "$had" ]; then
        found[afterwards]=$((found[afterwards] + 1))
    else
        found[before]=$((found[before] + 1))
    fi
    "$IMPRESS" ls "$tmp/store" >/dev/null 2>"$tmp/err" || fail "round $i: $(cat "$tmp/err")"
    [ "$("$IMPRESS" verify "$tmp/store")" = clean ] || fail "round $i: not clean"
    [ "$(find "$tmp/store" -name '*.tmp' | wc -l)" -eq 0 ] || fail "round $i: a stray file"
    "$IMPRESS" stat "$tmp/store" --json >"$tmp/stat.json" || fail "round $i: no stat"
    # While it looks, SQLite's shared memory is there too: 32 KiB.
    json_ok "$tmp/stat.json" "d['segments'] == $(find "$tmp/store/segments" -type f | wc -l) and
        abs(d['disk_bytes'] - $(du -s -B1 "$tmp/store" | cut -f1)) <= 64 << 10"
    ask "$tmp/old.txt" >"$tmp/old.json" 2>"$tmp/err" || fail "round $i: $(cat "$tmp/err")"
    json_ok "$tmp/old.json" "d['matched_tokens'] > 60 and d['answer'] == $answer"
done
echo "$killed killed; before the file: ${found[before]}, meanwhile: ${found[meanwhile]}, after: ${found[afterwards]}"
[ $((found[meanwhile] + found[afterwards])) -ge $started ] || fail "a kill after a file was made left none"
[ $((2 * killed)) -ge "$rounds" ] || fail "$killed of $rounds were killed"
finish
