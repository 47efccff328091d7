"""The GPU sum of returned rows against the torch one; without a GPU through the interpreter."""

import pytest

from tests.kernel_script import run_script

CHECK = """
import sys
import numpy as np, torch
from megatron_tree_cp.comm.exchange import RangeExchange
from megatron_tree_cp.comm.returned_rows_triton import add_rows
from megatron_tree_cp.plan.exchange import RankExchange
device = sys.argv[1]
# Three destinations; row 4 goes to all, rows 3 and 5 to two, the last destination wants none.
plan = RankExchange(
    np.array([2, 4, 0, 3]), np.array([4, 1, 1, 4]), (4, 2, 4, 0), (0,) * 4,
    np.zeros(0, np.int64), np.zeros(0, np.int64),
)
exchange = RangeExchange(plan, "group", torch.device("cpu"))
generator = torch.Generator().manual_seed(0)
for dtype in (torch.float32, torch.bfloat16):
    for width in (1, 24, 130):
        total = torch.randn(9, width, generator=generator).to(dtype)
        # Columns of a wider buffer, as dK and dV come home side by side.
        returned = torch.randn(10, width + 7, generator=generator).to(dtype)[:, 3 : 3 + width]
        want = exchange.accumulate(total.clone(), returned)
        got = total.to(device)
        returned = returned.to(device)
        target, order = (x.to(device) for x in exchange._by_source_row)
        add_rows(got, returned, target, order)
        assert torch.equal(got.cpu()[[1, 7, 8]], total[[1, 7, 8]])
        if dtype == torch.float32:
            assert torch.equal(got.cpu(), want)
        # The interpreter truncates where devices round: one unit in the last place.
        error = (got.cpu().float() - want.float()).abs() / want.float().abs()
        assert error.max() <= torch.finfo(dtype).eps, error.max()
        again = total.to(device)
        add_rows(again, returned, target, order)
        assert torch.equal(again, got)
empty = torch.zeros(0, dtype=torch.int64, device=device)
add_rows(got, returned[:0], empty, empty)
print("added")
"""


def test_interpreted():
    assert "added" in run_script(CHECK, "cpu")


@pytest.mark.gpu
def test_on_gpu():
    assert "added" in run_script(CHECK, "cuda")
