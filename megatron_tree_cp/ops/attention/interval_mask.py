"""The mask of one attention stage: an interval of local queries per key.

A shard's queries are sorted by row index and key k is visible to queries `[k, subtree_end[k])`, so
the local queries that may see a key are one interval, in whatever order keys sit in a buffer:

    visible(i, j)  iff  lo[j] <= i < hi[j]   (and  q_positions[i] - k_positions[j] < window)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.nn.functional as F

T = TypeVar("T")

HIDDEN = 2**30
"""As a key's lo: no query sees the key."""

SPARE = 256
"""Entries past a mask's extents that kernels may look up: more than their tiles overshoot by."""


@dataclass(frozen=True, eq=False)
class IntervalMask:
    """Interval mask of `num_queries` local queries over K keys.

    Attributes:
        lo, hi: int32[K], first and one past the last local query that may see the key.
        num_queries: Tq, queries of the stage.
        q_positions, k_positions: int32[Tq], int32[K] logical positions; None without a window.
        window: positions a query sees, itself included; None for no window.
        diagonal: lo[j] == j for every key, as for a shard's own keys in the order of its queries;
            a kernel may then leave lo unread.
        spare: entries that follow each vector in its memory and hide whatever looks them up (the
            positions may be any); a kernel that wants them otherwise makes copies.
    """

    lo: torch.Tensor
    hi: torch.Tensor
    num_queries: int
    q_positions: torch.Tensor | None = None
    k_positions: torch.Tensor | None = None
    window: int | None = None
    diagonal: bool = False
    spare: int = 0
    _memo: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.lo.dtype != torch.int32 or self.hi.dtype != torch.int32:
            raise ValueError(f"lo and hi must be int32, got {self.lo.dtype} and {self.hi.dtype}")
        if self.lo.shape != self.hi.shape or self.lo.dim() != 1:
            raise ValueError(
                f"lo and hi must be one vector each of equal length, got shapes "
                f"{tuple(self.lo.shape)} and {tuple(self.hi.shape)}"
            )
        if self.window is not None:
            queries, keys = self.window_positions
            if len(queries) != self.num_queries or len(keys) != self.num_keys:
                raise ValueError(
                    f"{self.num_queries} queries and {self.num_keys} keys need as many positions, "
                    f"got {len(queries)} and {len(keys)}"
                )

    @property
    def num_keys(self) -> int:
        """K, keys of the stage."""
        return self.lo.shape[0]

    @property
    def window_positions(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(q_positions, k_positions) of a windowed mask."""
        if self.q_positions is None or self.k_positions is None:
            raise ValueError("a window needs q_positions and k_positions")
        return self.q_positions, self.k_positions

    def with_spare(self) -> tuple[torch.Tensor, ...]:
        """lo, hi, and the window's positions of queries and keys, each with `SPARE` entries more:
        views where the memory holds them."""
        vectors = [self.lo, self.hi]
        if self.window is not None:
            vectors += self.window_positions
        if self.spare >= SPARE:
            return tuple(x.as_strided((len(x) + SPARE,), (1,)) for x in vectors)
        fills = (HIDDEN, 0, 0, 0)
        return tuple(F.pad(x, (0, SPARE), value=f) for x, f in zip(vectors, fills, strict=False))

    def cached(self, key: Hashable, build: Callable[[], T]) -> T:
        """Return what a kernel derives from this mask, built once for all layers of the row."""
        if key not in self._memo:
            self._memo[key] = build()
        return self._memo[key]

    def tile(self, q_begin: int, q_end: int, k_begin: int, k_end: int) -> torch.Tensor:
        """Visibility bool[q_end - q_begin, k_end - k_begin] of one tile."""
        queries = torch.arange(q_begin, q_end, dtype=torch.int32, device=self.lo.device)[:, None]
        visible = (self.lo[k_begin:k_end] <= queries) & (queries < self.hi[k_begin:k_end])
        if self.window is not None:
            q_positions, k_positions = self.window_positions
            distance = q_positions[q_begin:q_end, None] - k_positions[k_begin:k_end]
            visible &= distance < self.window
        return visible

    def dense(self) -> torch.Tensor:
        """Visibility bool[Tq, K]; for the reference and small pictures."""
        return self.tile(0, self.num_queries, 0, self.num_keys)

    def reached(self) -> torch.Tensor:
        """bool[Tq]: some key's interval covers the query (a window may still hide every key)."""
        return _coverage(self.lo, self.hi, self.num_queries) > 0


def _coverage(lo: torch.Tensor, hi: torch.Tensor, num_queries: int) -> torch.Tensor:
    """Count the intervals that cover each query, through a difference array: int64[Tq]."""
    step = (lo < hi).to(torch.int64)
    difference = torch.zeros(num_queries + 1, dtype=torch.int64, device=lo.device)
    difference.index_add_(0, lo.clamp(0, num_queries).long(), step)
    difference.index_add_(0, hi.clamp(0, num_queries).long(), -step)
    return difference.cumsum(0)[:num_queries]
