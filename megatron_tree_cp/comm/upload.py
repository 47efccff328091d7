"""Host arrays onto a rank's device without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

ALIGNMENT = 16
"""Bytes: kernels are compiled for pointers that are multiples of this."""


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy a numpy array to ``device``.

    On CUDA through pinned memory: a copy from pageable memory blocks the host until the stream has
    caught up, which would put the preparation of the next row after the computation of this one.
    """
    array = np.asarray(array, order="C")  # not ascontiguousarray: it gives scalars a dimension
    # Plan arrays are read-only; nothing writes through the tensor, and CUDA copies anyway.
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor


def upload_together(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Tensors of ``arrays`` on ``device``, views of one buffer that travels in one copy."""
    sizes = np.array([array.nbytes for array in arrays], dtype=np.int64)
    places = np.cumsum(-(-sizes // ALIGNMENT) * ALIGNMENT)
    buffer = np.zeros(int(places[-1]), dtype=np.uint8)
    starts = [0, *places.tolist()]
    for array, start in zip(arrays, starts, strict=False):
        buffer[start : start + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).ravel()
    there = upload(buffer, device)
    tensors = []
    for array, start in zip(arrays, starts, strict=False):
        kind = {"int32": torch.int32, "int64": torch.int64}[array.dtype.name]
        tensors.append(there[start : start + array.nbytes].view(kind).view(array.shape))
    return tensors
