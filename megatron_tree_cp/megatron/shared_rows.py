"""Planned rows from one rank's planners for all ranks of a node that work on the same rows.

Ranks of one pipeline stage and data-parallel replica need the same rows. By default each plans for
itself: nothing travels, but every rank's planners hold all rollouts and spend the same time. Here
the first rank of a group plans and broadcasts what its planners gave, over a CPU group.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist

from .rows import PlannedRow, RowFailure

_END = "the rows have ended"


class SharedRows(Iterator[PlannedRow | RowFailure]):
    """Iterator over the rows of the first rank of ``group``, on all of its ranks.

    ``source`` is that rank's iterator and None on the others. All ranks ask for rows in the same
    order, from one thread each, and use ``group`` for nothing else. An error of ``source`` is
    raised there as it is, on the others as RuntimeError with its message.
    """

    def __init__(
        self, source: Iterator[PlannedRow | RowFailure] | None, group: dist.ProcessGroup
    ) -> None:
        self._source, self._group = source, group
        self._root = dist.get_process_group_ranks(group)[0]
        if (dist.get_rank() == self._root) != (source is not None):
            raise ValueError("the first rank of the group, and no other, has the rows' source")

    def __next__(self) -> PlannedRow | RowFailure:
        return self._receive() if self._source is None else self._send(self._source)

    def _send(self, source: Iterator[PlannedRow | RowFailure]) -> PlannedRow | RowFailure:
        try:
            item = next(source)
        except StopIteration:
            self._broadcast(pickle.dumps(_END))
            raise
        except BaseException as error:  # of whatever kind: the others wait for it
            self._broadcast(pickle.dumps(f"{type(error).__name__}: {error}"))
            raise
        # Its planning is counted where it was done.
        told = replace(item, planning_cpu_ms=0.0) if isinstance(item, PlannedRow) else item
        self._broadcast(pickle.dumps(told, protocol=pickle.HIGHEST_PROTOCOL))
        return item

    def _receive(self) -> PlannedRow | RowFailure:
        item = pickle.loads(self._broadcast(None))
        if isinstance(item, str):
            if item == _END:
                raise StopIteration
            raise RuntimeError(f"rank {self._root}, which plans for this node: {item}")
        return item

    def _broadcast(self, sent: bytes | None) -> bytes:
        size = torch.tensor([0 if sent is None else len(sent)])
        dist.broadcast(size, self._root, group=self._group)
        if sent is None:
            buffer = torch.empty(int(size), dtype=torch.uint8)
        else:
            buffer = torch.frombuffer(bytearray(sent), dtype=torch.uint8)
        dist.broadcast(buffer, self._root, group=self._group)
        return buffer.numpy().tobytes() if sent is None else sent
