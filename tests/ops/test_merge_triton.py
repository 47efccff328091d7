"""The GPU merge against the torch one; without a GPU through Triton's interpreter."""

import pytest

from tests.kernel_script import run_script

CHECK = """
import sys, torch
from megatron_tree_cp.ops.attention import merge, merge_triton
device = sys.argv[1]
generator = torch.Generator().manual_seed(0)
for dtype in (torch.float32, torch.bfloat16):
    for rows, heads, width in ((37, 3, 16), (5, 2, 24), (1, 1, 64)):
        def normal(*size):
            return torch.randn(*size, generator=generator).to(device)
        # Views, as the executor passes them: rows of a shard, LSE with heads apart.
        out, part = (normal(rows + 4, heads, width).to(dtype)[2:-2] for _ in range(2))
        lse, part_lse = (3 * normal(heads, rows + 4).t()[2:-2] for _ in range(2))
        part_lse[::3] = float("-inf")
        part[::3] = float("nan")
        before = out.clone()
        want, want_lse = out.float().cpu(), lse.cpu().clone()
        merge.merge_into(want, want_lse, part.cpu(), part_lse.cpu())
        merge_triton.merge_into(out, lse, part, part_lse)
        assert torch.equal(out[::3], before[::3])
        assert torch.allclose(lse.cpu(), want_lse, atol=1e-5)
        error = (out.float().cpu() - want).norm() / want.norm()
        assert error <= (1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps), error
        # A sink: no output, one LSE a head, neither of which has memory for every row.
        logits = normal(heads)
        zero = torch.zeros(width, dtype=dtype, device=device).expand(out.shape)
        sink = logits.expand(lse.shape)
        merge.merge_into(want, want_lse, zero.cpu(), sink.cpu())
        merge_triton.merge_into(out, lse, zero, sink)
        assert torch.allclose(lse.cpu(), want_lse, atol=1e-5)
        error = (out.float().cpu() - want).norm() / want.norm()
        assert error <= (1e-6 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps), error
print("merged")
"""


def test_interpreted():
    assert "merged" in run_script(CHECK, "cpu")


@pytest.mark.gpu
def test_on_gpu():
    assert "merged" in run_script(CHECK, "cuda")


LENGTHS = """
import torch
from tests.ops_gdn.interpreter import accept_numpy
from tests.specialisations import Specialisations
accept_numpy()
watch = Specialisations()
from megatron_tree_cp.ops.attention import merge_triton
for rows in (7, 16, 31, 64, 1, 33):
    out, part = torch.randn(2, rows, 3, 16).unbind()
    lse, part_lse = (torch.randn(3, rows).t() for _ in range(2))
    merge_triton.merge_into(out, lse, part, part_lse)
    zero = torch.zeros(16).expand(out.shape)
    merge_triton.merge_into(out, lse, zero, torch.randn(3).expand(lse.shape))
    assert sum(watch.counts().values()) == 1, (rows, watch.counts())
print("no more")
"""


def test_new_lengths_compile_nothing():
    assert "no more" in run_script(LENGTHS, "cpu")
