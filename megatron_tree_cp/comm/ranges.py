"""Ranges on a device: a row's tables travel as ranges and are expanded where they are used."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from megatron_tree_cp.comm.upload import upload


@dataclass(frozen=True, eq=False)
class DeviceRanges:
    """Ranges `[start, start + length)`, one after the other, N entries in all.

    A row has a few hundred ranges and 100 times as many tokens: one small copy brings the ranges,
    the entries are made on the device. No host synchronisation.

    Attributes:
        table: int32[1 + C, R] on the device: the lengths, then the caller's columns.
        which: int64[N], the range of every entry.
        offset: int32[N], the entry's place in its range.
    """

    table: torch.Tensor
    which: torch.Tensor
    offset: torch.Tensor

    @classmethod
    def of(cls, lengths: np.ndarray, *columns: np.ndarray, device: torch.device) -> DeviceRanges:
        """Upload `lengths` int[R] and further columns int[R] of values below 2^31."""
        table = upload(np.stack([lengths, *columns]).astype(np.int32), device)
        total = int(lengths.sum())
        first = table[0].cumsum(0, dtype=torch.int32) - table[0]
        # The size is known: without it the device would be asked, and waited for.
        which = torch.repeat_interleave(table[0].long(), output_size=total)
        offset = torch.arange(total, dtype=torch.int32, device=device) - first[which]
        return cls(table, which, offset)

    def column(self, index: int) -> torch.Tensor:
        """int32[N]: caller's column `index` of every entry's range."""
        return self.table[1 + index][self.which]


def range_indices(starts: np.ndarray, lengths: np.ndarray, device: torch.device) -> torch.Tensor:
    """int64[N]: the integers of all ranges in order, on `device`."""
    ranges = DeviceRanges.of(lengths, starts, device=device)
    return (ranges.column(0) + ranges.offset).long()
