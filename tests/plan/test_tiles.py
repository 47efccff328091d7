"""Touched tiles counted from runs: the tiles that the kernels' own tables touch."""

import numpy as np
import pytest
import torch

from megatron_tree_cp.bench.presets import preset_tree
from megatron_tree_cp.ops.attention.block_mask import tile_classes
from megatron_tree_cp.ops.attention.interval_mask import IntervalMask
from megatron_tree_cp.plan import CostProfile, LayerClass, Layout, ModelShape, plan_row
from megatron_tree_cp.plan.cost import CostModel, local_loads, stage_loads
from megatron_tree_cp.plan.moves import Assignment, Option
from megatron_tree_cp.plan.remote import TILE
from megatron_tree_cp.plan.runs import RunTable, join_only_children
from megatron_tree_cp.plan.units import unit_cuts, unit_work
from megatron_tree_cp.tree import PackedTree

TILES = CostProfile(forward_hidden_factor=1.0, backward_hidden_factor=1.0)


def device_tiles(stage):
    lo, hi, _, _ = (torch.from_numpy(np.array(x)) for x in stage.keys.expand())
    queries = stage.query_range[1]
    mask = IntervalMask(lo.clamp(max=queries), hi, queries)
    return int(tile_classes(mask, TILE, TILE).touched.sum())


@pytest.mark.parametrize("waves", [0, 1, 3])
@pytest.mark.parametrize("name", ["varied_5k", "deep", "short", "one_chain"])
def test_counts_the_tiles_of_the_kernels(name, waves):
    tree = preset_tree(name, 1, num_tokens=12_345)
    cuts = np.unique(np.random.default_rng(3).integers(1, tree.num_tokens, 30))
    cuts = np.concatenate([[0], cuts, [tree.num_tokens]])
    owner = np.random.default_rng(4).integers(0, 3, len(cuts) - 1)
    layout = Layout.from_pieces(cuts, owner, 3, 1)
    plan = plan_row(tree, 3, ModelShape(token_flops=0), TILES, waves=waves, layout=layout)
    part = plan.attention_class(None)
    local = local_loads(part.runs, None, TILES)
    loads = stage_loads(part.runs, part.waves, None, local, TILES)
    for rank in range(3):
        stages = part.rank(rank)
        area = TILE * TILE * device_tiles(stages.local) - stages.local.visible_pairs
        assert loads.local_hidden[rank] == area
        for wave, stage in enumerate(stages.remote):
            area = TILE * TILE * device_tiles(stage) - stage.visible_pairs
            assert loads.hidden[wave, rank] == area


@pytest.mark.parametrize("name", ["varied_5k", "short", "one_chain"])
def test_units_hold_the_whole_rows_tiles(name):
    tree = preset_tree(name, 1, num_tokens=20_000)
    cuts = unit_cuts(join_only_children(tree), tree.num_tokens, 4)
    (work,) = unit_work(tree, cuts, (None,), tiles=True)
    runs = RunTable(tree, Layout.from_pieces(np.array([0, tree.num_tokens]), np.array([0]), 1, 1))
    assert work.hidden.sum() == local_loads(runs, None, TILES)[2].sum()


def test_hidden_pairs_have_a_price_and_move_work():
    """Half of the row is one chain, half short families: equal pairs, but unequal tiles."""
    lengths, parents = [2000], [-1]
    for _ in range(250):
        root = len(lengths)
        lengths += [8] * 5
        parents += [-1, *[root] * 4]
    tree, model = PackedTree(lengths, parents), ModelShape(token_flops=0)
    plain = plan_row(tree, 2, model, CostProfile())
    priced = plan_row(tree, 2, model, TILES)
    kept = plan_row(tree, 2, model, TILES, layout=plain.layouts["main"])
    assert kept.predicted.total_ms > plain.predicted.total_ms
    assert priced.predicted.total_ms < kept.predicted.total_ms
    assert priced.digest != plain.digest


def test_a_window_keeps_an_estimate():
    tree = preset_tree("varied_5k", 2, num_tokens=16_384)
    model = ModelShape((LayerClass("w", window=1024),), token_flops=0)
    plain = plan_row(tree, 2, model, CostProfile())
    priced = plan_row(tree, 2, model, TILES, layout=plain.layouts["main"])
    assert priced.predicted.total_ms > plain.predicted.total_ms


def test_moves_take_their_hidden_pairs_along():
    """A move is priced as the assignment after it, hidden pairs included."""
    tree = preset_tree("varied_5k", 4, num_tokens=30_000)
    costs = CostModel(ModelShape(token_flops=0), TILES, 1)
    cuts = unit_cuts(join_only_children(tree), tree.num_tokens, 4)
    works = unit_work(tree, cuts, (None,), tiles=True)
    owner = np.random.default_rng(1).integers(0, 4, len(cuts) - 1)
    state = Assignment(owner, np.diff(cuts), works, costs, 4)
    mine = np.flatnonzero(owner == 1)
    unit, to = np.repeat(mine, 3), np.tile([0, 2, 3], len(mine))
    options = [Option(False, False, 2)]
    scores = state.price_moves(1, unit, to, options)
    for i in range(0, len(unit), 7):
        after = state.moved(int(unit[i]), int(to[i]))
        # Moves keep the share of reached queries, which prices merges alone.
        after.states[0].reached[:] = state.states[0].reached
        assert scores[i] == pytest.approx(after.price(options)[0], rel=1e-12)
