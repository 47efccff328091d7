"""Kernels by time."""

import pytest
import torch

from megatron_tree_cp.bench.kernel_times import KernelTime, add_up, kernel_lines, kernel_times
from megatron_tree_cp.tree.errors import InputError


def test_launches_add_up_and_the_longest_comes_first():
    times = add_up([("a", 1.0), ("b", 4.0), ("a", 2.0), ("a", 3.0), ("b", 4.0)], calls=2)
    assert times == [KernelTime("b", 1.0, 4.0), KernelTime("a", 1.5, 3.0)]
    lines = kernel_lines(times, 1)
    assert len(lines) == 2 and lines[0].split() == ["4.000", "ms", "1.0x", "b"]
    assert lines[1].split()[:3] == ["7.000", "ms", "2.5x"]


def test_a_device_without_kernels_is_refused():
    with pytest.raises(InputError, match="--kernels"):
        kernel_times(lambda: None, torch.device("cpu"))


@pytest.mark.gpu
def test_kernels_of_a_product():
    x = torch.randn(512, 512, device="cuda")
    times = kernel_times(lambda: x @ x, torch.device("cuda"))
    assert times and times[0].ms > 0 and times[0].launches == 1
