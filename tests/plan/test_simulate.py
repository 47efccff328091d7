"""The simulated order of one layer, against hand calculations."""

import numpy as np
import pytest

from megatron_tree_cp.bench.presets import preset_tree
from megatron_tree_cp.plan import CostProfile, LayerClass, ModelShape, plan_row
from megatron_tree_cp.plan.simulate import (
    LayerRates,
    StageLoads,
    exchange_ms,
    layer_ms,
    link_masks,
)

# One pair costs 1 ms forward and 2.5 ms backward; a key row has 1 byte; copies are free.
LAYER = LayerClass("x", query_heads=1, kv_heads=1, head_dim=1)
PROFILE = CostProfile(
    forward_flops_per_ms=4.0,
    backward_flops_per_ms=4.0,
    remote_pair_factor=1.0,
    forward_launch_ms=0.0,
    backward_launch_ms=0.0,
    underfill_ms=0.0,
    memory_bytes_per_ms=1e30,
    exchange_latency_ms=3.0,
    exchange_bytes_per_ms=2.0,
)


def rates(profile=PROFILE):
    return LayerRates.of(LAYER, profile, 1, 1)


def loads(local, pairs, counts):
    pairs = np.array(pairs)
    return StageLoads(
        np.ones(2), np.array(local), pairs, np.zeros_like(pairs), *traffic(counts, PROFILE)
    )


def traffic(counts, profile):
    """(sent, received) [W, L, cp] of counts [W, source, destination]."""
    moved = np.array(counts)[:, None] * link_masks(len(counts[0]), profile)
    return moved.sum(-1), moved.sum(-2)


def test_waves_overlap_the_local_stage():
    # Rank 0 sends 4 rows (8 bytes: 4 ms + 3 ms latency) to rank 1 in each of two waves.
    work = loads([10, 2], [[0, 6], [0, 5]], [[[0, 4], [0, 0]]] * 2)
    forward, backward = layer_ms(work, rates(), fused=False)
    # Rank 1: local till 2, wave 0 arrives at 7, computes till 13, wave 1 arrives at 14, till 19.
    assert forward == pytest.approx([10, 19])
    # Rank 1: remote stages till 15 and 27.5, local till 32.5. Returns: 15 + 7, 27.5 + 7 = 34.5.
    assert backward == pytest.approx([34.5, 32.5])


def test_fused_waits_and_returns_at_the_end():
    work = loads([10, 2], [[0, 11]], [[[0, 8], [0, 0]]])
    forward, backward = layer_ms(work, rates(), fused=True)
    # 16 bytes: 8 ms + 3 ms latency, then 13 pairs on rank 1.
    assert forward == pytest.approx([21, 24])
    assert backward == pytest.approx([32.5 + 11, 32.5])


def test_batches_price_like_single_plans():
    rng = np.random.default_rng(0)
    single = [
        loads(rng.integers(0, 9, 2), rng.integers(0, 9, (3, 2)), rng.integers(0, 9, (3, 2, 2)))
        for _ in range(5)
    ]
    names = ("queries", "local_pairs", "pairs", "reached", "sent", "received")
    batch = StageLoads(*(np.stack([getattr(s, n) for s in single]) for n in names))
    for fused in (False, True):
        together = layer_ms(batch, rates(), fused)
        for i, one in enumerate(single):
            alone = layer_ms(one, rates(), fused)
            assert np.array_equal(together[0][i], alone[0])
            assert np.array_equal(together[1][i], alone[1])


def test_slow_link_between_nodes():
    profile = CostProfile(
        exchange_latency_ms=1.0,
        exchange_bytes_per_ms=10.0,
        ranks_per_node=2,
        network_latency_ms=5.0,
        network_bytes_per_ms=1.0,
    )
    counts = np.zeros((4, 4), int)

    def price():
        return float(exchange_ms(*traffic(counts[None], profile), 1.0, profile)[0])

    counts[0, 1] = 30
    assert price() == pytest.approx(1 + 3)
    counts[0, 2] = 4
    assert price() == pytest.approx(1 + 5 + 4)
    counts[0, 0] = 1000  # a rank's own rows do not travel
    assert price() == pytest.approx(1 + 5 + 4)


def test_slow_link_changes_placement():
    """Over a slow network less crosses the nodes than the plan for fast links would send."""
    tree = preset_tree("dominant", 4, num_tokens=120_000)
    model = ModelShape(token_flops=0)
    slow = CostProfile(ranks_per_node=2, network_bytes_per_ms=4e5)

    def crossing(plan):
        return sum(
            e.counts[:2, 2:].sum() + e.counts[2:, :2].sum()
            for e in plan.attention_class(None).exchanges
        )

    fast_plan, slow_plan = plan_row(tree, 4, model), plan_row(tree, 4, model, slow)
    kept = plan_row(tree, 4, model, slow, layout=fast_plan.layouts["main"])
    assert slow_plan.predicted.total_ms < kept.predicted.total_ms
    assert crossing(slow_plan) < crossing(fast_plan)
