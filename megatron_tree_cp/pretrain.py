"""Train a stock Megatron model on packed prefix trees.

    torchrun --nproc-per-node 2 -m megatron_tree_cp.pretrain --context-parallel-backend tree \\
        --tree-data rollouts.jsonl --tree-tokenizer bytes --tree-config config.yaml ...

Everything heavy is imported inside :func:`main`: data workers re-import this module when they
start, and the CPU shim has to be in place before Megatron is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> None:
    """Run one training job; bad input ends it with one line on stderr and exit code 2."""
    from megatron_tree_cp.tree.errors import InputError

    try:
        argv = list(sys.argv[1:] if argv is None else argv)
        from megatron_tree_cp.megatron.run_config import expand_tree_config, requests_cpu

        if requests_cpu(argv):
            from megatron_tree_cp.megatron import cpu

            cpu.enable()
        from megatron_tree_cp.megatron.run import run

        run(expand_tree_config(argv))
    except InputError as error:
        print(f"megatron_tree_cp: error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
