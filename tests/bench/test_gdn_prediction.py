"""Predicted against measured times of Gated DeltaNet layers: which plans are compared."""

import numpy as np
import pytest
import torch

from megatron_tree_cp.bench.gdn_layer import GdnShape
from megatron_tree_cp.bench.gdn_prediction import GdnPredictionBench
from megatron_tree_cp.bench.presets import preset_tree
from megatron_tree_cp.plan import CostProfile
from megatron_tree_cp.plan.recurrence import RecurrencePlan

SHAPE = GdnShape(2, 4, 16, 16, dtype=torch.float32)
CPU = torch.device("cpu")


@pytest.mark.parametrize("preset", ["varied_5k", "short", "one_chain"])
def test_local_and_chained_plans_of_a_row(preset):
    tree = preset_tree(preset, 2, num_tokens=600)
    bench = GdnPredictionBench(SHAPE, 2, None, CPU, CostProfile())
    plans, chosen = bench.plans(tree, 16)
    names = [name for name, _ in plans]
    assert len(plans) >= 4 and names[0] == "contiguous" and chosen in names
    assert len({plan.digest for _, plan in plans}) == len(plans)
    heads = {name: len(RecurrencePlan(tree, plan.layouts["main"]).heads) for name, plan in plans}
    assert heads["random 0"] > 0
    assert ("whole families" in names) == (np.count_nonzero(tree.parents < 0) > 1)
    assert heads.get("whole families", 0) == 0
    # What is compared is the planner's own price of that plan.
    best = min(plan.predicted.total_ms for _, plan in plans)
    assert dict(plans)[chosen].predicted.total_ms == pytest.approx(best, rel=0.05)


def test_a_row_on_one_rank_is_measured():
    bench = GdnPredictionBench(SHAPE, 1, None, CPU, CostProfile(), repeats=2)
    row = bench.measure(preset_tree("short", 1, num_tokens=200), 16)
    (plan,) = row.plans
    assert row.chosen == "contiguous" and 0 < plan.measured_forward_ms < plan.measured_ms
    assert plan.predicted_ms > 0 and plan.memory_error is None
