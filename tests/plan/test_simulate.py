"""The simulated order of one layer, against hand calculations."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from megatron_tree_cp.bench.presets import preset_tree
from megatron_tree_cp.plan import CostProfile, LayerClass, ModelShape, plan_row
from megatron_tree_cp.plan.rounds import backward_programs, forward_programs, idle_share
from megatron_tree_cp.plan.simulate import (
    LayerRates,
    StageLoad,
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
    forward, backward = layer_ms(work, rates(), False, False)
    # Rank 1: local till 2, wave 0 arrives at 7, computes till 13, wave 1 arrives at 14, till 19.
    assert forward == pytest.approx([10, 19])
    # Rank 1: remote stages till 15 and 27.5, local till 32.5. Returns: 15 + 7, 27.5 + 7 = 34.5.
    assert backward == pytest.approx([34.5, 32.5])


def test_fused_waits_and_returns_at_the_end():
    work = loads([10, 2], [[0, 11]], [[[0, 8], [0, 0]]])
    forward, backward = layer_ms(work, rates(), True, True)
    # 16 bytes: 8 ms + 3 ms latency, then 13 pairs on rank 1.
    assert forward == pytest.approx([21, 24])
    assert backward == pytest.approx([32.5 + 11, 32.5])


def test_directions_are_priced_by_their_own_flag():
    work = loads([10, 2], [[0, 11]], [[[0, 8], [0, 0]]])
    # Staged, rank 1: own stage till 2, rows at 11, 11 pairs. Backward: 27.5, rows home at 38.5.
    ahead = {True: [21, 24], False: [10, 22]}
    back = {True: [43.5, 32.5], False: [38.5, 32.5]}
    kinds = {True: {"fused", "assemble"}, False: {"local", "remote"}}
    seen = {"forward": set(), "backward": set()}
    for fused in itertools.product((True, False), repeat=2):
        for steps in seen.values():
            steps.clear()
        forward, backward = layer_ms(
            work, rates(), *fused, lambda direction, kind, *_: seen[direction].add(kind)
        )
        assert forward == pytest.approx(ahead[fused[0]])
        assert backward == pytest.approx(back[fused[1]])
        for steps, together in zip(seen.values(), fused, strict=True):
            assert kinds[together] <= steps and not kinds[not together] & steps


def test_batches_price_like_single_plans():
    rng = np.random.default_rng(0)
    single = [
        loads(rng.integers(0, 9, 2), rng.integers(0, 9, (3, 2)), rng.integers(0, 9, (3, 2, 2)))
        for _ in range(5)
    ]
    names = ("queries", "local_pairs", "pairs", "reached", "sent", "received")
    batch = StageLoads(*(np.stack([getattr(s, n) for s in single]) for n in names))
    for fused in (False, True):
        together = layer_ms(batch, rates(), fused, fused)
        for i, one in enumerate(single):
            alone = layer_ms(one, rates(), fused, fused)
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


def test_contention_delays_what_runs_beside_an_exchange():
    slow = replace(PROFILE, exchange_contention=0.5)
    work = loads([10, 2], [[0, 6], [0, 5]], [[[0, 4], [0, 0]]] * 2)
    forward, backward = layer_ms(work, rates(slow), False, False)
    # Two exchanges of 7 ms till 14: rank 0's own stage [0, 10) is beside them throughout. Rank 1:
    # own [0, 2) till 3, wave 0 from 7 till 13 and 3 more, wave 1 from 16 alone.
    assert forward == pytest.approx([15, 21])
    # Backward, rank 1: wave 0 till 15, its return till 22; wave 1 [15, 27.5) loses 3.5, till 31;
    # its return till 38 is beside the own stage [31, 36): 2.5 more, 38.5. Rank 0 waits for its rows
    # at 38; its own stage [0, 25) meets no return of the ranks' last one.
    assert backward == pytest.approx([38, 38.5])


def test_hidden_pairs_rows_and_keys_have_prices():
    priced = replace(
        PROFILE,
        forward_hidden_factor=0.5,
        backward_hidden_factor=2.0,
        forward_row_passes=3.0,
        backward_key_passes=4.0,
        memory_bytes_per_ms=2.0,
    )
    load = StageLoad(np.array([4, 0]), np.array([6, 6]), np.array([2, 2]), np.array([5, 5]))
    # 4 + 3 pairs of 1 ms, 2 rows of 1 byte moved thrice at 2 bytes a ms; nothing without a pair.
    assert rates(priced).stage_ms(load) == pytest.approx([7 + 3, 0])
    # 4 + 12 pairs of 2.5 ms, 5 keys of 2 bytes moved four times.
    assert rates(priced).stage_ms(load, backward=True) == pytest.approx([40 + 20, 0])


def test_the_idle_part_of_a_last_round_has_a_price():
    assert idle_share(np.array([0, 1, 4, 5, 8]), 4) == pytest.approx([0, 3, 0, 0.6, 0])
    # 300 queries of the 2 heads of each of 3 KV heads are 5 tiles of rows each; 300 keys are 3.
    assert forward_programs(np.array(300), 6, 3) == 15 and backward_programs(np.array(300), 6) == 18
    idle = replace(PROFILE, processors=10.0, forward_idle_factor=0.5, backward_idle_factor=2.0)
    layer = replace(LAYER, query_heads=6, kv_heads=3)
    priced, plain = (LayerRates.of(layer, profile, 1, 1) for profile in (idle, PROFILE))
    load = StageLoad(np.array([4, 0]), np.array([6, 6]), np.array([300, 2]), np.array([300, 2]))
    # 15 programs leave 5 of 20 turns idle, a third of what is computed: of 10 pairs, touched.
    more = priced.stage_ms(load) - plain.stage_ms(load)
    assert more == pytest.approx([10 * (5 / 15) * 0.5 * priced.forward_pair_ms, 0])
    more = priced.stage_ms(load, backward=True) - plain.stage_ms(load, backward=True)
    assert more == pytest.approx([10 * (2 / 18) * 2.0 * priced.backward_pair_ms, 0])


def test_rows_under_a_window_cost_their_edges():
    load = StageLoad(np.array([4, 0]), None, np.array([2, 2]), np.array([5, 5]))
    edges = replace(PROFILE, forward_window_row_ms=3.0, backward_window_row_ms=5.0)
    layer = replace(LAYER, window=7, query_heads=4)
    windowed = LayerRates.of(layer, edges, 1, 2)
    # On one of two TP ranks 4 pairs of 2 ms, and 2 rows of 2 heads; nothing where no pair is
    # visible, and without a window.
    assert windowed.stage_ms(load) == pytest.approx([4 * 2 + 2 * 2 * 3, 0])
    assert windowed.stage_ms(load, backward=True) == pytest.approx([2.5 * 4 * 2 + 2 * 2 * 5, 0])
    assert rates(edges).stage_ms(load) == pytest.approx([4, 0])


def test_backward_coefficients_default_to_the_forwards():
    load = StageLoad(np.array([4]), None, np.array([2]), np.array([5]))
    base = replace(PROFILE, remote_pair_factor=2.0, underfill_ms=8.0, fill_flops=32.0)
    own = replace(base, backward_remote_factor=3.0, backward_underfill_ms=1.0)
    own = replace(own, backward_fill_flops=1e-9)
    # 4 pairs of 4 FLOPs fill half of 32: 4 ms of underfill; a remote pair costs twice.
    for profile, backward in ((base, 20 + 4.0), (own, 30.0)):
        assert rates(profile).stage_ms(load, remote=True) == pytest.approx([8 + 4.0])
        got = rates(profile).stage_ms(load, backward=True, remote=True)
        assert got == pytest.approx([backward])


def test_a_head_dim_takes_the_factors_of_the_nearest():
    load = StageLoad(np.array([4]), None, np.array([2]), np.array([5]))
    plain = rates(PROFILE)
    factors = ((LAYER.head_dim, 2.0, 3.0), (LAYER.head_dim * 64, 7.0, 7.0))
    priced = rates(replace(PROFILE, head_dim_factors=factors))
    assert priced.forward_pair_ms == 2 * plain.forward_pair_ms
    assert priced.backward_pair_ms == 3 * plain.backward_pair_ms
    assert priced.stage_ms(load) > plain.stage_ms(load)
    assert CostProfile(head_dim_factors=factors).head_dim_factor(LAYER.head_dim * 63) == (7.0, 7.0)


def test_exchange_takes_the_rates_of_its_size():
    profile = replace(PROFILE, exchange_sizes=((2, 1.0, 1.0), (4, 2.0, 4.0)))
    for ranks, ms in ((2, 1 + 8), (4, 2 + 2)):
        counts = np.zeros((1, ranks, ranks), int)
        counts[0, 0, 1] = 8
        assert exchange_ms(*traffic(counts, profile), 1.0, profile) == pytest.approx([ms])
