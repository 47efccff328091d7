"""Random cases of distributed attention, and one rank's check of a case against the path oracle."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from hypothesis import strategies as st

from megatron_tree_cp import ops
from megatron_tree_cp.comm import TreeContext
from megatron_tree_cp.plan import LayerClass, Layout, ModelShape, plan_row
from megatron_tree_cp.tree.packed_tree import PackedTree
from tests.ops.path_oracle import Expected, expected


@dataclass(frozen=True)
class Case:
    """One row, its layout and one layer."""

    lengths: tuple[int, ...]
    parents: tuple[int, ...]
    waves: int | None = None
    fused: tuple[bool, bool] | None = None
    """Which directions are fused, with one wave; None leaves what the plan chose."""
    granule: int = 1
    pieces: int | None = None
    """Cut the row at random into so many pieces with random owners; None lets the plan choose."""
    owners: int | None = None
    """Ranks that own tokens (the others are empty); None for all."""
    query_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    value_dim: int = 8
    window: int | None = None
    sink: str = "vanilla"
    dtype: torch.dtype = torch.float64
    seed: int = 0
    impl: str = "auto"

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


@st.composite
def trees(draw, max_segments: int = 8, max_length: int = 9):
    """(lengths, parents) of a forest in DFS preorder."""
    count = draw(st.integers(1, max_segments))
    lengths = tuple(draw(st.integers(1, max_length)) for _ in range(count))
    chain: list[int] = []
    parents = []
    for segment in range(count):
        # In preorder the parent is on the chain of the previous segment, or none.
        depth = draw(st.integers(0, len(chain)))
        parents.append(chain[depth - 1] if depth else -1)
        chain = [*chain[:depth], segment]
    return lengths, tuple(parents)


@st.composite
def cases(draw, cp_size: int):
    """A random case for `cp_size` ranks."""
    lengths, parents = draw(trees())
    query_heads, kv_heads = draw(st.sampled_from([(4, 2), (4, 1), (3, 3), (6, 2)]))
    waves = draw(st.sampled_from([None, 0, 1, 2, 3]))
    mixed = waves == 1 and cp_size > 1
    return Case(
        lengths,
        parents,
        waves=waves,
        fused=draw(st.sampled_from([None, (True, False), (False, True)])) if mixed else None,
        granule=draw(st.sampled_from([1, 4])),
        pieces=draw(st.sampled_from([None, 1, 3, 9])),
        owners=draw(st.sampled_from([None, max(1, cp_size - 1)])),
        query_heads=query_heads,
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([4, 8])),
        value_dim=draw(st.sampled_from([4, 6, 8])),
        window=draw(st.sampled_from([None, 1, 3, 7])),
        sink=draw(st.sampled_from(["vanilla", "off-by-one", "learnable"])),
        dtype=draw(st.sampled_from([torch.float64, torch.float32])),
        seed=draw(st.integers(0, 2**20)),
    )


def tolerance(dtype: torch.dtype) -> float:
    """Relative norm error: rounding of the dtype times a small factor for the sums."""
    return {
        torch.float64: 1e-12,
        torch.float32: 1e-5,
        # Output, D and the wire round once each, dK and dV once per returning rank.
        torch.bfloat16: 4 * torch.finfo(torch.bfloat16).eps,
    }[dtype]


def build_plan(case: Case, cp_size: int):
    """The row's plan, with the case's forced layout."""
    tree = PackedTree(case.lengths, case.parents)
    classes = [LayerClass("global")]
    if case.window is not None:
        classes.append(LayerClass("windowed", window=case.window))
    options = {"layout": None, "granule": case.granule}
    if case.pieces is not None:
        rng = np.random.default_rng(case.seed)
        inner = rng.integers(0, case.num_tokens + 1, case.pieces - 1)
        cuts = np.unique(np.concatenate([[0], inner, [case.num_tokens]]))
        owner = rng.integers(0, case.owners or cp_size, len(cuts) - 1)
        options = {"layout": Layout.from_pieces(cuts, owner, cp_size, case.granule)}
    model = ModelShape(classes=tuple(classes))
    plan = plan_row(tree, cp_size, model, waves=case.waves, **options)
    if case.fused is None:
        return plan
    forward, backward = case.fused
    attention = {
        name: replace(part, forward_fused=forward, backward_fused=backward)
        for name, part in plan.attention.items()
    }
    return replace(plan, attention=attention)


@dataclass
class Row:
    """Inputs and upstream gradients of a whole row, and what the oracle says about them."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor
    sink: torch.Tensor | None
    expected: Expected


def make_row(case: Case) -> Row:
    """Seeded tensors, equal on every rank."""
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(case.dtype)

    tokens, heads = case.num_tokens, case.query_heads
    # Large keys make the softmax peaked: what a wrong LSE or weight cannot hide behind.
    q, k = normal(tokens, heads, case.head_dim), normal(tokens, case.kv_heads, case.head_dim) * 2
    v = normal(tokens, case.kv_heads, case.value_dim)
    dout, dlse = normal(tokens, heads, case.value_dim), normal(tokens, heads)
    sink = {"vanilla": None, "off-by-one": normal(heads) * 0, "learnable": normal(heads)}[case.sink]
    scale = case.head_dim**-0.5
    oracle = expected(case.lengths, case.parents, q, k, v, dout, dlse, scale, case.window, sink)
    return Row(q, k, v, dout, dlse, sink, oracle)


def shard(x: torch.Tensor, row_indices: torch.Tensor) -> torch.Tensor:
    """This rank's rows of `x`, padding poisoned with NaN."""
    rows = x.new_full((len(row_indices), *x.shape[1:]), float("nan"))
    rows[row_indices >= 0] = x[row_indices[row_indices >= 0]]
    return rows


def run_rank(case: Case, row: Row, ctx: TreeContext) -> dict[str, torch.Tensor]:
    """One layer, forward and backward, on this rank's shard: name -> tensor in shard order."""
    inputs = [shard(x, ctx.row_indices).requires_grad_() for x in (row.q, row.k, row.v)]
    sink = None if row.sink is None else row.sink.clone().requires_grad_()
    out, lse = ops.tree_attention(
        *inputs, ctx, window=case.window, sink=sink, return_lse=True, impl=case.impl
    )
    upstream = [shard(row.dout, ctx.row_indices), shard(row.dlse, ctx.row_indices).to(lse.dtype)]
    leaves = inputs if sink is None else [*inputs, sink]
    grads = torch.autograd.grad([out, lse], leaves, upstream)
    names = ["dq", "dk", "dv", "dsink"]
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(names, grads, strict=False))}


def errors(got: dict[str, torch.Tensor], row: Row, ctx: TreeContext, group) -> dict[str, float]:
    """Relative norm error per tensor on this rank; checks that padding is exactly zero."""
    real = ctx.row_indices >= 0
    gradient_norm = torch.stack(
        [x.norm() for x in (row.expected.dq, row.expected.dk, row.expected.dv)]
    ).norm()
    result = {}
    for name, value in got.items():
        want = getattr(row.expected, name)
        if name == "dsink":
            value = value.double()
            if group is not None:
                dist.all_reduce(value, group=group)
        else:
            assert (value[~real] == 0).all(), f"{name}: padding is not 0"
            want, value = want[ctx.row_indices[real]], value[real].double()
        floor = 1e-6 * gradient_norm if name.startswith("d") else 0.0
        bound = max(float(want.norm()), float(floor), 1e-300)
        result[name] = float((value - want).norm()) / bound
        assert torch.isfinite(value).all(), f"{name} is not finite"
    return result


def check_case(case: Case, group, cp_size: int) -> dict[str, float]:
    """Run a case on this rank and hold every tensor against the oracle; returns the errors."""
    row = make_row(case)
    ctx = TreeContext(build_plan(case, cp_size), group, "cpu")
    found = errors(run_rank(case, row, ctx), row, ctx, group)
    for name, error in found.items():
        assert error <= tolerance(case.dtype), f"{name} off by {error:.2e}: {case}"
    return found
