"""Merge of two stages on a GPU: one pass over the rows, fp32 maths, in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ROWS = 16


# The strides of an LSE are lengths where heads lie apart.
@triton.jit(do_not_specialize=["rows", "lse_row", "lse_head", "part_lse_row", "part_lse_head"])
def _merge(
    out,
    lse,
    part,
    part_lse,
    rows,
    out_row,
    out_head,
    lse_row,
    lse_head,
    part_row,
    part_head,
    part_lse_row,
    part_lse_head,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Program (i, h): rows [i * ROWS, ...) of head h. Strides are in elements, columns adjacent."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1).to(tl.int64)
    inside = row < rows
    lse_at = lse + row * lse_row + head * lse_head
    own = tl.load(lse_at, mask=inside, other=0.0).to(tl.float32)
    new = tl.load(
        part_lse + row * part_lse_row + head * part_lse_head, mask=inside, other=float("-inf")
    ).to(tl.float32)
    # A row that the stage does not reach stays bit for bit; its part may hold anything.
    reached = inside & (new != float("-inf"))
    top = tl.maximum(own, new)
    total = top + tl.log(tl.exp(own - top) + tl.exp(new - top))
    column = tl.arange(0, BLOCK)
    cell = reached[:, None] & (column < WIDTH)[None, :]
    out_at = out + row[:, None] * out_row + head * out_head + column[None, :]
    kept = tl.load(out_at, mask=cell, other=0.0).to(tl.float32)
    added = tl.load(
        part + row[:, None] * part_row + head * part_head + column[None, :], mask=cell, other=0.0
    ).to(tl.float32)
    merged = kept * tl.exp(own - total)[:, None] + added * tl.exp(new - total)[:, None]
    tl.store(out_at, merged.to(out.dtype.element_ty), mask=cell)
    tl.store(lse_at, total, mask=reached)


def merge_into(
    out: torch.Tensor, lse: torch.Tensor, part_out: torch.Tensor, part_lse: torch.Tensor
) -> None:
    """`merge.merge_into` for fp16, bf16 and fp32 on CUDA; any row and head strides."""
    rows, heads, width = out.shape
    if rows == 0:
        return
    if out.stride(2) != 1 or part_out.stride(2) != 1:
        raise ValueError("merge needs out and part_out with adjacent columns")
    _merge[(triton.cdiv(rows, _ROWS), heads)](
        out,
        lse,
        part_out,
        part_lse,
        rows,
        *out.stride()[:2],
        *lse.stride(),
        *part_out.stride()[:2],
        *part_lse.stride(),
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        ROWS=_ROWS,
    )
