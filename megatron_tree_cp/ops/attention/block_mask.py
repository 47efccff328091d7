"""Tile classes of an interval mask: which (query tile x key tile) to skip, mask, or take whole.

*full* comes from the tile-wise max of lo and min of hi and is exact. *touched* comes from a
difference array over query tiles, one column per key tile, and is exact without a window: it counts
each key's own tiles, not the hull of the key tile's intervals. With a window the positions of the
keys that reach the query tile, and of the queries between their first lo and last hi, bound the
distance: *touched* may keep a tile where branches meet, and no *full* tile hides a pair.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from megatron_tree_cp.ops.attention.interval_mask import IntervalMask

_FAR = 2**30
_PAIRS_AT_ONCE = 2**22
"""Entries of the largest table that a window's classification holds."""


@dataclass(frozen=True)
class TileClasses:
    """Classes of the tiles of one mask.

    Attributes:
        touched: bool[query tiles, key tiles], some pair of the tile may be visible.
        full: bool[query tiles, key tiles], every pair inside the mask's extents is visible;
            a subset of `touched`.
        q_tile, k_tile: tile sizes in rows.
    """

    touched: torch.Tensor
    full: torch.Tensor
    q_tile: int
    k_tile: int


def tile_classes(mask: IntervalMask, q_tile: int, k_tile: int) -> TileClasses:
    """Classify all tiles of `mask` on its device, without a host synchronisation."""
    num_q, num_k = -(-mask.num_queries // q_tile), -(-mask.num_keys // k_tile)
    device = mask.lo.device
    if num_q == 0 or num_k == 0:
        none = torch.zeros(num_q, num_k, dtype=torch.bool, device=device)
        return TileClasses(none, none, q_tile, k_tile)
    lo, hi = mask.lo.long(), mask.hi.long()
    touched = _touched(lo, hi, num_q, num_k, q_tile, k_tile)

    first = torch.arange(num_q, device=device)[:, None] * q_tile
    last = (first + q_tile).clamp(max=mask.num_queries)
    lo_max = _per_tile(lo, num_k, k_tile, -_FAR).amax(1)
    hi_min = _per_tile(hi, num_k, k_tile, _FAR).amin(1)
    full = (lo_max <= first) & (hi_min >= last)
    if mask.window is not None:
        q_pos, k_pos = (positions.long() for positions in mask.window_positions)
        q_max = _per_tile(q_pos, num_q, q_tile, -_FAR).amax(1)[:, None]
        k_min = _per_tile(k_pos, num_k, k_tile, _FAR).amin(1)
        full &= q_max - k_min < mask.window
        keys = (
            _per_tile(lo, num_k, k_tile, _FAR),
            _per_tile(hi, num_k, k_tile, -_FAR),
            _per_tile(k_pos, num_k, k_tile, 0),
        )
        queries = _per_tile(q_pos, num_q, q_tile, _FAR)
        at_once = max(1, _PAIRS_AT_ONCE // max(num_q * q_tile, num_k * k_tile))
        for some in torch.arange(num_q, device=device).split(at_once):
            distance = _least_distance(some * q_tile, queries[some], *keys)
            touched[some] &= distance < mask.window
    return TileClasses(touched, full & touched, q_tile, k_tile)


def _touched(
    lo: torch.Tensor, hi: torch.Tensor, num_q: int, num_k: int, q_tile: int, k_tile: int
) -> torch.Tensor:
    """Exact bool[num_q, num_k]: some interval of the key tile meets the query tile."""
    key_tile = torch.arange(lo.shape[0], device=lo.device) // k_tile
    step = (lo < hi).int()
    begin = (lo // q_tile).clamp(0, num_q)
    end = ((hi - 1) // q_tile + 1).clamp(0, num_q)
    difference = torch.zeros((num_q + 1) * num_k, dtype=torch.int32, device=lo.device)
    difference.index_add_(0, begin * num_k + key_tile, step)
    difference.index_add_(0, end * num_k + key_tile, -step)
    return difference.view(num_q + 1, num_k).cumsum(0)[:num_q] > 0


def _least_distance(
    first: torch.Tensor,
    q_pos: torch.Tensor,
    lo: torch.Tensor,
    hi: torch.Tensor,
    k_pos: torch.Tensor,
) -> torch.Tensor:
    """int64[len(first), key tiles]: a bound below of position(query) - position(key) in the tiles
    that begin at queries ``first``, over pairs that intervals allow.

    ``q_pos`` is [len(first), q_tile], the others [key tiles, k_tile].
    """
    begin, q_tile = first[:, None, None], q_pos.shape[1]
    reach = (lo < begin + q_tile) & (hi > begin) & (lo < hi)
    nearest_key = k_pos.masked_fill(~reach, -_FAR).amax(2)
    earliest = lo.masked_fill(~reach, _FAR).amin(2)[..., None]
    latest = hi.masked_fill(~reach, -_FAR).amax(2)[..., None]
    queries = begin + torch.arange(q_tile, device=lo.device)
    reached = (earliest <= queries) & (queries < latest)
    return q_pos[:, None].masked_fill(~reached, _FAR).amin(2) - nearest_key


def _per_tile(values: torch.Tensor, num_tiles: int, tile: int, fill: int) -> torch.Tensor:
    """View a vector as [num_tiles, tile], the tail filled with a neutral value."""
    return F.pad(values, (0, num_tiles * tile - values.shape[0]), value=fill).view(num_tiles, tile)


def block_tables(
    mask: IntervalMask, q_tile: int, k_tile: int, by_key: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tables of a block-sparse kernel: (partial count, partial index, full count, full index).

    int32 [1, 1, M] and [1, 1, M, N]: for each query tile its key tiles, or with `by_key` for each
    key tile its query tiles, in ascending order. A ragged last tile counts as partial, so that the
    kernel checks its bounds. No host synchronisation.
    """
    if mask.lo.is_cuda:
        from megatron_tree_cp.ops.attention import block_mask_triton

        return block_mask_triton.block_tables(mask, q_tile, k_tile, by_key)
    classes = tile_classes(mask, q_tile, k_tile)
    full = classes.full.clone()
    if mask.num_queries % q_tile:
        full[-1] = False
    if mask.num_keys % k_tile:
        full[:, -1] = False
    partial = classes.touched & ~full
    if by_key:
        partial, full = partial.t(), full.t()
    return (*_ordered(partial), *_ordered(full))


def _ordered(chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts [1, 1, rows] and the column indices of the chosen entries, first in their rows."""
    rows, columns = chosen.shape
    place = chosen.cumsum(1, dtype=torch.int64) - 1
    index = torch.zeros(rows, columns + 1, dtype=torch.int32, device=chosen.device)
    column = torch.arange(columns, dtype=torch.int32, device=chosen.device).expand(rows, columns)
    # Entries that are not chosen all land in the spare last column.
    index.scatter_(1, place.masked_fill(~chosen, columns), column)
    counts = chosen.sum(1, dtype=torch.int32)
    return counts[None, None], index[None, None, :, :columns].contiguous()
