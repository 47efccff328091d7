"""Host arrays onto a rank's device without waiting for the device."""

from __future__ import annotations

import numpy as np
import torch


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
