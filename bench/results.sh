#!/usr/bin/env bash
# The measurements of docs/results/, on a machine that does nothing else. Each can be stopped, and goes on from its rows.
#
# usage: bench/results.sh ttft OUT MODEL.gguf PREFIX.txt...    every system: disk at 25 MB/s, 125 MB/s and as it is; warm tiers
#        bench/results.sh peer OUT MODEL.gguf PREFIX.txt...    beside llama-server, 8,000 tokens, cold
#        bench/results.sh cost OUT MODEL.gguf DIR              cost curves, from prefixes of a folder
#        bench/results.sh io OUT                               reads beside fio
#        bench/results.sh ablation OUT MODEL.gguf PREFIX.txt...  one technique after the other; by retention; by chunk size
#        bench/results.sh replay OUT [FILE.pat...]             large models, modelled: opt-13b and opt-30b, and what they are
#                                                              sensitive to; also by recorded patterns (bench replay --record)
#        bench/results.sh pages OUT                            tables into docs/results/ and plots into docs/results/img/
#
# In the environment: REPS (default 2), SYSTEMS, OURS (variants of impress), REST (k8v4: the precision at which systems are
# compared alike), IMPRESS (build/impress), STORE (folder of the stores; default ~/.cache/impress/bench).
set -euo pipefail

cd "$(dirname "$0")/.."
impress=${IMPRESS:-build/impress}
rest=${REST:-k8v4}
reps=${REPS:-2}
published=as,as-h2o-lru,as-h2o-lfu,impress-paper,contiguous
alike=as+rest=$rest,as-h2o-lfu+rest=$rest,impress-paper+rest=$rest
ours=${OURS:-impress,impress+rest=$rest+bytes=.375,impress+rest=$rest+bytes=.25}
systems=${SYSTEMS:-$published,$alike,$ours}
store=()
[ -z "${STORE:-}" ] || store=(--store "$STORE")
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}

usage() { sed -n '2,/^[^#]/{/^#/p}' "$0" >&2; exit 2; }
[ $# -ge 2 ] || usage
step=$1 out=$2
shift 2
mkdir -p "$out"
files() { for f; do printf -- '-f\n%s\n' "$f"; done; }
name() { basename "$1" .gguf; }

case $step in
    ttft)
        [ $# -ge 2 ] || usage
        model=$1
        shift
        mapfile -t prefixes < <(files "$@")
        "$impress" bench ttft -m "$model" "${prefixes[@]}" "${store[@]}" -s "$systems" --warm --reps "$reps" \
            --io-limit 25M,125M,none --out "$out/ttft-$(name "$model").jsonl"
        ;;
    peer)
        [ $# -ge 2 ] || usage
        model=$1
        shift
        mapfile -t prefixes < <(files "$@")
        scripts/get-peer.sh >/dev/null
        "$impress" bench peer-llama-server -m "$model" "${prefixes[@]}" "${store[@]}" --prefix-tokens 8000 --n-prefixes 1 \
            --reps 5 -s "as,$ours" --out "$out/peer-$(name "$model").jsonl"
        ;;
    cost)
        [ $# -eq 2 ] || usage
        bench/cost_curves.py --model "$1" --prefixes "$2" --out "$out" --impress "$impress" \
            --match "$(dirname "$impress")/bench/bench-match" ${STORE:+--store "$STORE"} --reps "$reps" | tee "$out/cost-$(name "$1").md"
        ;;
    io)
        "$impress" bench io --sizes 16K,64K,256K,1M --depths 8,32 --json >"$out/io.jsonl"
        bench/io_table.py "$out/io.jsonl"
        ;;
    ablation)
        [ $# -ge 2 ] || usage
        model=$1
        shift
        mapfile -t prefixes < <(files "$@")
        ablate() {
            local file="$out/ablation-$1.jsonl"
            shift
            [ -s "$file" ] && return
            "$impress" bench ablation -m "$model" "${prefixes[@]}" "${store[@]}" --io-limit 125M --reps 1 --json "$@" >"$file.part"
            mv "$file.part" "$file"
        }
        ablate 1-steps
        ablate 2-retention --steps all-keys,sc,sketch,impress -r 0.05,0.1,0.5,1
        ablate 3-chunks --steps sc,impress --chunks 16,32,64,128,256 --state cold
        bench/ablation_tables.py "$out"/ablation-*.jsonl
        ;;
    replay)
        # A file for each call, so that a second run goes on where the first was stopped.
        play() {
            local file="$out/replay-$1.jsonl"
            shift
            [ -s "$file" ] && return
            "$impress" bench replay "$@" --json >"$file.part"
            mv "$file.part" "$file"
        }
        ours=impress+order=importance,$ours
        all=recomp,as,as-h2o-lru,as-h2o-lfu,spi,impress-paper,contiguous,$ours
        few=${SYSTEMS:-as-h2o-lfu,impress-paper,contiguous,$ours}
        for shape in opt-13b opt-30b; do
            play "$shape" --shape "$shape" -s "$all" --virtual
            for pattern; do
                play "$shape-$(basename "$pattern" .pat)" --shape "$shape" -s "$few" --virtual --patterns "$pattern"
            done
        done
        for disk in .125 1 14; do play "disk-$disk" --shape opt-13b -s "$few" --virtual --disk $disk; done
        for data in 30G 120G; do play "data-$data" --shape opt-13b -s "$few" --virtual --data $data; done
        for host in 8G 16G 64G; do play "host-$host" --shape opt-13b -s "$few" --virtual --host-cache $host; done
        for device in 0 5G 20G; do play "device-$device" --shape opt-13b -s "$few" --virtual --device-cache $device; done
        for chunk in 16 32 128 256; do
            play "chunk-$chunk" --shape opt-13b --virtual -s \
                "as-h2o-lfu+chunk=$chunk,impress-paper+chunk=$chunk,impress+chunk=$chunk,impress+rest=$rest+chunk=$chunk"
        done
        for shape in opt-13b opt-30b; do play "$shape-slept" --shape "$shape" -s "as,impress-paper,$ours" --stretch 4; done
        bench/replay_tables.py "$out"/replay-*.jsonl
        ;;
    pages)
        for file in "$out"/ttft-*.jsonl "$out"/peer-*.jsonl; do
            [ -f "$file" ] || continue
            bench/plot_bench.py docs/results/img "$file"
            bench/ttft_tables.py --page docs/results/ttft.md "$(basename "$file" .jsonl)" "$file"
        done
        [ ! -f "$out/io.jsonl" ] || { bench/io_table.py --page docs/results/io.md io "$out/io.jsonl"
            bench/plot_bench.py docs/results/img "$out/io.jsonl"; }
        if ls "$out"/ablation-*.jsonl >/dev/null 2>&1; then
            bench/ablation_tables.py --page docs/results/ablation.md ablation "$out"/ablation-*.jsonl
        fi
        if ls "$out"/replay-*.jsonl >/dev/null 2>&1; then
            bench/replay_tables.py --page docs/results/replay.md replay "$out"/replay-*.jsonl
            bench/plot_bench.py docs/results/img "$out"/replay-*.jsonl
        fi
        for file in "$out"/cost-*.md; do
            [ -f "$file" ] || continue
            bench/into_page.py docs/results/cost.md "$(basename "$file" .md)" "$file"
            cp "$out/$(basename "$file" .md)"-*.svg docs/results/img/
        done
        ;;
    *) usage ;;
esac
