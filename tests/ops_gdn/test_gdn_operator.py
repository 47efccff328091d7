"""The operators' specification and their refusals, in one process."""

from __future__ import annotations

import pytest
import torch

from megatron_tree_cp import ops
from megatron_tree_cp.comm import TreeContext
from megatron_tree_cp.ops.gdn import reference, registry
from megatron_tree_cp.ops.gdn.row import leaf_ends, parents_of
from megatron_tree_cp.plan import plan_row
from megatron_tree_cp.tree.packed_tree import PackedTree
from tests.ops_gdn.cases import Case, make_row

CASE = Case((6, 4, 1, 3, 5), (-1, 0, 1, 0, -1))


def test_row_reference_equals_trajectories_alone():
    """Outputs and every gradient of a row are what its paths give one by one."""
    row = make_row(CASE)
    tree = CASE.tree
    leaves = {name: x.clone().requires_grad_() for name, x in row.inputs.items()}
    roots = [int(s) for s in tree.segment_starts[tree.parents < 0]]
    total, counted = 0.0, set()
    for number, end in enumerate(leaf_ends(tree)):
        path = [end]
        while (parent := parents_of(tree)[path[0]]) >= 0:
            path.insert(0, parent)
        chain = list(range(-1, len(path) - 1))
        y = reference.causal_conv1d(
            leaves["x"][path], leaves["weight"], leaves["bias"], chain, "silu"
        )
        initial = leaves["initial"][roots.index(path[0])][None]
        out, states = reference.gated_delta_rule(
            *(leaves[name][path] for name in ("q", "k", "v", "g", "beta")),
            chain,
            CASE.key_dim**-0.5,
            initial_state=initial,
        )
        # A shared token's loss counts once: upstream gradients belong to stored tokens.
        fresh = [i for i, t in enumerate(path) if t not in counted]
        tokens = [path[i] for i in fresh]
        counted |= set(path)
        total = total + (y[fresh] * row.upstream["y"][tokens]).sum()
        total = total + (out[fresh] * row.upstream["out"][tokens]).sum()
        total = total + (states[-1] * row.upstream["final"][number]).sum()
    total.backward()
    for name, x in leaves.items():
        want = row.expected["d" + name]
        assert (x.grad - want).norm() <= 1e-12 * want.norm(), name


def _context(granule: int = 1) -> TreeContext:
    return TreeContext(plan_row(CASE.tree, 1, granule=granule), None, "cpu")


def _inputs(ctx: TreeContext, dtype=torch.float32) -> dict[str, torch.Tensor]:
    t = ctx.num_tokens
    shapes = {"q": (t, 1, 4), "k": (t, 1, 4), "v": (t, 2, 6)}
    inputs = {name: torch.ones(shape, dtype=dtype) for name, shape in shapes.items()}
    return inputs | {"g": torch.zeros(t, 2), "beta": torch.ones(t, 2)}


def test_dtypes_and_shapes_of_results():
    ctx = _context(granule=8)
    inputs = _inputs(ctx, torch.bfloat16)
    out, final = ops.tree_gated_delta_rule(**inputs, ctx=ctx, return_final_state=True)
    assert out.dtype == torch.bfloat16 and out.shape == (24, 2, 6)
    assert final.dtype == torch.float32 and final.shape == (3, 2, 4, 6)
    assert isinstance(ops.tree_gated_delta_rule(**inputs, ctx=ctx), torch.Tensor)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"q": torch.ones(5, 1, 4)}, "q has 5 rows but rank 0's shard has 19"),
        ({"k": torch.ones(19, 2, 4)}, "q and k must have one shape"),
        ({"v": torch.ones(19, 2, 6, dtype=torch.float64)}, "must share a dtype"),
        ({"g": torch.ones(19, 1)}, "g has 1 heads but v has 2"),
        ({"beta": torch.ones(19, 2, dtype=torch.long)}, "beta must have a float dtype"),
        ({"initial_state": torch.ones(1, 2, 4, 6)}, r"\[roots, Hv, Dk, Dv\] = \[2, 2, 4, 6\]"),
        ({"impl": "triton"}, "needs a CUDA device; use one of: auto, tiled, reference"),
        ({"impl": "flash"}, "unknown Gated DeltaNet implementation 'flash'"),
    ],
)
def test_delta_rule_says_what_does_not_fit(change, message):
    ctx = _context()
    with pytest.raises(ValueError, match=message):
        ops.tree_gated_delta_rule(**(_inputs(ctx) | change), ctx=ctx)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"x": torch.ones(5, 3)}, r"x must be \[19, C\]"),
        ({"weight": torch.ones(3, 1, 4)}, r"needs squeeze\(1\)"),
        ({"bias": torch.ones(4)}, r"bias must be \[3\]"),
        ({"split": (1, 1)}, "split must be positive sizes that sum to 3"),
        ({"activation": "gelu"}, "activation must be 'silu' or None"),
    ],
)
def test_convolution_says_what_does_not_fit(change, message):
    ctx = _context()
    given = {"x": torch.ones(19, 3), "weight": torch.ones(3, 4), "bias": None}
    with pytest.raises(ValueError, match=message):
        ops.tree_causal_conv1d(**(given | change), ctx=ctx)


def test_choice_is_described():
    case = registry.GdnCase("cpu", torch.float32, key_dim=64, value_dim=64)
    assert registry.select(case, "auto", registry.RULES).name == "tiled"
    assert registry.describe_choice(case, "auto", registry.RULES) == (
        "tiled (auto; triton needs a CUDA device)"
    )
    assert registry.describe_choice(case, "reference", registry.RULES) == "reference (requested)"
    several = registry.GdnCase("cpu", torch.float32, key_dim=64, value_dim=64, cp_size=2)
    with pytest.raises(ValueError, match="walks whole rows on one rank, this row is on 2"):
        registry.select(several, "reference", registry.RULES)
    half = registry.GdnCase("cuda", torch.bfloat16, key_dim=24, value_dim=64)
    assert "key head dim from 16 to 256" in registry.RULES[0].supports(half)


def test_one_token_row():
    ctx = TreeContext(plan_row(PackedTree((1,), (-1,)), 1), None, "cpu")
    q, v = torch.tensor([[[3.0, 4.0]]]), torch.tensor([[[2.0]]])
    out = ops.tree_gated_delta_rule(q, q, v, torch.zeros(1, 1), torch.ones(1, 1), ctx, scale=1.0)
    assert out.item() == pytest.approx(2.0)
