"""PackedTree: the segments of one packed prefix forest and who sees whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .errors import InputError

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


def read_only(array: NDArray[Any]) -> NDArray[Any]:
    """Make `array` immutable and return it."""
    array.flags.writeable = False
    return array


def integer_vector(values: ArrayLike, name: str) -> IntArray:
    """A fresh int64 copy of a vector of integers; InputError for anything else, booleans too."""
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, OverflowError) as error:
        raise InputError(f"{name}: not a vector of integers (ragged or mixed values)") from error
    if array.ndim != 1:
        raise InputError(f"{name}: expected one dimension, got shape {array.shape}")
    if array.size == 0:
        return np.empty(0, np.int64)
    if array.dtype.kind not in "iu":
        raise InputError(f"{name}: expected integers, got {array.dtype} values")
    if array.dtype == np.uint64 and int(array.max()) > np.iinfo(np.int64).max:
        raise InputError(f"{name}: {int(array.max())} does not fit a signed 64-bit integer")
    return array.astype(np.int64)


@dataclass(frozen=True, eq=False)
class PackedTree:
    """A forest of token segments in DFS preorder, parents first.

    Args:
        lengths: tokens of each segment, [S], all at least 1.
        parents: segment index of each segment's parent, [S], -1 for a root. Preorder means that
            the parent of a segment lies on the path from a root to the segment before it.

    Two numberings never mix: a *row index* is a token's storage address, 0 to num_tokens - 1;
    its *position* is its depth from its root. Key k is visible to query q iff
    `k <= q < subtree_end[k]`, and `positions[q] - positions[k] < window` where a window applies.

    Raises:
        InputError: ragged or non-integer arrays, lengths below 1, cycles, order not DFS preorder.
    """

    lengths: IntArray
    parents: IntArray

    def __init__(self, lengths: ArrayLike, parents: ArrayLike) -> None:
        lengths = integer_vector(lengths, "lengths")
        parents = integer_vector(parents, "parents")
        if lengths.shape != parents.shape:
            raise InputError(
                f"lengths and parents differ in size: {lengths.size} and {parents.size}"
            )
        if lengths.size == 0:
            raise InputError("lengths: a tree needs at least one segment")
        bad = np.flatnonzero(lengths < 1)
        if bad.size:
            segment = int(bad[0])
            raise InputError(
                f"lengths[{segment}]: a segment needs at least one token, got {lengths[segment]}"
            )
        _check_preorder(parents)
        object.__setattr__(self, "lengths", read_only(lengths))
        object.__setattr__(self, "parents", read_only(parents))

    def __reduce__(self) -> tuple[Any, ...]:
        # Derived arrays are cheap and read-only flags do not survive pickling: build afresh.
        return PackedTree, (np.array(self.lengths), np.array(self.parents))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PackedTree):
            return NotImplemented
        return np.array_equal(self.lengths, other.lengths) and np.array_equal(
            self.parents, other.parents
        )

    def __hash__(self) -> int:
        return hash((self.lengths.tobytes(), self.parents.tobytes()))

    @property
    def num_segments(self) -> int:
        return int(self.lengths.size)

    @cached_property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @cached_property
    def segment_ends(self) -> IntArray:
        """One past the last row index of each segment, [S]."""
        return read_only(np.cumsum(self.lengths))

    @cached_property
    def segment_starts(self) -> IntArray:
        """First row index of each segment, [S]."""
        return read_only(self.segment_ends - self.lengths)

    @cached_property
    def subtree_ends(self) -> IntArray:
        """One past the last row index of each segment's subtree, [S]."""
        ends = self.segment_ends.tolist()
        parents = self.parents.tolist()
        for segment in range(len(ends) - 1, -1, -1):
            parent = parents[segment]
            if parent >= 0 and ends[segment] > ends[parent]:
                ends[parent] = ends[segment]
        return read_only(np.array(ends, np.int64))

    @cached_property
    def segment_positions(self) -> IntArray:
        """Position of each segment's first token, [S]."""
        # Every segment adds its length below itself: from the next segment to its subtree's end.
        shift = np.append(0, self.lengths)
        np.subtract.at(
            shift,
            np.append(self.segment_starts, self.num_tokens).searchsorted(self.subtree_ends),
            self.lengths,
        )
        return read_only(np.cumsum(shift)[:-1])

    @cached_property
    def depths(self) -> IntArray:
        """Segments above each segment, [S]; 0 for roots."""
        depths: list[int] = []
        for parent in self.parents.tolist():
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return read_only(np.array(depths, np.int64))

    @cached_property
    def segment_of(self) -> IntArray:
        """Segment of each token, [T]."""
        return read_only(np.repeat(np.arange(self.num_segments), self.lengths))

    @cached_property
    def positions(self) -> IntArray:
        """Position of each token, [T]: its depth from its root, 0 at roots."""
        shift = self.segment_positions - self.segment_starts
        return read_only(np.arange(self.num_tokens) + np.repeat(shift, self.lengths))

    @cached_property
    def subtree_end(self) -> IntArray:
        """One past the last row index of the subtree of each token's segment, [T]."""
        return read_only(np.repeat(self.subtree_ends, self.lengths))

    def is_visible(
        self, q: ArrayLike, k: ArrayLike, window: int | None = None
    ) -> BoolArray | np.bool_:
        """Whether key k is visible to query q: row indices, which broadcast against each other."""
        _check_window(window)
        q, k = self._row_indices(q, "q"), self._row_indices(k, "k")
        visible = (k <= q) & (q < self.subtree_end[k])
        if window is not None:
            visible = visible & (self.positions[q] - self.positions[k] < window)
        return visible

    def visible_pairs(self, window: int | None = None) -> int:
        """Number of (query, key) pairs that see each other."""
        _check_window(window)
        keys = self.positions + 1  # a query sees its path, itself included
        if window is not None:
            keys = np.minimum(keys, window)
        return int(keys.sum())

    def dense_mask(self, window: int | None = None) -> BoolArray:
        """The whole mask as bool [T, T], (query, key): for tests and pictures of small trees."""
        index = np.arange(self.num_tokens)
        return np.asarray(self.is_visible(index[:, None], index[None, :], window))

    def path(self, segment: int) -> Sequence[int]:
        """Segment indices from the root of `segment` down to itself."""
        if not 0 <= segment < self.num_segments:
            raise InputError(f"segment {segment} is not in 0..{self.num_segments - 1}")
        path = []
        while segment >= 0:
            path.append(int(segment))
            segment = int(self.parents[segment])
        return tuple(reversed(path))

    def _row_indices(self, values: ArrayLike, name: str) -> IntArray:
        index = np.asarray(values)
        if index.dtype.kind not in "iu":
            raise InputError(f"{name}: row indices are integers, got {index.dtype}")
        if index.size and not (0 <= index.min() and index.max() < self.num_tokens):
            raise InputError(f"{name}: row index outside 0..{self.num_tokens - 1}")
        return index.astype(np.int64)


def _check_window(window: int | None) -> None:
    if window is not None and window < 1:
        raise InputError(f"window: must be at least 1, got {window}")


def _check_preorder(parents: IntArray) -> None:
    path: list[int] = []
    for segment, parent in enumerate(parents.tolist()):
        if parent < -1:
            raise InputError(f"parents[{segment}]: {parent} is neither a segment nor -1 (a root)")
        if parent >= segment:
            raise InputError(
                f"parents[{segment}]: {parent} does not come before its child; a cycle, or "
                "segments not in DFS preorder"
            )
        while path and path[-1] != parent:
            path.pop()
        if not path and parent != -1:
            raise InputError(
                f"parents[{segment}]: the subtree of segment {parent} is already closed; order "
                "the segments in DFS preorder"
            )
        path.append(segment)
