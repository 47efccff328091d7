"""Halos of a causal convolution on a tree: the last inputs along the path before every run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .exchange import ExchangePlan, RankExchange
from .recurrence import RecurrencePlan
from .values import Array, ArrayValue, freeze_arrays, frozen_array


@dataclass(frozen=True, eq=False)
class RankHalo(ArrayValue):
    """What one rank's runs read before their start; runs are numbered along the shard."""

    start: Array
    """int64[R]: first row of each run in the shard."""

    length: Array
    """int64[R]"""

    before: Array
    """int64[R, width - 1]: the input 1, 2, .. tokens before the run on its path, as a row of [real
    rows of the shard; received rows]; -1 before a root."""

    num_received: int

    def __post_init__(self) -> None:
        freeze_arrays(self)


@dataclass(frozen=True, eq=False)
class HaloPlan(ArrayValue):
    """Inputs before each run that a convolution of ``width`` taps reads, and their exchange.

    They may lie on several ranks, and a short run hands its own ancestors' inputs on.
    """

    recurrence: RecurrencePlan
    width: int

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError(f"a convolution has at least one tap, got width {self.width}")

    @cached_property
    def rows(self) -> Array:
        """int64[runs, width - 1]: row index 1, 2, .. tokens before each run's start, -1 if none."""
        runs, parent = self.recurrence.runs, self.recurrence.parent
        # The padding entry stands for "before a root" and leads to itself.
        last = np.where(parent < 0, -1, runs.start[parent] + runs.length[parent] - 1)
        before = np.append(last, -1)
        current, columns = before[:-1], []
        for _ in range(self.width - 1):
            columns.append(current)
            run = np.where(current < 0, len(runs), self.recurrence.run_of(current))
            inside = current > np.append(runs.start, 0)[run]
            current = np.where(inside & (current >= 0), current - 1, before[run])
        shape = (len(runs), self.width - 1)
        return frozen_array(np.stack(columns, axis=1) if columns else np.zeros(shape))

    @cached_property
    def exchange(self) -> ExchangePlan:
        """One exchange: every rank receives each row that it needs once."""
        runs = self.recurrence.runs
        reader = np.repeat(runs.owner.astype(np.int64), self.width - 1)
        row = self.rows.reshape(-1)
        reader, row = reader[row >= 0], row[row >= 0]
        away = runs.owner[self.recurrence.run_of(row)] != reader
        pairs = np.unique(np.stack([reader[away], row[away]], axis=1), axis=0)
        reader, row = pairs[:, 0], pairs[:, 1]
        run = self.recurrence.run_of(row)
        source = runs.owner[run]
        order = np.lexsort((row, source, reader))
        run, row = run[order], row[order]
        return ExchangePlan.from_pieces(
            self.recurrence.layout.cp_size,
            source[order],
            reader[order].astype(np.int32),
            runs.local_start[run] + row - runs.start[run],
            np.ones(len(row), dtype=np.int64),
        )

    def received_rows(self, rank: int) -> Array:
        """int64: row indices that ``rank`` receives, in receive order (source, then row)."""
        runs = self.recurrence.runs
        row = np.unique(self.rows[runs.owner == rank])
        row = row[row >= 0]
        source = runs.owner[self.recurrence.run_of(row)]
        row, source = row[source != rank], source[source != rank]
        received: Array = row[np.lexsort((row, source))]
        return received

    def rank(self, rank: int) -> RankHalo:
        """The part of ``rank``."""
        runs = self.recurrence.runs
        mine = np.flatnonzero(runs.owner == rank)
        received = self.received_rows(rank)
        rows = self.rows[mine]
        run = self.recurrence.run_of(np.maximum(rows, 0))
        own = runs.local_start[run] + rows - runs.start[run]
        found = np.zeros_like(rows)
        if len(received):
            sorter = np.argsort(received)
            entry = np.searchsorted(received, rows, sorter=sorter)
            found = sorter[entry.clip(max=len(sorter) - 1)]
        before = np.where(runs.owner[run] == rank, own, int(runs.length[mine].sum()) + found)
        return RankHalo(
            start=frozen_array(runs.local_start[mine]),
            length=frozen_array(runs.length[mine]),
            before=frozen_array(np.where(rows < 0, -1, before)),
            num_received=len(received),
        )


@dataclass(frozen=True, eq=False)
class ConvolutionArrays(ArrayValue):
    """One rank's convolution of ``width`` taps: its halo, and who reads across starts of runs."""

    width: int
    part: RankHalo
    heads: Array
    """int32[.]: tokens of the shard that read across their run's start, ascending."""

    late_rows: Array
    """int32[m]: rows of [shard; halo] that taps across a run's start read, ascending."""

    late_offsets: Array
    """int32[m + 1]"""

    late_readers: Array
    """int32[.]: tap * len(heads) + head, the readers of each late row, in a fixed order."""

    exchange: RankExchange | None
    """Brings the halo; None when no rank of the row needs any."""

    def __post_init__(self) -> None:
        freeze_arrays(self)

    @property
    def num_tokens(self) -> int:
        """Real rows n of the shard."""
        return int(self.part.length.sum())

    @classmethod
    def of(cls, plan: HaloPlan, rank: int) -> ConvolutionArrays:
        """The arrays of ``rank``."""
        part = plan.rank(rank)
        heads, rows, offsets, readers = _late(part)
        exchange = plan.exchange.rank(rank) if len(plan.exchange.length) else None
        return cls(
            plan.width,
            part,
            heads=frozen_array(heads, np.int32),
            late_rows=frozen_array(rows, np.int32),
            late_offsets=frozen_array(offsets, np.int32),
            late_readers=frozen_array(readers, np.int32),
            exchange=exchange,
        )


def _late(part: RankHalo) -> tuple[Array, Array, Array, Array]:
    """Tokens that read across a run's start; the rows that they read, and those rows' readers (tap
    * tokens + index of the token) in CSR form."""
    offset, tap = np.triu_indices(part.before.shape[1])  # token `offset` of a run reads by `tap`
    row = part.before[:, tap - offset]
    token, by = part.start[:, None] + offset, np.broadcast_to(tap, row.shape)
    valid = (row >= 0) & (offset < part.length[:, None])
    row, by = row[valid], by[valid]
    heads, head = np.unique(token[valid], return_inverse=True)
    reader = by * len(heads) + head
    order = np.lexsort((reader, row))
    rows, counts = np.unique(row, return_counts=True)
    return heads, rows, np.concatenate([[0], np.cumsum(counts)]), reader[order]
