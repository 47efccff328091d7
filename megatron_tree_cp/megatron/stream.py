"""The data iterator: planned rows from lookahead workers, agreed on by all ranks.

``next()`` returns the batch that was fetched, verified and uploaded one microbatch ago and then
starts on the one after it.  Plan digests and worker errors travel over a CPU group before any
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
from typing import cast

import torch
from torch.utils.data import DataLoader, Dataset

from ..comm.agreement import Agreement, AgreementError
from ..tree.errors import InputError
from .batch import TreeBatch
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


class RowStream:
    """Microbatches of one data-parallel replica, shared by its virtual pipeline chunks.

    Every consumer (one per model chunk) sees every microbatch once and in order; a microbatch is
    prepared once, by whichever consumer asks first.
    """

    def __init__(
        self,
        source: Iterator[PlannedRow | RowFailure],
        agreement: Agreement,
        upload: Callable[[PlannedRow], TreeBatch],
        on_first: Callable[[PlannedRow], None] | None = None,
    ):
        self._source, self._agreement, self._upload = source, agreement, upload
        self._on_first = on_first
        self._ready: deque[TreeBatch] = deque()
        self._base = 0
        self._cursors: list[int] = []
        self._ahead: tuple | None = None
        self.waited_ms = 0.0
        """Time the training loop has spent waiting for rows since :meth:`take_waited_ms`."""

    def consumer(self) -> RowIterator:
        """A new iterator over this stream; make all of them before the first ``next``."""
        self._cursors.append(0)
        return RowIterator(self, len(self._cursors) - 1)

    def take_waited_ms(self) -> float:
        """Exposed preparation in ms since the last call."""
        waited, self.waited_ms = self.waited_ms, 0.0
        return waited

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
        planned, pending = self._ahead or self._fetch()
        try:
            pending.finish()
        except AgreementError:
            if isinstance(planned, RowFailure) and planned.bad_input:
                raise InputError(planned.message) from None
            raise
        if self._on_first is not None:
            self._on_first(planned)
            self._on_first = None
        batch = self._upload(planned)
        self._ahead = self._fetch()
        self.waited_ms += (time.perf_counter() - started) * 1e3
        return batch

    def _fetch(self) -> tuple:
        """Take the next planned row and start telling the other ranks what it is."""
        try:
            planned = next(self._source)
        except StopIteration:
            raise
        except Exception as error:  # a killed or crashed worker: every rank must hear of it
            planned = RowFailure(-1, f"data worker failed: {error}")
        if isinstance(planned, RowFailure):
            return planned, self._agreement.begin("", error=planned.message)
        digest = f"{planned.plan.digest[:32]}:{planned.fingerprint[:32]}:{planned.sample}"
        if planned.recurrence is not None:
            digest += f":{planned.recurrence.digest[:32]}"
        return planned, self._agreement.begin(digest)


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
