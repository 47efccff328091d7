"""Where the stock Megatron-LM scripts lie; they are not in the wheel and not in this repository."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SCRIPTS = ("pretrain_gpt.py", "pretrain_hybrid.py", "gpt_builders.py", "hybrid_builders.py")
SCRIPTS += ("model_provider.py",)
VARIABLE = "TREE_CP_MEGATRON_SCRIPTS"


def stock_scripts() -> Path:
    """The folder that TREE_CP_MEGATRON_SCRIPTS names; skips the test without it."""
    folder = Path(os.environ.get(VARIABLE, ""))
    if VARIABLE not in os.environ or not (folder / SCRIPTS[0]).is_file():
        pytest.skip(
            f"set {VARIABLE} to a folder with {', '.join(SCRIPTS)} of Megatron-LM core_r0.19.0"
        )
    return folder
