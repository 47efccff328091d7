#!/usr/bin/env bash
# Trains a 300M-class dense model on one host. Copy it, edit the arrays, run it:
#
#   DATA=rollouts.jsonl TOKENIZER=hf:/path/to/tokenizer GPUS=2 CP=2 \
#       scripts/torchrun/pretrain_llama_300m.sh [more flags]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

DATA=${DATA:?a JSON or JSONL file of rollouts}
TOKENIZER=${TOKENIZER:-bytes}
GPUS=${GPUS:-2}
CP=${CP:-$GPUS}
ROW=${ROW:-16384} # tokens of a packed row; does not depend on CP
RUN=${RUN:-runs/llama_300m}

export CUDA_DEVICE_MAX_CONNECTIONS=1 # Megatron demands it before Blackwell when CP > 1
mkdir -p "$RUN"

DISTRIBUTED_ARGS=(--standalone --nproc-per-node "$GPUS")
MODEL_ARGS=(
    --tree-config configs/models/llama_300m.yaml
    --seq-length "$ROW"
    --max-position-embeddings "$ROW"
    --transformer-impl local
)
MODEL_PARALLEL_ARGS=(
    --context-parallel-backend tree
    --context-parallel-size "$CP"
)
DATA_ARGS=(
    --tree-data "$DATA"
    --tree-tokenizer "$TOKENIZER"
)
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 8
    --train-iters 1000
    --lr 3e-4
    --min-lr 3e-5
    --lr-decay-style cosine
    --lr-warmup-iters 50
    --clip-grad 1.0
    --weight-decay 0.1
)
LOGGING_ARGS=(
    --log-interval 1
    --log-throughput
    --eval-iters 0
    --tree-metrics-file "$RUN/metrics.jsonl"
    --tensorboard-dir "$RUN/tensorboard"
    --save "$RUN/checkpoints"
    --load "$RUN/checkpoints"
    --save-interval 100
)

exec python3 -m torch.distributed.run "${DISTRIBUTED_ARGS[@]}" -m megatron_tree_cp.pretrain \
    "${MODEL_ARGS[@]}" "${MODEL_PARALLEL_ARGS[@]}" "${DATA_ARGS[@]}" "${TRAINING_ARGS[@]}" \
    "${LOGGING_ARGS[@]}" "$@"
