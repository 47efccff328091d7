"""`python -m tests.oracle.entry SIDE FOLDER GRADIENTS WEIGHTS -- <pretrain arguments>`.

SIDE is ``tree`` (the package's own entry), ``alone`` (each trajectory by itself on the stock spec),
``script`` (a stock script, as Python runs it) or ``launch`` (the same under our launcher); for the
last two the script's path comes before its arguments. GRADIENTS and WEIGHTS are comma-separated
iterations at which the probe writes, or ``-``.
"""

from __future__ import annotations

import runpy
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
    from tests.oracle.probe import Probe, record_losses

    Probe(Path(folder), iterations(gradients), iterations(weights)).install()
    if side == "alone":
        from tests.oracle.alone import run_alone

        run_alone(expand_tree_config(argv))
    elif side == "script":
        record_losses(Path(folder))
        sys.argv = argv
        sys.path.insert(0, str(Path(argv[0]).parent))
        runpy.run_path(argv[0], run_name="__main__")
    elif side == "launch":
        from megatron_tree_cp import launch

        record_losses(Path(folder))
        launch.main(argv)
    else:
        from megatron_tree_cp import pretrain

        pretrain.main(argv)


if __name__ == "__main__":
    main()
