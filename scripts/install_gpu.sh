#!/usr/bin/env bash
# Installs the package with its GPU extras into .venv, or into the active environment (--here, as in
# a container). Knows which packages need build flags.
#
#   scripts/install_gpu.sh [--here] [--keep-torch] [--te] [--dev]
#
#   --here        install into the Python on PATH instead of .venv
#   --keep-torch  leave the installed torch and Triton as they are (a container's own build)
#   --te          Transformer Engine as well: compiles its torch extension (about 15 minutes on two
#                 cores; needs nvcc and the CUDA headers)
#   --dev         test tools as well
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

here=0 keep_torch=0 te=0 extras=data,logging
for arg in "$@"; do
    case "$arg" in
        --here) here=1 ;;
        --keep-torch) keep_torch=1 ;;
        --te) te=1 ;;
        --dev) extras+=,dev ;;
        -h | --help) sed -n '2,12s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
        *) fail "unknown option $arg (see --help)" ;;
    esac
done

if ((here)); then
    python="$(command -v python3 || command -v python)"
    usable_python "$python" || fail "$python is older than 3.12"
else
    usable_python "$VENV/bin/python" || "$(find_python)" -m venv "$VENV"
    python="$VENV/bin/python"
fi
command -v nvcc >/dev/null || [[ -n "${CUDA_HOME:-}" ]] ||
    say "no nvcc on PATH and no CUDA_HOME: kernels that compile at run time will not find CUDA"

pins="$(mktemp)"
trap 'rm -f "$pins"' EXIT
cp "$ROOT/constraints/h200.txt" "$pins"
if ((keep_torch)); then
    sed -i -E '/^(torch|triton|numpy)==/d' "$pins"
    "$python" -m pip freeze | grep -E '^(torch|triton|numpy)==' >>"$pins" ||
        fail "--keep-torch: no torch is installed in $python"
fi
pip_install() { "$python" -m pip install --disable-pip-version-check --constraint "$pins" "$@"; }

say "package"
pip_install --editable "$ROOT[$extras]"

say "kernels that come as wheels"
pip_install flash-linear-attention tilelang flash-attn-4 nvidia-cutlass-dsl

# Only mamba-ssm's Triton SSD kernels are used. Its CUDA extension (selective scan) takes long to
# compile and the index has no wheel, so it is built without; its build imports the installed torch.
# --no-deps: its requirements name model-loading packages that nothing here needs.
say "mamba-ssm without its CUDA extension"
pip_install setuptools wheel packaging ninja
MAMBA_FORCE_BUILD=TRUE MAMBA_SKIP_CUDA_BUILD=TRUE \
    pip_install --no-build-isolation --no-deps mamba-ssm

if ((te)); then
    say "Transformer Engine (its torch extension compiles now)"
    # The headers of pip's CUDA packages are not where a compiler looks.
    nvidia="$("$python" -c 'import nvidia; print(next(iter(nvidia.__path__)))' 2>/dev/null || true)"
    if [[ -n "$nvidia" ]]; then
        for part in cu13 cudnn nccl nvshmem; do
            CPATH="${CPATH:+$CPATH:}$nvidia/$part/include"
            LIBRARY_PATH="${LIBRARY_PATH:+$LIBRARY_PATH:}$nvidia/$part/lib"
        done
        export CPATH LIBRARY_PATH
    fi
    NVTE_FRAMEWORK=pytorch MAX_JOBS="${MAX_JOBS:-$(nproc)}" \
        pip_install --no-build-isolation 'transformer-engine[pytorch,core_cu13]'
fi

say "installed"
"$python" - <<'END'
from importlib.metadata import PackageNotFoundError, version

for name in ("megatron-tree-cp", "megatron-core", "torch", "triton", "flash-attn-4",
             "nvidia-cutlass-dsl", "flash-linear-attention", "tilelang", "mamba-ssm",
             "transformer-engine"):
    try:
        print(f"  {name:24} {version(name)}")
    except PackageNotFoundError:
        print(f"  {name:24} -")
END
