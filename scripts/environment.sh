# Sourced by the other scripts: finds a Python >= 3.12, makes .venv, installs the package in it.
# Sets ROOT (the repository) and VENV; `prepare_environment CONSTRAINTS EXTRAS` (EXTRAS may
# be empty) returns at once when nothing that decides the installation has changed since.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"

say() { printf '\033[1m==> %s\033[0m\n' "$*" >&2; }
fail() { printf 'error: %s\n' "$*" >&2; exit 2; }

# True if $1 runs, is at least 3.12, and can make virtual environments (a pyenv shim on PATH may
# exist and still refuse to run; Debian's python3 may lack ensurepip).
usable_python() {
    "$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 12))' \
        >/dev/null 2>&1
}

# Prints a usable interpreter: $PYTHON if set, then 3.12 (the version the pins were tested with),
# then anything newer, from PATH and from pyenv.
find_python() {
    local candidate versions="${PYENV_ROOT:-$HOME/.pyenv}/versions"
    if [[ -n "${PYTHON:-}" ]]; then
        usable_python "$PYTHON" || fail "PYTHON=$PYTHON is not a Python >= 3.12 with venv"
        printf '%s\n' "$PYTHON"
        return
    fi
    for candidate in python3.12 "$versions"/3.12.*/bin/python3 \
        python3 python python3.13 python3.14 "$versions"/3.1[3-9]*/bin/python3; do
        if usable_python "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    fail "no Python >= 3.12 with venv on PATH or in $versions; install one or set PYTHON=/path/to/it"
}

prepare_environment() {
    local constraints="$1" extras="$2" stamp key python
    exec 9<"$ROOT/pyproject.toml"
    ! command -v flock >/dev/null || flock 9 # two scripts started together install once
    if ! "$VENV/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
        python="$(find_python)"
        say "creating .venv with $python"
        "$python" -m venv --clear "$VENV"
    fi
    stamp="$VENV/.installed-${extras:-base}"
    key="$(cat "$ROOT/pyproject.toml" "$ROOT/$constraints" | sha256sum | cut -d' ' -f1) $ROOT"
    # An installation with extras holds the base too.
    if ! grep -qsxF "$key" "$stamp" && { [[ -n "$extras" ]] || ! cat "$VENV"/.installed-* \
        2>/dev/null | grep -qxF "$key"; }; then
        say "installing megatron-tree-cp${extras:+[$extras]} with $constraints (minutes at first)"
        # --no-compile: compiling all of torch takes longer than what a run imports of it.
        "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile \
            --constraint "$ROOT/$constraints" --editable "$ROOT${extras:+[$extras]}"
        printf '%s\n' "$key" >"$stamp"
    fi
    exec 9<&-
}
