#!/usr/bin/env bash
# Trains a small model on example rollouts through Megatron's own loop, on CPU: 20 iterations on
# one process, the same 20 on two context-parallel processes, and compares every loss.
#
#   scripts/quickstart.sh                  about 5 minutes the first time, seconds to install after
#   scripts/quickstart.sh --train-iters 5  everything else goes to both training runs
#
# Leaves logs and metrics in runs/quickstart/.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
case "${1:-}" in -h | --help) sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;; esac

prepare_environment constraints/cpu-py312.txt ""
cd "$ROOT"
python=.venv/bin/python
out=runs/quickstart
data=examples/rollouts.jsonl
mkdir -p "$out" examples

# gloo, CPU tensors and one thread a rank; a GPU in this machine is left alone.
export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES="" CUDA_DEVICE_MAX_CONNECTIONS=1 PYTHONWARNINGS=ignore

say "writing example rollouts to $data"
$python scripts/make_example_rollouts.py --out "$data"

# train CP [flags]: one run; its log goes to a file, one line an iteration to the screen.
train() {
    local cp=$1 log="$out/cp$1.log" metrics="$out/cp$1.jsonl"
    shift
    say "training with CP$cp; full log: $log"
    rm -f "$metrics"
    timeout 900 $python -m torch.distributed.run --standalone --nproc-per-node "$cp" \
        -m megatron_tree_cp.pretrain --tree-cpu --tree-config configs/quickstart.yaml \
        --context-parallel-size "$cp" --tree-metrics-file "$metrics" "$@" 2>&1 |
        tee "$log" | sed -unE "$iteration_line" || {
        tail -n 40 "$log" >&2
        fail "training with CP$cp failed; the log above is the end of $log"
    }
}
iteration_line='s/.* iteration +([0-9]+)\/ *([0-9]+) .*iteration \(ms\): ([0-9.]+) .*lm loss: '
iteration_line+='([^ ]+) .*grad norm: ([^ ]+) .*/  iteration \1\/\2  loss \4  grad norm \5  \3 ms/p'
train 1 "$@"
train 2 "$@"

say "CP1 and CP2, iteration by iteration"
$python scripts/compare_metrics.py "$out/cp1.jsonl" "$out/cp2.jsonl" --labels CP1 CP2 --falling

say "what was packed"
.venv/bin/tree-cp pack "$data" --tokenizer bytes --max-tokens 2048

cat <<'END'

Next:
  scripts/test.sh             the test suite, gradients against trajectories alone among it
  configs/quickstart.yaml     what was just trained; every key is a Megatron flag
  docs/quickstart.md          your own rollouts, your own model, GPUs
  docs/architecture.md        how it works
END
