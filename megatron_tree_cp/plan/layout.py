"""Layouts: which rank owns which row indices."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .values import Array, ArrayValue, expand_ranges, frozen_array


@dataclass(frozen=True, eq=False)
class Layout(ArrayValue):
    """Disjoint row ranges per rank that together cover ``[0, num_tokens)``.

    ``ranges[r]`` is int64[n, 2] of half-open ranges; adjacent ranges of a rank are joined here.
    A shard holds its rank's tokens sorted by row index and pads its tail to a multiple of
    ``granule`` (at least one granule). Raises ``ValueError`` when ranges overlap or leave a gap.
    """

    num_tokens: int
    ranges: tuple[Array, ...]
    granule: int = 1

    def __post_init__(self) -> None:
        if self.granule < 1:
            raise ValueError(f"Layout: granule must be at least 1, got {self.granule}")
        if not self.ranges:
            raise ValueError("Layout needs ranges for at least one rank")
        parts = [np.array(part, dtype=np.int64).reshape(-1, 2) for part in self.ranges]
        joined = tuple(map(frozen_array, parts if _are_joined(parts) else map(_join, parts)))
        object.__setattr__(self, "ranges", joined)
        rows = np.concatenate(joined)
        rows = rows[np.argsort(rows[:, 0], kind="stable")]
        edges = np.concatenate([[0], rows[:, 1]])
        if not np.array_equal(edges[:-1], rows[:, 0]) or edges[-1] != self.num_tokens:
            raise ValueError(
                f"Layout: the ranges of all ranks must cover [0, {self.num_tokens}) exactly once"
            )

    @classmethod
    def from_pieces(cls, cuts: Array, owner: Array, cp_size: int, granule: int = 1) -> Layout:
        """Piece i is ``[cuts[i], cuts[i + 1])`` and belongs to rank ``owner[i]``."""
        cuts = np.asarray(cuts, dtype=np.int64)
        pieces, owner = np.stack([cuts[:-1], cuts[1:]], axis=1), np.asarray(owner)
        order = np.argsort(owner, kind="stable")
        ends = np.searchsorted(owner[order], np.arange(cp_size + 1))
        ranges = tuple(pieces[order[ends[r] : ends[r + 1]]] for r in range(cp_size))
        return cls(int(cuts[-1]), ranges, granule)

    @property
    def cp_size(self) -> int:
        """Number of ranks."""
        return len(self.ranges)

    def num_real(self, rank: int) -> int:
        """Tokens that ``rank`` owns, without padding."""
        part = self.ranges[rank]
        return int((part[:, 1] - part[:, 0]).sum())

    def shard_size(self, rank: int) -> int:
        """Tokens of the shard with its padding: a multiple of ``granule``, at least ``granule``."""
        return max(-(-self.num_real(rank) // self.granule), 1) * self.granule

    def row_indices(self, rank: int) -> Array:
        """int64[shard_size]: row index of every shard token, ascending; -1 is padding (tail)."""
        part = self.ranges[rank]
        rows = np.full(self.shard_size(rank), -1, dtype=np.int64)
        rows[: self.num_real(rank)] = expand_ranges(part[:, 0], part[:, 1] - part[:, 0])
        return rows

    def owner(self) -> Array:
        """int32[num_tokens]: the rank of every row index."""
        starts, lengths, ranks, _ = self.pieces
        return np.repeat(ranks, lengths) if len(starts) else np.zeros(0, dtype=np.int32)

    @cached_property
    def pieces(self) -> tuple[Array, Array, Array, Array]:
        """Ranges in row order: (start i64, length i64, rank i32, local start in the shard i64)."""
        sizes = [len(part) for part in self.ranges]
        rows = np.concatenate(self.ranges)
        lengths = rows[:, 1] - rows[:, 0]
        ranks = np.repeat(np.arange(self.cp_size, dtype=np.int32), sizes)
        local = np.concatenate([[0], np.cumsum(lengths)[:-1]]) if len(rows) else lengths
        first = np.searchsorted(ranks, np.arange(self.cp_size))
        local = local - np.append(local, 0)[first][ranks]
        order = np.argsort(rows[:, 0], kind="stable")
        return (
            frozen_array(rows[order, 0]),
            frozen_array(lengths[order]),
            frozen_array(ranks[order], np.int32),
            frozen_array(local[order]),
        )


def _are_joined(parts: list[Array]) -> bool:
    """Whether all ranges are ascending, not empty and apart, rank by rank: one look at them all."""
    rows = np.concatenate(parts)
    apart = rows[1:, 0] > rows[:-1, 1]
    borders = np.cumsum([len(part) for part in parts])[:-1]
    apart[borders[(borders > 0) & (borders < len(rows))] - 1] = True
    return bool(apart.all() and (rows[:, 1] > rows[:, 0]).all())


def _join(rows: Array) -> Array:
    if (rows[:, 1] < rows[:, 0]).any():
        raise ValueError("Layout: a range ends before it starts")
    rows = rows[rows[:, 1] > rows[:, 0]]
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    if len(rows) < 2:
        return rows
    fresh = np.concatenate([[True], rows[1:, 0] != rows[:-1, 1]])
    last = np.concatenate([np.flatnonzero(fresh)[1:] - 1, [len(rows) - 1]])
    return np.stack([rows[fresh, 0], rows[last, 1]], axis=1)
