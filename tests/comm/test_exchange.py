"""Range exchanges and layout changes: values, transposes, padding and empty ranks."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_tree_cp.comm import RangeExchange, TreeContext
from megatron_tree_cp.plan import ExchangePlan, Layout, ModelShape, plan_row
from megatron_tree_cp.tree.packed_tree import PackedTree
from tests.distributed import run_ranks

# (destination, source, first row, rows): rank 2 sends nothing to anyone, rank 0 receives nothing.
PIECES = [(1, 0, 0, 3), (1, 0, 5, 2), (2, 0, 1, 4), (2, 1, 2, 1)]


def _wave():
    destination, source, start, length = (np.array(x) for x in zip(*PIECES, strict=True))
    return ExchangePlan.from_pieces(3, source, destination, start, length)


def _source(rank, dtype):
    rows = torch.arange(8, dtype=torch.float64)
    return torch.stack([rows + 100 * rank, -rows], 1).to(dtype)


def _move(rank, world_size, dtype):
    exchange = RangeExchange(_wave().rank(rank), dist.group.WORLD, torch.device("cpu"))
    x = _source(rank, dtype)
    received = exchange.start(x).wait()
    packed = exchange.start(x[:, :1].unflatten(1, (1, 1)), x).wait()
    assert torch.equal(packed[:, 1:], received) and torch.equal(packed[:, :1], received[:, :1])
    returned = exchange.start_transposed(received).wait()
    assert returned.dtype == dtype
    total = exchange.accumulate(torch.zeros(8, 2), returned)
    return received, total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranges_arrive_in_order_and_return_summed(dtype):
    results = run_ranks(3, _move, dtype, timeout=30)
    sent = [_source(rank, dtype) for rank in range(3)]
    reads = torch.zeros(3, 8)
    for rank, (received, _) in enumerate(results):
        pieces = [(s, a, n) for d, s, a, n in PIECES if d == rank]
        want = [sent[s][a : a + n] for s, a, n in pieces]
        assert torch.equal(received, torch.cat(want) if want else sent[0][:0])
        for source, start, rows in pieces:
            reads[source, start : start + rows] += 1
    for rank, (_, total) in enumerate(results):
        assert total.dtype == torch.float32
        assert torch.equal(total, reads[rank][:, None] * sent[rank].float())


LAYOUTS = {
    "main": ([0, 4, 9, 13], [1, 0, 1]),
    "island": ([0, 2, 7, 10, 13], [0, 1, 0, 0]),
}


def _layouts(rank, world_size):
    tree = PackedTree([13], [-1])
    layouts = {
        name: Layout.from_pieces(np.array(cuts), np.array(owner), 3, granule=4)
        for name, (cuts, owner) in LAYOUTS.items()
    }
    plan = plan_row(tree, 3, ModelShape(), layout=layouts["main"])
    # Only the layouts of the plan matter here.
    plan = type(plan)(**{**_fields(plan), "layouts": layouts})
    ctx = TreeContext(plan, dist.group.WORLD, "cpu")
    rows = ctx.row_indices
    x = torch.where(rows >= 0, rows.double() + 1, float("nan"))[:, None].requires_grad_()
    moved = ctx.exchange(x, "main", "island")
    island = ctx.in_layout("island")
    target = island.row_indices
    assert torch.equal(moved[:, 0], (target.double() + 1))  # padding is -1 + 1 = 0
    upstream = torch.where(target >= 0, 10 * (target.double() + 1), float("nan"))[:, None]
    (grad,) = torch.autograd.grad(moved, x, upstream)
    assert torch.equal(grad[:, 0], 10 * (rows.double() + 1))
    back = ctx.exchange(moved, "island", "main")
    assert torch.equal(back[:, 0], rows.double() + 1)
    assert torch.equal(island.positions, target.clamp(min=0))
    assert island.in_layout("main").row_indices is rows and island.in_layout("island") is island
    assert (island.num_tokens, island.num_real) == (len(target), int((target >= 0).sum()))
    assert torch.equal(island.exchange(x, "main", "island"), moved)
    assert island.cached("here", object) is not ctx.cached("here", object)
    assert ctx.in_layout("island").cached("here", object) is island.cached("here", object)
    with pytest.raises(ValueError, match="no layout 'elsewhere'; it has: island, main"):
        ctx.exchange(x, "main", "elsewhere")
    with pytest.raises(ValueError, match="x has 3 rows but layout 'main'"):
        ctx.exchange(x[:3], "main", "island")
    return len(rows)


def _fields(plan):
    return {name: getattr(plan, name) for name in plan.__dataclass_fields__}


def test_layout_changes_with_padding_and_an_empty_rank():
    assert run_ranks(3, _layouts, timeout=30) == [8, 8, 4]


def test_context_refuses_a_plan_of_another_size():
    plan = plan_row(PackedTree([5], [-1]), 2)
    with pytest.raises(ValueError, match="plan was made for 2 context-parallel ranks"):
        TreeContext(plan, None, "cpu")


def test_context_of_one_rank():
    plan = plan_row(PackedTree([3, 2, 2], [-1, 0, 0]), 1, granule=4)
    ctx = TreeContext(plan, None, "cpu")
    assert (ctx.rank, ctx.cp_size, ctx.num_tokens, ctx.num_real) == (0, 1, 8, 7)
    assert ctx.row_indices.tolist() == [0, 1, 2, 3, 4, 5, 6, -1]
    assert ctx.positions.tolist() == [0, 1, 2, 3, 4, 3, 4, 0]
    builds = []
    assert ctx.cached("key", lambda: builds.append(1) or "value") == "value"
    assert ctx.cached("key", lambda: builds.append(1) or "value") == "value"
    assert builds == [1]
