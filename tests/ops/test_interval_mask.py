"""Interval masks, tile classes, and local kernels over one stage."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_tree_cp.ops.attention import reference, tiled
from megatron_tree_cp.ops.attention.block_mask import tile_classes
from megatron_tree_cp.ops.attention.interval_mask import IntervalMask
from megatron_tree_cp.ops.attention.merge import merge_into
from megatron_tree_cp.tree.packed_tree import PackedTree


def random_mask(seed: int, queries: int, keys: int, window: int | None) -> IntervalMask:
    """Any intervals, empty ones included: kernels must not need a tree's regularity."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low, high, count):
        return torch.randint(low, high, (count,), generator=generator, dtype=torch.int32)

    lo = integers(0, queries, keys)
    hi = (lo + integers(-3, queries // 2 + 2, keys)).clamp(0, queries)
    if window is None:
        return IntervalMask(lo, hi, queries)
    return IntervalMask(lo, hi, queries, integers(0, 30, queries), integers(0, 30, keys), window)


masks = st.builds(
    random_mask,
    st.integers(0, 2**20),
    st.integers(1, 70),
    st.integers(1, 70),
    st.sampled_from([None, None, 1, 8]),
)


def _by_tile(visible, q_tile, k_tile, fill):
    rows, columns = -(-visible.shape[0] // q_tile), -(-visible.shape[1] // k_tile)
    padded = torch.full((rows * q_tile, columns * k_tile), fill)
    padded[: visible.shape[0], : visible.shape[1]] = visible
    return padded.view(rows, q_tile, columns, k_tile).transpose(1, 2).flatten(2)


@given(masks, st.sampled_from([1, 4, 16]), st.sampled_from([1, 5, 16]))
def test_tile_classes(mask, q_tile, k_tile):
    visible = mask.dense()
    some = _by_tile(visible, q_tile, k_tile, False).any(2)
    every = _by_tile(visible, q_tile, k_tile, True).all(2)
    classes = tile_classes(mask, q_tile, k_tile)
    if mask.window is None:
        assert torch.equal(classes.touched, some)
        assert torch.equal(classes.full, every & some)
    else:
        assert (classes.touched >= some).all()
        assert (classes.full <= every).all()
    covered = (mask.lo <= torch.arange(mask.num_queries)[:, None]) & (
        torch.arange(mask.num_queries)[:, None] < mask.hi
    )
    assert torch.equal(mask.reached(), covered.any(1))


def test_a_window_drops_tiles_where_branches_meet():
    """A tile that holds one branch's end and another's beginning touches no key between them."""
    tree = PackedTree((40, 250, 261), (-1, 0, 0))
    positions = torch.from_numpy(tree.positions).int()
    rows = torch.arange(tree.num_tokens, dtype=torch.int32)
    hi = torch.from_numpy(tree.subtree_end).int()
    mask = IntervalMask(rows, hi, len(rows), positions, positions, window=20)
    touched = tile_classes(mask, 16, 16).touched
    assert torch.equal(touched, _by_tile(mask.dense(), 16, 16, False).any(2))


@settings(max_examples=40)
@given(masks, st.sampled_from([(4, 2, 8, 8), (3, 1, 4, 6), (2, 2, 8, 3)]), st.sampled_from([5, 16]))
def test_tiled_is_the_reference(mask, shape, tile):
    heads, kv_heads, dim, value_dim = shape
    generator = torch.Generator().manual_seed(mask.num_keys)

    def normal(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    q, k = normal(mask.num_queries, heads, dim), normal(mask.num_keys, kv_heads, dim)
    v = normal(mask.num_keys, kv_heads, value_dim)
    stock = tiled.Q_TILE, tiled.K_TILE, tiled.MAX_KEYS
    tiled.Q_TILE, tiled.K_TILE, tiled.MAX_KEYS = tile, tile, 2 * tile
    try:
        out, lse = tiled.forward(q, k, v, mask, 0.3)
        want_out, want_lse = reference.forward(q, k, v, mask, 0.3)
        torch.testing.assert_close(lse, want_lse, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(out, want_out, rtol=1e-12, atol=1e-12)
        # A global LSE larger than the stage's own, and -inf where no stage has a key.
        args = (normal(*out.shape), q, k, v, out, lse + 0.7, normal(*lse.shape), mask, 0.3)
        got, want = tiled.backward(*args), reference.backward(*args)
    finally:
        tiled.Q_TILE, tiled.K_TILE, tiled.MAX_KEYS = stock
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_merge_leaves_rows_without_keys_alone():
    out, lse = torch.randn(3, 2, 4), torch.tensor([[1.0, 2.0], [0.5, -3.0], [float("-inf")] * 2])
    before = out.clone(), lse.clone()
    part = torch.full((3, 2, 4), float("nan"))
    merge_into(out, lse, part, torch.full((3, 2), float("-inf")))
    assert torch.equal(out[:2], before[0][:2]) and torch.equal(lse, before[1])
    assert torch.isfinite(out).all()


def test_merge_is_the_softmax_over_both_key_sets():
    scores, values = torch.randn(5, 2, 9, dtype=torch.float64) * 8, torch.randn(9, 4).double()

    def attend(part):
        lse = torch.logsumexp(scores[:, :, part], 2)
        return torch.exp(scores[:, :, part] - lse[:, :, None]) @ values[part], lse

    out, lse = attend(slice(0, 4))
    merge_into(out, lse, *attend(slice(4, 9)))
    want_out, want_lse = attend(slice(0, 9))
    torch.testing.assert_close(out, want_out)
    torch.testing.assert_close(lse, want_lse)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lo": torch.zeros(3, dtype=torch.int64)}, "must be int32"),
        ({"hi": torch.zeros(2, dtype=torch.int32)}, "equal length"),
        ({"window": 3}, "needs q_positions"),
        (
            {"window": 3, "q_positions": torch.zeros(2), "k_positions": torch.zeros(2)},
            "2 queries and 3 keys need as many positions, got 2 and 2",
        ),
    ],
)
def test_bad_masks(changes, message):
    good = {"lo": torch.zeros(3, dtype=torch.int32), "hi": torch.ones(3, dtype=torch.int32)}
    with pytest.raises(ValueError, match=message):
        IntervalMask(**{**good, "num_queries": 2, **changes})


def test_own_keys_are_diagonal_and_received_keys_are_not():
    from megatron_tree_cp.comm import TreeContext
    from megatron_tree_cp.ops.attention.stages import attention_stages
    from megatron_tree_cp.plan import Layout, plan_row
    from megatron_tree_cp.tree.packed_tree import PackedTree

    tree = PackedTree([150, 30, 1, 80], [-1, 0, 0, -1])
    context = TreeContext(plan_row(tree, 1), None, "cpu")
    mask = attention_stages(context, None).forward.local.mask
    assert mask.diagonal and torch.equal(mask.lo, torch.arange(261, dtype=torch.int32))
    halves = Layout(261, (np.array([[0, 140]]), np.array([[140, 261]])), 1)
    for fused in (0, 1):
        stages = plan_row(tree, 2, layout=halves, waves=fused).attention_class(None).rank(1)
        assert stages.local.keys.diagonal.all()
        assert np.array_equal(stages.local.keys.expand()[0], np.arange(121))
        assert not (stages.fused if fused == 0 else stages.remote[0]).keys.diagonal.all()
