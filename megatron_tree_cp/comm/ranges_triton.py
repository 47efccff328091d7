"""Expansion of ranges on a GPU: one launch, however many columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 256


@triton.jit(do_not_specialize=["ranges", "entries", "width", "steps"])
def _expand(table, out, ranges, entries, width, steps, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """table int32 [1 + 2 * COLUMNS, ranges]: firsts, bases and slopes; out [COLUMNS, width]."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < entries
    # The last range that begins at the entry or before: empty ranges share their firsts.
    below = tl.zeros([BLOCK], tl.int32)
    above = below + ranges
    step = 0
    while step < steps:
        middle = (below + above) // 2
        begun = tl.load(table + middle, mask=inside & (middle < ranges), other=0) <= entry
        further = begun & (middle < above)
        below = tl.where(further, middle, below)
        above = tl.where(further, above, middle)
        step += 1
    offset = entry - tl.load(table + below, mask=inside, other=0)
    row = table + below
    for column in tl.static_range(COLUMNS):
        base = tl.load(row + (1 + 2 * column) * ranges, mask=inside, other=0)
        slope = tl.load(row + (2 + 2 * column) * ranges, mask=inside, other=0)
        value = (base + slope * offset).to(out.dtype.element_ty)
        tl.store(out + column * width + entry, value, mask=inside)


def expand(table: torch.Tensor, out: torch.Tensor, entries: int) -> None:
    """Fill out[:, :entries] as `ranges.expand_columns` describes it; the rest is left alone."""
    ranges = table.shape[1]
    if not entries:
        return
    _expand[(triton.cdiv(entries, _BLOCK),)](
        table,
        out,
        ranges,
        entries,
        out.shape[1],
        ranges.bit_length(),
        COLUMNS=len(out),
        BLOCK=_BLOCK,
    )
