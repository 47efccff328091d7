"""Run an unmodified stock Megatron-LM script, with the context parallelism that you choose.

    torchrun --nproc-per-node 2 -m megatron_tree_cp.launch /path/to/pretrain_gpt.py \\
        --context-parallel-backend tree --tree-data rollouts.jsonl ...

With ``tree`` the script's data, layers, loss and metrics are those of `megatron_tree_cp.pretrain`.
With ``te``, the default, Megatron is left untouched. ``--tree-cpu`` (CPU ranks over gloo) and
``--tree-config FILE`` serve both.

Everything heavy is imported inside functions: the CPU shim has to be in place before Megatron is.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

USAGE = "usage: python -m megatron_tree_cp.launch SCRIPT [--context-parallel-backend {te,tree}] ..."


def main(argv: Sequence[str] | None = None) -> None:
    """Run ``SCRIPT`` as ``__main__``; bad input ends it with one line on stderr and exit code 2."""
    from megatron_tree_cp.tree.errors import InputError

    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] in (["-h"], ["--help"]):
        print(f"{__doc__}\n{USAGE}")
        return
    try:
        _launch(argv)
    except InputError as error:
        print(f"megatron_tree_cp: error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)


def _launch(argv: list[str]) -> None:
    from megatron_tree_cp.megatron.arguments import requested_backend, stock_options
    from megatron_tree_cp.megatron.run_config import expand_tree_config, requests_cpu

    script, options = _script(argv)
    # As under `python SCRIPT`, and before Megatron is imported: a checkout's own comes first.
    sys.path.insert(0, str(script.parent))
    if requests_cpu(options):
        from megatron_tree_cp.megatron import cpu

        cpu.enable()
    options = expand_tree_config(options)
    asks_for_help = not {"-h", "--help"}.isdisjoint(options)
    tree = requested_backend(options) == "tree" or asks_for_help
    if not tree:
        options = stock_options(options)
    sys.argv = [str(script), *options]
    if tree:
        from megatron_tree_cp.megatron.install import install

        install(exit_on_bad_input=False)
    runpy.run_path(str(script), run_name="__main__")


def _script(argv: list[str]) -> tuple[Path, list[str]]:
    from megatron_tree_cp.tree.errors import InputError

    if not argv or argv[0].startswith("-"):
        raise InputError(f"no script to run: {USAGE}")
    script = Path(argv[0]).resolve()
    if not script.is_file():
        raise InputError(f"{argv[0]}: no such script: give the path of a stock pretrain_*.py")
    return script, argv[1:]


if __name__ == "__main__":
    main()
