"""Planned rows made ready by a thread while the training loop computes.

What a row costs on its rank (its pickle, its digest, its device tables) is spent here. The training
loop takes what is ready, then says that there is room for more. Only then does the thread go on: it
would hold the interpreter while the loop hands a row over.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from .batch import TreeBatch
from .rows import PlannedRow, RowFailure

AHEAD = 2
"""Rows ready or in the making: one for ranks to agree on, and the one behind it."""


@dataclass(frozen=True)
class PreparedRow:
    """A row and its batch, or what went wrong with it."""

    planned: PlannedRow | RowFailure
    digest: str = ""
    """Of all that ranks must agree on; empty for a failure."""
    batch: TreeBatch | None = None
    uploaded: torch.cuda.Event | None = None
    """Behind the batch's copies; None on CPU."""
    cause: BaseException | None = None
    """The exception behind a failure, where this process met one."""


class PreparedRows:
    """Takes rows from ``source`` and builds their batches in a thread, in order.

    The thread works on the stream that is current where this object is made, the training loop's.
    So what the loop frees has its last use on that stream before it is given out again: no tensor
    of a batch needs its own event. A loop on another stream waits for `PreparedRow.uploaded`.

    Errors, those of a killed worker too, become failures for every rank to hear of; only the end of
    ``source`` is the end.
    """

    def __init__(
        self,
        source: Iterator[PlannedRow | RowFailure],
        build: Callable[[PlannedRow], TreeBatch],
        device: torch.device,
    ) -> None:
        self._source, self._build = source, build
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._room = threading.Semaphore(AHEAD)
        self._ready: queue.Queue[PreparedRow | None] = queue.Queue()
        threading.Thread(target=self._work, daemon=True, name="prepared rows").start()

    def take(self) -> PreparedRow:
        """The next row, waiting for it; StopIteration after the last."""
        row = self._ready.get()
        if row is None:
            self._ready.put(None)  # whoever asks again hears it again
            raise StopIteration
        return row

    def take_ready(self) -> PreparedRow | None:
        """The next row if there is one already."""
        try:
            return None if self._ready.empty() else self.take()
        except StopIteration:
            return None

    def make_room(self) -> None:
        """Let the thread make one more row: once for each row taken."""
        self._room.release()

    def _work(self) -> None:
        # A stream's context sets its device as well; threads start on device 0.
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            while True:
                self._room.acquire()
                row = self._prepare()
                self._ready.put(row)
                if row is None:
                    return

    def _prepare(self) -> PreparedRow | None:
        try:
            planned = next(self._source)
        except StopIteration:
            return None
        except BaseException as error:  # of whatever kind: a thread that ends tells nobody
            return PreparedRow(RowFailure(-1, f"data worker failed: {error}"), cause=error)
        if isinstance(planned, RowFailure):
            return PreparedRow(planned)
        try:
            batch = self._build(planned)
        except BaseException as error:
            told = f"row {planned.sample} on its device: {type(error).__name__}: {error}"
            return PreparedRow(RowFailure(planned.sample, told), cause=error)
        uploaded = None
        if self._stream is not None:
            uploaded = torch.cuda.Event()
            uploaded.record(self._stream)
        return PreparedRow(planned, digest_of(planned), batch, uploaded)


def digest_of(planned: PlannedRow) -> str:
    """What ranks of one row must share: plan, data, sample number and recurrent states."""
    digest = f"{planned.plan.digest[:32]}:{planned.fingerprint[:32]}:{planned.sample}"
    if planned.recurrence is not None:
        digest += f":{planned.recurrence.digest[:32]}"
    return digest
