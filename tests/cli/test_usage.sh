#!/usr/bin/env bash
# Misuse: one line that says what and where, exit code 2; and help that is complete.
. "$(dirname "$0")/lib.sh"
unset IMPRESS_MODEL # it would fill in for -m
echo text >"$tmp/prefix.txt"
run=("$IMPRESS" run)
base=("${run[@]}" -m "$tmp/no.gguf" -f "$tmp/prefix.txt" -p question)

expect 2 'unknown command `frobnicate`.*run' "$IMPRESS" frobnicate
expect 2 'no model' "${run[@]}" -f x -p y
expect 2 'no prefix' "${run[@]}" -m x -p y
expect 2 'no question' "${run[@]}" -m x -f y
expect 2 'question is empty' "${run[@]}" -m x -f y -p ' '
expect 2 'unknown option --frob' "${base[@]}" --frob
expect 2 'unknown option -Z' "${base[@]}" -Z
expect 2 '-n wants a value' "${run[@]}" -m x -f y -p z -n
expect 2 'unexpected argument `stray`' "${base[@]}" stray
for r in 0 -1 -0.5 1.01 nan 1e9 abc '' autox auto: auto:1 auto:0 auto:0.9: auto:0.9:0.5 auto:0.9:0.5-0.1 auto:0.9:0-1; do
    expect 2 'retention' "${base[@]}" --system as-h2o-lru --retention="$r"
done

# Systems and switches: whatever is wrong, the valid ones are named.
expect 2 "unknown system 'frob'.*as-h2o-lru.*impress.*recomp" "${base[@]}" --system frob
expect 2 'no switch `frob`.*identify, order.*rank' "${base[@]}" --system impress+frob=1
expect 2 'bytes wants a value' "${base[@]}" --system impress+bytes
expect 2 'bytes has no meaning for as' "${base[@]}" --system as+bytes=.5
expect 2 'recomp loads nothing' "${base[@]}" --system recomp+order=core
expect 2 'system: identify: `x` is not one of none, all-keys' "${base[@]}" --system impress+identify=x
expect 2 '--identify: `frob` is not one of none, all-keys, probe, static, chunks, sketch, random' "${base[@]}" --identify frob
expect 2 '--order: .* token, importance, core' "${base[@]}" --order size
expect 2 '--rest: .* raw, q8, k8v4, q4, f16' "${base[@]}" --rest q3
expect 2 '--cache: .* none, lru, lfu, score, attention, aged' "${base[@]}" --cache random
expect 2 '--prefetch: .* none, layers, core, chunks' "${base[@]}" --prefetch all
expect 2 '--rank: .* prefill, reconstruction' "${base[@]}" --system spi --rank best
for n in 0 8 20 272 x -16; do expect 2 '--chunk wants a multiple of 16' "${base[@]}" --chunk="$n"; done
for x in 0 1.5 -1 nan x; do expect 2 '--bytes wants a share' "${base[@]}" --bytes="$x"; done
for x in -1 x inf; do expect 2 '--history-weight wants 0 or more' "${base[@]}" --history-weight="$x"; done
for x in -0.1 nan x; do expect 2 '--probe-alpha wants 0 or more' "${base[@]}" -s impress-paper --probe-alpha="$x"; done
for x in -0.1 1.1 x; do expect 2 '--probe-similarity wants 0 to 1' "${base[@]}" -s impress-paper --probe-similarity="$x"; done
for o in probe-heads period query-rows sketch-rows; do
    for n in 0 x -1 1.5; do expect 2 "--$o wants at least 1" "${base[@]}" --$o="$n"; done
done
for o in keep-first keep-last; do for n in x -1; do expect 2 "--$o wants 0 or more" "${base[@]}" --$o="$n"; done; done
expect 2 '--probe-spread wants yes or no' "${base[@]}" --probe-spread=maybe
for p in 0 -5 soon; do expect 2 '--reorder-period wants seconds or never' "${base[@]}" --reorder-period="$p"; done
expect 2 '--reorder-after wants a whole number' "${base[@]}" --reorder-after often
expect 2 '--read-deadline wants no more than' "${base[@]}" --read-deadline 1000001
expect 2 '--host-cache wants a size' "${base[@]}" --host-cache much
expect 2 '--device-cache wants a size' "${base[@]}" --device-cache -1
expect 2 'IMPRESS_PROBE_SPREAD wants yes' env IMPRESS_PROBE_SPREAD=perhaps "${base[@]}"
expect 2 'gc: --order' "$IMPRESS" gc "$tmp" --reorder --order size
expect 2 'no switch `frob`' "$IMPRESS" systems --values frob
expect 2 'unknown system' "$IMPRESS" systems frob

# What an option says, what the table says, and what is put together from both.
for switch in identify order rest cache prefetch rank; do
    values=$("$IMPRESS" systems --values $switch) || fail "systems --values $switch"
    help=$("$IMPRESS" run --help | sed -n "/^ *--$switch /,/^ *-[-a-z]/p")
    for v in $values; do grep -qw -- "$v" <<<"$help" || fail "the help of --$switch lacks $v"; done
done
"$IMPRESS" systems --json >"$tmp/systems.json" || fail "systems --json"
json_ok "$tmp/systems.json" '{"recomp", "as", "as-h2o-lru", "spi", "impress-paper", "contiguous", "impress"} <= {s["system"] for s in d}'
"$IMPRESS" systems 'impress+bytes=0.375+history-weight=0' impress+order=core --json >"$tmp/systems.json" || fail "systems"
json_ok "$tmp/systems.json" 'd[0]["system"] == "impress+bytes=.375+history-weight=0" and d[0]["order"] == "core"'
json_ok "$tmp/systems.json" 'd[1]["system"] == "impress"'

# Measurements.
bench=("$IMPRESS" bench)
expect 2 'unknown command `frob`; known ones: ablation' "${bench[@]}" frob
chat=("${bench[@]}" chat -m "$tmp/no.gguf")
expect 2 'no model' "${bench[@]}" chat -f "$tmp/prefix.txt"
expect 2 'no document' "${chat[@]}"
expect 2 'no question' "${chat[@]}" -f "$tmp/prefix.txt"
expect 2 'retention wants' "${chat[@]}" -f "$tmp/prefix.txt" -p x -r 0
expect 2 'n-predict wants' "${chat[@]}" -f "$tmp/prefix.txt" -p x -n 0
expect 2 'unknown system' "${chat[@]}" -f "$tmp/prefix.txt" -p x -s frob
ablation=("${bench[@]}" ablation -m "$tmp/no.gguf")
expect 2 'no model' "${bench[@]}" ablation -f "$tmp/prefix.txt"
expect 2 'no prefix' "${ablation[@]}"
expect 2 'unknown system.*steps as, all-keys, itf, ro, sc, sketch' "${ablation[@]}" -f x --steps frob
expect 2 'steps wants' "${ablation[@]}" -f x --steps ,
expect 2 'retention wants' "${ablation[@]}" -f x -r 0.5,2
expect 2 'chunk wants a multiple|steps: chunk' "${ablation[@]}" -f x --chunks 16,20
expect 2 'state.*cold, warm, both' "${ablation[@]}" -f x --state hot
expect 2 'reps' "${ablation[@]}" -f x --reps 0
expect 2 'exclude' "${ablation[@]}" -f x -p a --questions b
expect 2 'wants a --host-cache' "${ablation[@]}" -f x --store none
expect 2 'never cold' "${ablation[@]}" -f x --store none --host-cache 1G --state cold
expect 1 "only warm up" "${ablation[@]}" -f "$tmp/prefix.txt" --warm 6
expect 1 "can't read the folder $tmp/nowhere" "${ablation[@]}" --prefixes "$tmp/nowhere"
expect 1 "$tmp/nowhere.txt: No such file" "${ablation[@]}" -f "$tmp/nowhere.txt"
expect 2 '--io.*auto, uring, threads' "${base[@]}" --io mmap
expect 2 '--cache-type.*f16, q8_0' "${base[@]}" --cache-type q4
expect 2 '--limit wants a size' "${base[@]}" --limit 10X
expect 2 '--n-predict' "${base[@]}" -n 0
expect 2 'whole number' "${base[@]}" -n -3
expect 2 'needs a store' "${base[@]}" --store none --compare
expect 2 'not the number of a node' "$IMPRESS" rm "$tmp" ../etc
expect 2 'NODE' "$IMPRESS" rm "$tmp"
expect 2 'no nodes' "$IMPRESS" rm "$tmp" 1 --all
expect 2 'NODE' "$IMPRESS" pin "$tmp"
expect 2 'NODE' "$IMPRESS" pin --store "$tmp"
expect 2 '`no-node` is not the number of a node' "$IMPRESS" pin --store "$tmp" 1 no-node
expect 2 '`none` is no store' "$IMPRESS" rm --store none 1
for all in '' '1 '; do expect 2 'wants a STORE and no nodes' "$IMPRESS" rm $all--all; done # a default store isn't emptied
expect 2 'no nodes' "$IMPRESS" rm --store "$tmp" 1 --all
expect 1 "$tmp/cache/impress/store" "$IMPRESS" rm 1
expect 1 "$tmp/cache/impress/store" "$IMPRESS" pin 1 2
expect 2 'configuration file .*missing' "$IMPRESS" run --config "$tmp/missing" -m x -f y -p z
printf 'retention 5\n' >"$tmp/bad.conf"
expect 2 'bad.conf:1' "$IMPRESS" run --config "$tmp/bad.conf" -m x -f y -p z
printf '# fine\n\nn-predict = many\n' >"$tmp/bad.conf"
expect 2 'bad.conf:3' "$IMPRESS" run --config "$tmp/bad.conf" -m x -f y -p z
printf 'stroe = /tmp\n' >"$tmp/bad.conf"
expect 2 'bad.conf:1: no such setting: `stroe`' "$IMPRESS" run --config "$tmp/bad.conf" -m x -f y -p z
printf 'file = x\n' >"$tmp/bad.conf"
expect 2 'bad.conf:1: only a flag' "$IMPRESS" run --config "$tmp/bad.conf" -m x -f y -p z
expect 2 'IMPRESS_LIMIT wants a size' env IMPRESS_LIMIT=lots "${base[@]}"

# A value that is wrong is named by where it came from: a flag, a variable, or a line of a file; the one that counts.
expect 2 'serve: IMPRESS_PORT wants 0 to 65535, not 70000' env IMPRESS_PORT=70000 "$IMPRESS" serve -m x
expect 2 'serve: --port wants 0 to 65535, not 70001' env IMPRESS_PORT=70000 "$IMPRESS" serve -m x --port 70001
printf '\nport = 70002\nidentify = frob\nslots = 3\n' >"$tmp/bad.conf"
expect 2 'serve: [^ ]*bad.conf:2: port wants 0 to 65535, not 70002' "$IMPRESS" serve -m x --config "$tmp/bad.conf"
expect 2 'serve: IMPRESS_PORT wants .* 70000' env IMPRESS_PORT=70000 "$IMPRESS" serve -m x --config "$tmp/bad.conf"
expect 2 'serve: [^ ]*bad.conf:3: identify: `frob` is not' "$IMPRESS" serve -m x --config "$tmp/bad.conf" --port 1
expect 2 'serve: --slots wants 1 to 64' "$IMPRESS" serve -m x --config "$tmp/bad.conf" --port 1 --slots 0
expect 2 'serve: IMPRESS_TLS_CERT and --tls-key go together' env IMPRESS_TLS_CERT=c "$IMPRESS" serve -m x
expect 2 'IMPRESS_IDENTIFY: `--slots` is not one' env IMPRESS_IDENTIFY=--slots IMPRESS_SLOTS=3 "$IMPRESS" serve -m x
expect 2 'IMPRESS_RETENTION wants' env IMPRESS_RETENTION=7 "${base[@]}"

# What begins like a setting and is none: one line, with what it may stand for; then the command does what it does.
noted() { # PATTERN VARIABLE=VALUE...: the first of two lines
    local pattern=$1
    shift
    env "$@" "${base[@]}" >"$tmp/out" 2>"$tmp/err"
    [ $? -eq 1 ] && [ "$(wc -l <"$tmp/err")" -eq 2 ] || fail "$*: $(cat "$tmp/err")"
    head -1 "$tmp/err" | grep -qE -- "$pattern" || fail "no /$pattern/ in $(head -1 "$tmp/err")"
}
noted '^impress: note: ignored, no settings: IMPRESS_LIMTI \(IMPRESS_LIMIT\?\)$' IMPRESS_LIMTI=1G
noted 'IMPRESS_API_KEYS \(IMPRESS_API_KEY\?\)$' IMPRESS_API_KEYS=secret-of-mine
noted ' IMPRESS_SERVICE_HOST$' IMPRESS_SERVICE_HOST=10.0.0.1
noted ' IMPRESS_FILE( |$)' IMPRESS_FILE=only-by-a-flag
noted 'IMPRESS_SLTOS.*, IMPRESS_ZZZZZZ|IMPRESS_ZZZZZZ, IMPRESS_SLTOS' IMPRESS_SLTOS=1 IMPRESS_ZZZZZZ=1
grep -q secret-of-mine "$tmp/err" && fail "a value in a note"
expect 1 'no.gguf' env IMPRESS_SLOTS=3 IMPRESS_API_KEY=kkkkkkkkkk IMPRESS_ANY_FS=1 IMPRESS_LLAMA_PREFIX=x "${base[@]}"
expect 1 'no.gguf' env IMPRESS_=x "${base[@]}"

"$IMPRESS" >/dev/null 2>&1
[ $? -eq 2 ] || fail "no command should be a misuse"
version=$(sed -nE 's/^#define IMP_VERSION_(MAJOR|MINOR|PATCH) ([0-9]+)$/\2/p' ../../include/impress/impress.h | paste -sd.)
[ "$("$IMPRESS" --version)" = "impress $version" ] || fail "the program's version is not the header's"

# Help names every command; the manual page (of the command, or the common one) has every option that help has, and
# completions find them.
check_help() { # PAGE COMMAND...
    local page=$1 manual o
    shift
    manual=$(sed 's/\\-/-/g' "$page")
    "$IMPRESS" "$@" --help >"$tmp/help" || fail "$* --help failed"
    grep -q "^usage: impress $*" "$tmp/help" || fail "$* --help has no usage line"
    for o in $(grep -oE '^ +(-[a-z], )?--[a-z-]+' "$tmp/help" | grep -oE -- '--[a-z-]+'); do
        [ "$o" = --help ] || grep -qF -- "$o" <<<"$manual" || fail "$page lacks $o of $*"
        complete_has "$o" impress "$@" "$o"
    done
    awk 'length > 104 { exit 1 }' "$tmp/help" || fail "$* --help has a line over 104 columns"
}
# Does completion offer WANTED for the last of WORD...?
complete_has() {
    local wanted=$1 got
    shift
    got=$(bash --norc -c '
        . ../../completions/impress.bash
        compopt() { :; }
        COMP_WORDS=("$IMPRESS" "${@:2}") COMP_CWORD=$(($# - 1))
        _impress
        printf "%s\n" "${COMPREPLY[@]}"' bash "$@" 2>/dev/null)
    grep -qxF -- "$wanted" <<<"$got" || fail "completion of \"$*\" lacks $wanted"
}
# Long lists stand under headings, each of them once and with something below it.
for c in run serve; do
    "$IMPRESS" $c --help >"$tmp/help"
    grep -qx 'options:' "$tmp/help" && fail "$c --help has options without a heading"
    heads=$(sed -n '/^examples:/d; s/^\([A-Z][a-z ,]*\):$/\1/p' "$tmp/help")
    [ "$(wc -l <<<"$heads")" -ge 5 ] && [ -z "$(sort <<<"$heads" | uniq -d)" ] || fail "headings of $c --help: $heads"
    for h in Model Store; do grep -qx "$h" <<<"$heads" || fail "$c --help has no heading $h"; done
    grep -A 1 -E '^[A-Z][a-z ,]*:$' "$tmp/help" | grep -vE -- '^--$|^[A-Z][a-z ,]*:$|^ +(-[a-z], )?--' && fail "$c --help: a heading alone"
    grep -E -- '^ *--(Model|Store)' "$tmp/help" && fail "$c --help: a heading as an option"
    expect 2 'unknown option --Store' "$IMPRESS" $c -m x --Store x
done

commands=$("$IMPRESS" --help | sed -n 's/^  \([a-z]\+\)  .*/\1/p')
[ "$(wc -w <<<"$commands")" -ge 8 ] || fail "help lists too few commands: $commands"
for c in $commands; do
    complete_has "$c" impress "$c"
    page=../../man/impress-$c.1
    [ -f "$page" ] || fail "\`man impress-$c\` finds nothing"
    told=$(sed -n 's#^\.so man1/#../../man/#p' "$page") # a link to the common page, which has it among the commands
    [ -z "$told" ] || grep -qxF ".B $c" "$told" || fail "$told says nothing of $c"
    page=${told:-$page}
    [ "$c" = bench ] || check_help "$page" "$c"
done
subcommands=$("$IMPRESS" bench --help | sed -n 's/^  \([a-z-]\+\)  .*/\1/p')
[ "$(wc -w <<<"$subcommands")" -ge 1 ] || fail "bench --help lists no commands"
for c in $subcommands; do
    complete_has "$c" impress bench "$c"
    check_help ../../man/impress-bench.1 bench "$c"
done
for s in recomp impress contiguous; do complete_has "$s" impress run -s "$s"; done
complete_has importance impress eval --order i
complete_has sketch impress run --identify sk
finish
