"""Units of the search: contiguous row ranges that are moved between ranks as a whole."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..tree.packed_tree import PackedTree
from .remote import TILE, needed_keys
from .runs import RunTable, Segments
from .tiles import hidden_of_units
from .values import Array, expand_ranges, frozen_array


def max_units(cp_size: int) -> int:
    """Most units a search starts from; splits refine where it matters."""
    return 64 + 8 * cp_size


def unit_cuts(segments: Segments, num_tokens: int, cp_size: int) -> Array:
    """int64[U + 1]: cuts of a row into at most ``max_units`` units of similar size.

    Every cell of a regular grid gives one cut: at the shallowest segment boundary in the cell, or
    at its middle when a long segment runs through. Short segments so share a unit.
    """
    size = max(-(-num_tokens // max_units(cp_size)), min(128, max(1, num_tokens // (8 * cp_size))))
    middle = np.arange(size, num_tokens, size)
    boundary = segments.start[1:]
    cell = (boundary + size // 2) // size - 1
    inside = (cell >= 0) & (cell < len(middle))
    boundary, cell = boundary[inside], cell[inside]
    # The subtree that a boundary closes is the larger, the shallower the next segment starts.
    depth = segments.position[1:][inside]
    rank = depth * (2 * size) + np.abs(boundary - middle[cell])
    cuts = middle.copy()
    if len(cell):
        first = np.flatnonzero(np.concatenate([[True], cell[1:] != cell[:-1]]))
        best = np.minimum.reduceat(rank, first)
        # Written backwards: of equals the first boundary stays.
        found = np.flatnonzero(rank == np.repeat(best, np.diff(np.append(first, len(cell)))))[::-1]
        cuts[cell[found]] = boundary[found]
    return np.unique(np.concatenate([[0], cuts, [num_tokens]]))


@dataclass(frozen=True, eq=False)
class UnitGrid:
    """The units between ``cuts`` int64[U + 1], seen as a layout with one unit per owner."""

    cuts: Array

    @property
    def cp_size(self) -> int:
        return len(self.cuts) - 1

    @cached_property
    def pieces(self) -> tuple[Array, Array, Array, Array]:
        units = np.arange(self.cp_size, dtype=np.int32)
        return self.cuts[:-1], np.diff(self.cuts), units, np.zeros(self.cp_size, np.int64)


@dataclass(frozen=True, eq=False)
class UnitEntries:
    """Entries of a `UnitWork`: query unit, key unit, visible pairs, keys seen (0 of its own)."""

    query: Array
    key: Array
    pairs: Array
    keys: Array


@dataclass(frozen=True, eq=False)
class UnitWork:
    """Exact work between units under one window.

    ``pairs`` float64[U query, U key] visible pairs; ``keys`` float64[U query, U key] keys of the
    second unit that the first unit's queries see (0 on the diagonal). ``hidden`` float64[U key]
    hidden pairs of touched tiles, None where they are not counted.
    """

    pairs: Array
    keys: Array
    hidden: Array | None = None

    @cached_property
    def queries(self) -> Array:
        """float64[U]: pairs of each unit's queries."""
        return np.asarray(self.pairs.sum(1))

    @cached_property
    def entries(self) -> UnitEntries:
        """What is not zero: most units see few others."""
        query, key = np.nonzero(self.pairs)
        return UnitEntries(query, key, self.pairs[query, key], self.keys[query, key])


def unit_work(
    tree: PackedTree, cuts: Array, windows: tuple[int | None, ...], tiles: bool = False
) -> list[UnitWork]:
    """The work between the units of ``cuts``, per window; ``tiles`` counts hidden pairs too."""
    runs = RunTable(tree, UnitGrid(frozen_array(cuts)))
    size = runs.cp_size
    owner = runs.owner.astype(np.int64)
    last = owner[runs.stop - 1]
    crossing = np.flatnonzero(last > owner)
    spread = last[crossing] - owner[crossing]
    pairs = (expand_ranges(owner[crossing] + 1, spread), np.repeat(crossing, spread))
    result = []
    for window in windows:
        far = needed_keys(runs, window, *pairs)
        flat = far.destination * size + owner[far.run]
        between = runs.count_pairs(far.destination, far.run, far.start, far.length, window)
        within = runs.count_pairs(owner, np.arange(len(runs)), runs.start, runs.length, window)
        work = np.bincount(flat, weights=between, minlength=size * size).reshape(size, size)
        work[np.diag_indices(size)] = np.bincount(owner, weights=within, minlength=size)
        keys = np.bincount(flat, weights=far.length, minlength=size * size).reshape(size, size)
        hidden = None
        if tiles and window is None:
            hidden = hidden_of_units(runs, cuts, work.sum(0))
        elif tiles:
            hidden = np.diff(cuts) * float(TILE)
        result.append(UnitWork(work, keys, hidden))
    return result
