"""Tiles that a stage's kernel touches: short branches waste the rest of their tiles.

Block-sparse kernels compute every 128 x 128 tile with a visible pair whole. Under a window only an
estimate is kept: both edges of the band waste half a tile of each key's queries.
"""

from __future__ import annotations

import numpy as np

from .remote import TILE, RemoteKeys
from .runs import RunTable
from .values import Array, expand_ranges


def hidden_pairs(
    runs: RunTable,
    keys: RemoteKeys,
    window: int | None,
    pairs: Array,
    interval: tuple[Array, Array],
) -> Array:
    """float64[cp]: hidden pairs of the tiles that each rank's stage over ``keys`` touches.

    Args:
        keys: in buffer order per destination, destinations ascending.
        pairs: visible pairs per destination.
        interval: local queries [lo, hi) per entry, as `RunTable.reach` gives them.
    """
    lo, hi = interval
    rank, length = keys.destination, keys.length
    if window is not None:
        reached = np.where(hi > lo, length, 0)
        seen = np.bincount(rank, weights=reached, minlength=runs.cp_size)
        return np.asarray(seen * TILE)
    total = np.concatenate([[0], np.cumsum(length)])
    first = np.searchsorted(rank, np.arange(runs.cp_size))
    begin = total[:-1] - total[first][rank]
    rising = runs.owner[keys.run] == rank
    touched = touched_tiles(rank, begin, length, lo, hi, rising, runs.cp_size)
    return np.asarray(touched * float(TILE * TILE) - pairs)


def hidden_of_units(runs: RunTable, cuts: Array, pairs: Array) -> Array:
    """float64[U]: hidden pairs of the tiles of each unit's keys, with the row on one rank.

    ``runs`` are the runs of the units between ``cuts``; ``pairs`` [U] are visible pairs per key
    unit. A key tile counts for the unit that holds its first key.
    """
    zero = np.zeros(len(runs), dtype=np.int64)
    end = np.append(runs.start, runs.tree.num_tokens)[runs.stop]
    _, tile, count = _touched_columns(zero, runs.start, runs.length, runs.start, end, zero + 1)
    unit = np.searchsorted(cuts, tile * TILE, side="right") - 1
    touched = np.bincount(unit, weights=count, minlength=len(cuts) - 1)
    return np.asarray(touched * float(TILE * TILE) - pairs)


def touched_tiles(
    stage: Array, begin: Array, length: Array, lo: Array, hi: Array, rising: Array, stages: int
) -> Array:
    """float64[stages]: exact number of touched tiles per stage, without a window.

    Per entry, ascending by (stage, begin): keys ``[begin, begin + length)`` of the stage's buffer,
    visible to its queries ``[lo, hi)``, where lo grows by one a key on a ``rising`` entry.
    """
    stage, _, count = _touched_columns(stage, begin, length, lo, hi, rising)
    return np.bincount(stage, weights=count, minlength=stages)


def _touched_columns(
    stage: Array, begin: Array, length: Array, lo: Array, hi: Array, rising: Array
) -> tuple[Array, Array, Array]:
    """(stage, key tile, touched query tiles), a key tile possibly in several parts."""
    some = hi > lo
    stage, begin, length = stage[some], begin[some], length[some]
    lo, hi, rising = lo[some], hi[some], rising[some]
    if not len(stage):
        return stage, begin, length
    first = begin // TILE
    count = (begin + length - 1) // TILE - first + 1
    entry = np.repeat(np.arange(len(count)), count)
    tile = expand_ranges(first, count)
    offset = np.maximum(tile * TILE - begin[entry], 0) * rising[entry]
    top = (lo[entry] + offset) // TILE
    bottom = (hi[entry] - 1) // TILE + 1
    # Columns in one number line each, so that a running maximum never leaves its column.
    height = int(bottom.max()) + 1
    column = (stage[entry] * (int(tile.max()) + 1) + tile) * height
    top, bottom = column + top, column + bottom
    if (top[1:] < top[:-1]).any():
        order = np.argsort(top, kind="stable")
        top, bottom, entry, tile = top[order], bottom[order], entry[order], tile[order]
    covered = np.maximum.accumulate(bottom)
    fresh = bottom - top
    fresh[1:] = np.maximum(bottom[1:] - np.maximum(top[1:], covered[:-1]), 0)
    return stage[entry], tile, fresh
