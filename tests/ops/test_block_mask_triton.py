"""The GPU's block tables against the torch ones; without a GPU through Triton's interpreter."""

import pytest

from tests.kernel_script import run_script

CHECK = """
import sys, torch
from megatron_tree_cp.ops.attention import block_mask, block_mask_triton
from megatron_tree_cp.ops.attention.interval_mask import IntervalMask
device = sys.argv[1]
generator = torch.Generator().manual_seed(0)
def integers(low, high, count):
    return torch.randint(low, high, (count,), generator=generator, dtype=torch.int32)
seen = torch.zeros(2, dtype=torch.int64)
for queries, keys, window, q_tile, k_tile in (
    (70, 50, None, 8, 16), (33, 41, None, 16, 5), (64, 64, None, 16, 16), (1, 1, None, 4, 4),
    (70, 90, 9, 8, 16), (64, 64, 40, 4, 20), (5, 0, None, 4, 4),
):
    lo = integers(0, queries, keys)
    lo[: keys // 2] = 0
    hi = (lo + integers(-3, 2 * queries, keys)).clamp(0, queries)
    hi[: 2 * keys // 3] = queries
    extra = () if window is None else (
        torch.arange(queries, dtype=torch.int32), torch.arange(keys, dtype=torch.int32), window
    )
    mask = IntervalMask(lo, hi, queries, *extra)
    there = IntervalMask(
        lo.to(device), hi.to(device), queries,
        *(x.to(device) if isinstance(x, torch.Tensor) else x for x in extra),
    )
    for by_key in (False, True):
        want = block_mask.block_tables(mask, q_tile, k_tile, by_key)
        got = block_mask_triton.block_tables(there, q_tile, k_tile, by_key)
        for name, a, b in zip(("partial", "index", "full", "index"), want, got, strict=True):
            assert torch.equal(a, b.cpu()), (queries, keys, window, by_key, name, a, b)
        seen += torch.stack([want[0].sum(), want[2].sum()])
assert (seen > 20).all(), seen
print("equal")
"""


def test_interpreted():
    assert "equal" in run_script(CHECK, "cpu")


@pytest.mark.gpu
def test_on_gpu():
    assert "equal" in run_script(CHECK, "cuda")


LENGTHS = """
import random, torch
from tests.ops_gdn.interpreter import accept_numpy
from tests.specialisations import Specialisations
accept_numpy()
watch = Specialisations()
from megatron_tree_cp.comm import TreeContext
from megatron_tree_cp.ops.attention import block_mask_triton
from megatron_tree_cp.ops.attention.stages import attention_stages
from megatron_tree_cp.plan import LayerClass, ModelShape, plan_row
from megatron_tree_cp.tree.packed_tree import PackedTree
model = ModelShape(classes=(LayerClass("global"), LayerClass("near", window=9)))
random.seed(0)
def one_row():
    lengths = [random.randint(1, 40) for _ in range(5)]
    ctx = TreeContext(plan_row(PackedTree(lengths, [-1, 0, 0, -1, 3]), 1, model), None, "cpu")
    for window in (None, 9):
        for call in attention_stages(ctx, window).calls:
            for by_key in (False, True):
                block_mask_triton.block_tables(call.mask, 8, 16, by_key)
one_row()
first = watch.counts()
assert first
for _ in range(12):
    one_row()
assert watch.counts() == first, (first, watch.counts())
print("no more")
"""


def test_new_lengths_compile_nothing():
    assert "no more" in run_script(LENGTHS, "cpu")
