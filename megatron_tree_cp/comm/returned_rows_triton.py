"""Sum of returned rows at their owners on a GPU: one launch, fp32 maths, a fixed order.

Returned rows are sorted by the owner's row (stably, so that contributions to one row stay in
ascending order of the returning rank). The program of a row's first contribution adds all of them
and rounds once: no atomics, bitwise repeatable.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["entries"])
def _add_rows(
    total,
    returned,
    target,
    order,
    entries,
    total_row,
    returned_row,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program i: the sorted entries from i on that share its target row, if i is their first."""
    first = tl.program_id(0)
    row = tl.load(target + first)
    before = tl.load(target + first - 1, mask=first > 0, other=-1)
    if before != row:
        column = tl.arange(0, BLOCK)
        inside = column < WIDTH
        at = total + row * total_row + column
        value = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        entry = first
        current = row
        while current == row:
            source = returned + tl.load(order + entry) * returned_row + column
            value += tl.load(source, mask=inside, other=0.0).to(tl.float32)
            entry += 1
            current = tl.load(target + entry, mask=entry < entries, other=-1)
        tl.store(at, value.to(total.dtype.element_ty), mask=inside)


def add_rows(
    total: torch.Tensor, returned: torch.Tensor, target: torch.Tensor, order: torch.Tensor
) -> None:
    """total[target[i]] += returned[order[i]] for all i, in place.

    Args:
        total: [rows, W] with adjacent columns, fp16, bf16 or fp32.
        returned: [entries, W] with adjacent columns.
        target: int64[entries], ascending. order: int64[entries].
    """
    if total.stride(1) != 1 or returned.stride(1) != 1:
        raise ValueError("add_rows needs rows with adjacent columns")
    width = total.shape[1]
    if not len(target) or not width:
        return
    _add_rows[(len(target),)](
        total,
        returned,
        target,
        order,
        len(target),
        total.stride(0),
        returned.stride(0),
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
    )
