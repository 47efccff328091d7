"""plan_row: every visible pair once, equal inputs give equal plans, bad arguments are named."""

import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_tree_cp.bench.presets import preset_tree
from megatron_tree_cp.plan import CostProfile, LayerClass, Layout, ModelShape, plan_row
from megatron_tree_cp.tree import PackedTree
from tests.plan.oracle import MODEL, check_plan, layouts, trees

TREE = PackedTree([7, 3, 1, 5, 4, 1, 9], [-1, 0, 1, 1, 0, -1, 5])
SETTINGS = settings(deadline=None, derandomize=True, print_blob=True)


@pytest.mark.parametrize("waves", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("cp_size", [1, 2, 3, 4, 8])
def test_plan_covers_the_mask(cp_size, waves):
    plan = plan_row(TREE, cp_size, MODEL, waves=waves, granule=2)
    check_plan(plan)
    for attention in plan.attention.values():
        if cp_size > 1 and waves is not None:
            assert attention.forward_fused == attention.backward_fused == (waves == 0)
            assert attention.num_waves == max(waves, 1)
        elif cp_size == 1:
            assert attention.num_waves == 0
            assert not attention.forward_fused and not attention.backward_fused


@settings(SETTINGS, max_examples=40)
@given(trees(), st.integers(1, 8), st.sampled_from([None, 0, 1, 2, 4]))
def test_planned_rows_cover_the_mask(tree, cp_size, waves):
    check_plan(plan_row(tree, cp_size, MODEL, waves=waves))


@settings(SETTINGS, max_examples=120)
@given(
    trees(), st.integers(1, 6), st.sampled_from([None, 0, 1, 2, 3]), st.integers(1, 12), st.data()
)
def test_forced_layouts_cover_the_mask(tree, cp_size, waves, window, data):
    layout = data.draw(layouts(tree.num_tokens, cp_size))
    model = ModelShape(classes=(LayerClass("full"), LayerClass("near", window=window)))
    plan = plan_row(tree, cp_size, model, waves=waves, layout=layout)
    assert plan.layouts["main"] is layout
    check_plan(plan)


def test_classes_with_one_window_share_a_plan():
    model = ModelShape(classes=(LayerClass("a"), LayerClass("b", kv_heads=8, layers=3)))
    plan = plan_row(TREE, 2, model)
    assert plan.attention["a"] is plan.attention["b"] is plan.attention_class(None)


def test_other_kinds_have_no_attention_plan():
    plan = plan_row(TREE, 2, ModelShape(classes=(LayerClass("gdn", kind="gdn"),)))
    assert not plan.attention and plan.predicted.total_ms > 0
    assert plan.predicted.tokens.sum() == TREE.num_tokens


def test_unknown_window_is_named():
    plan = plan_row(TREE, 2, MODEL)
    assert plan.attention_class(5).name == "w5"
    with pytest.raises(ValueError, match=r"window 6 \(known: 5, None\); add a LayerClass"):
        plan.attention_class(6)


def test_rank_without_tokens():
    plan = plan_row(PackedTree([2], [-1]), 4, MODEL, waves=2, granule=4)
    check_plan(plan)
    layout = plan.layouts["main"]
    empty = [rank for rank in range(4) if layout.num_real(rank) == 0]
    assert empty and all((layout.row_indices(rank) == -1).all() for rank in empty)
    assert all(len(layout.row_indices(rank)) == 4 for rank in range(4))


def big_plan(name="varied_5k", cp_size=4):
    return plan_row(preset_tree(name, cp_size), cp_size, MODEL, tp_size=2)


def test_equal_inputs_give_equal_plans():
    first, second = big_plan(), big_plan()
    assert first is not second and first.digest == second.digest
    assert pickle.dumps(first) == pickle.dumps(second)


def test_digest_does_not_depend_on_the_process():
    code = "from tests.plan.test_planner import big_plan; print(big_plan().digest)"
    env = {**os.environ, "PYTHONHASHSEED": "77"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == big_plan().digest, done.stderr


def test_digest_tells_plans_apart():
    tree = preset_tree("varied_5k", 2)
    plans = [plan_row(tree, 2, MODEL, waves=waves) for waves in (0, 1, 2)]
    plans += [plan_row(tree, 2, tp_size=2), plan_row(tree, 2, granule=2), plan_row(tree, 4)]
    plans += [plan_row(preset_tree("varied_5k", 2, row=17), 2, MODEL, waves=0)]
    assert len({plan.digest for plan in plans}) == len(plans)


def test_pickle_is_small_and_stays_immutable():
    plan = big_plan()
    plan.attention_class(None).rank(1)  # fills caches, which must not travel
    data = pickle.dumps(plan)
    assert len(data) < 32_768
    copy = pickle.loads(data)
    assert copy.digest == plan.digest and copy.tree == plan.tree
    for rank in range(4):
        mine, theirs = (p.attention_class(None).rank(rank).fused for p in (plan, copy))
        assert all(np.array_equal(a, b) for a, b in zip(mine.keys.expand(), theirs.keys.expand()))
    with pytest.raises(ValueError):
        copy.layouts["main"].ranges[0][0] = 7
    with pytest.raises(ValueError):
        copy.attention_class(None).exchanges[0].length[0] = 7
    with pytest.raises(TypeError):
        copy.layouts["main"] = None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cp_size": 0}, "cp_size and tp_size must be at least 1"),
        ({"tp_size": 0}, "cp_size and tp_size must be at least 1"),
        ({"waves": -1}, "waves must be None"),
        ({"granule": 3, "tp_size": 2}, "granule must be a positive multiple of tp_size 2"),
        ({"layout": Layout.from_pieces([0, 30], [0], 1)}, "30 tokens on 1 ranks"),
        ({"layout": Layout.from_pieces([0, 30], [0], 2), "granule": 8}, "granule 1, not 8"),
        ({"profile": CostProfile(memory_limit_bytes=1.0)}, "shorter rows, a larger CP or TP size"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan_row(TREE, **{"cp_size": 2, **arguments})


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: LayerClass(""), "needs a name"),
        (lambda: LayerClass("x", window=0), "window must be at least 1"),
        (lambda: LayerClass("x", kv_heads=0), "kv_heads must be at least 1"),
        (lambda: LayerClass("x", value_dim=0), "value_dim must be"),
        (lambda: ModelShape(classes=()), "at least one LayerClass"),
        (lambda: ModelShape(classes=(LayerClass("x"), LayerClass("x"))), "must differ"),
        (lambda: ModelShape(token_flops=float("nan")), "token_flops"),
        (lambda: ModelShape(hidden_size=0), "hidden_size"),
        (lambda: CostProfile(exchange_bytes_per_ms=0), "exchange_bytes_per_ms must be more than 0"),
        (lambda: CostProfile(underfill_ms=-1), "underfill_ms must be at least 0"),
        (lambda: Layout(4, (np.array([[0, 3]]),)), r"cover \[0, 4\) exactly once"),
        (lambda: Layout(4, (np.array([[0, 3]]), np.array([[2, 4]]))), "exactly once"),
        (lambda: Layout(4, (np.array([[3, 0], [0, 4]]),)), "ends before it starts"),
        (lambda: Layout(4, (np.array([[0, 4]]),), 0), "granule"),
        (lambda: Layout(4, ()), "at least one rank"),
    ],
)
def test_bad_values_are_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()
