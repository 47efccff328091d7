"""Predicted against measured: which plans are compared, and what is counted."""

import pytest
import torch

from megatron_tree_cp.bench.attention import Shape
from megatron_tree_cp.bench.prediction import (
    PlanResult,
    PredictionBench,
    RowResult,
    distinct_plans,
    summarise,
)
from megatron_tree_cp.bench.presets import preset_tree
from megatron_tree_cp.plan import CostProfile, ModelShape
from tests.plan.oracle import check_plan


@pytest.mark.parametrize("preset", ["varied_5k", "dominant", "long_chain", "short"])
@pytest.mark.parametrize("cp_size", [2, 4])
def test_eight_distinct_plans_of_a_row(preset, cp_size):
    model = ModelShape(token_flops=0.0)
    tree = preset_tree(preset, cp_size, num_tokens=200 * cp_size)
    plans, chosen = distinct_plans(tree, cp_size, model, CostProfile(), 16)
    names = [name for name, _ in plans]
    assert len(plans) >= 8 and names[0] == "contiguous" and chosen in names
    assert len({plan.digest for _, plan in plans}) == len(plans)
    assert sum(name.startswith("random") for name in names) == 2
    parts = [plan.attention_class(None) for _, plan in plans]
    assert {1, 2, 3, 4} <= {part.num_waves for part in parts}
    both = {(part.forward_fused, part.backward_fused) for part in parts}
    assert both == {(f, b) for f in (False, True) for b in (False, True)}
    for _, plan in plans:
        check_plan(plan)


def result(name, predicted, measured, peak=0.0):
    return PlanResult(name, predicted, measured, measured / 3, 100.0, peak)


def test_metrics_by_hand():
    # Measured order a < b < c < d, c and d within 1 %; predicted a < c < b, d first of all.
    plans = (
        result("contiguous", 12.0, 10.0, 80.0),
        result("b", 15.0, 11.0),
        result("c", 13.0, 12.0),
        result("chosen", 11.0, 12.06),
    )
    row = RowResult(16, 100, plans, "chosen")
    assert row.regret == pytest.approx(0.206) and row.gain == pytest.approx(-0.206)
    assert row.ordered(0.0) == (2, 6) and row.ordered(0.01) == (2, 5)
    metrics = summarise([row])
    assert metrics["clear_order_right_percent"] == {"median": 40.0, "pairs": 5}
    assert metrics["memory_error_percent"]["median"] == pytest.approx(25.0)
    errors = [100 * abs(p.predicted_ms - p.measured_ms) / p.measured_ms for p in plans]
    assert metrics["time_error_percent"]["worst"] == pytest.approx(max(errors))
    assert metrics["gain_over_contiguous_percent"]["median"] == pytest.approx(-20.6)


def test_one_rank_has_one_plan():
    shape = Shape(4, 2, 16, torch.float32, "tiled")
    bench = PredictionBench(shape, 1, None, torch.device("cpu"), CostProfile(), repeats=2)
    row = bench.measure(preset_tree("short", 1, num_tokens=256), 16)
    (plan,) = row.plans
    assert row.chosen == "contiguous" and row.regret == 0 and plan.memory_error is None
    assert 0 < plan.measured_forward_ms < plan.measured_ms and plan.predicted_ms > 0
