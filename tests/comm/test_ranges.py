"""Ranges expanded on a device against numpy; the GPU's kernel through the interpreter too."""

import numpy as np
import pytest
import torch

from megatron_tree_cp.comm.ranges import expand_columns, range_indices
from tests.kernel_script import run_script


def test_expanded_in_torch():
    lengths = np.array([3, 0, 1, 4])
    columns = [(np.array([5, 9, 7, -2]), np.array([1, 1, 0, 2])), (lengths, 0 * lengths)]
    a, b = expand_columns(lengths, columns, torch.device("cpu"))
    assert a.tolist() == [5, 6, 7, 7, -2, 0, 2, 4] and b.tolist() == [3, 3, 3, 1, 4, 4, 4, 4]
    indices = range_indices(np.array([4, 0]), np.array([2, 3]), torch.device("cpu"))
    assert indices.tolist() == [4, 5, 0, 1, 2] and indices.dtype == torch.int64


CHECK = """
import sys, numpy as np, torch
from tests.ops_gdn.interpreter import accept_numpy
from tests.specialisations import Specialisations
watch = None
if sys.argv[1] == "cpu":
    accept_numpy()
    watch = Specialisations()
from megatron_tree_cp.comm import ranges, ranges_triton
device = torch.device(sys.argv[1])
generator = np.random.default_rng(0)
for ranges_in_all in (1, 2, 3, 7, 64, 65, 130):
    lengths = generator.integers(0, 9, ranges_in_all)
    if not lengths.sum():
        lengths[-1] = 5
    columns = [generator.integers(-50, 50, (2, ranges_in_all)) for _ in range(3)]
    want = ranges.expand_columns(lengths, columns, torch.device("cpu"))
    first = np.cumsum(lengths) - lengths
    flat = [x for column in columns for x in column]
    table = torch.from_numpy(np.stack([first, *flat]).astype(np.int32)).to(device)
    for dtype in (torch.int32, torch.int64):
        out = torch.full((3, 32 * 40), -99, dtype=dtype, device=device)
        ranges_triton.expand(table, out, len(want[0]))
        got = out.cpu()
        assert torch.equal(got[:, : len(want[0])], torch.stack(want).to(dtype)), ranges_in_all
        assert (got[:, len(want[0]) :] == -99).all()
if watch is not None:
    assert sum(watch.counts().values()) == 2, watch.counts()  # two dtypes
print("expanded")
"""


def test_interpreted():
    assert "expanded" in run_script(CHECK, "cpu")


@pytest.mark.gpu
def test_on_gpu():
    assert "expanded" in run_script(CHECK, "cuda")
