"""The data iterator: planned rows from lookahead workers, agreed on by all ranks.

``next()`` returns a batch that a thread has built while the last one was computed, and tells the
other ranks of the one after it.  Plan digests and worker errors travel over a CPU group before any
data collective of that microbatch, so a failure raises on every rank instead of hanging some.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch.utils.data import DataLoader, Dataset

from ..comm.agreement import Agreement, AgreementError, PendingAgreement
from ..tree.errors import InputError
from .batch import TreeBatch
from .prepared_rows import PreparedRow, PreparedRows
from .rows import PlannedRow, PlannedRows, RowFailure
from .watched_rows import WatchedRows


def _identity(item):
    return item


def _end_with_parent(worker: int) -> None:
    """End this worker as soon as its training process is gone, however that ended.

    DataLoader's own watchdog looks at the fork server, which lives on for as long as a worker
    does: after a kill of the training process both would stay for ever.
    """

    def follow() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True, name=f"worker {worker} follows").start()


class SampleOrder:
    """Sampler over the run's global row numbers that fall to one data-parallel rank."""

    def __init__(self, consumed: int, dp_rank: int, dp_size: int):
        self.first, self.step = consumed + dp_rank, dp_size

    def __iter__(self) -> Iterator[int]:
        return itertools.count(self.first, self.step)


def planned_row_loader(
    dataset: PlannedRows, order: SampleOrder, workers: int, lookahead: int
) -> Iterator[PlannedRow | RowFailure]:
    """Iterate planned rows; with ``workers`` > 0 they are made ahead of time in processes.

    ``lookahead`` rows are in flight (at least one per worker).  Workers start through forkserver:
    forking a process that holds CUDA or gloo threads is not safe.
    """
    if workers == 0:
        return (dataset[sample] for sample in order)
    loader: DataLoader = DataLoader(
        cast(Dataset, dataset),  # by duck typing: rows.py imports no torch
        batch_size=None,
        sampler=order,
        num_workers=workers,
        collate_fn=_identity,
        prefetch_factor=max(1, -(-lookahead // workers)),
        persistent_workers=True,
        multiprocessing_context="forkserver",
        worker_init_fn=_end_with_parent,
    )
    return WatchedRows(loader)


@dataclass(frozen=True)
class Preparation:
    """What rows have cost on this rank over some time."""

    waited_ms: float = 0.0
    """Of the training loop: exposed."""
    planning_cpu_ms: float = 0.0
    """Of planner processes, for the rows that the loop took."""


class RowStream:
    """Microbatches of one data-parallel replica, shared by its virtual pipeline chunks.

    Every consumer (one per model chunk) sees every microbatch once and in order; a microbatch is
    prepared once, by whichever consumer asks first. ``agreement`` serves this stream alone: when a
    rank tells the others of its next row depends on when it is ready.
    """

    def __init__(
        self,
        source: Iterator[PlannedRow | RowFailure],
        agreement: Agreement,
        upload: Callable[[PlannedRow], TreeBatch],
        on_first: Callable[[PlannedRow], None] | None = None,
        device: torch.device | None = None,
    ):
        self._source, self._agreement, self._upload = source, agreement, upload
        self._on_first = on_first
        self._device = torch.device("cpu") if device is None else device
        self._ready: deque[TreeBatch] = deque()
        self._base = 0
        self._cursors: list[int] = []
        self._prepared: PreparedRows | None = None
        self._ahead: tuple[PreparedRow, PendingAgreement] | None = None
        self._spent = Preparation()

    def consumer(self) -> RowIterator:
        """A new iterator over this stream; make all of them before the first ``next``."""
        self._cursors.append(0)
        return RowIterator(self, len(self._cursors) - 1)

    def take_preparation(self) -> Preparation:
        """What rows have cost since the last call."""
        spent, self._spent = self._spent, Preparation()
        return spent

    def get(self, consumer: int) -> TreeBatch:
        """The next microbatch of ``consumer``."""
        index = self._cursors[consumer]
        batch = self.peek(index)
        self._cursors[consumer] = index + 1
        while self._ready and min(self._cursors) > self._base:
            self._ready.popleft()
            self._base += 1
        return batch

    def position(self, consumer: int) -> int:
        """Number of microbatches that ``consumer`` has taken."""
        return self._cursors[consumer]

    def peek(self, index: int) -> TreeBatch:
        """Microbatch ``index`` of the stream, which not every consumer has taken yet."""
        while index >= self._base + len(self._ready):
            self._ready.append(self._advance())
        return self._ready[index - self._base]

    def _advance(self) -> TreeBatch:
        started = time.perf_counter()
        if self._prepared is None:
            self._prepared = PreparedRows(self._source, self._upload, self._device)
        rows = self._prepared
        row, pending = self._ahead or self._tell(rows.take())
        self._ahead = row, pending
        planned, batch = row.planned, row.batch
        try:
            pending.finish()
        except AgreementError as error:
            if isinstance(planned, RowFailure) and planned.bad_input:
                raise InputError(planned.message) from None
            raise error from row.cause
        assert isinstance(planned, PlannedRow) and batch is not None  # or finish() had raised
        if self._on_first is not None:
            self._on_first(planned)
            self._on_first = None
        if row.uploaded is not None:
            torch.cuda.current_stream(self._device).wait_event(row.uploaded)
        following = rows.take_ready()
        self._ahead = None if following is None else self._tell(following)
        self._spent = Preparation(
            self._spent.waited_ms + (time.perf_counter() - started) * 1e3,
            self._spent.planning_cpu_ms + planned.planning_cpu_ms,
        )
        rows.make_room()
        return batch

    def _tell(self, row: PreparedRow) -> tuple[PreparedRow, PendingAgreement]:
        """Start telling the other ranks what row this rank has next."""
        error = row.planned.message if isinstance(row.planned, RowFailure) else None
        return row, self._agreement.begin(row.digest, error)


class RowIterator:
    """What Megatron calls ``next`` on."""

    def __init__(self, stream: RowStream, number: int):
        self._stream, self._number = stream, number

    def __iter__(self) -> RowIterator:
        return self

    def __next__(self) -> TreeBatch:
        return self._stream.get(self._number)

    @property
    def position(self) -> int:
        """Number of microbatches taken so far."""
        return self._stream.position(self._number)

    def peek(self, index: int) -> TreeBatch:
        """Microbatch ``index`` of the stream without taking it."""
        return self._stream.peek(index)


def device_of_rank() -> torch.device:
    """The device that Megatron has set for this process (CPU under the CPU shim)."""
    current = torch.cuda.current_device()
    return current if isinstance(current, torch.device) else torch.device("cuda", current)
