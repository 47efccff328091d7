#!/usr/bin/env bash
# Trains one model under several parallel shapes from the same initial weights and compares every
# step's loss and gradient norm with one GPU's: 0.5 % and 1 %, the noise of bf16.
#
#   DATA=rollouts.jsonl MODEL=configs/models/llama_1b.yaml GPUS=2 scripts/compare_shapes.sh [flags]
#
# Further flags go to every run (--messages-key, --transformer-impl local, ...). CPU=1 tries it on
# CPU ranks. Shapes with experts want EXPERTS=1.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

DATA=${DATA:?a JSON or JSONL file of rollouts}
MODEL=${MODEL:?a YAML model config}
GPUS=${GPUS:-2}
ROW=${ROW:-32768}
STEPS=${STEPS:-20}
LR=${LR:-1e-5} # small: at rates where gradients jump, roundings alone part any two runs
RUN=${RUN:-runs/shapes}
PYTHON=${PYTHON:-python3}

# Experts are spread by EP alone: gloo cannot cut them.
TP="--tensor-model-parallel-size 2 --sequence-parallel${EXPERTS:+ --expert-tensor-parallel-size 1}"
case $GPUS in
    2)
        SHAPES=(
            "CP2|--context-parallel-size 2"
            "TP2|$TP"
            "PP2|--pipeline-model-parallel-size 2"
            "DP2|"
        )
        [ -z "${EXPERTS:-}" ] ||
            SHAPES+=("EP2xCP2|--context-parallel-size 2 --expert-model-parallel-size 2")
        ;;
    4)
        SHAPES=(
            "TP2xCP2|--context-parallel-size 2 $TP"
            "PP2xCP2|--context-parallel-size 2 --pipeline-model-parallel-size 2"
            "DP2xCP2|--context-parallel-size 2"
        )
        [ -z "${EXPERTS:-}" ] ||
            SHAPES+=("EP4xCP4|--context-parallel-size 4 --expert-model-parallel-size 4")
        ;;
    *)
        echo "GPUS=$GPUS: this script knows shapes of 2 and of 4 GPUs" >&2
        exit 2
        ;;
esac

export CUDA_DEVICE_MAX_CONNECTIONS=1
mkdir -p "$RUN"
rm -rf "$RUN"/weights "$RUN"/*.jsonl

COMMON=(
    --tree-config "$MODEL"
    --context-parallel-backend tree
    --tree-data "$DATA"
    --tree-max-tokens "$ROW"
    --max-position-embeddings "$ROW"
    --micro-batch-size 1
    --global-batch-size 2
    --ckpt-format torch_dist
    ${CPU:+--tree-cpu}
)
STEPPING=(--train-iters "$STEPS" --lr "$LR" --min-lr "$LR" --lr-decay-style constant)
FROM_WEIGHTS=(--load "$RUN/weights" --finetune --no-load-optim --no-load-rng)

train() { # name, processes, flags
    local name=$1 processes=$2
    shift 2
    if ! "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$processes" \
        -m megatron_tree_cp.pretrain "${COMMON[@]}" "$@" > "$RUN/$name.log" 2>&1; then
        echo "$name failed: $RUN/$name.log" >&2
        grep -h "rror: " "$RUN/$name.log" | tail -n 3 >&2
        exit 1
    fi
}

echo "initial weights"
train weights 1 --train-iters 1 --lr 0 --min-lr 0 --save "$RUN/weights" --save-interval 1 \
    --no-save-optim --no-save-rng "$@"
echo "CP1"
train CP1 1 "${STEPPING[@]}" "${FROM_WEIGHTS[@]}" --tree-metrics-file "$RUN/CP1.jsonl" "$@"
status=0
for shape in "${SHAPES[@]}"; do
    name=${shape%%|*}
    echo "$name"
    read -ra flags <<< "${shape#*|}"
    train "$name" "$GPUS" "${flags[@]}" "${STEPPING[@]}" "${FROM_WEIGHTS[@]}" \
        --tree-metrics-file "$RUN/$name.jsonl" "$@"
    "$PYTHON" scripts/compare_metrics.py "$RUN/CP1.jsonl" "$RUN/$name.jsonl" \
        --labels CP1 "$name" --rtol 0.005 --grad-norm-rtol 0.01 || status=1
done
exit $status
