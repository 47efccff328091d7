"""`python -m tests.oracle.entry SIDE FOLDER GRADIENTS WEIGHTS -- <pretrain arguments>`.

SIDE is ``tree`` (the package's own entry) or ``alone`` (each trajectory by itself on the stock
spec); GRADIENTS and WEIGHTS are comma-separated iterations at which the probe writes, or ``-``.
"""

from __future__ import annotations

import sys
from pathlib import Path


def iterations(text: str) -> set[int]:
    """``"1,10"`` -> {1, 10}; ``"-"`` -> empty."""
    return set() if text == "-" else {int(part) for part in text.split(",")}


def main() -> None:
    side, folder, gradients, weights, dashes, *argv = sys.argv[1:]
    assert dashes == "--"
    from megatron_tree_cp.megatron import cpu
    from megatron_tree_cp.megatron.run_config import expand_tree_config

    cpu.enable()
    argv = expand_tree_config(argv)
    from tests.oracle.probe import Probe

    Probe(Path(folder), iterations(gradients), iterations(weights)).install()
    if side == "alone":
        from tests.oracle.alone import run_alone

        run_alone(argv)
    else:
        from megatron_tree_cp.megatron.run import run

        run(argv)


if __name__ == "__main__":
    main()
