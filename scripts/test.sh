#!/usr/bin/env bash
# Makes .venv if needed, then runs ruff, mypy and the tests on CPU.
#
#   scripts/test.sh                       the fast tier
#   scripts/test.sh --all                 the slow tier too; this is what CI runs
#   scripts/test.sh --no-lint tests/plan  everything else goes to pytest
#
# Tests run two files at a time (`-n 2 --dist loadfile`); give `-n 0` for one process, as pdb needs.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

lint=1
pytest_args=()
for arg in "$@"; do
    case "$arg" in
        --no-lint) lint=0 ;;
        -h | --help) sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
        *) pytest_args+=("$arg") ;;
    esac
done

prepare_environment constraints/cpu-py312.txt dev
cd "$ROOT"
status=0
if ((lint)); then
    say "ruff"
    .venv/bin/ruff check . || status=1
    .venv/bin/ruff format --check . || status=1
    say "mypy"
    .venv/bin/mypy || status=1
fi
say "pytest"
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
.venv/bin/python -m pytest -n 2 --dist loadfile "${pytest_args[@]}" || status=$?
if ((status)); then
    printf 'scripts/test.sh: failed (see above)\n' >&2
fi
exit "$status"
