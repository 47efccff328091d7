"""Block tables of an interval mask on a GPU: one launch for each order of the tables.

A program owns one row of the tables (a query tile, or a key tile with `BY_KEY`), walks the tiles of
the other side in ascending order, classifies a few of them at a time and appends the chosen ones.
The classes are those of block_mask.py: `touched` asks every key of a tile, `full` its extremes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_tree_cp.ops.attention.interval_mask import IntervalMask

_AT_ONCE = 8
_HIDDEN = 2**30


@triton.jit(do_not_specialize=["num_queries", "num_keys", "window", "columns"])
def _tables(
    lo,
    hi,
    q_positions,
    k_positions,
    counts,
    index,
    num_queries,
    num_keys,
    window,
    columns,
    Q_TILE: tl.constexpr,
    K_TILE: tl.constexpr,
    K_BLOCK: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BY_KEY: tl.constexpr,
    WINDOW: tl.constexpr,
    HIDDEN: tl.constexpr,
):
    """Shapes inside: A = AT_ONCE tiles of the walked side; keys [A or 1, K_BLOCK].

    counts [2, rows] and index [2, rows, columns]: partial tiles, then full ones. Not four pointers:
    kernels are compiled for pointers by their alignment, and the second halves may have any.
    """
    row = tl.program_id(0)
    rows = tl.num_programs(0).to(tl.int64)
    partials = 0
    fulls = 0
    key = tl.arange(0, K_BLOCK)
    query = tl.arange(0, Q_BLOCK)
    begin = 0
    while begin < columns:
        walked = begin + tl.arange(0, AT_ONCE)
        if BY_KEY:
            q_tile = walked
            k_tile = tl.full([1], 0, tl.int32) + row
        else:
            q_tile = tl.full([1], 0, tl.int32) + row
            k_tile = walked
        keys = k_tile[:, None] * K_TILE + key[None, :]
        present = (key < K_TILE)[None, :] & (keys < num_keys)
        low = tl.load(lo + keys, mask=present, other=HIDDEN)
        high = tl.load(hi + keys, mask=present, other=0)
        first = q_tile * Q_TILE
        last = tl.minimum(first + Q_TILE, num_queries)
        if BY_KEY:
            meets = (low < last[:, None]) & (high > first[:, None]) & (low < high)
        else:
            meets = (low < last) & (high > first) & (low < high)
        touched = tl.max((present & meets).to(tl.int32), axis=1) > 0
        highest_lo = tl.max(tl.where(present, low, -HIDDEN), axis=1)
        lowest_hi = tl.min(tl.where(present, high, HIDDEN), axis=1)
        full = (highest_lo <= first) & (lowest_hi >= last)
        # A ragged last tile counts as partial: the kernel then checks its bounds.
        full = full & (first + Q_TILE <= num_queries) & ((k_tile + 1) * K_TILE <= num_keys)
        if WINDOW:
            queries = q_tile[:, None] * Q_TILE + query[None, :]
            inside = (query < Q_TILE)[None, :] & (queries < num_queries)
            position = tl.load(q_positions + queries, mask=inside, other=0)
            q_max = tl.max(tl.where(inside, position, -HIDDEN), axis=1)
            place = tl.load(k_positions + keys, mask=present, other=0)
            k_min = tl.min(tl.where(present, place, HIDDEN), axis=1)
            # The nearest pair: of keys that reach the tile, and of queries that they reach.
            reach = present & meets
            k_max = tl.max(tl.where(reach, place, -HIDDEN), axis=1)
            earliest = tl.min(tl.where(reach, low, HIDDEN), axis=1)
            latest = tl.max(tl.where(reach, high, -HIDDEN), axis=1)
            reached = inside & (queries >= earliest[:, None]) & (queries < latest[:, None])
            q_min = tl.min(tl.where(reached, position, HIDDEN), axis=1)
            full = full & (q_max - k_min < window)
            touched = touched & (q_min - k_max < window)
        touched = touched & (walked < columns)
        full = full & touched
        partial = touched & ~full
        at = row.to(tl.int64) * columns
        taken = partial.to(tl.int32)
        place_in_row = partials + tl.cumsum(taken, axis=0) - 1
        tl.store(index + at + place_in_row, walked, mask=partial)
        partials += tl.sum(taken, axis=0)
        taken = full.to(tl.int32)
        place_in_row = fulls + tl.cumsum(taken, axis=0) - 1
        tl.store(index + rows * columns + at + place_in_row, walked, mask=full)
        fulls += tl.sum(taken, axis=0)
        begin += AT_ONCE
    tl.store(counts + row, partials)
    tl.store(counts + rows + row, fulls)
    entry = tl.arange(0, 256)
    for kind in tl.static_range(2):
        end = partials if kind == 0 else fulls
        rest = index + kind * rows * columns + row.to(tl.int64) * columns
        while end < columns:
            tl.store(rest + end + entry, tl.zeros([256], tl.int32), mask=end + entry < columns)
            end += 256


def block_tables(
    mask: IntervalMask, q_tile: int, k_tile: int, by_key: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`block_mask.block_tables` in one launch; entries past a row's count are 0."""
    num_q, num_k = triton.cdiv(mask.num_queries, q_tile), triton.cdiv(mask.num_keys, k_tile)
    rows, columns = (num_k, num_q) if by_key else (num_q, num_k)
    counts = torch.empty(2, 1, 1, rows, dtype=torch.int32, device=mask.lo.device)
    index = torch.empty(2, 1, 1, rows, columns, dtype=torch.int32, device=mask.lo.device)
    if not columns:
        counts.zero_()
    if rows and columns:
        positions = (mask.lo, mask.lo) if mask.window is None else mask.window_positions
        _tables[(rows,)](
            mask.lo,
            mask.hi,
            *positions,
            counts,
            index,
            mask.num_queries,
            mask.num_keys,
            mask.window or 0,
            columns,
            Q_TILE=q_tile,
            K_TILE=k_tile,
            K_BLOCK=triton.next_power_of_2(k_tile),
            Q_BLOCK=triton.next_power_of_2(q_tile),
            AT_ONCE=_AT_ONCE,
            BY_KEY=by_key,
            WINDOW=mask.window is not None,
            HIDDEN=_HIDDEN,
        )
    return counts[0], index[0], counts[1], index[1]
