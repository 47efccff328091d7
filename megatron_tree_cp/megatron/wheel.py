"""What a megatron-core wheel needs that a source checkout does not."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def allow_wheel_install() -> bool:
    """Let ``pretrain()`` start from a megatron-core wheel; True if the build step was replaced.

    Megatron runs ``make`` in its dataset folder on every start and exits with status 1 when that
    fails. A wheel ships the compiled helpers but no Makefile, so ``pretrain()`` can never start
    from one, on GPU machines either. A source checkout, which has the Makefile, is left alone.
    """
    from megatron.core.datasets import utils

    if (Path(utils.__file__).parent / "Makefile").exists():
        return False
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
        raise RuntimeError(
            "megatron-core has neither its dataset helpers nor a Makefile: reinstall the wheel"
        )
    utils.compile_helpers = _already_compiled
    return True


def _already_compiled() -> None:
    """Stand-in for ``compile_helpers`` where the compiled module came with the wheel."""
