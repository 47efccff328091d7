#!/usr/bin/env bash
# Measures on this machine's GPUs what docs/benchmarks holds: one file a step, in the order below.
#
#   scripts/measure.sh OUT [STEP ...]
#
# A step whose file is in OUT is not run again, so that a run that was cut short goes on. Copy the
# evidence into docs/benchmarks/evidence and run docs/benchmarks/generate.py; copy OUT/profile.json
# into your runs (--tree-profile). GPUS=N uses N of the GPUs, LIMIT=S ends a step after S seconds,
# CPU=1 tries all steps with tiny rows on CPU ranks. PYTHON=.venv/bin/python names the interpreter.
set -euo pipefail
STEPS=(calibrate predict attention strong windows heads repeatable gdn gdn_heads baselines)

OUT=${1:?a folder for what is measured}
shift
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python3}
CPU=${CPU:-}
LIMIT=${LIMIT:-1800}
if [ -z "${GPUS:-}" ]; then
    GPUS=2
    [ -n "$CPU" ] || GPUS=$(nvidia-smi --list-gpus | wc -l)
fi
CP=()
for ((size = 1; size <= GPUS; size *= 2)); do CP+=("$size"); done
COMMIT=$(git describe --always --dirty 2> /dev/null || echo unknown)
export CUDA_DEVICE_MAX_CONNECTIONS=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}

# What every measurement takes, and what tiny CPU runs take in place of a step's own options.
COMMON=(--commit "$COMMIT")
TINY=() HEADS=() GDN_HEADS=() ROWS=(--warmup 6 --rows 8) FEW=(--warmup 2 --rows 4) PLANNED=2
if [ -n "$CPU" ]; then
    COMMON+=(--device cpu --dtype float32)
    TINY=(--tokens 256)
    HEADS=(--heads 4/2/16)
    GDN_HEADS=(--gdn-heads 2/4/16/16)
    ROWS=(--warmup 1 --rows 1) FEW=(--warmup 1 --rows 1) PLANNED=1
fi

cli() { # log, words of tree-cp
    local log=$1
    shift
    timeout "$LIMIT" "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$GPUS" \
        -m megatron_tree_cp.cli "$@" > "$log" 2>&1
}

profile() { [ ! -f "$OUT/profile.json" ] || printf -- '--profile\n%s\n' "$OUT/profile.json"; }

bench() { # operator, file, options
    local operator=$1 file=$2 with
    shift 2
    mapfile -t with < <(profile)
    cli "${file%.json}.log" bench "$operator" "${COMMON[@]}" "${TINY[@]}" \
        "${with[@]}" --evidence "$file" "$@"
}

presets=(fixed_5k varied_5k dominant medium_long deep short long_chain)

calibrate() {
    local how=(--gdn --repeats 3 --samples "$OUT/samples.json" --resume)
    [ -z "$CPU" ] || how+=(--quick --hidden-size 32 --ffn-size 64 --impl tiled)
    cli "$OUT/calibrate.log" calibrate --cp "${CP[@]}" "${COMMON[@]}" "${HEADS[@]}" "${how[@]}" \
        --out "$1"
}

predict() {
    local with
    mapfile -t with < <(profile)
    cli "$OUT/predict.log" predict --preset "${presets[@]}" --cp "${CP[@]}" "${COMMON[@]}" \
        "${HEADS[@]}" "${TINY[@]}" "${with[@]}" --rows "$PLANNED" --evidence "$1"
}

attention() {
    bench attention "$1" --preset "${presets[@]}" --cp "${CP[@]}" --fill "${ROWS[@]}" "${HEADS[@]}"
}

strong() {
    local one=(--warmup 1 --rows 1)
    bench attention "$1" --preset one_tree one_chain --cp "${CP[@]}" "${one[@]}" "${HEADS[@]}"
}

windows() { bench attention "$1" --preset long_chain --window 1024 "${FEW[@]}" "${HEADS[@]}"; }

repeatable() {
    local kernel=(--impl repeatable)
    bench attention "$1" --preset fixed_5k dominant "${kernel[@]}" "${FEW[@]}" "${HEADS[@]}"
}

gdn() {
    local rows=(varied_5k medium_long deep one_tree one_chain)
    bench gdn "$1" --preset "${rows[@]}" --cp "${CP[@]}" --fill "${FEW[@]}" "${GDN_HEADS[@]}"
}

heads() { # GPT-OSS with its sinks, its windows; Qwen3-32B, Qwen3.5: a file each, joined
    local shapes=("64/8/64" "64/8/64 --sink" "64/8/64 --sink --window 128" "64/8/128" "16/2/256")
    [ -z "$CPU" ] || shapes=("8/1/16" "8/1/16 --sink --window 9")
    local shape words files=()
    for shape in "${shapes[@]}"; do
        read -ra words <<< "$shape"
        files+=("$OUT/heads.${#files[@]}.json")
        bench attention "${files[-1]}" --preset fixed_5k dominant --heads "${words[@]}" \
            "${FEW[@]}" || return 1
    done
    "$PYTHON" -c 'import json, sys; from pathlib import Path
out, *parts = map(Path, sys.argv[1:])
out.write_text(json.dumps([r for p in parts for r in json.loads(p.read_text())], indent=1) + "\n")' \
        "$1" "${files[@]}"
    rm -f "${files[@]}"
}

gdn_heads() {
    local shape=16/64/128/128
    [ -z "$CPU" ] || shape=2/8/16/16
    bench gdn "$1" --preset varied_5k one_chain --gdn-heads "$shape" "${FEW[@]}"
}

baselines() {
    [ -z "$CPU" ] || { echo "  needs a GPU"; return 0; }
    bench gdn "$1" --preset varied_5k one_chain --cp "${CP[@]}" --baselines "${FEW[@]}"
}

[ $# -gt 0 ] || set -- "${STEPS[@]}"
for step; do
    [[ " ${STEPS[*]} " == *" $step "* ]] || {
        echo "scripts/measure.sh: no step $step; there are ${STEPS[*]}" >&2
        exit 2
    }
done
status=0
for step; do
    file=$OUT/$step.json
    [ "$step" != calibrate ] || file=$OUT/profile.json
    [ ! -f "$file" ] || { echo "$step: there"; continue; }
    began=$SECONDS
    echo "$step"
    if ! "$step" "$file"; then
        log=$(ls -t "$OUT"/*.log | head -n 1)
        echo "  failed: $log: $(grep 'rror: ' "$log" | tail -n 1)" >&2
        status=1
    fi
    echo "  $((SECONDS - began)) s"
done
exit $status
