"""Runs: the pieces of one segment that one rank owns contiguously, and who reaches them.

All keys of a run share their subtree end. The queries of another rank that see a key of the run are
the same local interval for every key, so everything here is computed per run, never per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from ..tree.packed_tree import PackedTree
from .values import Array, ArrayValue, frozen_array, merge_sorted


@dataclass(frozen=True)
class Segments:
    """Segments in row order, only children joined to their parent (they share a subtree end).

    ``start``, ``length``, ``position`` (of the first token), ``subtree_end`` (row index): int64[S].
    """

    start: Array
    length: Array
    position: Array
    subtree_end: Array


def join_only_children(tree: PackedTree) -> Segments:
    """The segments of ``tree`` with chains of only children joined."""
    starts, ends = tree.segment_starts, tree.subtree_ends
    joined = np.zeros(tree.num_segments, dtype=bool)
    before = np.arange(tree.num_segments - 1)
    joined[1:] = (tree.parents[1:] == before) & (ends[1:] == ends[:-1])
    first = np.flatnonzero(~joined)
    return Segments(
        start=starts[first],
        length=np.diff(np.append(starts[first], tree.num_tokens)),
        position=tree.segment_positions[first],
        subtree_end=ends[first],
    )


class RangeMinimum:
    """Sparse table over int64[n]: minima and last or first entries below a bound, vectorised."""

    def __init__(self, values: Array) -> None:
        self.levels = [np.asarray(values, dtype=np.int64)]
        while (width := 1 << len(self.levels)) <= len(values):
            below = self.levels[-1]
            half = width // 2
            self.levels.append(np.minimum(below[: len(below) - half], below[half:]))

    def minimum(self, begin: Array, end: Array) -> Array:
        """Minimum of ``values[begin:end]`` per entry; every interval must hold something."""
        level = np.frexp((end - begin).astype(np.float64))[1] - 1
        result = np.empty(len(begin), dtype=np.int64)
        for depth in np.unique(level):
            pick = level == depth
            table = self.levels[depth]
            result[pick] = np.minimum(table[begin[pick]], table[end[pick] - (1 << depth)])
        return result

    def trim(self, begin: Array, end: Array, bound: Array) -> tuple[Array, Array]:
        """The smallest [begin, end) per entry that keeps every value below ``bound``."""
        begin, end = begin.copy(), end.copy()
        for depth in range(len(self.levels) - 1, -1, -1):
            width, table = 1 << depth, self.levels[depth]
            for side in ("end", "begin"):
                fits = np.flatnonzero(end - begin >= width)
                at = end[fits] - width if side == "end" else begin[fits]
                drop = fits[table[at] >= bound[fits]]
                if side == "end":
                    end[drop] -= width
                else:
                    begin[drop] += width
        return begin, end


class Ownership(Protocol):
    """What a run table needs to know about a layout."""

    @property
    def cp_size(self) -> int:
        """Number of owners."""

    @property
    def pieces(self) -> tuple[Array, Array, Array, Array]:
        """Ranges in row order: start, length, owner, local start in the owner's shard."""


@dataclass(frozen=True, eq=False)
class RunTable(ArrayValue):
    """The runs of one tree under one layout, in row order.

    Per run, int64[R] unless said: ``start`` row index, ``length``, ``owner`` int32, ``local_start``
    in the owner's shard, ``position`` of the first token, ``stop`` (index one past the last run of
    the run's subtree).
    """

    tree: PackedTree
    layout: Ownership

    @cached_property
    def _columns(self) -> tuple[Array, ...]:
        segments = join_only_children(self.tree)
        piece_start, _, piece_rank, piece_local = self.layout.pieces
        start = merge_sorted(segments.start, piece_start)
        segment = np.searchsorted(segments.start, start, side="right") - 1
        piece = np.searchsorted(piece_start, start, side="right") - 1
        return (
            frozen_array(start),
            frozen_array(np.diff(np.append(start, self.tree.num_tokens))),
            frozen_array(piece_rank[piece], np.int32),
            frozen_array(piece_local[piece] + start - piece_start[piece]),
            frozen_array(segments.position[segment] + start - segments.start[segment]),
            frozen_array(np.searchsorted(start, segments.subtree_end[segment])),
        )

    @property
    def start(self) -> Array:
        return self._columns[0]

    @property
    def length(self) -> Array:
        return self._columns[1]

    @property
    def owner(self) -> Array:
        return self._columns[2]

    @property
    def local_start(self) -> Array:
        return self._columns[3]

    @property
    def position(self) -> Array:
        return self._columns[4]

    @property
    def stop(self) -> Array:
        return self._columns[5]

    @property
    def cp_size(self) -> int:
        return self.layout.cp_size

    def __len__(self) -> int:
        return len(self.start)

    @cached_property
    def order(self) -> Array:
        """int64[R]: run ids sorted by (owner, row index)."""
        return frozen_array(np.argsort(self.owner, kind="stable"))

    @cached_property
    def _code(self) -> Array:
        return self.owner[self.order].astype(np.int64) * (len(self) + 1) + self.order

    @cached_property
    def _tokens_before(self) -> Array:
        return np.concatenate([[0], np.cumsum(self.length[self.order])])

    @cached_property
    def _rank_first(self) -> Array:
        return np.searchsorted(self.owner[self.order], np.arange(self.cp_size + 1))

    @cached_property
    def _rank_base(self) -> Array:
        return self._tokens_before[self._rank_first[:-1]]

    @cached_property
    def _in_rank_order(self) -> bool:
        return not (self.owner[1:] < self.owner[:-1]).any()

    @cached_property
    def _positions(self) -> RangeMinimum:
        return RangeMinimum(self.position[self.order])

    @cached_property
    def split(self) -> Array:
        """int64[n]: the runs whose subtree is not all on one rank (only these can be needed)."""
        changes = np.concatenate([[0], np.cumsum(self.owner[1:] != self.owner[:-1])])
        return frozen_array(np.flatnonzero(changes[self.stop - 1] != changes[: len(self)]))

    def own_interval(self, rank: Array, run: Array) -> tuple[Array, Array]:
        """Entries of ``order`` [begin, end): the runs of ``rank`` inside the subtree of ``run``."""
        if self._in_rank_order:  # `order` is the row's: no search
            first, last = self._rank_first[rank], self._rank_first[rank + 1]
            return np.clip(run, first, last), np.clip(self.stop[run], first, last)
        base = rank.astype(np.int64) * (len(self) + 1)
        begin = np.searchsorted(self._code, base + run)
        return begin, np.searchsorted(self._code, base + self.stop[run])

    def oldest_query(self, begin: Array, end: Array) -> Array:
        """Smallest position among the runs ``order[begin:end]`` (intervals must not be empty)."""
        return self._positions.minimum(begin, end)

    def reach(
        self, rank: Array, run: Array, start: Array, length: Array, window: int | None
    ) -> tuple[Array, Array]:
        """Local queries [lo, hi) of ``rank`` that see a key ``[start, start + length)`` of ``run``.

        For the owner of a run lo belongs to the first key. (0, 0) when nothing is reached.
        """
        begin, end = self.own_interval(rank, run)
        bound = self.position[run] + start - self.start[run] + length - 1
        bound = bound + (window if window is not None else self.tree.num_tokens + 1)
        if window is not None:
            begin, end = self._positions.trim(begin, end, bound)
        lo = self._tokens_before[begin] - self._rank_base[rank]
        hi = self._tokens_before[end] - self._rank_base[rank]
        if window is not None and len(run):
            last = self.order[np.maximum(end - 1, 0)]
            hi = hi - np.maximum(self.position[last] + self.length[last] - bound, 0) * (end > begin)
        own = self.owner[run] == rank
        lo = np.where(own, self.local_start[run] + start - self.start[run], lo)
        some = hi > lo
        return np.where(some, lo, 0), np.where(some, hi, 0)

    def count_pairs(
        self, rank: Array, run: Array, start: Array, length: Array, window: int | None
    ) -> Array:
        """int64: exact visible pairs of each key range with the queries of ``rank``.

        A range of the rank's own keys must be its whole run.
        """
        if window is None:
            lo, hi = self.reach(rank, run, start, length, None)
            own = self.owner[run] == rank
            unseen = np.where(own, length * (length - 1) // 2, 0)
            return np.asarray(length * (hi - lo) - unseen)
        begin, end = self.own_interval(rank, run)
        first = self.position[run] + start - self.start[run]
        begin, end = self._positions.trim(begin, end, first + length - 1 + window)
        result = np.zeros(len(run), dtype=np.int64)
        which = np.repeat(np.arange(len(run)), end - begin)
        offsets = np.cumsum(end - begin) - (end - begin)
        query = self.order[np.arange(len(which)) - np.repeat(offsets - begin, end - begin)]
        pairs = windowed_pairs(
            self.position[query], self.length[query], first[which], length[which], window
        )
        np.add.at(result, which, pairs)
        return result


def windowed_pairs(
    query: Array, num_queries: Array, key: Array, num_keys: Array, window: int
) -> Array:
    """Pairs with ``0 <= q - k < window`` between positions [query, +num) and [key, +num) of a path.

    Counts lattice points of a band in a rectangle as a difference of four triangular numbers.
    """

    def triangle(n: Array) -> Array:
        count = np.maximum(n, 0)
        return np.asarray(count * (count + 1) // 2)

    def at_most(bound: Array | int) -> Array:
        # pairs with q - k <= bound: reflect k so that the region is a corner of the rectangle
        corner = bound - (query - (key + num_keys - 1)) + 1
        return (
            triangle(corner)
            - triangle(corner - num_queries)
            - triangle(corner - num_keys)
            + triangle(corner - num_queries - num_keys)
        )

    return at_most(window - 1) - at_most(-1)
