"""The shipped hybrid run config trains at CP2 as at CP1, through the package's own entry."""

from __future__ import annotations

import pytest

from .launch import ROOT
from .test_context_parallel_sizes import losses_agree

CONFIG = ROOT / "configs" / "hybrid_gdn.yaml"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_hybrid_gdn_trains_the_same_at_cp1_and_cp2(tmp_path):
    argv = f"--tree-config {CONFIG} --train-iters 4 --tree-planner-workers 1".split()
    losses_agree(tmp_path, argv, (1, 2), timeout=280)
