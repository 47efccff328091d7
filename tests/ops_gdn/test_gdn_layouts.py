"""Operators in a second layout of a row: against the row oracle, beside the first, built ahead."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_tree_cp import ops
from megatron_tree_cp.comm import TreeContext
from megatron_tree_cp.ops.gdn.ahead import upload_recurrent_row
from megatron_tree_cp.plan import Layout
from megatron_tree_cp.plan.recurrence_tables import recurrent_row
from tests.distributed import run_ranks
from tests.ops_gdn.cases import Case, build_plan, errors, make_row, run_rank, tolerance

CASE = Case((9, 5, 1, 7, 3, 6, 2), (-1, 0, 1, 0, 3, -1, 5), pieces=9, seed=3)
CASES = [
    CASE,
    replace(CASE, granule=8, dtype=torch.float32),
    replace(CASE, pieces=30, width=8, seed=5, initial=False),
    Case((150, 70, 66), (-1, 0, 0), pieces=5, seed=4, dtype=torch.float32),
    Case((6, 4, 4), (-1, 0, 0), pieces=3, owners=1, seed=5),
]


def plan_of_two(case: Case, cp_size: int):
    """A plan whose islands have the case's layout, and whose main layout is another."""
    island = build_plan(case, cp_size)
    main = build_plan(replace(case, pieces=7, seed=case.seed + 1, owners=None), cp_size)
    layouts = {"main": main.layouts["main"], "gdn": island.layouts["main"]}
    return replace(main, layouts=layouts, model=case.model())


def _second_layout(rank, world_size, batch):
    group = dist.group.WORLD if world_size > 1 else None
    for case, row in batch:
        main = TreeContext(plan_of_two(case, world_size), group, "cpu")
        # Both orders of first use: what one layout has built must not reach the other.
        for ctx in (main.in_layout("gdn"), main, main.in_layout("gdn")):
            found = errors(run_rank(case, row, ctx), row, ctx, group)
            for name, error in found.items():
                assert error <= tolerance(case.dtype), (ctx.layout_name, name, error, case)
    return main.num_tokens != ctx.num_tokens


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_both_layouts_give_the_reference(cp_size):
    batch = [(case, make_row(case)) for case in CASES]
    shards_differ = run_ranks(cp_size, _second_layout, batch, timeout=120)
    assert any(shards_differ) == (cp_size > 1)


EVEN = replace(CASE, lengths=(9, 5, 1, 7, 3, 5, 2))


def _mistaken(rank, world_size, row):
    """Errors where operators in the island work with main's tables, of shards of one size."""
    cuts, group = np.arange(0, 33, 8), dist.group.WORLD
    layouts = {
        "main": Layout.from_pieces(cuts, [0, 0, 1, 1], world_size),
        "gdn": Layout.from_pieces(cuts, [0, 1, 0, 1], world_size),
    }
    ctx = TreeContext(replace(build_plan(EVEN, world_size), layouts=layouts), group, "cpu")
    island = ctx.in_layout("gdn")
    run_rank(EVEN, row, ctx)
    for (layout, name), value in list(ctx._memo.items()):
        if layout == "main" and name not in ("row_indices", "positions"):
            ctx._memo["gdn", name] = value
    return max(errors(run_rank(EVEN, row, island), row, island, group).values())


def test_tables_of_the_other_layout_are_caught():
    assert min(run_ranks(2, _mistaken, make_row(EVEN), timeout=60)) > 1e-3


def _ahead(rank, world_size):
    plan = plan_of_two(CASE, world_size)
    row = make_row(CASE, oracle=False)
    lazy = TreeContext(plan, dist.group.WORLD, "cpu").in_layout("gdn")
    ahead = TreeContext(plan, dist.group.WORLD, "cpu")
    made = recurrent_row(plan, rank)
    upload_recurrent_row(ahead, made)
    ahead.in_layout("gdn")
    built = set(ahead._memo)
    x = torch.randn(ahead.num_tokens, 3)
    ahead.exchange(ahead.exchange(x, "main", "gdn"), "gdn", "main")
    first, second = (run_rank(CASE, row, ctx) for ctx in (lazy, ahead.in_layout("gdn")))
    equal = all(torch.equal(first[name], second[name]) for name in first)
    one = recurrent_row(replace(plan, layouts={"main": plan.layouts["main"]}), rank)
    assert (made.layout, one.layout) == ("gdn", "main") and made.digest != one.digest
    return equal, sorted(map(str, set(ahead._memo) - built))


def test_what_is_made_ahead_serves_the_island():
    for equal, late in run_ranks(2, _ahead, timeout=60):
        assert equal and not late


def test_attention_is_refused_in_an_island():
    ctx = TreeContext(plan_of_two(replace(CASE, owners=1), 1), None, "cpu").in_layout("gdn")
    x = torch.zeros(ctx.num_tokens, 1, 8)
    with pytest.raises(ValueError, match="pass ctx.in_layout\\('main'\\)"):
        ops.tree_attention(x, x, x, ctx)
