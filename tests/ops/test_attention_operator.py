"""`tree_attention`: what it refuses and how it says so; choice of implementations."""

import pytest
import torch

from megatron_tree_cp import ops
from megatron_tree_cp.comm import TreeContext
from megatron_tree_cp.ops.attention.reference import dense_tree_attention
from megatron_tree_cp.ops.attention.registry import AttentionCase, describe_choice, select
from megatron_tree_cp.plan import LayerClass, ModelShape, plan_row
from megatron_tree_cp.tree.packed_tree import PackedTree

TREE = PackedTree([4, 3, 2], [-1, 0, 0])
MODEL = ModelShape(classes=(LayerClass("global"), LayerClass("near", window=3)))


@pytest.fixture(name="ctx")
def _ctx():
    return TreeContext(plan_row(TREE, 1, MODEL), None, "cpu")


def _inputs(**changes):
    made = {"q": torch.randn(9, 4, 8), "k": torch.randn(9, 2, 8), "v": torch.randn(9, 2, 6)}
    return {**made, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.randn(8, 4, 8)}, "q has 8 rows but rank 0's shard has 9"),
        ({"k": torch.randn(9, 16)}, r"k must be \[T, heads, dim\], got shape \(9, 16\)"),
        ({"k": torch.randn(9, 2, 4)}, "equal head dims, got 8 and 4"),
        ({"v": torch.randn(9, 4, 6)}, "equal heads, got 2 and 4"),
        ({"q": torch.randn(9, 3, 8)}, "3 query heads are not a multiple of 2 KV heads"),
        ({"v": torch.randn(9, 2, 6).double()}, "q, k and v must share dtype and device"),
        ({"sink": torch.zeros(3)}, r"sink must be \[4\] logits, got shape \(3,\)"),
        ({"window": 5}, r"no attention class with window 5 \(known: 3, None\)"),
        ({"impl": "magic"}, "unknown attention implementation 'magic'; use one of"),
        ({"impl": "flex"}, "'flex' needs a CUDA device .*; use one of: auto, tiled, reference"),
    ],
)
def test_refusals(ctx, changes, message):
    with pytest.raises(ValueError, match=message) as error:
        ops.tree_attention(**_inputs(**changes), ctx=ctx)
    assert "\n" not in str(error.value)


def test_choice():
    case = AttentionCase("cpu", torch.float32, 4, 2, 8, 8)
    assert select(case).name == "tiled"
    assert describe_choice(case).startswith("tiled (auto; flash needs a CUDA device; flex needs")
    assert describe_choice(case, "reference") == "reference (requested)"
    cuda = AttentionCase("cuda", torch.bfloat16, 4, 2, 64, 64)
    repeatable = describe_choice(cuda, "repeatable")
    assert repeatable == "flex (repeatable; flash sums gradients in an order that changes)"
    with pytest.raises(ValueError, match="needs a float dtype"):
        select(AttentionCase("cpu", torch.int32, 4, 2, 8, 8))


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dense_reference(ctx, window, dtype):
    inputs = {name: x.to(dtype).requires_grad_() for name, x in _inputs().items()}
    sink = torch.randn(4, dtype=dtype)
    out, lse = ops.tree_attention(
        **inputs, ctx=ctx, window=window, sink=sink, return_lse=True, scale=0.7
    )
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    visible = torch.from_numpy(TREE.dense_mask(window))
    wide = [x.detach().double() for x in inputs.values()]
    want_out, want_lse = dense_tree_attention(*wide, visible, 0.7, sink.double())
    tolerance = 4 * torch.finfo(dtype).eps
    assert (out.double() - want_out).norm() <= tolerance * want_out.norm()
    assert (lse.double() - want_lse).norm() <= max(tolerance, 1e-6) * want_lse.norm()


def test_no_gradient_needed(ctx):
    with torch.no_grad():
        out = ops.tree_attention(**_inputs(), ctx=ctx)
    assert not out.requires_grad


def test_lse_alone_has_a_gradient(ctx):
    inputs = {name: x.double().requires_grad_() for name, x in _inputs().items()}
    _, lse = ops.tree_attention(**inputs, ctx=ctx, return_lse=True)
    got = torch.autograd.grad(lse.sum(), list(inputs.values()))
    visible = torch.from_numpy(TREE.dense_mask())
    _, want_lse = dense_tree_attention(*inputs.values(), visible, 8**-0.5)
    want = torch.autograd.grad(want_lse.sum(), [inputs["q"], inputs["k"]])
    torch.testing.assert_close(got[0], want[0])
    torch.testing.assert_close(got[1], want[1])
    assert (got[2] == 0).all()
