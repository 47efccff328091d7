"""Prices of Gated DeltaNet layers: by hand, on units, after moves, and what the planner makes."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_tree_cp.bench.presets import preset_tree
from megatron_tree_cp.plan import CostProfile, LayerClass, Layout, ModelShape, plan_row
from megatron_tree_cp.plan.cost import CostModel
from megatron_tree_cp.plan.cost_gdn import GdnRates
from megatron_tree_cp.plan.recurrence import RecurrencePlan
from megatron_tree_cp.plan.recurrence_loads import recurrence_loads
from megatron_tree_cp.plan.runs import join_only_children
from megatron_tree_cp.plan.schedule import schedule
from megatron_tree_cp.plan.shipped_profiles import profile_for
from megatron_tree_cp.plan.unit_chains import ChainState, UnitChains
from megatron_tree_cp.plan.units import unit_cuts
from megatron_tree_cp.tree.packed_tree import PackedTree
from tests.plan.oracle import trees

LAYER = LayerClass("gdn", kind="gdn", query_heads=16, kv_heads=32)
MODEL = ModelShape(classes=(LAYER,), hidden_size=2048, token_flops=0)
# Round numbers: a step is 1 ms, a level 10 ms, an exchange 100 ms; tokens and bytes cost nothing.
PLAIN = CostProfile(
    gdn_token_bytes_per_ms=1e30,
    gdn_conv_passes=0,
    gdn_step_ms=1,
    gdn_state_bytes_per_ms=1e30,
    gdn_fork_passes=0,
    gdn_gradient_step_ms=3,
    gdn_gradient_flops_per_ms=1e30,
    gdn_gradient_fork_passes=0,
    gdn_summary_step_ms=2,
    gdn_summary_flops_per_ms=1e30,
    gdn_summary_fork_passes=0,
    gdn_carry_passes=0,
    gdn_level_ms=10,
    gdn_compose_ms=1000,
    gdn_layer_ms=0,
    exchange_latency_ms=100,
    exchange_bytes_per_ms=1e30,
)


def priced(tree: PackedTree, cuts: list[int], owner: list[int], cp_size: int, profile=PLAIN):
    layout = Layout.from_pieces(np.array([0, *cuts, tree.num_tokens]), np.array(owner), cp_size)
    loads = recurrence_loads(RecurrencePlan(tree, layout), 64)
    return GdnRates.of(LAYER, profile, 2, 1).layer_ms(loads)


def test_a_branched_row_on_one_rank_by_hand():
    # Levels: the root's 2 chunks, then children of 3 and 1: the longest counts.
    tree = PackedTree([128, 190, 64], [-1, 0, 0])
    forward, backward = priced(tree, [], [0], 1)
    assert forward.tolist() == pytest.approx([10 + 2 + 10 + 3])
    assert backward.tolist() == pytest.approx([25 + 3 * 2 + 3 * 3 + 2 * 10])


def test_rows_that_fill_up_chunks_have_a_price():
    tree = PackedTree([128, 190, 62], [-1, 0, 0])  # 2, 3 and 1 chunks: 4 rows are padding
    free = replace(PLAIN, gdn_step_ms=0, gdn_gradient_step_ms=0, gdn_level_ms=0)
    costs = replace(free, gdn_token_bytes_per_ms=1.0, gdn_padding_factor=0.25)
    forward, _ = priced(tree, [], [0], 1, costs)
    assert forward.tolist() == pytest.approx([2 * 32 * (4 * 128 + 3 * 64) * (380 + 4 / 4)])


def test_what_is_sent_and_received_is_put_in_order():
    tree = PackedTree([64 * 4], [-1])
    free = replace(PLAIN, gdn_step_ms=0, gdn_level_ms=0, gdn_compose_ms=0, exchange_latency_ms=0)
    costs = replace(free, gdn_carry_passes=3, memory_bytes_per_ms=2**21)
    forward, _ = priced(tree, [128], [0, 1], 2, costs)
    # One state of 2 MiB, 3 ms at either end.
    assert forward.tolist() == pytest.approx([3, 6])


def test_a_chain_on_three_ranks_by_hand():
    tree = PackedTree([64 * 9], [-1])
    forward, _ = priced(tree, [64 * 2, 64 * 6], [0, 1, 2], 3)
    # Halo 100; rank 0 ends its 2 chunks at 12; rank 1 summarises its 4, each twice as long. The
    # exchange waits for rank 1.
    arrived = 100 + max(10 + 2, 10 + 2 * 4) + 100
    # Rank 1 composes one end state, rank 2 two; rank 0 has nothing left to do.
    assert forward.tolist() == pytest.approx(
        [arrived, arrived + 1000 + 14, arrived + 2000 + 10 + 3]
    )


def test_backward_waits_for_the_components_below():
    tree = PackedTree([64 * 2, 64 * 3, 64 * 5], [-1, 0, 0])
    forward, backward = priced(tree, [64 * 2, 64 * 5], [0, 0, 1], 2)
    walk, back = {0: 10 + 2 + 10 + 3, 1: 10 + 5}, {0: 10 + 6 + 10 + 9, 1: 10 + 15}
    # Rank 1's leaf walks its gradients first; rank 0 waits, adds them up, and walks both levels.
    arrived = 100 + walk[1] + back[1] + 100
    assert backward.tolist() == pytest.approx([arrived + 1000 + back[0], arrived])
    arrived = 100 + (10 + 2 + 10 + 3) + 100  # the root's component is walked before
    assert forward.tolist() == pytest.approx([arrived, arrived + 1000 + 15])


def test_a_fork_is_a_state_read_and_left_behind():
    tree = PackedTree([64, 64, 64], [-1, 0, 0])
    profile = replace(PLAIN, gdn_step_ms=0, gdn_level_ms=0, gdn_fork_passes=2)
    forward, _ = priced(tree, [], [0], 1, replace(profile, memory_bytes_per_ms=2**21))
    assert forward.tolist() == pytest.approx([3 * 2])


def test_rates_follow_head_and_state_sizes():
    def rates(tp_size=1, **change):
        shape = {"query_heads": 16, "kv_heads": 32, "head_dim": 128} | change
        layer = LayerClass("gdn", kind="gdn", **shape)
        return GdnRates.of(layer, CostProfile(), 2, tp_size)

    base, wide, halved = rates(), rates(kv_heads=64), rates(tp_size=2)
    assert base.token_ms == 2 * halved.token_ms and base.states.chunk == 2 * halved.states.chunk
    # Elements by hand, of 32 value heads: twice keys and values, three times a chunk's column.
    elements = base.token_ms * CostProfile().gdn_token_bytes_per_ms / 2
    assert elements == pytest.approx(32 * (2 * 128 + 2 * 128 + 3 * 64))
    assert base.padding_ms == CostProfile().gdn_padding_factor * base.token_ms
    chunk = 64 * (2048 + 32 * (128 + 2 * 128 + 128 * 128 / 64))
    assert base.states.chunk * CostProfile().gdn_state_bytes_per_ms == 2 * chunk
    # Three products of a gradient's chunk with 128 columns, two of a summary's with 256.
    product = 2 * 64 * 32 * 128
    flops = base.gradients.chunk * CostProfile().gdn_gradient_flops_per_ms
    assert flops == pytest.approx(3 * product * 128)
    flops = base.summaries.chunk * CostProfile().gdn_summary_flops_per_ms
    assert flops == pytest.approx(2 * product * 256)
    assert wide.token_ms == 2 * base.token_ms and wide.token_back_ms == 2 * base.token_back_ms
    assert wide.states.step == base.states.step
    assert base.state_bytes == base.transfer_bytes == 2 * 2**20
    narrow = rates(head_dim=64, value_dim=128)
    assert narrow.states.step == base.states.step
    assert narrow.summaries.chunk == 3 / 8 * base.summaries.chunk  # half the keys, 192 columns
    assert narrow.transfer_bytes == narrow.state_bytes / 2 == base.state_bytes / 4
    assert base.row_bytes == 2 * (2 * 16 * 128 + 32 * 128)


def random_cuts(tree: PackedTree, seed: int, limit: int = 12):
    rng = np.random.default_rng(seed)
    inner = rng.integers(0, tree.num_tokens + 1, limit)
    return np.unique(np.concatenate([[0], inner, [tree.num_tokens]]))


@settings(deadline=None, derandomize=True, max_examples=80)
@given(trees(), st.integers(0, 10**6), st.integers(2, 4))
def test_moves_give_the_chains_of_a_fresh_assignment(tree, seed, cp_size):
    rng = np.random.default_rng(seed)
    chains = UnitChains.of(tree, random_cuts(tree, seed))
    units = len(chains.chunks)
    state = ChainState(chains, rng.integers(0, cp_size, units), cp_size)
    for _ in range(3):
        unit = int(rng.integers(units))
        rank = int(state.owner[unit])
        to = int((rank + 1 + rng.integers(cp_size - 1)) % cp_size)
        owner = state.owner.copy()
        owner[unit] = to
        fresh = ChainState(chains, owner, cp_size)
        after = state.loads_after(rank, np.array([unit]), np.array([to]))
        for name in ("blocks", "runs", "longest", "incoming"):
            assert getattr(after, name)[0].tolist() == getattr(fresh.loads, name).tolist(), name
        state = state.moved(unit, to, owner)
        for field in fields(fresh.loads):
            known, new = getattr(fresh.loads, field.name), getattr(state.loads, field.name)
            assert known.tolist() == new.tolist(), field.name
        for name in ("parents", "children", "on_path"):
            assert np.array_equal(getattr(state, name), getattr(fresh, name)), name


@settings(deadline=None, derandomize=True, max_examples=80)
@given(trees(), st.integers(0, 10**6))
def test_units_know_which_runs_cross_ranks(tree, seed):
    cuts = random_cuts(tree, seed)
    owner = np.random.default_rng(seed + 1).integers(0, 3, len(cuts) - 1)
    state = ChainState(UnitChains.of(tree, cuts), owner, 3)
    plan = RecurrencePlan(tree, Layout.from_pieces(cuts, owner, 3))
    heads = np.bincount(plan.runs.owner[plan.heads], minlength=3)
    assert state.loads.incoming.tolist() == heads.tolist()
    assert state.crosses == bool(heads.any())


def test_units_estimate_what_runs_cost():
    """A chain in equal pieces: the estimate leaves out launches and little else."""
    tree = PackedTree([64 * 4096], [-1])
    costs = CostModel(MODEL, CostProfile(), 1)
    cuts = unit_cuts(join_only_children(tree), tree.num_tokens, 4)
    owner = np.minimum(np.arange(len(cuts) - 1) * 4 // (len(cuts) - 1), 3)
    state = ChainState(UnitChains.of(tree, cuts), owner, 4)
    tokens = np.bincount(owner, weights=np.diff(cuts), minlength=4)
    layout = Layout.from_pieces(cuts, owner, 4)
    exact = costs.recurrent_ms(recurrence_loads(RecurrencePlan(tree, layout), 64))
    assert float(state.cost(tokens, costs).total) == pytest.approx(float(exact.total), rel=0.05)


def test_totals_are_sums_over_layer_classes():
    tree = preset_tree("varied_5k", 2, num_tokens=30_000)
    layout = plan_row(tree, 2).layouts["main"]
    attention = LayerClass("global", layers=2)
    classes = {"both": (attention, LAYER), "attention": (attention,), "gdn": (LAYER,)}
    flops = {"both": 3e9, "attention": 2e9, "gdn": 1e9}  # 1e9 a layer in each
    plans = {
        name: plan_row(tree, 2, ModelShape(found, token_flops=flops[name]), layout=layout)
        for name, found in classes.items()
    }
    both, *parts = (plan.predicted for plan in plans.values())
    assert both.total_ms == pytest.approx(sum(part.total_ms for part in parts))
    assert both.forward_ms.tolist() == pytest.approx(sum(p.forward_ms for p in parts).tolist())
    assert both.peak_bytes.max() >= max(part.peak_bytes.max() for part in parts)
    assert both.chained_runs == plans["gdn"].predicted.chained_runs > 0


def test_families_stay_whole_when_exchanges_are_dear():
    tree = PackedTree([600, 80, 80, 600, 80, 80] * 4, [-1, 0, 0, -1, 3, 3] * 1 + [
        parent + 6 * family if parent >= 0 else -1
        for family in (1, 2, 3)
        for parent in (-1, 0, 0, -1, 3, 3)
    ])  # fmt: skip
    dear = plan_row(tree, 4, MODEL, CostProfile(exchange_latency_ms=5)).predicted
    assert dear.chained_runs == 0 and dear.candidates[0].total_ms >= dear.total_ms
    whole = PackedTree([64 * 2000], [-1])
    free = plan_row(whole, 4, MODEL, CostProfile(exchange_latency_ms=0.01)).predicted
    assert free.chained_runs > 0 and free.imbalance < 1.2


def test_seeds_are_priced_run_by_run():
    predicted = plan_row(preset_tree("varied_5k", 4), 4, MODEL).predicted
    names = {candidate.name for candidate in predicted.candidates}
    assert {"contiguous", "folded 8", "folded 16", "subtrees 1.0", "subtrees 0.25"} <= names
    assert predicted.total_ms == min(
        c.total_ms for c in predicted.candidates if "on units" not in c.name
    )


def test_states_count_in_the_predicted_peak():
    tree = PackedTree([4096], [-1])
    wide = ModelShape(classes=(LAYER,), activation_bytes=0, token_flops=0)
    peak = plan_row(tree, 1, wide).predicted.peak_bytes[0]
    states = 2 * (4096 // 64) * 32 * 128 * 128 * 2
    # q and k of 16 heads, nine rows of 128 and a system's of 64 of 32, three gates in fp32.
    rows = 4096 * (2 * (2 * 16 * 128 + 32 * (9 * 128 + 64)) + 3 * 4 * 32)
    assert peak == states + rows + 4 * 32 * 128 * 128  # one run's gradient in fp32
    with pytest.raises(ValueError, match="the limit is"):
        plan_row(tree, 1, wide, CostProfile(memory_limit_bytes=states))


@pytest.mark.parametrize("heads", [(2, 4, 128), (4, 8, 128), (32, 32, 64), (16, 64, 128)])
def test_a_fork_is_cheaper_than_a_chunk_walked_again(heads):
    """Why no child walks its parent's chunks in the place of a fork: by an H200's costs."""
    keys, values, dim = heads
    layer = LayerClass("gdn", kind="gdn", query_heads=keys, kv_heads=values, head_dim=dim)
    rates = GdnRates.of(layer, profile_for("H200")[0], 2, 1)
    # States are walked forward and again in backward, gradients once.
    fork = 2 * rates.states.fork + rates.gradients.fork
    walked = 2 * rates.states.chunk + rates.gradients.chunk
    chunk = walked + 64 * (rates.token_ms + rates.token_back_ms)
    assert 4 * fork < chunk


def test_the_memory_limit_means_the_same_to_the_search_and_to_the_plan():
    """Of short runs, whose gradients in fp32 and half-empty chunks only a priced layout knows."""
    tree = PackedTree([70] * 200, [-1] * 200)
    free = plan_row(tree, 2, MODEL).predicted
    costs = CostModel(MODEL, CostProfile(), 1)
    found = schedule(tree, plan_row(tree, 2, MODEL).layouts["main"], costs, None)
    assert found.peak_bytes(costs).tolist() == free.peak_bytes.tolist()
    assert found.peak_bytes(costs).max() > 1.25 * costs.peak_bytes(free.tokens, []).max()
    # What the search takes for fitting, the plan does not refuse.
    tight = CostProfile(memory_limit_bytes=1.001 * float(free.peak_bytes.max()))
    assert plan_row(tree, 2, MODEL, tight).predicted.peak_bytes.max() <= tight.memory_limit_bytes
