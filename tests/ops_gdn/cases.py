"""Random cases of the Gated DeltaNet operators, and one rank's check against the row oracle."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from hypothesis import strategies as st

from megatron_tree_cp import ops
from megatron_tree_cp.comm import TreeContext
from megatron_tree_cp.ops.gdn import reference
from megatron_tree_cp.ops.gdn.row import leaf_ends, parents_of
from megatron_tree_cp.plan import LayerClass, Layout, ModelShape, plan_row
from megatron_tree_cp.tree.packed_tree import PackedTree
from tests.ops.cases import shard, trees

INPUTS = ("x", "weight", "bias", "q", "k", "v", "g", "beta", "initial")
SHARDED = ("x", "q", "k", "v", "g", "beta")


@dataclass(frozen=True)
class Case:
    """One row, its layout and one layer."""

    lengths: tuple[int, ...]
    parents: tuple[int, ...]
    granule: int = 1
    pieces: int | None = None
    """Cut the row at random into so many pieces with random owners; None lets the plan choose."""
    owners: int | None = None
    """Ranks that own tokens (the others are empty); None for all."""
    key_heads: int = 1
    value_heads: int = 2
    key_dim: int = 4
    value_dim: int = 6
    width: int = 4
    bias: bool = True
    activation: str | None = "silu"
    split: tuple[int, ...] | None = None
    """Parts of the convolution's channels."""
    norm: bool = True
    initial: bool = True
    final: bool = True
    decay: float = 0.05
    """Mean of -g: slow, so that a state of the wrong branch still shows far down."""
    dtype: torch.dtype = torch.float64
    seed: int = 0
    impl: str = "auto"

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def tree(self) -> PackedTree:
        return PackedTree(self.lengths, self.parents)

    def model(self) -> ModelShape:
        """One layer of the case's sizes, for the planner."""
        layer = LayerClass(
            "gdn",
            kind="gdn",
            query_heads=self.key_heads,
            kv_heads=self.value_heads,
            head_dim=self.key_dim,
            value_dim=self.value_dim,
            conv_width=self.width,
        )
        return ModelShape(classes=(layer,))


@st.composite
def cases(draw, cp_size: int, max_length: int = 9):
    """A random case for `cp_size` ranks."""
    lengths, parents = draw(trees(max_length=max_length))
    key_heads, value_heads = draw(st.sampled_from([(1, 2), (2, 2), (1, 3)]))
    return Case(
        lengths,
        parents,
        granule=draw(st.sampled_from([1, 4])),
        pieces=draw(st.sampled_from([None, 1, 3, 9, 30])),
        owners=draw(st.sampled_from([None, max(1, cp_size - 1)])),
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=draw(st.sampled_from([3, 4])),
        value_dim=draw(st.sampled_from([2, 5])),
        width=draw(st.sampled_from([1, 2, 4, 8])),
        bias=draw(st.booleans()),
        activation=draw(st.sampled_from(["silu", None])),
        split=draw(st.sampled_from([None, (2, 3), (1, 3, 1)])),
        norm=draw(st.booleans()),
        initial=draw(st.booleans()),
        final=draw(st.booleans()),
        dtype=draw(st.sampled_from([torch.float64, torch.float32])),
        seed=draw(st.integers(0, 2**20)),
    )


def tolerance(dtype: torch.dtype) -> float:
    """Relative norm error that rounding explains."""
    return {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]


def build_plan(case: Case, cp_size: int):
    """The row's plan, with the case's forced layout."""
    options = {"layout": None, "granule": case.granule}
    if case.pieces is not None:
        rng = np.random.default_rng(case.seed)
        inner = rng.integers(0, case.num_tokens + 1, case.pieces - 1)
        cuts = np.unique(np.concatenate([[0], inner, [case.num_tokens]]))
        owner = rng.integers(0, case.owners or cp_size, len(cuts) - 1)
        options = {"layout": Layout.from_pieces(cuts, owner, cp_size, case.granule)}
    return plan_row(case.tree, cp_size, **options)


@dataclass
class Row:
    """Inputs and upstream gradients of a whole row, and the oracle's answers, by name."""

    inputs: dict[str, torch.Tensor | None]
    upstream: dict[str, torch.Tensor]
    expected: dict[str, torch.Tensor]


def make_row(case: Case, oracle: bool = True) -> Row:
    """Seeded tensors, equal on every rank."""
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(case.dtype)

    tokens, heads, channels = case.num_tokens, case.value_heads, 5
    tree = case.tree
    roots, leaves = int((tree.parents < 0).sum()), len(leaf_ends(tree))
    state = (heads, case.key_dim, case.value_dim)
    size = 0.7 if case.norm else 0.3  # without the norm |k|^2 beta must stay below 2
    inputs = {
        "x": normal(tokens, channels),
        "weight": normal(channels, case.width),
        "bias": normal(channels) if case.bias else None,
        "q": normal(tokens, case.key_heads, case.key_dim),
        "k": normal(tokens, case.key_heads, case.key_dim) * size,
        "v": normal(tokens, heads, case.value_dim),
        "g": -normal(tokens, heads).abs() * case.decay,
        "beta": torch.sigmoid(normal(tokens, heads)),
        "initial": normal(roots, *state) if case.initial else None,
    }
    upstream = {
        "y": normal(tokens, channels),
        "out": normal(tokens, heads, case.value_dim),
        "final": normal(leaves, *state),
    }
    if not case.final:
        del upstream["final"]
    return Row(inputs, upstream, expected(case, inputs, upstream) if oracle else {})


def expected(case: Case, inputs, upstream) -> dict[str, torch.Tensor]:
    """Outputs and gradients of the whole row by the reference, in fp64."""
    leaves = {
        name: x.double().clone().requires_grad_() for name, x in inputs.items() if x is not None
    }
    parents = parents_of(case.tree)
    y = reference.causal_conv1d(
        leaves["x"], leaves["weight"], leaves.get("bias"), parents, case.activation
    )
    out, states = reference.gated_delta_rule(
        *(leaves[name] for name in ("q", "k", "v", "g", "beta")),
        parents,
        case.key_dim**-0.5,
        case.norm,
        leaves.get("initial"),
    )
    found = {"y": y, "out": out, "final": states[leaf_ends(case.tree)]}
    found = {name: found[name] for name in upstream}
    grads = torch.autograd.grad(
        list(found.values()), list(leaves.values()), [x.double() for x in upstream.values()]
    )
    return {name: x.detach() for name, x in found.items()} | {
        "d" + name: grad for name, grad in zip(leaves, grads, strict=True)
    }


def run_rank(case: Case, row: Row, ctx: TreeContext) -> dict[str, torch.Tensor]:
    """Both operators, forward and backward, on this rank's shard: name -> tensor in shard order."""
    device = ctx.device
    rows = ctx.row_indices.cpu()
    leaves = {
        name: (shard(x, rows) if name in SHARDED else x.clone()).to(device).requires_grad_()
        for name, x in row.inputs.items()
        if x is not None
    }
    y = ops.tree_causal_conv1d(
        leaves["x"],
        leaves["weight"],
        leaves.get("bias"),
        ctx,
        activation=case.activation,
        impl=case.impl,
        split=case.split,
    )
    if case.split is not None:
        assert all(part.is_contiguous() for part in y)
        y = torch.cat(y, dim=1)
    found = {"y": y}
    result = ops.tree_gated_delta_rule(
        *(leaves[name] for name in ("q", "k", "v", "g", "beta")),
        ctx,
        use_qk_l2norm=case.norm,
        initial_state=leaves.get("initial"),
        return_final_state=case.final,
        impl=case.impl,
    )
    found["out"], *final = result if case.final else (result,)
    if case.final:
        found["final"] = final[0]
    upstream = [
        (row.upstream[name] if name == "final" else shard(row.upstream[name], rows)).to(
            device, found[name].dtype
        )
        for name in found
    ]
    grads = torch.autograd.grad(list(found.values()), list(leaves.values()), upstream)
    return {name: x.detach().cpu() for name, x in found.items()} | {
        "d" + name: grad.cpu() for name, grad in zip(leaves, grads, strict=True)
    }


def errors(got, row: Row, ctx: TreeContext, group) -> dict[str, float]:
    """Relative norm error per tensor on this rank; checks that padding is exactly zero."""
    rows = ctx.row_indices.cpu()
    real = rows >= 0
    result = {}
    for name, value in got.items():
        want = row.expected[name]
        if name.removeprefix("d") in (*SHARDED, "y", "out"):
            assert (value[~real] == 0).all(), f"{name}: padding is not 0"
            want, value = want[rows[real]], value[real].double()
        else:  # summed over the ranks
            value = value.double()
            if group is not None:
                dist.all_reduce(value, group=group)
        assert torch.isfinite(value).all(), f"{name} is not finite"
        norm = row.expected[name].norm() * (want.numel() / row.expected[name].numel()) ** 0.5
        bound = max(float(want.norm()), 1e-3 * float(norm), 1e-300)
        result[name] = float((value - want).norm()) / bound
    return result


def check_case(case: Case, group, cp_size: int, row: Row | None = None) -> dict[str, float]:
    """Run a case on this rank and hold every tensor against the oracle; returns the errors."""
    row = make_row(case) if row is None else row
    ctx = TreeContext(build_plan(case, cp_size), group, "cpu")
    found = errors(run_rank(case, row, ctx), row, ctx, group)
    for name, error in found.items():
        assert error <= tolerance(case.dtype), f"{name} off by {error:.2e}: {case}"
    return found
