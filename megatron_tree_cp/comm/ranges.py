"""Ranges on a device: a row's tables travel as ranges and are expanded where they are used."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from megatron_tree_cp.comm.upload import upload

_ALIGNMENT = 32
"""Of the results, in entries: kernels are compiled for the alignment of their pointers."""


def expand_columns(
    lengths: np.ndarray,
    columns: Sequence[tuple[np.ndarray, np.ndarray]],
    device: torch.device,
    dtype: torch.dtype = torch.int32,
) -> tuple[torch.Tensor, ...]:
    """Entries of ranges that lie one after the other: per column, ``base[r] + slope[r] * i``.

    A row has a few hundred ranges and 100 times as many tokens: one small copy brings the ranges,
    the entries are made on the device, on CUDA in one launch. No host synchronisation.

    Args:
        lengths: int[R], entries of each range, N in all.
        columns: (base int[R], slope int[R]) of every result, values below 2^31.

    Returns:
        One vector [N] a column, where entry i of range r holds base[r] + slope[r] * i.
    """
    first = np.cumsum(lengths) - lengths
    table = upload(np.stack([first, *(x for c in columns for x in c)]).astype(np.int32), device)
    total = int(lengths.sum())
    width = -(-total // _ALIGNMENT) * _ALIGNMENT
    out = torch.empty(len(columns), width, dtype=dtype, device=device)
    if device.type == "cuda":
        from megatron_tree_cp.comm import ranges_triton

        ranges_triton.expand(table, out, total)
    else:
        entry = torch.arange(total, dtype=torch.int32)
        which = torch.repeat_interleave(torch.from_numpy(np.asarray(lengths)))
        offset = entry - table[0][which]
        for i in range(len(columns)):
            base, slope = table[1 + 2 * i][which], table[2 + 2 * i][which]
            out[i, :total] = base + slope * offset
    return tuple(column[:total] for column in out)


def range_indices(starts: np.ndarray, lengths: np.ndarray, device: torch.device) -> torch.Tensor:
    """int64[N]: the integers of all ranges in order, on `device`."""
    (indices,) = expand_columns(lengths, [(starts, np.ones_like(starts))], device, torch.int64)
    return indices
