#!/usr/bin/env bash
# Runs every GPU kernel once under NVIDIA's compute-sanitizer: memory errors in all, races in ours.
# Needs a GPU, the extra `gpu` and the CUDA toolkit. PYTHON=.venv/bin/python scripts/sanitize.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python3}
PATH=$PATH:/usr/local/cuda/bin
# Freed memory goes back to the driver, so that a read of it shows.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1

# API errors are left out: importing the CUDA bindings asks an older driver for newer functions.
check() { # tool, step
    echo "$1, $2"
    compute-sanitizer --tool "$1" --error-exitcode 3 --print-limit 5 \
        --report-api-errors no --kernel-name-exclude kns=at::native "$PYTHON" -m tests.sanitized "$2"
}

check memcheck own
check racecheck own
check memcheck flash
