"""Rows from data workers, with an eye on the workers.

A worker that is killed while it writes a row leaves half of it in its pipe. Whoever reads that pipe
waits for the other half for ever, and DataLoader's own look at its workers comes between two reads
only. So one thread reads, and the training loop, while it waits for a row, sees whether the
workers live.
"""

from __future__ import annotations

import multiprocessing
import queue
import threading
from collections.abc import Iterable, Iterator

LOOK_EVERY = 1.0
"""Seconds between two looks at the workers of a training loop that waits."""


class WatchedRows[T](Iterator[T]):
    """Iterator over `loader`, whose iterator starts processes; raises RuntimeError when one dies.

    Rows come in the loader's order; one is read ahead.
    """

    def __init__(self, loader: Iterable[T]) -> None:
        before = set(multiprocessing.active_children())
        self._rows = iter(loader)
        self._workers = [p for p in multiprocessing.active_children() if p not in before]
        self._ready: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(maxsize=1)
        threading.Thread(target=self._read, daemon=True, name="planned rows").start()

    def _read(self) -> None:
        while True:
            try:
                item = next(self._rows), None
            except BaseException as error:  # of whatever kind: the training loop raises it
                self._ready.put((None, error))
                return
            self._ready.put(item)

    def __next__(self) -> T:
        while True:
            try:
                row, error = self._ready.get(timeout=LOOK_EVERY)
            except queue.Empty:
                dead = [p for p in self._workers if not p.is_alive()]
                if dead:
                    raise RuntimeError(
                        f"planner process {dead[0].pid} ended with exit code {dead[0].exitcode}"
                    ) from None
                continue
            if error is not None:
                self._ready.put(
                    (None, error)
                )  # nothing follows it: whoever asks again hears it again
                raise error
            return row  # type: ignore[return-value]
