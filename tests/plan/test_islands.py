"""A second layout for recurrent layers: taken when it is predicted to win, and only then."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_tree_cp.bench.presets import preset_tree
from megatron_tree_cp.plan import CostProfile, LayerClass, ModelShape, plan_row
from megatron_tree_cp.plan.islands import plan_row_with_islands

ATTENTION = LayerClass("global", layers=2)
RECURRENT = LayerClass("gdn", kind="gdn", layers=6, query_heads=16, kv_heads=32)
MODEL = ModelShape(classes=(ATTENTION, RECURRENT), hidden_size=2048, token_flops=0)
# Exchanges of the residual stream cost nothing, states walk slowly, and levels are dear: attention
# wants a folded chain, recurrent layers whole pieces.
FREE = CostProfile(
    exchange_latency_ms=0, exchange_bytes_per_ms=1e30, gdn_level_ms=2, gdn_step_ms=0.02
)
CHAIN = preset_tree("one_chain", 4, num_tokens=65_536)


def totals(plan):
    one, islands = plan.predicted.candidates[-2:]
    assert (one.name, islands.name) == ("one layout", "islands")
    return one.total_ms, islands.total_ms


def test_islands_are_taken_when_they_win():
    plan = plan_row_with_islands(CHAIN, 4, 1, MODEL, FREE)
    one, islands = totals(plan)
    assert islands < one and plan.predicted.total_ms == islands
    assert plan.predicted.total_ms == pytest.approx(
        plan_row(CHAIN, 4, ModelShape((ATTENTION,), token_flops=0), FREE).predicted.total_ms
        + plan_row(CHAIN, 4, ModelShape((RECURRENT,), token_flops=0), FREE).predicted.total_ms
    )
    main, own = plan.layouts["main"], plan.layouts["gdn"]
    assert any(not np.array_equal(a, b) for a, b in zip(main.ranges, own.ranges, strict=True))
    together = plan_row(CHAIN, 4, MODEL, FREE)
    assert plan.digest != together.digest and plan.model == together.model


def test_dear_exchanges_leave_one_layout():
    dear = replace(FREE, exchange_latency_ms=20)
    plan = plan_row_with_islands(CHAIN, 4, 6, MODEL, dear)
    one, islands = totals(plan)
    assert islands > one == plan.predicted.total_ms and set(plan.layouts) == {"main"}
    assert plan.digest == plan_row(CHAIN, 4, MODEL, dear).digest


def test_a_second_layout_can_be_forced():
    dear = replace(FREE, exchange_latency_ms=20)
    plan = plan_row_with_islands(CHAIN, 4, 6, MODEL, dear, force=True)
    one, islands = totals(plan)
    assert islands > one and plan.predicted.total_ms == islands
    assert set(plan.layouts) == {"main", "gdn"} and plan.recurrent_layout == "gdn"
    assert plan_row_with_islands(CHAIN, 4, 6, MODEL, dear).recurrent_layout == "main"
    tight = replace(dear, memory_limit_bytes=plan.predicted.peak_bytes.max() - 1)
    with pytest.raises(ValueError, match="two layouts need .* GiB: plan one layout"):
        plan_row_with_islands(CHAIN, 4, 6, MODEL, tight, force=True)


def test_every_island_pays_two_exchanges_each_way():
    costs = {n: totals(plan_row_with_islands(CHAIN, 4, n, MODEL))[1] for n in (1, 2, 5)}
    a_turn = (costs[2] - costs[1]) / 4
    assert a_turn > CostProfile().exchange_latency_ms
    assert costs[5] - costs[1] == pytest.approx(16 * a_turn)


def test_two_layouts_must_fit_together():
    peak = plan_row_with_islands(CHAIN, 4, 1, MODEL, FREE).predicted.peak_bytes.max()
    one = plan_row(CHAIN, 4, MODEL, FREE).predicted.peak_bytes.max()
    assert one < peak
    tight = replace(FREE, memory_limit_bytes=(one + peak) / 2)
    assert set(plan_row_with_islands(CHAIN, 4, 1, MODEL, tight).layouts) == {"main"}


def test_one_rank_has_no_islands():
    assert set(plan_row_with_islands(CHAIN, 1, 1, MODEL, FREE).layouts) == {"main"}


@pytest.mark.parametrize(
    ("classes", "islands", "message"),
    [
        ((ATTENTION,), 1, "no recurrent"),
        ((RECURRENT,), 1, "no other"),
        ((ATTENTION, RECURRENT), -1, "1 to 6"),
        ((ATTENTION, RECURRENT), 7, "1 to 6"),
    ],
)
def test_what_is_no_island_is_refused(classes, islands, message):
    with pytest.raises(ValueError, match=message):
        plan_row_with_islands(CHAIN, 2, islands, ModelShape(classes=classes))
