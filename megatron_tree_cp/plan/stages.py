"""Stages: the keys of one kernel call and, per key, the local queries that may see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from .values import Array, ArrayValue, expand_ranges, frozen_array

_DTYPES: dict[str, Any] = {"query_lo": np.int32, "query_hi": np.int32, "diagonal": np.bool_}


@dataclass(frozen=True, eq=False)
class KeyRanges(ArrayValue):
    """Contiguous keys of one segment and owner, in buffer order.

    Range j holds the keys with row indices ``start[j] + i`` and positions ``position[j] + i``,
    ``0 <= i < length[j]``. Key i is visible to the local queries ``[lo, query_hi[j])``, where
    ``lo`` is ``query_lo[j]``, plus i on a ``diagonal`` range (the rank's own keys). With a window
    the kernel also compares positions; the intervals are then the tightest for the whole range.
    """

    start: Array
    length: Array
    query_lo: Array
    query_hi: Array
    diagonal: Array
    position: Array

    def __post_init__(self) -> None:
        for field in fields(self):
            array = frozen_array(getattr(self, field.name), _DTYPES.get(field.name, np.int64))
            object.__setattr__(self, field.name, array)

    @classmethod
    def concatenate(cls, parts: Sequence[KeyRanges]) -> KeyRanges:
        """The keys of ``parts``, one part after the other."""
        return cls(*(np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(cls)))

    def __len__(self) -> int:
        return len(self.start)

    @property
    def num_keys(self) -> int:
        """Keys of all ranges together."""
        return int(self.length.sum())

    def expand(self) -> tuple[Array, Array, Array, Array]:
        """Per key: (lo int32[K], hi int32[K], positions int64[K], row_indices int64[K])."""
        rows = expand_ranges(self.start, self.length)
        which = np.repeat(np.arange(len(self.start)), self.length)
        offset = rows - self.start[which]
        lo = (self.query_lo[which] + self.diagonal[which] * offset).astype(np.int32)
        return lo, self.query_hi[which], self.position[which] + offset, rows


@dataclass(frozen=True, eq=False)
class StagePlan(ArrayValue):
    """One kernel call: its keys, the queries it reaches and its exact number of visible pairs.

    ``query_range`` is the smallest interval of local query indices with every query that sees a key
    of the stage, (0, 0) when there is none.
    """

    keys: KeyRanges
    query_range: tuple[int, int]
    visible_pairs: int

    @classmethod
    def concatenate(cls, stages: Sequence[StagePlan]) -> StagePlan:
        """One call over the keys of ``stages`` in order."""
        reached = [stage.query_range for stage in stages if stage.query_range[1]]
        return cls(
            KeyRanges.concatenate([stage.keys for stage in stages]),
            (min(r[0] for r in reached), max(r[1] for r in reached)) if reached else (0, 0),
            sum(stage.visible_pairs for stage in stages),
        )
